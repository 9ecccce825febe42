"""The strategies of other papers, with which AdaFuse is compared, and its own beam search.

They use only public names of ``adafuse_llm``, as a strategy of yours would. The suites of
``benchmarks.paper`` name them as `NAMED` does. They compare free text:
they obey the length limit, stop sequences and weights, and refuse sampling and prescribed forms.
"""

from __future__ import annotations

from benchmarks.peers.answers import MajorityVote, Rerank
from benchmarks.peers.beam import BeamSearch
from benchmarks.peers.deepen import DeePEn
from benchmarks.peers.gac import GaC
from benchmarks.peers.sweetspan import SweetSpan
from benchmarks.peers.unite import UniTE

__all__ = [
    "NAMED",
    "BeamSearch",
    "DeePEn",
    "GaC",
    "MajorityVote",
    "Rerank",
    "SweetSpan",
    "UniTE",
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
"""The strategies of the suites. The names of variants have a setting in them."""

NAMED = {each.name: each for each in STRATEGIES}
"""These strategies by name, such as ``unite``, ``gac-gated-0.9`` and ``beam-3``."""
