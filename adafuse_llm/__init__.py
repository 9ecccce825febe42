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

__version__ = "0.1.0"  # before the imports: modules below read it

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
from adafuse_llm.loading.specs import MemberSpec
from adafuse_llm.results import (
    Candidate,
    Generation,
    Round,
    ScoredText,
    Scores,
    StreamEvent,
    Usage,
)

__all__ = [  # noqa: RUF022  grouped by use
    "AdaFuseEngine",
    "AdaFuseConfig",
    "RuntimeConfig",
    "MemberSpec",
    "Generation",
    "Round",
    "Candidate",
    "StreamEvent",
    "Usage",
    "Scores",
    "ScoredText",
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
