"""The seam between how a round is decided and the loop that plays rounds."""

# ruff: noqa: ARG002  what a subclass may leave out looks at nothing

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.draft import Drafting
from adafuse_llm.decoding.member import Member
from adafuse_llm.decoding.rounds import PlayRound
from adafuse_llm.errors import InvalidOptionError


@dataclass(frozen=True)
class StrategyContext:
    """One request, as its strategy sees it.

    Attributes:
        members: the request's members, each with its prompt.
        config: the request's options.
        new_drafting: makes the drafting of these members, as the engine's settings say. It changes
            what the members' passes evaluate, so call it at most once.
    """

    members: Sequence[Member]
    config: AdaFuseConfig
    new_drafting: Callable[[Sequence[Member]], Drafting]


@runtime_checkable
class Strategy(Protocol):
    """How the members' next piece of text is chosen. Immutable; shared by all requests.

    A subclass may leave out `check`, `top` and `max_extra_tokens`.

    Whatever the strategy, the lowest score of a round's candidates wins, and equal scores go to
    the earlier candidate. What score and ``nll`` mean is said by each.
    """

    @property
    def name(self) -> str:
        """Its name, such as ``"adafuse"``."""
        ...

    @property
    def options(self) -> frozenset[str]:
        """Options of `AdaFuseConfig` that it looks at, besides those of every decode
        (`ALWAYS_USED`).
        """
        ...

    def check(self, members: Sequence[Backend]) -> None:
        """Refuse members that it cannot decode with.

        Raises:
            InvalidInputError: there are too many or too few, or they lack what it needs.
        """
        return

    def top(self, config: AdaFuseConfig) -> int:
        """How many of the likeliest next tokens it looks at, at least two."""
        return 2

    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        """Most tokens that a member evaluates beside the committed ones."""
        return 0

    def begin(self, context: StrategyContext) -> PlayRound:
        """Start a request and return the function that plays its rounds."""
        ...


ALWAYS_USED = frozenset({"max_new_tokens", "stop", "use"})
"""Options that the loop over rounds and the engine see to."""


def refuse_unused_options(strategy: Strategy, config: AdaFuseConfig) -> None:
    """Refuse options that a strategy would ignore.

    Raises:
        InvalidOptionError: one that it does not look at is not at its default.
    """
    used = ALWAYS_USED | strategy.options
    for name, field in AdaFuseConfig.model_fields.items():
        given = getattr(config, name)
        if name not in used and given != field.default:
            raise InvalidOptionError(
                f"option {name!r}: strategy {strategy.name!r} does not use it; got {given!r}. "
                f"It uses {', '.join(sorted(used))}. Leave the option out, or choose a strategy "
                "that uses it."
            )
