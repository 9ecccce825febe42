"""Calibrations, which turn an ensemble's scores into probabilities that its answers are right."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.results import Generation

__all__ = ["Calibration", "DecisionCalibration", "features"]

Coefficient = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
"""A coefficient, limited so that no weighted sum becomes infinite."""


def some_weight(weights: Any) -> Any:
    """Check that a weight is above 0. Weights are by member, or a tuple."""
    if not any(weights.values() if isinstance(weights, dict) else weights):
        raise ValueError("a weight must be above 0")
    return weights


class Calibration(BaseModel):
    """A logistic regression that computes `Generation.confidence`.

    ``adafuse tune`` fits it on labeled questions, and writes it into the configuration file. It is
    valid for the same members, the same strategy, and similar questions.

    Attributes:
        strategy: name of the strategy.
        members: coefficients of `Generation.member_logprobs`, by member name.
        logprob: coefficient of `Generation.logprob`.
        agreement: coefficient of the share of rounds, forced ones aside, with only one candidate.
        length: coefficient of the number of tokens in the response, averaged over the members.
        intercept: constant term of the sum.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    strategy: str
    members: dict[str, Coefficient]
    logprob: Coefficient
    agreement: Coefficient
    length: Coefficient
    intercept: Coefficient

    def check(self, strategy: str, members: Collection[str]) -> None:
        """Raise an InvalidOptionError if the fit was for another strategy or other members."""
        if strategy != self.strategy or {*members} != {*self.members}:
            raise InvalidOptionError(
                f"option 'calibration': it was fitted on answers of {', '.join(self.members)} with "
                f"strategy {self.strategy!r}, not of {', '.join(members)} with {strategy!r}. Pass "
                "calibration=None (-o calibration=null on the command line), or run adafuse tune "
                "again."
            )

    def confidence(self, generation: Generation) -> float | None:
        """Return the probability that a response is right.

        It is None if the `features` are None, or if other members or another strategy decoded.
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


class DecisionCalibration(BaseModel):
    """A calibration that turns members' answers to typed questions into probabilities.

    The score of an option is the weighted mean of the members' log-probabilities, divided by the
    temperature, plus the option's intercept. The probabilities are the softmax of the scores.
    ``adafuse tune --decide`` fits the calibration. It is valid for the same members, the default
    orders of the options, and similar questions.

    Attributes:
        weights: weight by member, 0 for members that do not help.
        temperature: above 1, it makes the probabilities more equal; below 1, less equal.
        intercepts: intercept by option, such as ``yes``. Absent options have 0.
        threshold: lowest confidence of a sure answer. None: `Answer.is_sure` is None, too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: dict[str, Annotated[float, Field(ge=0, le=1e18)]]
    temperature: Annotated[float, Field(ge=1e-9, le=1e9)] = 1.0
    intercepts: dict[str, Coefficient] = {}
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None

    _some_weight = field_validator("weights")(some_weight)

    def check(self, members: Collection[str]) -> None:
        """Raise an InvalidOptionError if the calibration was fitted for other members."""
        if {*members} != {*self.weights}:
            raise InvalidOptionError(
                f"option 'decisions': it was fitted on answers of {', '.join(self.weights)}, not "
                f"of {', '.join(members)}. Pass decisions=None (-o decisions=null on the command "
                "line), or run adafuse tune --decide again."
            )


def features(generation: Generation, members: Sequence[str]) -> tuple[float, ...] | None:
    """Return the numbers from which a calibration computes a confidence.

    They are `Generation.logprob`, the `member_logprobs` of `members`, the share of rounds with one
    candidate (forced rounds do not count), and the number of tokens, averaged over the members.
    The result is None if the response is incomplete or has no log-probability.
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
