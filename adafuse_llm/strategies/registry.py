"""Strategies by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from adafuse_llm.errors import InvalidOptionError, nearest, short_repr
from adafuse_llm.strategies.adafuse import AdaFuse
from adafuse_llm.strategies.base import Strategy
from adafuse_llm.strategies.beam import BeamSearch
from adafuse_llm.strategies.deepen import DeePEn
from adafuse_llm.strategies.fixed import FixedWords
from adafuse_llm.strategies.gac import GaC
from adafuse_llm.strategies.rerank import Rerank
from adafuse_llm.strategies.single import Single
from adafuse_llm.strategies.sweetspan import SweetSpan
from adafuse_llm.strategies.unite import UniTE
from adafuse_llm.strategies.vote import MajorityVote

NAMED: Mapping[str, Callable[[], Strategy]] = {
    "adafuse": AdaFuse,
    "single": Single,
    "fixed-1": lambda: FixedWords(1),
    "fixed-2": lambda: FixedWords(2),
    "fixed-3": lambda: FixedWords(3),
    "beam": BeamSearch,
    "unite": UniTE,
    "gac": GaC,
    "gac-gated": lambda: GaC(threshold=0.5),
    "deepen": DeePEn,
    "sweetspan": SweetSpan,
    "rerank": Rerank,
    "vote": MajorityVote,
}
"""Strategies by name, each with the settings of its paper."""


def find_strategy(strategy: Strategy | str) -> Strategy:
    """Return the strategy with a given name. Return a strategy object unchanged.

    The names ``fixed-N`` and ``beam-N`` allow any number N of up to three digits.

    Raises:
        InvalidOptionError: the name is unknown, or the object is not a strategy.
    """
    if isinstance(strategy, str):
        if match := re.fullmatch(r"fixed-(\d{1,3})", strategy):
            return FixedWords(int(match[1]))
        if match := re.fullmatch(r"beam-(\d{1,3})", strategy):
            return BeamSearch(int(match[1]))
        if strategy in NAMED:
            return NAMED[strategy]()
    elif isinstance(strategy, Strategy) and not isinstance(strategy, type):
        return strategy
    raise InvalidOptionError(
        f"strategy must be one of {', '.join(NAMED)}, or a Strategy object; "
        f"got {short_repr(strategy)}."
        f"{nearest(str(strategy), NAMED)}"
    )
