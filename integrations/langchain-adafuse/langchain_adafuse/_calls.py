"""A call of a model: its beginning, its steps and its responses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from adafuse_llm import AdaFuseConfig, Engine, Generation, Round, StreamEvent
from adafuse_llm.adapters.logprobs import openai_logprobs
from langchain_adafuse._rounds import RoundRecords


class Place(NamedTuple):
    """The place of a response in its call.

    Attributes:
        number: number of the response in the call.
        labels: what records of its rounds tell about the place.
    """

    number: int = 0
    labels: Mapping[str, int] = {}


ONLY = Place()
"""The place of the only response of a call."""


class Step(NamedTuple):
    """An event of a response.

    Attributes:
        event: the event.
        records: the records of its round that messages have.
        metadata: the metadata of the response, in the last event; otherwise empty.
    """

    event: StreamEvent
    records: RoundRecords
    metadata: dict[str, Any]


class Response(NamedTuple):
    """A whole response.

    Attributes:
        generation: the engine's result.
        records: the records of its rounds that messages have.
        metadata: its metadata, with the log-probabilities of all rounds.
    """

    generation: Generation
    records: RoundRecords
    metadata: dict[str, Any]

    @property
    def is_cancelled(self) -> bool:
        """Whether the response ended before it was complete."""
        return self.generation.finish_reason == "cancelled"

    @property
    def event(self) -> StreamEvent:
        """The response as one event."""
        generation = self.generation
        return StreamEvent(
            text=generation.text,
            round=None,
            generation=generation,
            reply_prefix=generation.reply_prefix,
        )


class Timing:
    """Measures how long a call takes. It begins when it is created."""

    def __init__(self) -> None:
        self._began = self._loaded = time.perf_counter_ns()
        self._committed: dict[int, int] = {}  # when each response began, by its number

    def end_loading(self) -> None:
        """Note that the members are loaded."""
        self._loaded = time.perf_counter_ns()

    def note(self, number: int) -> None:
        """Note an event of a response. Only the first one counts."""
        self._committed.setdefault(number, time.perf_counter_ns())

    def durations(self, number: int, generation: Generation) -> dict[str, int]:
        """Return the durations of a response, with the names and the unit of Ollama's API.

        Time that a consumer of the events takes does not count.
        """
        parts = {
            "load_duration": self._loaded - self._began,
            "prompt_eval_duration": self._committed[number] - self._loaded,
            "eval_duration": round(sum(each.elapsed for each in generation.rounds[1:]) * 1e9),
        }
        return {"total_duration": sum(parts.values()), **parts}


class Start(NamedTuple):
    """The beginning of a call.

    Attributes:
        engine: the engine.
        config: the options of the call.
        timing: the durations so far.
    """

    engine: Engine
    config: AdaFuseConfig
    timing: Timing

    def logprobs(self, rounds: Sequence[Round]) -> dict[str, Any]:
        """Return the metadata with the log-probabilities of rounds; empty without the option."""
        if not rounds or not (self.config.logprobs or self.config.top_logprobs):
            return {}
        leader = self.config.leading_member(self.engine.members)
        return {"logprobs": openai_logprobs(rounds, leader)}

    def whole(self, steps: Sequence[Step]) -> Response:
        """Return the response of all its steps."""
        last = steps[-1]
        generation = last.event.generation
        assert generation is not None, "a decode ends with its generation or an error"
        records = [record for step in steps for record in step.records]
        metadata = {**last.metadata, **self.logprobs(generation.rounds)}
        return Response(generation, records, metadata)

    def metadata(self, step: Step) -> dict[str, Any]:
        """Return the metadata of one step of a stream, with its log-probabilities."""
        done = step.event.round
        return step.metadata if done is None else {**step.metadata, **self.logprobs((done,))}

    def variants(self) -> list[dict[str, Any]]:
        """Return the options in which the responses to one prompt differ."""
        if self.config.n == 1:
            return [{}]
        return [{"n": 1, "seed": seed} for seed in self.config.seeds()]
