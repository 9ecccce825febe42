"""The ensemble as a LlamaIndex LLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import copy_context
from os import PathLike
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import (
    messages_to_prompt as generic_messages_to_prompt,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_serializer
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.adafuse._decode import Chunk, Decode, aends_when_closed, ends_when_closed
from llama_index.llms.adafuse._messages import extend, to_turns
from llama_index.llms.adafuse._structured import Attempts, Model, Partial
from llama_index_instrumentation import get_dispatcher
from typing_extensions import Self, Unpack

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, InvalidInputError, MemberSpec, RuntimeConfig
from adafuse_llm.adapters.conversation import to_messages
from adafuse_llm.adapters.ensembles import Ensemble, fields_from_config
from adafuse_llm.adapters.options import check_option_names
from adafuse_llm.config import DecodeOptions

if TYPE_CHECKING:
    import torch
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.chat_engine.types import AgentChatResponse
    from llama_index.core.rate_limiter import BaseRateLimiter
    from llama_index.core.tools import BaseTool
    from llama_index.core.types import BaseOutputParser

dispatcher = get_dispatcher(__name__)

OBSERVATION = "\nObservation:"
"""Where a ReAct agent's step ends; what a model writes from there on is made up."""

_MODES = (PydanticProgramMode.DEFAULT, PydanticProgramMode.LLM)
_LOADING = ("dtype", "device_map", "revision", "trust_remote_code", "runtime")


def _option(name: str) -> Any:
    """A field for an option of `AdaFuseConfig`; None is the engine's own value."""
    return Field(default=None, description=AdaFuseConfig.model_fields[name].description)


class LLMOptions(DecodeOptions, total=False):
    """The keyword arguments of `AdaFuseLLM`, for type checkers."""

    dtype: str | torch.dtype
    device_map: str | None
    revision: str | None
    trust_remote_code: bool
    runtime: RuntimeConfig
    emit_events: bool
    retries: int
    max_tokens: int | None
    max_completion_tokens: int | None
    system_prompt: str | None
    messages_to_prompt: Callable[[Sequence[ChatMessage]], str] | None
    completion_to_prompt: Callable[[str], str] | None
    query_wrapper_prompt: BasePromptTemplate | str | None
    callback_manager: CallbackManager
    output_parser: BaseOutputParser | None
    pydantic_program_mode: PydanticProgramMode | str
    rate_limiter: BaseRateLimiter | None


