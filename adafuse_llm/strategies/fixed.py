"""A fixed number of greedy words per round (Figure 2 of the paper), and one member alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import CONSTRAINTS, SAMPLING, AdaFuseConfig
from adafuse_llm.decoding.rounds import PlayRound
from adafuse_llm.decoding.score import Scorer, score
from adafuse_llm.errors import InvalidInputError, InvalidOptionError
from adafuse_llm.strategies.adafuse import branch_tokens, rounds_of_words
from adafuse_llm.strategies.base import Strategy, StrategyContext

MAX_WORDS = 100
"""Maximum number of words per round, as for the option ``max_words``."""


class FixedWords(Strategy):
    """AdaFuse with the same number of words in every round (the paper's Figure 2).

    Every member proposes its greedy continuation of this length, whether it is confident or not. It
    proposes no alternatives. If the response ends earlier, the span is shorter. The score and the
    NLL are the same as in `AdaFuse`.

    Args:
        words: words per round.

    Attributes:
        scorer: function that scores a candidate, which a subclass may replace.

    Raises:
        InvalidOptionError: `words` is not from 1 to 100.
    """

    options = frozenset({*CONSTRAINTS, *SAMPLING, "max_word_letters", "max_word_tokens", "weights"})
    scorer: Scorer = staticmethod(score)

    def __init__(self, words: int) -> None:
        if not 1 <= words <= MAX_WORDS:
            raise InvalidOptionError(f"words per round must be 1 to {MAX_WORDS}; got {words!r}")
        self.words = words

    @property
    @override
    def name(self) -> str:
        return f"fixed-{self.words}"

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        return branch_tokens(members, self._always_sure(config))

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        sure = replace(context, config=self._always_sure(context.config))
        return rounds_of_words(sure, self.scorer)

    def _always_sure(self, config: AdaFuseConfig) -> AdaFuseConfig:
        """Return options that make every member propose all words greedily and never branch."""
        return config.override(
            {"margin_threshold": 0.0, "max_words": self.words, "branching_factor": 1}
        )


class Single(FixedWords):
    """One member alone, which decodes greedily. This is the baseline of every ensemble.

    The tokens are the same as those of the model's own greedy ``generate()``. A round has one word.
    If the engine has several members, choose one with the option ``use=("name",)``. The score and
    the NLL are both the word's mean negative log-likelihood per token, in nats.
    """

    name = "single"
    options = frozenset({*CONSTRAINTS, *SAMPLING, "max_word_letters", "max_word_tokens"})

    def __init__(self) -> None:
        super().__init__(1)

    @override
    def check(self, members: Sequence[Backend]) -> None:
        if len(members) != 1:
            raise InvalidInputError(
                f"strategy 'single' decodes with one member; got {len(members)} "
                f"({', '.join(member.name for member in members)}). Choose one with the option "
                f"use=({members[0].name!r},)."
            )
