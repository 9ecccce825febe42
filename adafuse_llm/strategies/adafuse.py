"""The AdaFuse strategy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from adafuse_llm.config import CONSTRAINTS, SAMPLING, AdaFuseConfig
from adafuse_llm.decoding.rounds import PlayRound, play_round
from adafuse_llm.decoding.score import Scorer, score
from adafuse_llm.strategies.base import Strategy, StrategyContext

OF_ROUNDS = (
    *("margin_threshold", "max_words", "branching_factor"),
    *("max_word_letters", "max_word_tokens", "weights"),
)
"""Options of the rounds of Algorithm 1."""


@dataclass(frozen=True)
class AdaFuse(Strategy):
    """Adaptive ensembling of words (Algorithm 1 of arXiv 2601.06022).

    In a round, each member proposes up to M words. It stops at the first word of which it is not
    confident, and proposes alternatives for this word. The score is the fused score F (equation 5).
    The NLL is the mean in nats per token (equation 4). One member alone writes its own greedy text,
    unless `branching_factor` is set.

    Cost: each member processes its own proposal and the other members' proposals. It keeps only the
    key/value rows of the winner. A unanimous round costs each member about one pass per token.
    """

    name = "adafuse"
    options = frozenset({*CONSTRAINTS, *SAMPLING, *OF_ROUNDS})

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return max(2, config.branches)

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        return branch_tokens(members, config)

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return rounds_of_words(context)


def rounds_of_words(context: StrategyContext, scorer: Scorer = score) -> PlayRound:
    """Return the function that plays rounds of Algorithm 1, with drafts if they are turned on.

    If one member decodes and `branching_factor` is not set, there is nothing to fuse, and B is 1.
    """
    config = context.config
    if len(context.members) == 1 and config.branching_factor is None:
        config = config.override({"branching_factor": 1})
    return partial(play_round, context.members, config, context.drafting, scorer=scorer)


def branch_tokens(members: int, config: AdaFuseConfig) -> int:
    """Return the largest number of uncommitted tokens that a member's tree holds for one pool.

    Each of K members proposes at most M - 1 confident words, which its branches share, and B
    alternatives for the next word. Every word counts as `max_word_tokens` tokens. Most words are
    shorter. The difference leaves room for nodes of earlier rounds, and for members that split the
    words into more tokens.
    """
    words = config.max_words - 1 + config.branches
    return members * words * config.max_word_tokens
