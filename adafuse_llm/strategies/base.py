"""What a strategy is to the loop that plays rounds."""

# ruff: noqa: ARG002  default methods ignore their arguments

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import ADJUSTMENTS, AdaFuseConfig
from adafuse_llm.decoding.draft import NoDrafts
from adafuse_llm.decoding.member import MemberState
from adafuse_llm.decoding.rounds import PlayRound
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, short_repr


@dataclass(frozen=True)
class StrategyContext:
    """One request, as a strategy receives it.

    Attributes:
        members: the request's members, each with its prompt.
        config: the request's options.
        drafts: what adds drafts to the passes of these members, from the engine's settings.
    """

    members: Sequence[MemberState]
    config: AdaFuseConfig
    drafts: NoDrafts


class Strategy(ABC):
    """Chooses the next text of a response. A subclass sets `name`, `options` and `begin`.

    A strategy is immutable, and all requests share it. In every strategy, the candidate with the
    lowest score wins a round. If two scores are equal, the earlier candidate wins. A subclass
    documents its ``score`` and its ``nll``.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the strategy, such as ``"adafuse"``."""

    @property
    @abstractmethod
    def options(self) -> frozenset[str]:
        """Options of `AdaFuseConfig` that the strategy uses in addition to `ALWAYS_USED`."""

    def check(self, members: Sequence[Backend]) -> None:
        """Check that the strategy can decode with these members.

        Raises:
            InvalidInputError: the number of members is wrong, or a member lacks a capability.
        """
        return

    def weights(self, members: Sequence[Backend]) -> Sequence[float]:
        """Return the weights of the members that decode, if the option ``weights`` is not set."""
        return [1.0] * len(members)

    def top(self, config: AdaFuseConfig) -> int:
        """Return the number of likeliest next tokens that the strategy needs, at least two."""
        return 2

    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        """Return the largest number of uncommitted tokens that a member evaluates."""
        return 0

    @abstractmethod
    def begin(self, context: StrategyContext) -> PlayRound:
        """Start a request and return the function that plays its rounds."""


def check_listed(members: Sequence[Backend], top: int) -> None:
    """Check that members list as many likeliest tokens as a request needs.

    Raises:
        InvalidOptionError: a member lists fewer.
    """
    for member in members:
        if member.listed_limit is not None and member.listed_limit < top:
            raise InvalidOptionError(
                f"the request needs the {top} likeliest tokens, but member {member.name!r} lists "
                f"{member.listed_limit} at most. Raise the limit of its server (vLLM: "
                f"--max-logprobs {top}), lower branching_factor or top_logprobs, or leave the "
                "member out with use=[...]."
            )


def check_word_ends(strategy: str, members: Sequence[Backend]) -> None:
    """Check that members tell how likely a word ends.

    Raises:
        InvalidInputError: a member does not.
    """
    for member in members:
        if not member.has_word_ends():
            raise InvalidInputError(
                f"strategy {strategy!r} needs to know how likely a word ends, but "
                f"member {member.name!r} does not know it. Servers of vLLM and SGLang do if their "
                "structured outputs work; llama-server does not. Leave the member out with "
                "use=[...], or choose another strategy, such as 'adafuse'."
            )


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
        *ADJUSTMENTS,
    }
)
"""Options that apply to every strategy. The engine, the loop of rounds and the members handle
them."""


def refuse_unused_options(strategy: Strategy, config: AdaFuseConfig) -> None:
    """Check that the strategy uses every option that differs from its default.

    Raises:
        InvalidOptionError: the strategy ignores an option that differs from its default.
    """
    used = ALWAYS_USED | strategy.options
    for name, field in AdaFuseConfig.model_fields.items():
        given = getattr(config, name)
        if name not in used and given != field.default:
            raise InvalidOptionError(
                f"option {name!r}: strategy {strategy.name!r} does not use it; "
                f"got {short_repr(given)}. The strategy uses {', '.join(sorted(used))}. Leave the "
                "option out, or choose a strategy that uses it."
            )
