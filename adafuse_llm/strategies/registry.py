"""Strategies by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, nearest, short_repr
from adafuse_llm.strategies.adafuse import AdaFuse
from adafuse_llm.strategies.base import Strategy, refuse_unused_options
from adafuse_llm.strategies.beam import BeamSearch
from adafuse_llm.strategies.fixed import FixedWords
from adafuse_llm.strategies.mixture import Mixture
from adafuse_llm.strategies.rivals.deepen import DeePEn
from adafuse_llm.strategies.rivals.gac import GATED_THRESHOLD, GaC
from adafuse_llm.strategies.rivals.rerank import Rerank
from adafuse_llm.strategies.rivals.sweetspan import SweetSpan
from adafuse_llm.strategies.rivals.unite import UniTE
from adafuse_llm.strategies.rivals.vote import MajorityVote
from adafuse_llm.strategies.single import Single

AUTO: Final = "auto"
"""Name of the default: `choose_strategy` chooses the strategy for the members."""

UNEVEN: Final = 2.0
"""Members are uneven if the largest has this many times the parameters of the smallest."""

NAMED: Mapping[str, Callable[[], Strategy]] = {
    "adafuse": AdaFuse,
    "mixture": Mixture,
    "single": Single,
    "fixed-1": lambda: FixedWords(1),
    "fixed-2": lambda: FixedWords(2),
    "fixed-3": lambda: FixedWords(3),
    "beam-3": BeamSearch,
    "unite": UniTE,
    "gac": GaC,
    "gac-gated": lambda: GaC(threshold=GATED_THRESHOLD),
    "deepen": DeePEn,
    "sweetspan": SweetSpan,
    "rerank": Rerank,
    "vote": MajorityVote,
}
"""Strategies by name. Those of a paper have its settings."""

_WITH_COUNT: Mapping[str, Callable[[int], Strategy]] = {
    "fixed": FixedWords,
    "beam": BeamSearch,
}
"""Strategies whose names end in a whole number."""

_WITH_SETTING: Mapping[str, Callable[[float], Strategy]] = {
    "deepen": lambda rate: DeePEn(rate=rate),
    "gac-gated": lambda threshold: GaC(threshold=threshold),
}
"""Strategies whose names may end in a decimal number."""


def choose_strategy(members: Sequence[Backend], config: AdaFuseConfig) -> Strategy:
    """Return the strategy that suits the members: `Mixture` if they are uneven, else `AdaFuse`.

    `AdaFuse` gives every member the same say. That suits members of similar size, which know
    different things, but a member that is much smaller than another takes the ensemble down
    wherever it cannot do the task. `Mixture` weighs members by their size. It is not chosen if the
    size of a member is not known, if a member cannot take part in it, or if `config` sets an option
    that it does not use.
    """
    mixture = Mixture()
    sizes = mixture.weights(members)  # all equal if one is not known
    if not sizes or max(sizes) < UNEVEN * min(sizes):
        return AdaFuse()
    try:
        mixture.check(members)
        refuse_unused_options(mixture, config)
    except InvalidInputError:
        return AdaFuse()
    return mixture


def find_strategy(
    strategy: Strategy | str, members: Sequence[Backend] = (), config: AdaFuseConfig | None = None
) -> Strategy:
    """Return the strategy with a given name. Return a strategy object unchanged.

    The name ``auto`` stands for the strategy that `choose_strategy` chooses for the members.

    The names ``fixed-N`` and ``beam-N`` allow any number N of
    up to three digits.
    The names ``deepen-R`` and ``gac-gated-T`` set the learning rate R and the threshold T, such as
    ``deepen-0.3``.

    Raises:
        InvalidOptionError: the name is unknown, or the object is not a strategy.
    """
    if isinstance(strategy, str):
        if strategy == AUTO:
            return choose_strategy(members, config or AdaFuseConfig())
        if match := re.fullmatch(rf"({'|'.join(_WITH_COUNT)})-(\d{{1,3}})", strategy):
            return _WITH_COUNT[match[1]](int(match[2]))
        if match := re.fullmatch(rf"({'|'.join(_WITH_SETTING)})-(\d+(?:\.\d+)?)", strategy):
            return _WITH_SETTING[match[1]](float(match[2]))
        if strategy in NAMED:
            return NAMED[strategy]()
    elif isinstance(strategy, Strategy) and not isinstance(strategy, type):
        return strategy
    raise InvalidOptionError(
        f"strategy must be one of {AUTO}, {', '.join(NAMED)}, or a Strategy object; "
        f"got {short_repr(strategy)}."
        f"{nearest(str(strategy), NAMED)}"
    )
