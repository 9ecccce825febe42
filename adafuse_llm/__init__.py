"""adafuse-llm: several local language models answer as one (AdaFuse, arXiv 2601.06022).

The words used throughout, with the paper's symbols:

member
    one language model with its tokenizer; an ensemble has K of them.
word
    optional whitespace followed by non-whitespace, grown token by token (§3.1).
margin, Δ
    a member's probability of its likeliest next token less that of the second (equation 1). It is
    confident where Δ >= τ (`margin_threshold`).
span
    what a member proposes: up to M words (`max_words`) while confident, and B alternatives
    (`branching_factor`) for the first word it is unsure of (§3.2, §3.3).
pool, candidate
    the union of the spans proposed in a round.
fused score, F
    mean over members of a candidate's negative log-likelihood per token (equations 5, 6).
round
    propose, score, commit the candidate of lowest F to every member (Algorithm 1).

Importing this package loads neither torch nor transformers; loading a member does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from adafuse_llm.backends.base import Answer, Ask, Backend, Drafted, Placed, Relative
    from adafuse_llm.backends.fake import FakeBackend
    from adafuse_llm.config import AdaFuseConfig, RuntimeConfig
    from adafuse_llm.engine import AdaFuseEngine
    from adafuse_llm.errors import (
        AdaFuseError,
        CacheMemoryError,
        ContextWindowError,
        DecodingError,
        EngineClosedError,
        InvalidInputError,
        InvalidOptionError,
        LoadError,
        MalformedReplyError,
        MemberError,
        MemberOutOfMemoryError,
        MissingDependencyError,
        UnsupportedModelError,
    )
    from adafuse_llm.loading.members import MemberSpec
    from adafuse_llm.results import (
        Candidate,
        Generation,
        Round,
        ScoredText,
        Scores,
        StreamEvent,
        Usage,
    )
    from adafuse_llm.strategies import (
        AdaFuse,
        BeamSearch,
        DeePEn,
        FixedWords,
        GaC,
        MajorityVote,
        Rerank,
        Single,
        SweetSpan,
        UniTE,
    )
    from adafuse_llm.strategies.base import Strategy
    from adafuse_llm.strategies.pair_ranker import PairRanker

_HOMES = {
    "backends.base": ("Answer", "Ask", "Backend", "Drafted", "Placed", "Relative"),
    "backends.fake": ("FakeBackend",),
    "config": ("AdaFuseConfig", "RuntimeConfig"),
    "strategies": (
        "AdaFuse",
        "BeamSearch",
        "DeePEn",
        "FixedWords",
        "GaC",
        "MajorityVote",
        "Rerank",
        "Single",
        "SweetSpan",
        "UniTE",
    ),
    "strategies.base": ("Strategy",),
    "engine": ("AdaFuseEngine",),
    "errors": (
        "AdaFuseError",
        "CacheMemoryError",
        "ContextWindowError",
        "DecodingError",
        "EngineClosedError",
        "InvalidInputError",
        "InvalidOptionError",
        "LoadError",
        "MalformedReplyError",
        "MemberError",
        "MemberOutOfMemoryError",
        "MissingDependencyError",
        "UnsupportedModelError",
    ),
    "loading.members": ("MemberSpec",),
    "strategies.pair_ranker": ("PairRanker",),
    "results": (
        "Candidate",
        "Generation",
        "Round",
        "ScoredText",
        "Scores",
        "StreamEvent",
        "Usage",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022  one group per module, as in _HOMES
    "AdaFuseEngine",
    "AdaFuseConfig",
    "RuntimeConfig",
    "MemberSpec",
    "Strategy",
    "AdaFuse",
    "BeamSearch",
    "FixedWords",
    "Single",
    "UniTE",
    "GaC",
    "DeePEn",
    "SweetSpan",
    "Rerank",
    "PairRanker",
    "MajorityVote",
    "Generation",
    "Round",
    "Candidate",
    "StreamEvent",
    "Usage",
    "Scores",
    "ScoredText",
    "Backend",
    "Ask",
    "Answer",
    "Placed",
    "Drafted",
    "Relative",
    "FakeBackend",
    "AdaFuseError",
    "CacheMemoryError",
    "ContextWindowError",
    "DecodingError",
    "EngineClosedError",
    "InvalidInputError",
    "InvalidOptionError",
    "LoadError",
    "MalformedReplyError",
    "MemberError",
    "MemberOutOfMemoryError",
    "MissingDependencyError",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
