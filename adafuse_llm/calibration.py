"""The confidence of a response: the probability that it is right, after a calibration."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.results import Generation

__all__ = ["Calibration", "features"]

Coefficient = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
"""A number with which no response has an infinite confidence."""


class Calibration(BaseModel):
    """A logistic regression from which `Generation.confidence` is computed.

    ``adafuse tune`` fits it on labeled questions, and writes it into the configuration file. It is
    valid for the same members, the same strategy, and similar questions.

    Attributes:
        strategy: name of the strategy.
        members: coefficient of `Generation.member_logprobs` by member, for each one that decodes.
        logprob: coefficient of `Generation.logprob`.
        agreement: coefficient of the share of rounds with one candidate only.
        length: coefficient of the mean number of tokens.
        intercept: value before all others are added.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    strategy: str
    members: dict[str, Coefficient]
    logprob: Coefficient
    agreement: Coefficient
    length: Coefficient
    intercept: Coefficient

    def check(self, strategy: str, members: Collection[str]) -> None:
        """Check that the calibration is one of this strategy and of these members.

        Raises:
            InvalidOptionError: it is not.
        """
        if strategy != self.strategy or {*members} != {*self.members}:
            raise InvalidOptionError(
                f"option 'calibration': it was fitted on answers of {', '.join(self.members)} with "
                f"strategy {self.strategy!r}, not of {', '.join(members)} with {strategy!r}. Pass "
                "calibration=None (-o calibration=null on the command line), or run adafuse tune "
                "again."
            )

    def confidence(self, generation: Generation) -> float | None:
        """Return the probability that a response is right.

        It is None if the response is not whole, or if other members or another strategy wrote it.
        """
        members = generation.usage.completion_tokens
        if generation.strategy != self.strategy or {*members} != {*self.members}:
            return None
        values = features(generation, [*self.members])
        if values is None:
            return None
        weights = (self.logprob, *self.members.values(), self.agreement, self.length)
        total = math.fsum(w * value for w, value in zip(weights, values, strict=True))
        return 0.5 + 0.5 * math.tanh(0.5 * (self.intercept + total))


def features(generation: Generation, members: Sequence[str]) -> tuple[float, ...] | None:
    """Return what a calibration knows about a response, or None if the response is not whole.

    Returns:
        The log-probability of the response, the sum of each member, the share of rounds with one
        candidate only (forced rounds do not count), and the mean number of tokens.
    """
    if generation.logprob is None or generation.finish_reason in ("cancelled", "length"):
        return None
    agreed = [len(each.candidates) == 1 for each in generation.rounds if not each.forced]
    return (
        generation.logprob,
        *(generation.member_logprobs.get(name, 0.0) for name in members),
        fmean(agreed) if agreed else 1.0,
        fmean(generation.usage.completion_tokens.values()),
    )
