"""Options of decoding, and of how requests are run: frozen, valid by construction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from typing_extensions import Unpack

from adafuse_llm.errors import InvalidOptionError, nearest


class Options(BaseModel):
    """A frozen set of options; what is wrong with one is said in one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    if not TYPE_CHECKING:  # a type checker reads the fields instead

        def __init__(self, **options: Any) -> None:
            try:
                super().__init__(**options)
            except ValidationError as error:
                raise InvalidOptionError(_explain(error, list(type(self).model_fields))) from None


class RuntimeConfig(Options):
    """How an engine runs requests: what they cost, never what they return.

    Raises:
        InvalidOptionError: an option is unknown or out of range.
    """

    drafting: bool = Field(
        default=True,
        description="Evaluate likely continuations (other members' words, copies from the prompt) "
        "in passes that are made anyway.",
    )
    max_requests: int = Field(
        default=16,
        ge=1,
        description="Requests that are decoded at the same time; more wait their turn.",
    )
    cache_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Most bytes of key/value cache that running requests hold on one device; a "
        "request that does not fit waits. Counted are key/value rows alone, not the logits of its "
        "trees' nodes (4 bytes per node and vocabulary entry), the activations of a pass, or "
        "what is kept of finished requests (`MemberSpec.prefix_cache_bytes`). Default: half of "
        "what is free when it is first used, which leaves the other half to those.",
    )


class DecodeOptions(TypedDict, total=False):
    """The keyword arguments of `AdaFuseConfig` and of every call, for type checkers.

    `AdaFuseConfig` describes each option.
    """

    margin_threshold: float
    max_words: int
    branching_factor: int
    max_word_tokens: int
    max_new_tokens: int
    stop: str | Sequence[str] | None
    weights: Mapping[str, float] | Sequence[float] | None
    use: str | Sequence[str] | None
    temperature: float | None


class AdaFuseConfig(Options):
    """Options of AdaFuse decoding (arXiv 2601.06022, §3 and §4.1).

    Change it by copy with :meth:`override`. Decoding is deterministic: there is no temperature
    (0 is accepted and means just that).

    Raises:
        InvalidOptionError: an option is unknown or out of range.
    """

    margin_threshold: float = Field(
        0.7,
        ge=0.0,
        le=1.0,
        description="τ: a member is confident where the probability of its likeliest token exceeds "
        "that of the second by at least this much (§3.2, equation 1).",
    )
    max_words: int = Field(
        3, ge=1, description="M: most words in one span, while the member stays confident (§3.2)."
    )
    branching_factor: int = Field(
        3, ge=1, description="B: first tokens explored where a member is not confident (§3.3)."
    )
    max_word_tokens: int = Field(
        16, ge=1, description="A word is cut after this many tokens (scripts without spaces)."
    )
    max_new_tokens: int = Field(
        256, ge=1, description="Decoding ends once a member's response holds this many tokens."
    )
    stop: tuple[str, ...] = Field(
        (), description="The text ends right before the first of these sequences."
    )
    weights: dict[str, float] | tuple[float, ...] | None = Field(
        None,
        description="Weight of each member in the fused score, by name or in member order; "
        "non-negative, not all zero. Default: all equal (§3.4, equation 6).",
    )
    use: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="Names of the members that decode, in any order. Default: all of the engine's.",
    )

    def __init__(self, **options: Unpack[DecodeOptions]) -> None:
        temperature = options.pop("temperature", 0)
        if temperature not in (0, None):
            raise InvalidOptionError(
                f"temperature must be 0: AdaFuse decoding is deterministic; got {temperature!r}. "
                "Leave it out."
            )
        values: dict[str, Any] = {**options}
        super().__init__(**values)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_or_many(cls, stop: Any) -> Any:
        if stop is None:
            return ()
        return (stop,) if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if any(not sequence for sequence in stop):
            raise ValueError("a stop sequence must hold at least one character")
        return stop

    @field_validator("use", mode="before")
    @classmethod
    def _one_member_or_many(cls, names: Any) -> Any:
        return (names,) if isinstance(names, str) else names

    @field_validator("weights")
    @classmethod
    def _usable_weights(
        cls, weights: dict[str, float] | tuple[float, ...] | None
    ) -> dict[str, float] | tuple[float, ...] | None:
        if weights is None:
            return None
        values = list(weights.values()) if isinstance(weights, dict) else list(weights)
        if any(not math.isfinite(value) or value < 0 for value in values) or not any(values):
            raise ValueError("weights must be finite, non-negative and not all zero")
        return weights

    def override(self, options: Mapping[str, Any]) -> AdaFuseConfig:
        """A copy with `options` changed, validated like a new one.

        Raises:
            InvalidOptionError: an option is unknown or out of range.
        """
        if not options:
            return self
        return AdaFuseConfig(**{**self.model_dump(), **options})

    def member_weights(self, members: Sequence[str]) -> dict[str, float]:
        """The members that decode, each with its weight, in the order of `members`.

        Args:
            members: names of all members of an ensemble.

        Raises:
            InvalidOptionError: ``use`` or ``weights`` do not fit them.
        """
        names = members if self.use is None else self.use
        if self.weights is None:
            weights = dict.fromkeys(members, 1.0)
        elif isinstance(self.weights, dict):
            weights = self.weights
        elif len(self.weights) == len(members):
            weights = dict(zip(members, self.weights, strict=True))
        else:
            raise InvalidOptionError(
                f"option 'weights' must have one value per member ({len(members)}); "
                f"got {len(self.weights)}"
            )
        for option, used in (("use", names), ("weights", weights)):
            for name in used:
                if name not in members:
                    raise InvalidOptionError(
                        f"option {option!r}: there is no member {name!r}.{nearest(name, members)} "
                        f"Members: {', '.join(members)}."
                    )
        if missing := [name for name in names if name not in weights]:
            raise InvalidOptionError(
                f"option 'weights' must name every member; {', '.join(missing)} is missing"
            )
        if not any(weights[name] for name in names):
            raise InvalidOptionError(
                f"option 'weights' leaves no weight to the members ({', '.join(names)})"
            )
        return {name: weights[name] for name in members if name in names}


def hint(name: str, allowed: Iterable[str]) -> str:
    """Return what to write instead of an unknown option, or an empty string."""
    if name == "members":
        return " use= chooses among the members that are loaded."
    return nearest(name, allowed)


def _explain(error: ValidationError, names: list[str]) -> str:
    """One line: option, what is allowed, what was given (the first problem found)."""
    problem = error.errors()[0]
    name = str(problem["loc"][0]) if problem["loc"] else "options"
    if problem["type"] == "extra_forbidden":
        return f"unknown option {name!r}.{hint(name, names)} The options are: {', '.join(names)}."
    allowed = problem["msg"].removeprefix("Value error, ")
    allowed = allowed[:1].lower() + allowed[1:]
    return f"option {name!r}: {allowed}; got {problem['input']!r}"
