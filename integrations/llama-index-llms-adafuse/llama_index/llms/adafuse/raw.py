"""The ``raw`` field of responses, with rounds and token usage."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import BaseModel, ConfigDict, Field

from adafuse_llm import Generation, Round, Usage
from adafuse_llm.adapters.logprobs import openai_usage
from adafuse_llm.results import FinishReason
from adafuse_llm.summary import Summary


class TokenUsage(BaseModel):
    """Token counts of the member with the most tokens. `members` has those of all members."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    members: Usage


class AdaFuseRaw(BaseModel):
    """The ``raw`` field of a response or chunk. It can be written as JSON.

    Attributes:
        rounds: all rounds of a whole response, or the round of a chunk. With the option
            `logprobs`, they have the log-probabilities of all members.
        finish_reason, usage, summary, strategy, logprob, confidence, seed, cut_by, alternatives:
            values of the whole response, mostly as in `Generation`. In a stream, only the last
            chunk has them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: tuple[Round, ...] = Field(repr=False)  # they can have megabytes
    finish_reason: FinishReason | None = None
    usage: TokenUsage | None = Field(default=None, repr=False)
    summary: Summary | None = Field(default=None, repr=False)
    strategy: str | None = None
    logprob: float | None = None
    confidence: float | None = None
    seed: int | None = None
    cut_by: str = ""
    alternatives: tuple[Generation, ...] = Field(default=(), repr=False)

    @classmethod
    def of(cls, rounds: tuple[Round, ...], generation: Generation | None) -> AdaFuseRaw:
        """Return the field with `rounds`. A `generation` adds the values of the whole response."""
        if generation is None:
            return cls(rounds=rounds)
        counts = openai_usage(generation.usage)
        del counts["prompt_tokens_details"]
        of_whole: Any = {
            "rounds": rounds,
            "usage": TokenUsage(**counts, members=generation.usage),
            "summary": Summary.of(generation.rounds),
        }
        same = cls.model_fields.keys() - of_whole.keys()
        return cls(**of_whole, **{name: getattr(generation, name) for name in same})
