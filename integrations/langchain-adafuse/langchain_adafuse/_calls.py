"""A call of a model: it opens requests, and turns the events of their replies into chunks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from langchain_core import exceptions
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, Generation, GenerationChunk
from pydantic import BaseModel, Field

from adafuse_llm import AdaFuseEngine, AdaFuseError, Engine, Request, StreamEvent, Usage, errors
from adafuse_llm import Generation as Response
from adafuse_llm.adapters.logprobs import openai_logprobs, openai_usage
from adafuse_llm.adapters.reply import cut_off
from adafuse_llm.adapters.reply_form import ReplyForm, enforced
from adafuse_llm.grammar.matchers import is_available
from adafuse_llm.run import check_one_response
from adafuse_llm.summary import Summary, record
from adafuse_llm.text.reply_start import EFFORT, effort_variables

if TYPE_CHECKING:
    from langchain_adafuse._model import EnsembleModel

CUT_KEY = "adafuse_cut"
"""Key in the metadata of a message: what cut the message off, such as a limit."""

ROUNDS_KEY = "adafuse_rounds"
"""Key in messages and generations: the records of the rounds."""

RoundDetail = Literal["none", "summary", "full"]


STANDARD: Mapping[type[AdaFuseError], type[exceptions.ModelError]] = {
    errors.ContextWindowError: exceptions.ContextOverflowError,
    errors.CacheMemoryError: exceptions.ContextOverflowError,
    errors.QueueFullError: exceptions.ModelRateLimitError,
    errors.RequestTimeoutError: exceptions.ModelTimeoutError,
    errors.InvalidInputError: exceptions.ModelInvalidRequestError,
    errors.ServerError: exceptions.ModelConnectionError,
    errors.MemberUnavailableError: exceptions.ModelConnectionError,
    errors.MemberError: exceptions.ModelAPIError,
}
"""LangChain's class for each class of errors. The first row that fits applies."""


@contextmanager
def langchains_error() -> Iterator[None]:
    """Make an error in the block also an instance of LangChain's class for it (`STANDARD`)."""
    try:
        yield
    except AdaFuseError as error:
        standard = next((STANDARD[each] for each in STANDARD if isinstance(error, each)), None)
        if standard is not None and not isinstance(error, standard):
            error.__class__ = _of_both(type(error), standard)  # type: ignore[arg-type]
        raise


@cache
def _of_both(own: type[AdaFuseError], standard: type[exceptions.ModelError]) -> Any:
    def reduced(error: AdaFuseError) -> tuple[Any, ...]:
        of_own: Any = own.__reduce__(error)
        return own, *of_own[1:]  # a pickle cannot name the class below

    return type(own.__name__, (own, standard), {"__reduce__": reduced})


class Told(BaseModel):
    """A mixin for chunks. Callbacks read `rounds`: records of the rounds that wrote the chunk."""

    rounds: list[dict[str, Any]] = Field(default_factory=list)


class ChatRoundChunk(Told, ChatGenerationChunk):
    """A chunk of a chat model."""


class RoundChunk(Told, GenerationChunk):
    """A chunk of a text model."""


def usage_metadata(usage: Usage) -> UsageMetadata:
    """Return the token counts of the member with the most tokens, in LangChain's form."""
    totals = openai_usage(usage)
    return UsageMetadata(
        input_tokens=totals["prompt_tokens"],
        output_tokens=totals["completion_tokens"],
        total_tokens=totals["total_tokens"],
        input_token_details={"cache_read": totals["prompt_tokens_details"]["cached_tokens"]},
    )


