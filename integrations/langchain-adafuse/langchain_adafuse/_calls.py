"""A call of a model: it opens the requests, and gives the steps of their responses."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages.ai import UsageMetadata

from adafuse_llm import (
    ContextWindowError,
    Engine,
    Generation,
    InvalidOptionError,
    Request,
    RequestTimeoutError,
    Round,
    StreamEvent,
)
from adafuse_llm.adapters.logprobs import openai_logprobs
from adafuse_llm.adapters.reply_form import ReplyForm, enforced
from adafuse_llm.summary import Summary, record
from adafuse_llm.text.matchers import is_available
from langchain_adafuse._rounds import ROUNDS_KEY, RoundRecords

if TYPE_CHECKING:
    from langchain_adafuse._model import EnsembleModel

TOKEN_KINDS = ("prompt_tokens", "completion_tokens", "total_tokens")
ONE_STREAM = "n must be 1 when streaming; to get several responses, call generate"


class Step(NamedTuple):
    """An event of a response.

    Attributes:
        number: number of the response in the call.
        event: the event.
        rounds: the record of its round, for callbacks.
        metadata: the metadata of the response, in the last event; otherwise empty.
    """

    number: int
    event: StreamEvent
    rounds: RoundRecords
    metadata: dict[str, Any]


class Call:
    """One call of a model. It begins when it is created.

    Args:
        model: the model, with the overrides of the call.
        form: the form of the replies; None for a text model, whose records of rounds have the
            number of their prompt.
        streams: whether the steps are streamed.

    Raises:
        InvalidOptionError: several responses would be streamed.
    """

    def __init__(
        self, model: EnsembleModel, form: ReplyForm | None = None, *, streams: bool = False
    ) -> None:
        if streams and model._config.n > 1:
            raise InvalidOptionError(ONE_STREAM)
        self.form = form or ReplyForm()
        self.model = model
        self._numbers_prompts = form is None
        self._cancel = threading.Event()
        self._began = self._loaded = time.perf_counter_ns()
        self._first: dict[int, int] = {}  # when each response had its first event

    def steps(self, requests: Sequence[Request]) -> Generator[Step, None, None]:
        """Yield the steps of all responses. Load the members if needed."""
        engine = self.model._loaded()
        requests = self._prepared(engine, requests)
        with self._limited(), closing(engine.open(requests)) as run:
            for number, event in run:
                yield self._step(number, event)

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
                yield self._step(number, event)

    def metadata(self, step: Step) -> dict[str, Any]:
        """Return the metadata of one chunk, with the log-probabilities of its round."""
        done = step.event.round
        return {**step.metadata, **self.logprobs(() if done is None else (done,))}

    def kept(self, rounds: RoundRecords) -> dict[str, RoundRecords]:
        """Return the rounds under their key in messages, if messages have them."""
        return {ROUNDS_KEY: rounds} if rounds and self.model.round_detail == "full" else {}

    def logprobs(self, rounds: Sequence[Round]) -> dict[str, Any]:
        """Return the metadata with the log-probabilities of rounds; empty without the option."""
        if not rounds or self._config.counted_logprobs is None:
            return {}
        leader = self._config.reported_member(self._members)
        return {"logprobs": openai_logprobs(rounds, leader)}

    def _prepared(self, engine: Engine, requests: Sequence[Request]) -> list[Request]:
        """Return requests with the options of the call, once the members are loaded."""
        self._loaded = time.perf_counter_ns()
        model, options = self.model, self.model._engine_options
        self._members = engine.members
        self._config = engine.config.override(options)
        if not self.form.is_free:
            enforce = model.enforce if model.enforce is True or is_available() else False
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

    def _step(self, number: int, event: StreamEvent) -> Step:
        """Return a step. Time that a consumer of the steps takes does not count as a duration.

        Raises:
            RequestTimeoutError: the call took too long.
        """
        first = self._first.setdefault(number, time.perf_counter_ns())
        rounds = []
        if event.round is not None and self.model.round_detail != "none":
            prompt, response = divmod(number, self._config.n)
            labels = {"prompt": prompt} if self._numbers_prompts else {}
            labels |= {"response": response} if self._config.n > 1 else {}
            rounds = [record(event.round) | labels]
        if event.generation is None:
            return Step(number, event, rounds, {})
        if event.generation.finish_reason == "cancelled":
            raise RequestTimeoutError(
                "the call was stopped, because it took longer than "
                f"timeout={self.model.timeout} seconds"
            )
        later = event.generation.rounds[1:]
        durations = {  # with the names and the unit of Ollama's API
            "load_duration": self._loaded - self._began,
            "prompt_eval_duration": first - self._loaded,
            "eval_duration": round(sum(each.elapsed for each in later) * 1e9),
        }
        metadata = {
            **self._metadata_of(event.generation),
            "total_duration": sum(durations.values()),
            **durations,
        }
        return Step(number, event, rounds, metadata)

    def _metadata_of(self, generation: Generation) -> dict[str, Any]:
        """Return the metadata of a response, without log-probabilities and durations."""
        reason, usage = generation.finish_reason, generation.usage.model_dump()
        optional: dict[str, Any] = {
            "adafuse_closing": generation.closing or None,
            "seed": generation.seed,
        }
        if self.model.round_detail != "none":
            summary = Summary.of(generation.rounds)
            optional["adafuse_summary"] = summary.model_dump(mode="json")
        return {
            **{key: value for key, value in optional.items() if value is not None},
            "finish_reason": "stop" if reason == "stop_sequence" else reason,
            "model_name": self.model.model_name,
            "model_provider": "adafuse",
            "strategy": generation.strategy,
            "token_usage": token_usage([usage_of(generation)]),
            "usage_by_member": {
                member: {kind: counts[member] for kind, counts in usage.items()}
                for member in generation.usage.prompt_tokens
            },
        }

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


def usage_of(generation: Generation) -> UsageMetadata:
    """Return the token counts of the first active member, in LangChain's form."""
    usage = generation.usage
    first = next(iter(usage.prompt_tokens))
    prompt, completion = usage.prompt_tokens[first], usage.completion_tokens[first]
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=completion,
        total_tokens=prompt + completion,
        input_token_details={"cache_read": usage.cached_tokens[first]},
    )


def token_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the tokens of all responses to one prompt, in OpenAI's form. The prompt counts once.

    Args:
        usages: the token counts of each response, in LangChain's form.
    """
    prompt = usages[0].get("input_tokens", 0) if usages else 0
    completion = sum(usage.get("output_tokens", 0) for usage in usages)
    counts = (prompt, completion, prompt + completion)
    return dict(zip(TOKEN_KINDS, counts, strict=True))


def output_of(model_name: str, usages: Iterable[Mapping[str, int]]) -> dict[str, Any]:
    """Return LangChain's ``llm_output``: the model's name and the total of token counts.

    Args:
        model_name: the name.
        usages: the token counts of each prompt, in OpenAI's form.
    """
    usages = list(usages)
    total = {kind: sum(usage[kind] for usage in usages) for kind in TOKEN_KINDS}
    return {"model_name": model_name, "token_usage": total}
