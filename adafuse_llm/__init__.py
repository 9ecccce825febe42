"""adafuse-llm lets several local language models write one response (AdaFuse, arXiv 2601.06022).

The code and the documentation use these words. The symbols are those of the paper.

member
    One language model with its tokenizer. An ensemble has K members.
word
    Optional whitespace followed by non-whitespace. A member writes a word token by token (§3.1).
margin, Δ
    The probability of a member's most likely next token minus that of the second most likely one
    (equation 1). A member is confident if Δ >= τ (`margin_threshold`).
span
    A text of up to M words (`max_words`) that a member proposes. The member adds words while it is
    confident. At the first word where it is not, it proposes B spans (`branching_factor`), which
    differ only in that word (§3.2, §3.3).
pool, candidate
    The pool of a round is the union of the spans that the members propose. Each span in the pool is
    a candidate.
fused score, F
    The weighted mean over members of a candidate's negative log-likelihood per token (equations
    4, 5).
round
    One iteration of Algorithm 1. The members propose spans and score all candidates. The candidate
    with the lowest F is committed: it becomes the next part of the response, and every member
    continues from it.

Importing this package loads neither torch nor transformers; loading a member does.
"""

from __future__ import annotations

__version__ = "0.1.0"  # set before the imports because the imported modules read it

from adafuse_llm import errors
from adafuse_llm.config import AdaFuseConfig, RuntimeConfig
from adafuse_llm.decisions import Choice, Predicate, Score
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import *  # noqa: F403  # all of them
from adafuse_llm.interface import Engine
from adafuse_llm.loading.specs import GGUFMember, MemberSpec, ServerMember, TransformersMember
from adafuse_llm.remote.client import RemoteEngine
from adafuse_llm.request import Request
from adafuse_llm.results import (
    Answer,
    Candidate,
    Chosen,
    Decision,
    Generation,
    MemberInfo,
    Round,
    ScoredText,
    Scores,
    StreamEvent,
    TokenLogprob,
    TopToken,
    Usage,
)
from adafuse_llm.run import Run
from adafuse_llm.text.conversation import Tool

__all__ = [  # noqa: RUF022  grouped by use
    "AdaFuseEngine",
    "RemoteEngine",
    "Engine",
    "AdaFuseConfig",
    "RuntimeConfig",
    "GGUFMember",
    "MemberSpec",
    "ServerMember",
    "TransformersMember",
    "Tool",
    "Predicate",
    "Choice",
    "Score",
    "Request",
    "Run",
    "Generation",
    "Round",
    "Candidate",
    "Chosen",
    "Decision",
    "Answer",
    "StreamEvent",
    "TokenLogprob",
    "TopToken",
    "Usage",
    "MemberInfo",
    "Scores",
    "ScoredText",
]
__all__ += errors.__all__
