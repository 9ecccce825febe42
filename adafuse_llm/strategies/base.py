"""The interface between a strategy and the loop that plays rounds."""

# ruff: noqa: ARG002  default methods ignore their arguments

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import ADJUSTMENTS, CONSTRAINTS, SAMPLING, AdaFuseConfig
from adafuse_llm.decoding.draft import NoDrafts
from adafuse_llm.decoding.member import MemberState
from adafuse_llm.decoding.rounds import PlayRound
from adafuse_llm.errors import InvalidOptionError, short_repr


@dataclass(frozen=True)
class StrategyContext:
    """One response, as a strategy receives it: the members with their prompts, and the options.

    `drafts` adds drafts to the passes of these members. If drafting is off, it adds none.
    """

    members: Sequence[MemberState]
    config: AdaFuseConfig
    drafts: NoDrafts


class Strategy(ABC):
    """Chooses the next text of a response. A subclass has `name`, `options` and `begin`.

    A strategy is immutable, and all requests share it. The candidate with the lowest score wins a
    round, and of equal ones the first. A subclass documents what its ``score`` and ``nll`` mean.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the strategy, such as ``"adafuse"``."""

    @property
    @abstractmethod
    def options(self) -> frozenset[str]:
        """The options that the strategy uses besides `ALWAYS_USED`."""

    def check(self, members: Sequence[Backend]) -> None:
        """Check that the strategy can decode with these members.

        Raises:
            InvalidInputError: the number of members is wrong, or a member lacks a capability.
        """
        return

    def weights(self, members: Sequence[Backend]) -> Sequence[float]:
        """Return the weights that these members have if the option ``weights`` is not set."""
        return [1.0] * len(members)

    def top(self, config: AdaFuseConfig) -> int:
        """Return how many of the likeliest next tokens the strategy needs, at least two."""
        return 2

    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        """Return how many uncommitted tokens to allow for in a member's tree."""
        return 0

    @abstractmethod
    def begin(self, context: StrategyContext) -> PlayRound:
        """Start a response and return the function that plays its rounds.

        A request can have several responses. So keep what belongs to one in that function.
        """


ALWAYS_USED = frozenset(
    {
        "max_new_tokens",
        "stop",
        "use",
        "logprobs",
        "top_logprobs",
        "chat_template_kwargs",
        "continue_final_message",
        "calibration",
        "decisions",
        *ADJUSTMENTS,
    }
)
"""Options that every strategy accepts, because they work outside of strategies."""

OF_WORDS = frozenset({*CONSTRAINTS, *SAMPLING, "max_word_letters", "max_word_tokens"})
"""Options of strategies whose members write words."""


def refuse_unused_options(strategy: Strategy, config: AdaFuseConfig) -> None:
    """Raise an InvalidOptionError if an option is set that the strategy does not use."""
    used = ALWAYS_USED | strategy.options
    for name, field in AdaFuseConfig.model_fields.items():
        value = getattr(config, name)
        if name not in used and value != field.default:
            raise InvalidOptionError(
                f"option {name!r}: strategy {strategy.name!r} does not use it; "
                f"got {short_repr(value)}. The strategy uses {', '.join(sorted(used))}. Leave the "
                "option out, or choose a strategy that uses it."
            )