@dataclass
class ResponseChunks(ABC):
    """One response of a call, with its chunks and the records of its rounds so far."""

    call: ModelCall
    number: int
    chunks: list[Any] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @abstractmethod
    def read(self, event: StreamEvent) -> list[Any]:
        """Add an event to the response, and return the chunks of the event."""

    @abstractmethod
    def generation(self) -> Generation:
        """Return the finished response as LangChain's generation."""

    def records(self, event: StreamEvent) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Record an event's round. Return one record or none, and a message's entry for it."""
        call = self.call
        if event.round is None or call.model.round_detail == "none":
            return [], {}
        prompt, response = divmod(self.number, call.config.n)
        labels = {"prompt": prompt} if call.requests[0].messages is None else {}
        labels |= {"response": response} if call.config.n > 1 else {}
        records = [record(event.round) | labels]
        self.rounds += records
        return records, {ROUNDS_KEY: records} if call.model.round_detail == "full" else {}

    def metadata(self, whole: Response) -> tuple[dict[str, Any], UsageMetadata]:
        """Return the metadata of the whole response, and its token counts."""
        call, reason, counts = self.call, whole.finish_reason, whole.usage.model_dump()
        totals = openai_usage(whole.usage)
        del totals["prompt_tokens_details"]
        optional: dict[str, Any] = {
            "seed": whole.seed,
            "logprob": whole.logprob,
            "confidence": whole.confidence,
            CUT_KEY: cut_off(reason, whole.cut_by) or None,
        }
        if call.config.counted_logprobs is not None:
            optional["logprobs"] = openai_logprobs(whole.rounds)
        if call.model.round_detail != "none":
            optional["adafuse_summary"] = Summary.of(self.rounds).model_dump(mode="json")
        metadata = {
            **{key: value for key, value in optional.items() if value is not None},
            "finish_reason": "stop" if reason == "stop_sequence" else reason,
            "model_name": call.model.model_name,
            "model_provider": "adafuse",
            "strategy": whole.strategy,
            "token_usage": totals,
            "usage_by_member": {
                member: {kind: of_members[member] for kind, of_members in counts.items()}
                for member in whole.usage.prompt_tokens
            },
        }
        return metadata, usage_metadata(whole.usage)


@dataclass
class ModelCall:
    """One call of a model. `model` is the copy that has the call's options.

    Attributes:
        not_enforced: why a part of `form` is not enforced although it should be, otherwise "".
    """

    model: EnsembleModel
    requests: Sequence[Request]
    reply: type[ResponseChunks]
    form: ReplyForm | None = None
    effort: str | None = None
    not_enforced: str = ""

    def chunks(
        self, run: CallbackManagerForLLMRun | None, *, streams: bool = True
    ) -> Generator[Any, None, None]:
        """Yield the chunks of all responses, and pass them to the callbacks of LangChain's run."""
        engine, requests = self._prepared()
        with langchains_error(), closing(engine.open(requests)) as events:
            if streams:
                check_one_response(events)
            for number, event in events:
                for chunk in self._replies[number].read(event):
                    if run is not None:
                        run.on_llm_new_token("" if number else chunk.text, chunk=chunk)
                    yield chunk

    async def achunks(
        self, run: AsyncCallbackManagerForLLMRun | None, *, streams: bool = True
    ) -> AsyncGenerator[Any, None]:
        """Like `chunks`, but does not block the event loop."""
        engine, requests = await asyncio.to_thread(self._prepared)
        with langchains_error(), closing(await engine.aopen(requests)) as events:
            if streams:
                check_one_response(events)
            async for number, event in events:
                for chunk in self._replies[number].read(event):
                    if run is not None:
                        await run.on_llm_new_token("" if number else chunk.text, chunk=chunk)
                    yield chunk

    def generations(self, run: CallbackManagerForLLMRun | None) -> list[Any]:
        """Return all responses."""
        for _ in self.chunks(_for_whole(run), streams=False):
            pass
        return [reply.generation() for reply in self._replies]

    async def agenerations(self, run: AsyncCallbackManagerForLLMRun | None) -> list[Any]:
        """Like `generations`, but does not block the event loop."""
        async for _ in self.achunks(_for_whole(run), streams=False):
            pass
        return [reply.generation() for reply in self._replies]

    @langchains_error()
    def _prepared(self) -> tuple[Engine, list[Request]]:
        model, options = self.model, self.model._options
        engine = model._loaded()
        if self.effort is not None:
            options = self._with_effort(engine, options, self.effort)
        if self.form is not None:  # compiling a new grammar takes time
            enforce = model.enforce if model.enforce is True or is_available() else False
            options, self.not_enforced = enforced(engine, self.form, options, enforce)
            if self.not_enforced:
                model._warn_once(self.not_enforced)
        self.config, self.options = model._config, options
        size = len(self.requests) * self.config.n
        self._replies = [self.reply(self, number) for number in range(size)]
        return engine, [
            replace(request, options=options, timeout=model.timeout) for request in self.requests
        ]

    def _with_effort(self, engine: Engine, options: dict[str, Any], effort: str) -> dict[str, Any]:
        """Add `effort` to the variables of chat templates. The user's own variables override it."""
        read, problem = {EFFORT: effort}, ""
        if isinstance(engine, AdaFuseEngine):  # a server has templates that are not known here
            active = [each for each in engine.backends if each.name in self.model._names]
            read, problem = effort_variables({each.name: each.codec for each in active}, effort)
        if problem:
            self.model._warn_once(f"the option 'reasoning_effort' was ignored: {problem}")
        variables = {**read, **(options.get("chat_template_kwargs") or {})}
        return {**options, "chat_template_kwargs": variables} if variables else options


def _for_whole(run: Any) -> Any:
    """Return a run without its streaming handlers, because this call asks for whole responses."""
    if run is None:
        return None
    run = copy(run)  # LangChain knows these handlers by their method, too
    run.handlers = [each for each in run.handlers if not hasattr(each, "tap_output_iter")]
    return run
