"""The strategies of other papers, with which AdaFuse is compared, and its own beam search.

They use only public names of ``adafuse_llm``, as a strategy of yours would. `register` gives them
the names that the suites of ``benchmarks.paper`` use. They serve comparisons on text: their options
are the length limit, stop sequences and weights, and not sampling or the form of a response.
"""

from __future__ import annotations

from adafuse_llm.strategies import register_strategy
from benchmarks.peers.answers import MajorityVote, Rerank
from benchmarks.peers.beam import BeamSearch
from benchmarks.peers.deepen import DeePEn
from benchmarks.peers.gac import GaC
from benchmarks.peers.sweetspan import SweetSpan
from benchmarks.peers.unite import UniTE

__all__ = [
    "BeamSearch",
    "DeePEn",
    "GaC",
    "MajorityVote",
    "Rerank",
    "SweetSpan",
    "UniTE",
    "register",
]

STRATEGIES = (
    MajorityVote(),
    Rerank(),
    SweetSpan(),
    UniTE(),
    GaC(),
    GaC(threshold=0.5),
    GaC(threshold=0.9),
    DeePEn(),
    DeePEn(rate=0.3),
    *(BeamSearch(width) for width in (2, 3, 5)),
)
"""The strategies that have a name. Those with a setting in their names are variants."""


def register() -> None:
    """Give all peers their names, such as ``unite``, ``gac-gated-0.9`` and ``beam-3``."""
    for strategy in STRATEGIES:
        register_strategy(strategy.name, strategy)
