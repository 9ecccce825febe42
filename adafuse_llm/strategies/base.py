"""The seam between how a round is decided and the loop that plays rounds."""

# ruff: noqa: ARG002  what a subclass may leave out looks at nothing

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import AdaFuseConfig, RuntimeConfig
from adafuse_llm.decoding.member import Member
from adafuse_llm.decoding.rounds import Play
from adafuse_llm.errors import InvalidOptionError


@runtime_checkable
class Strategy(Protocol):
    """How the members' next piece of text is chosen. Immutable; shared by all requests.

    A subclass may leave out `check`, `top` and `spare`.

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

    def spare(self, members: int, config: AdaFuseConfig) -> int:
        """Most tokens that a member evaluates beside the committed ones."""
        return 0

    def begin(
        self,
        members: Sequence[Member],
        config: AdaFuseConfig,
        runtime: RuntimeConfig,
        crowded: Callable[[], bool],
    ) -> Play:
        """Start a request.

        Args:
            members: the request's members, each with its prompt.
            config: the request's options.
            runtime: how the engine runs requests.
            crowded: whether many requests are being decoded.
        """
        ...


ALWAYS_USED = frozenset({"max_new_tokens", "stop", "members"})
"""Options that the loop over rounds and the engine see to."""


def check_options(strategy: Strategy, config: AdaFuseConfig) -> None:
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
