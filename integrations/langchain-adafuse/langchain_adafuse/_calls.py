"""A call of a model: it opens the requests, and gives the steps of their responses."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage

from adafuse_llm import ContextWindowError, Engine, Request, Round, StreamEvent
from adafuse_llm.adapters.enforcing import enforced
from adafuse_llm.adapters.logprobs import openai_logprobs
from adafuse_llm.adapters.reply_form import ReplyForm
from adafuse_llm.text.matchers import is_available
from langchain_adafuse._metadata import metadata_of
from langchain_adafuse._rounds import ModelRun, RoundRecords, RoundReporter
from langchain_adafuse.errors import CallTimeoutError

if TYPE_CHECKING:
    from langchain_adafuse._model import EnsembleModel

ANY_TEXT = ReplyForm()


class Step(NamedTuple):
    """An event of a response, or a whole response as one event.

    Attributes:
        number: number of the response in the call.
        event: the event.
        records: the records of its rounds that messages have.
        metadata: the metadata of the response, in the last event; otherwise empty.
    """

    number: int
    event: StreamEvent
    records: RoundRecords
    metadata: dict[str, Any]


class Call:
    """One call of a model. It begins when it is created.

    Args:
        model: the model, with the overrides of the call.
        run: the run to report rounds to.
        form: the form of the replies.
        numbers_prompts: whether records of rounds have the number of their prompt.

    Attributes:
        model: as above.
        form: as above.
    """

    def __init__(
        self,
        model: EnsembleModel,
        run: ModelRun | None,
        form: ReplyForm = ANY_TEXT,
        *,
        numbers_prompts: bool = False,
    ) -> None:
        self.form = form
        self.model = model
        self._numbers_prompts = numbers_prompts
        self._reporter = RoundReporter(run, model.round_detail, model.trace_rounds)
        self._cancel = threading.Event()
        self._began = self._loaded = time.perf_counter_ns()
        self._first: dict[int, int] = {}  # when each response had its first event

    def steps(self, requests: Sequence[Request]) -> Generator[Step, None, None]:
        """Yield the steps of all responses, and report their rounds. Load the members if needed."""
        engine = self.model._loaded()
        requests = self._prepared(engine, requests)
        with self._limited(), closing(engine.open(requests)) as run:
            for number, event in run:
                labels = self._labels(number)
                yield self._step(number, event, self._reporter.report(event, **labels))

    async def asteps(self, requests: Sequence[Request]) -> AsyncGenerator[Step, None]:
        """Do the same as `steps`, without blocking the event loop."""
        loaded = self.model._ensemble.is_loaded
        load = self.model._loaded
        engine = load() if loaded else await asyncio.to_thread(load)
        if self.form.is_free:
            requests = self._prepared(engine, requests)
        else:  # compiling a new grammar takes time
            requests = await asyncio.to_thread(self._prepared, engine, requests)
        with self._limited(), closing(await engine.aopen(requests)) as run:
            async for number, event in run:
                labels = self._labels(number)
                yield self._step(number, event, await self._reporter.areport(event, **labels))

    def wholes(
        self, steps: Iterable[Step], as_partial: Callable[[Step], AIMessage | str]
    ) -> list[Step]:
        """Return the whole response of each last step, with the records and metadata of all steps.

        Args:
            steps: steps of the call.
            as_partial: converts a response for the error.

        Raises:
            CallTimeoutError: a response was cancelled, because the call took too long.
        """
        ends: dict[int, Step] = {}
        records: dict[int, RoundRecords] = {}
        for step in steps:
            records.setdefault(step.number, []).extend(step.records)
            ends[step.number] = step
        wholes, is_late = [], False
        for number, step in sorted(ends.items()):
            generation = step.event.generation
            assert generation is not None, "a response ends with its generation or an error"
            event = StreamEvent(
                text=generation.text,
                round=None,
                generation=generation,
                reply_prefix=generation.reply_prefix,
            )
            metadata = {**step.metadata, **self._logprobs(generation.rounds)}
            wholes.append(Step(number, event, records[number], metadata))
            is_late = is_late or generation.finish_reason == "cancelled"
        if is_late:
            raise CallTimeoutError(
                "the call was stopped, because it took longer than "
                f"timeout={self.model.timeout} seconds",
                list(map(as_partial, wholes)),
            )
        return wholes

    def metadata(self, step: Step) -> dict[str, Any]:
        """Return the metadata of one step of a stream, with its log-probabilities."""
        done = step.event.round
        return step.metadata if done is None else {**step.metadata, **self._logprobs((done,))}

    def _prepared(self, engine: Engine, requests: Sequence[Request]) -> list[Request]:
        """Return requests with the options of the call, once the members are loaded."""
        self._loaded = time.perf_counter_ns()
        model, options = self.model, self.model._engine_options
        self._members = engine.members
        self._config = engine.config.override(options)
        if not self.form.is_free:
            enforce = model._enforces if model._enforces is True or is_available() else False
            options, problem = enforced(engine, self.form, options, enforce)
            if problem:
                model._warn_once(
                    f"the form of replies is only described to the members, not enforced: {problem}"
                )
        return [
            Request(
                prompt=each.prompt, messages=each.messages, options=options, cancel=self._cancel
            )
            for each in requests
        ]

    def _labels(self, number: int) -> dict[str, int]:
        """Return what records of rounds tell about the place of a response in the call."""
        prompt, response = divmod(number, self._config.n)
        labels = {"prompt": prompt} if self._numbers_prompts else {}
        return {**labels, "response": response} if self._config.n > 1 else labels

    def _step(self, number: int, event: StreamEvent, records: RoundRecords) -> Step:
        """Return a step. Time that a consumer of the steps takes does not count as a duration."""
        first = self._first.setdefault(number, time.perf_counter_ns())
        if event.generation is None:
            return Step(number, event, records, {})
        later = event.generation.rounds[1:]
        durations = {  # with the names and the unit of Ollama's API
            "load_duration": self._loaded - self._began,
            "prompt_eval_duration": first - self._loaded,
            "eval_duration": round(sum(each.elapsed for each in later) * 1e9),
        }
        metadata = metadata_of(
            event.generation,
            model_name=self.model.model_name,
            detail=self.model.round_detail,
            durations={"total_duration": sum(durations.values()), **durations},
        )
        return Step(number, event, records, metadata)

    def _logprobs(self, rounds: Sequence[Round]) -> dict[str, Any]:
        """Return the metadata with the log-probabilities of rounds; empty without the option."""
        if not rounds or self._config.counted_logprobs is None:
            return {}
        leader = self._config.reported_member(self._members)
        return {"logprobs": openai_logprobs(rounds, leader)}

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Cancel the requests when the time of the call is over, and when it ends.

        Raises:
            ContextOverflowError: the prompt does not fit a member's context window.
        """
        timer = threading.Timer(self.model.timeout or 0, self._cancel.set)
        timer.daemon = True
        if self.model.timeout is not None:
            timer.start()
        try:
            yield
        except ContextWindowError as error:
            raise ContextOverflowError(str(error)) from error
        finally:
            timer.cancel()
            self._cancel.set()