class AdaFuseLLM(CustomLLM):
    """A LlamaIndex LLM whose every answer is decoded by an AdaFuse ensemble.

    Nothing is loaded before it is needed, and LLMs that name the same members share one engine.
    Thread-safe; copies are the same object, pickles hold names and options but no weights.

    Args:
        members: folders, hub ids or `MemberSpec`, any number; an empty list stands for the three
            small models that ship with adafuse-llm.
        engine: an ensemble that is there already, instead of members and how to load them.
        dtype, device_map, revision, trust_remote_code: as for `AdaFuseEngine.from_pretrained`.
        runtime: how requests are run.
        emit_events: whether rounds are told as instrumentation events.
        retries: how often members are asked again where a reply is not of the form that was asked
            for (structured prediction, `predict_and_call`).
        **kwargs: any option of `AdaFuseConfig`, for every call (a call's own override them), and
            what every LlamaIndex LLM takes: `system_prompt`, `completion_to_prompt`,
            `messages_to_prompt`, `query_wrapper_prompt`, `callback_manager`, `output_parser`,
            `pydantic_program_mode`, `rate_limiter`.

    Raises:
        InvalidInputError: neither members nor an engine, or both; an option that is out of range.
        TypeError: an unknown keyword.
    """

    members: tuple[Any, ...] | None = Field(
        default=None, description="Folders, hub ids or MemberSpec; empty for the shipped ones."
    )
    dtype: Any = Field(default="auto", description="dtype of the weights.")
    device_map: str | None = Field(default=None, description="Passed to accelerate.")
    revision: str | None = Field(default=None, description="Revision of hub models.")
    trust_remote_code: bool = Field(
        default=False, description="Allow code that comes with a model to run."
    )
    runtime: RuntimeConfig = Field(
        default_factory=RuntimeConfig, description="How requests are run."
    )
    emit_events: bool = Field(
        default=True, description="Tell rounds as instrumentation events, under their own span."
    )
    retries: int = Field(
        default=2, ge=0, description="How often an ill-formed structured reply is asked for again."
    )
    margin_threshold: float | None = _option("margin_threshold")
    max_words: int | None = _option("max_words")
    branching_factor: int | None = _option("branching_factor")
    max_word_tokens: int | None = _option("max_word_tokens")
    max_new_tokens: int | None = _option("max_new_tokens")
    stop: tuple[str, ...] | None = _option("stop")
    weights: dict[str, float] | tuple[float, ...] | None = _option("weights")
    use: tuple[str, ...] | None = _option("use")

    _given: AdaFuseEngine | None = PrivateAttr(default=None)
    _always: dict[str, Any] = PrivateAttr(default_factory=dict)

    def __init__(
        self,
        members: Sequence[str | MemberSpec | dict[str, Any]] | None = None,
        *,
        engine: AdaFuseEngine | None = None,
        **kwargs: Unpack[LLMOptions],
    ) -> None:
        fields = {*type(self).model_fields} - {*AdaFuseConfig.model_fields}
        given: dict[str, Any] = {**kwargs}
        base = {key: given.pop(key) for key in fields & {*given}}
        options = check_option_names(given, extra=sorted(fields))
        config = AdaFuseConfig(**options)
        options.pop("temperature", None)
        if (members is None) == (engine is None):
            raise InvalidInputError(
                "pass either members=[...] (folders, hub ids or MemberSpec) or engine=...; "
                "AdaFuseLLM.from_embedded() takes the small members that ship with adafuse-llm"
            )
        if engine is not None and (said := [key for key in _LOADING if key in base]):
            raise InvalidInputError(
                f"{', '.join(said)}: say so where the engine is made; it is loaded already"
            )
        if (mode := base.get("pydantic_program_mode")) not in (None, *_MODES):
            raise InvalidInputError(
                f"pydantic_program_mode must be 'default' or 'llm', which ask for JSON in words; "
                f"got {mode!r}: the others need a model that calls functions"
            )
        ensemble = Ensemble(given=engine) if members is None else Ensemble.of(members)
        if isinstance(base.get("query_wrapper_prompt"), str):
            base["query_wrapper_prompt"] = PromptTemplate(base["query_wrapper_prompt"])
        super().__init__(
            members=None if members is None else ensemble.members,
            **{key: value for key, value in base.items() if value is not None},
            **{name: getattr(config, name) for name in options},
        )
        self._given = engine

    @classmethod
    def from_embedded(cls, **kwargs: Unpack[LLMOptions]) -> Self:
        """The three small models that ship with adafuse-llm, for trying out and for tests."""
        return cls(members=[], **kwargs)

    @classmethod
    def from_config(cls, path: str | PathLike[str], **kwargs: Unpack[LLMOptions]) -> Self:
        """What a configuration file describes, such as one that ``adafuse tune`` wrote.

        Args:
            path: YAML or JSON; see `adafuse_llm.loading.config_file`.
            **kwargs: as for the constructor; they come before what the file says.

        Raises:
            InvalidInputError: there is no such file, or it says something that cannot be used.
        """
        return cls(**{"members": [], **fields_from_config(path), **kwargs})

    @classmethod
    def class_name(cls) -> str:
        return "AdaFuseLLM"

    @property
    def engine(self) -> AdaFuseEngine:
        """The ensemble; the first use of members loads them.

        Raises:
            LoadError: a member cannot be loaded.
        """
        return self._ensemble.engine()

    def warmup(self) -> Self:
        """Load the members now."""
        self._ensemble.engine()
        return self

    def unload(self) -> None:
        """Let go of the members, for every LLM that names the same; the next call loads them again.
        An engine that was given is left to its owner.
        """
        self._ensemble.unload()

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts with; loads the members, as it is read off them."""
        engine = self.engine
        return LLMMetadata(
            context_window=engine.context_window or LLMMetadata().context_window,
            num_output=engine.config.override(self._options({})).max_new_tokens,
            is_chat_model=all(backend.codec.has_chat_template for backend in engine.backends),
            model_name=self._model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        if self._ensemble.is_loaded:
            return super().to_payload()
        return {"class_name": self.class_name(), "model_name": self._model_name}

    # The eight entry points -------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        decode = self._decode(self._prompt(prompt, formatted, kwargs))
        return _completion(decode.result())

    @ends_when_closed
    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        decode = self._decode(self._prompt(prompt, formatted, kwargs))
        return (_completion(chunk) for chunk in decode.chunks())

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        decode = await self._adecode(self._prompt(prompt, formatted, kwargs))
        return _completion(await decode.aresult())

    @aends_when_closed
    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        decode = await self._adecode(self._prompt(prompt, formatted, kwargs))
        return (_completion(chunk) async for chunk in decode.achunks())

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        decode = self._decode(self._messages(messages, kwargs))
        return _reply(decode.result())

    @ends_when_closed
    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        decode = self._decode(self._messages(messages, kwargs))
        return (_reply(chunk) for chunk in decode.chunks())

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        decode = await self._adecode(self._messages(messages, kwargs))
        return _reply(await decode.aresult())

    @aends_when_closed
    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        decode = await self._adecode(self._messages(messages, kwargs))
        return (_reply(chunk) async for chunk in decode.achunks())

    # Structured prediction --------------------------------------------------------------------

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """An object of `output_cls`, read off the members' reply to a prompt.

        The schema is part of the prompt; fences and words around the object are left out; a reply
        that is no such object is asked for again, `retries` times at most.

        Raises:
            MalformedReplyError: no reply was of that form.
        """
        attempts = self._attempts(output_cls, prompt, prompt_args)
        for messages in attempts:
            attempts.take(self.chat(messages, **(llm_kwargs or {})).message.content or "")
        dispatcher.event(LLMStructuredPredictEndEvent(output=attempts.output))
        return attempts.output

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """`structured_predict` without blocking the event loop."""
        attempts = self._attempts(output_cls, prompt, prompt_args)
        for messages in attempts:
            reply = await self.achat(messages, **(llm_kwargs or {}))
            attempts.take(reply.message.content or "")
        dispatcher.event(LLMStructuredPredictEndEvent(output=attempts.output))
        return attempts.output

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """Objects that grow as the reply is written; the last one is whole and valid."""
        asked = prompt.format_messages(llm=self, **prompt_args)
        attempts = Attempts(output_cls, asked, self.retries)
        for messages in attempts:
            partial, text = Partial(output_cls), ""
            for chunk in self.stream_chat(messages, **(llm_kwargs or {})):
                text = chunk.message.content or ""
                if (read := partial.take(text)) is not None:
                    yield read
            attempts.take(text)
        yield attempts.output

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        asked = prompt.format_messages(llm=self, **prompt_args)
        attempts = Attempts(output_cls, asked, self.retries)

        async def objects() -> AsyncGenerator[Any, None]:
            for messages in attempts:
                partial, text = Partial(output_cls), ""
                stream = await self.astream_chat(messages, **(llm_kwargs or {}))
                async with aclosing(stream):
                    async for chunk in stream:
                        text = chunk.message.content or ""
                        if (read := partial.take(text)) is not None:
                            yield read
                attempts.take(text)
            yield attempts.output

        return objects()

    # Tools ------------------------------------------------------------------------------------

    def predict_and_call(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        **kwargs: Any,
    ) -> AgentChatResponse:
        """Let the members choose a tool (ReAct), call it, and return what it says.

        Where they answer without a tool, that is the response. What they hallucinate as the tool's
        result is cut off. A step that cannot be read is asked for again, `retries` times at most.

        Args:
            tools: what can be called.
            user_msg: what is asked.
            chat_history: turns before it.
            verbose: print calls and their results.
            **kwargs: `react_chat_formatter`, `output_parser`, `tool_retriever`, `memory`, and any
                option of `AdaFuseConfig`.

        Raises:
            MalformedReplyError: no step could be read.
        """
        step = self._step_and_call(tools, user_msg, chat_history, verbose, kwargs)
        with ThreadPoolExecutor(max_workers=1) as pool:  # a loop may be running in this thread
            return pool.submit(copy_context().run, asyncio.run, step).result()

    async def apredict_and_call(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        **kwargs: Any,
    ) -> AgentChatResponse:
        """`predict_and_call` without blocking the event loop."""
        return await self._step_and_call(tools, user_msg, chat_history, verbose, kwargs)

    async def _step_and_call(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None,
        chat_history: list[ChatMessage] | None,
        verbose: bool,
        kwargs: dict[str, Any],
    ) -> AgentChatResponse:
        from llama_index.llms.adafuse._tools import step_and_call

        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        asked = [*(chat_history or []), *([user_msg] if user_msg else [])]
        own = ("react_chat_formatter", "output_parser", "tool_retriever", "memory")
        agent = {key: kwargs[key] for key in own if kwargs.get(key) is not None}
        options = check_option_names({k: v for k, v in kwargs.items() if k not in own}, extra=own)
        stop = options.get("stop", self._options({}).get("stop", ()))
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        llm = self.model_copy()
        llm._always = {**options, "stop": (*stop, OBSERVATION)}
        return await step_and_call(llm, tools, asked, agent, self.retries, verbose=verbose)

    # Copies and pickles -----------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self._given is not None:
            raise TypeError(
                "an LLM over an engine that was given cannot be pickled, as weights do not travel; "
                "make it with members=[...], which the other process loads by name"
            )
        return super().__getstate__()

    @field_serializer("members")
    def _named(self, members: tuple[MemberSpec, ...] | None) -> list[Any] | None:
        return self._ensemble.identity["members"] if members else None if members is None else []

    @field_serializer("dtype")
    def _dtype_name(self, dtype: Any) -> str:
        return str(dtype)

    # ------------------------------------------------------------------------------------------

    @property
    def _ensemble(self) -> Ensemble:
        if self._given is not None:
            return Ensemble(given=self._given)
        return Ensemble.of(self.members or (), **{key: getattr(self, key) for key in _LOADING})

    @property
    def _model_name(self) -> str:
        return "+".join(self.use or self._ensemble.names)

    def _options(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a call: its own, else the LLM's; the engine's where neither says anything."""
        fields = {name: getattr(self, name, None) for name in AdaFuseConfig.model_fields}
        own = {name: value for name, value in fields.items() if value is not None}
        return {**own, **self._always, **check_option_names(said)}

    def _prompt(self, prompt: str, formatted: bool, said: Mapping[str, Any]) -> dict[str, Any]:
        """What a completion asks: a text to continue, unless `formatted` put into the LLM's own
        prompts, in the order in which `predict` does so.
        """
        if not formatted:
            if self.completion_to_prompt is not None:
                prompt = self.completion_to_prompt(prompt)
            prompt = self._extend_prompt(prompt)
        return {"prompt": prompt, **self._options(said)}

    def _messages(self, messages: Sequence[ChatMessage], said: Mapping[str, Any]) -> dict[str, Any]:
        """What a chat asks: messages for every member's own template, or one text for all where
        `messages_to_prompt` was given.
        """
        options = self._options(said)
        extended = extend(messages, self.system_prompt, self.query_wrapper_prompt)
        if self.messages_to_prompt not in (None, generic_messages_to_prompt):
            return {"prompt": self.messages_to_prompt(extended), **options}
        return {"messages": to_messages(to_turns(extended)), **options}

    def _decode(self, asked: dict[str, Any]) -> Decode:
        return Decode(self.engine, asked, emit_events=self.emit_events)

    async def _adecode(self, asked: dict[str, Any]) -> Decode:
        ensemble = self._ensemble
        if not ensemble.is_loaded:
            await asyncio.to_thread(ensemble.engine)
        return self._decode(asked)

    def _attempts(
        self, output_cls: type[Model], prompt: BasePromptTemplate, prompt_args: dict[str, Any]
    ) -> Attempts[Model]:
        dispatcher.event(
            LLMStructuredPredictStartEvent(
                output_cls=output_cls, template=prompt, template_args=prompt_args
            )
        )
        asked = prompt.format_messages(llm=self, **prompt_args)
        return Attempts(output_cls, asked, self.retries)


def _completion(chunk: Chunk) -> CompletionResponse:
    return CompletionResponse(text=chunk.text, delta=chunk.delta, raw=chunk.raw)


def _reply(chunk: Chunk) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=chunk.text)
    return ChatResponse(message=message, delta=chunk.delta, raw=chunk.raw)
