"""The AdaFuse strategy, and one member alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.member import MemberState
from adafuse_llm.decoding.rounds import PlayRound, play_round
from adafuse_llm.decoding.score import PoolCandidate, score
from adafuse_llm.errors import InvalidInputError
from adafuse_llm.results import Candidate
from adafuse_llm.strategies.base import OF_WORDS, Strategy, StrategyContext


@dataclass(frozen=True)
class AdaFuse(Strategy):
    """Adaptive ensembling of words (Algorithm 1 of arXiv 2601.06022).

    In a round, members propose up to M words. They stop at the first word of which they are not
    confident, and propose alternatives for it. The score is the fused score F (equation 5), and the
    NLL is the mean in nats per token (equation 4). One member alone writes its own greedy text,
    unless `branching_factor` is set.

    Cost: every member reads all proposals. A unanimous round takes about one pass per token.

    A subclass may replace `scorer` and `rule`.
    """

    name = "adafuse"
    options = OF_WORDS | {"margin_threshold", "max_words", "branching_factor", "weights"}

    def scorer(self, candidate: PoolCandidate, members: Sequence[MemberState]) -> Candidate:
        """Return a candidate with its score, and with each member's log-likelihood."""
        return score(candidate, members)

    def rule(self, config: AdaFuseConfig) -> AdaFuseConfig:
        """Return the options for the rounds of a request that has the options `config`."""
        return config

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return max(2, self.rule(config).branches)

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        return branch_tokens(members, self.rule(config))

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        config = self.rule(context.config)
        if len(context.members) == 1 and config.branching_factor is None:  # nothing to fuse
            config = config.override({"branching_factor": 1})
        return partial(play_round, context.members, config, context.drafts, scorer=self.scorer)


class Single(AdaFuse):
    """One member alone, the baseline of every ensemble: the option ``use=("name",)`` chooses it.

    By default, its tokens are those of the model's own greedy ``generate()``. A round has one word.
    Score and NLL are the word's mean negative log-likelihood per token, in nats.
    """

    name = "single"
    options = OF_WORDS

    @override
    def rule(self, config: AdaFuseConfig) -> AdaFuseConfig:
        return config.override({"margin_threshold": 0.0, "max_words": 1, "branching_factor": 1})

    @override
    def check(self, members: Sequence[Backend]) -> None:
        if len(members) != 1:
            raise InvalidInputError(
                f"strategy 'single' decodes with one member; got {len(members)} "
                f"({', '.join(member.name for member in members)}). Choose one with the option "
                f"use=({members[0].name!r},)."
            )


def branch_tokens(members: int, config: AdaFuseConfig) -> int:
    """Return how many uncommitted tokens to allow for in a member's tree.

    Every word counts as `max_word_tokens`. Most are shorter, so there is room for nodes of earlier
    rounds, and for words that take more tokens in this member than in the one that proposed them.
    """
    # a member proposes at most M - 1 confident words, and B alternatives that all continue them
    words = config.max_words - 1 + config.branches
    return members * words * config.max_word_tokens
