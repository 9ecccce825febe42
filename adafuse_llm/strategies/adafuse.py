"""AdaFuse itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.rounds import PlayRound, Scorer, play_round, score
from adafuse_llm.strategies.base import Strategy, StrategyContext


@dataclass(frozen=True)
class AdaFuse(Strategy):
    """Adaptive ensembling of words (Algorithm 1 of arXiv 2601.06022): the default.

    A round commits up to M words where its proposer is sure, and chooses among alternatives where
    it is not. Score: the fused score F (equation 6). NLL: mean nats per token (equation 5).

    Cost: each member processes its own proposal and the others', and keeps the winner's rows;
    unanimous rounds cost about a pass per token and member.
    """

    name = "adafuse"
    options = frozenset(
        {"margin_threshold", "max_words", "branching_factor", "max_word_tokens", "weights"}
    )

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return max(2, config.branching_factor)

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        return branch_tokens(members, config)

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return rounds_of_words(context)


def rounds_of_words(context: StrategyContext, scorer: Scorer = score) -> PlayRound:
    """Rounds of Algorithm 1, with drafts if the engine drafts."""
    drafting = context.new_drafting(context.members)
    return partial(play_round, context.members, context.config, drafting, scorer=scorer)


def branch_tokens(members: int, config: AdaFuseConfig) -> int:
    """Most tokens of a round's pool, which a member's tree holds beside the committed ones.

    Each of K members proposes M - 1 words it is sure of, which its branches share, and B
    alternatives for the next. Every word is counted at `max_word_tokens`. Few words are that
    long, which leaves room for what the tree keeps of earlier rounds, and for a member that cuts
    another's words into more tokens.
    """
    words = config.max_words - 1 + config.branching_factor
    return members * words * config.max_word_tokens
