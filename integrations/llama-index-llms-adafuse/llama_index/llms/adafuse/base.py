"""The LlamaIndex LLM."""

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
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_serializer
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.adafuse._decode import Chunk, Decode, aends_when_closed, ends_when_closed
from llama_index.llms.adafuse._messages import add_prompts, to_turns
from llama_index.llms.adafuse._structured import Attempts, Model, Partial
from llama_index.llms.adafuse._tokens import LongestTokenizer, make_prompt_helper
from llama_index.llms.adafuse.errors import aadapter_errors, adapter_errors
from llama_index_instrumentation import get_dispatcher
from typing_extensions import Self, Unpack

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    InvalidInputError,
    InvalidOptionError,
    MemberSpec,
    RuntimeConfig,
)
from adafuse_llm.adapters.conversation import to_conversation
from adafuse_llm.adapters.ensembles import Ensemble, fields_from_config
from adafuse_llm.adapters.options import check_option_names
from adafuse_llm.backends import Backend
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
"""The text that ends a ReAct agent's step. A model that writes more invents a tool's result."""

_PROGRAM_MODES = (PydanticProgramMode.DEFAULT, PydanticProgramMode.LLM)
_LOADING = ("dtype", "device_map", "revision", "trust_remote_code", "runtime")
_OTHER_NAMES_OF_MEMBERS = ("member", "model", "models", "model_id", "model_name", "model_path")


def _option(name: str) -> Any:
    """Return a field for an option of `AdaFuseConfig`; None means the engine's value."""
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
    complete_as_chat: bool | None
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
    """A LlamaIndex LLM backed by an ensemble of local language models.

    The members are loaded on first use. LLMs with the same members share one engine. An LLM is
    thread-safe. A copy by `copy.deepcopy` has options of its own and shares the engine, the
    callback manager and the rate limiter. A pickled LLM contains the list of its members and its
    options, but no weights.

    Calls raise an `AdaFuseLLMError` where other code of this package raises a `ValueError` or
    `TypeError`, because LlamaIndex's response synthesizers ignore errors of these types.

    Args:
        members: folders, hub ids or `MemberSpec` objects; an empty list for the three small models
            that ship with adafuse-llm.
        engine: an existing engine to use instead of `members` and the options for loading them.
        dtype, device_map, revision, trust_remote_code: as for `AdaFuseEngine.from_pretrained`.
        runtime: settings of the engine's scheduler and caches.
        emit_events: whether to emit instrumentation events for the rounds.
        retries: how many times structured prediction and `predict_and_call` request another reply
            if a reply is malformed.
        complete_as_chat: whether completions send the prompt as a user message, which each member
            formats with its own chat template. `complete` then returns what `chat` returns for one
            user message. Default: true if every active member has a chat template and
            `completion_to_prompt` is not set. A call with ``formatted=True`` always continues the
            prompt as it is.
        **kwargs: options of `AdaFuseConfig`, which each call can override, and the arguments of
            every LlamaIndex LLM: `system_prompt`, `completion_to_prompt`, `messages_to_prompt`,
            `query_wrapper_prompt`, `callback_manager`, `output_parser`, `pydantic_program_mode`,
            `rate_limiter`.

    Raises:
        InvalidInputError: both or neither of `members` and `engine` are given, or an option is
            unknown or out of range.
    """

    model_config = ConfigDict(validate_assignment=True)

    members: tuple[Any, ...] | None = Field(
        default=None,
        description="Folders, hub ids or MemberSpec objects; empty for the embedded members.",
    )
    dtype: Any = Field(default="auto", description="Data type of the weights.")
    device_map: str | None = Field(
        default=None, description="Devices on which accelerate places the weights."
    )
    revision: str | None = Field(default=None, description="Revision of hub models.")
    trust_remote_code: bool = Field(
        default=False, description="Whether to run code from model repositories."
    )
    runtime: RuntimeConfig = Field(
        default_factory=RuntimeConfig,
        description="Settings of the engine's scheduler and caches.",
    )
    emit_events: bool = Field(
        default=True,
        description="Whether to emit instrumentation events for the rounds. Each response has "
        "its own span.",
    )
    retries: int = Field(
        default=2,
        ge=0,
        description="How many times to request another reply if a reply is malformed.",
    )
    complete_as_chat: bool | None = Field(
        default=None,
        description="Whether completions go through the members' chat templates. Default: whether "
        "every active member has one and completion_to_prompt is not set.",
    )
    margin_threshold: float | None = _option("margin_threshold")
    max_words: int | None = _option("max_words")
    branching_factor: int | None = _option("branching_factor")
    max_word_tokens: int | None = _option("max_word_tokens")
    max_new_tokens: int | None = _option("max_new_tokens")
    stop: tuple[str, ...] | None = _option("stop")
    weights: dict[str, float] | tuple[float, ...] | None = _option("weights")
    json_schema: Any = _option("json_schema")
    regex: str | None = _option("regex")
    grammar: str | None = _option("grammar")
    choices: tuple[str, ...] | None = _option("choices")
    use: tuple[str, ...] | None = _option("use")

    _passed_engine: AdaFuseEngine | None = PrivateAttr(default=None)
    _fixed_options: dict[str, Any] = PrivateAttr(default_factory=dict)

    def __init__(
        self,
        members: Sequence[str | MemberSpec | dict[str, Any]] | None = None,
        *,
        engine: AdaFuseEngine | None = None,
        **kwargs: Unpack[LLMOptions],
    ) -> None:
        fields = {*type(self).model_fields} - {*AdaFuseConfig.model_fields}
        given: dict[str, Any] = {**kwargs}
        for name in _OTHER_NAMES_OF_MEMBERS:
            if name in given:
                raise InvalidOptionError(
                    f"unknown option {name!r}. Did you mean 'members'? It takes a list of folders, "
                    "hub ids or MemberSpec objects: members=[...]"
                )
        base = {key: given.pop(key) for key in fields & {*given}}
        options = check_option_names(given, extra=sorted(fields))
        config = AdaFuseConfig(**options)
        options.pop("temperature", None)
        if (members is None) == (engine is None):
            raise InvalidInputError(
                "pass either members=[...] (folders, hub ids or MemberSpec) or engine=...; "
                "AdaFuseLLM.from_embedded() uses the small models that ship with adafuse-llm"
            )
        if engine is not None and (loading := [key for key in _LOADING if key in base]):
            raise InvalidInputError(
                f"engine= cannot be combined with {', '.join(loading)}, because the engine is "
                "already loaded; pass loading options when you create the engine"
            )
        if (mode := base.get("pydantic_program_mode")) not in (None, *_PROGRAM_MODES):
            raise InvalidInputError(
                f"pydantic_program_mode must be 'default' or 'llm', which request JSON in the "
                f"prompt; got {mode!r}. Other modes need a function-calling model"
            )
        ensemble = Ensemble(given=engine) if members is None else Ensemble.of(members)
        if isinstance(base.get("query_wrapper_prompt"), str):
            base["query_wrapper_prompt"] = PromptTemplate(base["query_wrapper_prompt"])
        super().__init__(
            members=None if members is None else ensemble.members,
            **{key: value for key, value in base.items() if value is not None},
            **{name: getattr(config, name) for name in options},
        )
        self._passed_engine = engine

    @classmethod
    def from_embedded(cls, **kwargs: Unpack[LLMOptions]) -> Self:
        """Create an LLM from the three small members that ship with adafuse-llm.

        Raises:
            InvalidInputError: `members` or `engine` is given.
            InvalidOptionError: an option is unknown or out of range.
        """
        if given := [name for name in ("members", "engine") if name in kwargs]:
            raise InvalidInputError(
                f"from_embedded has no argument {given[0]!r}, because its members ship with "
                f"adafuse-llm. For other members, call AdaFuseLLM({given[0]}=...); to choose among "
                "the three, pass use=[...]"
            )
        return cls(members=[], **kwargs)

    @classmethod
    def from_config(cls, path: str | PathLike[str], **kwargs: Unpack[LLMOptions]) -> Self:
        """Create an LLM from a configuration file, such as one written by ``adafuse tune``.

        Args:
            path: a YAML or JSON file; see `adafuse_llm.loading.config_file`.
            **kwargs: arguments of the constructor, which override the file.

        Raises:
            InvalidInputError: the file cannot be read, or has unknown or invalid content.
        """
        return cls(**{"members": [], **fields_from_config(path), **kwargs})

    @classmethod
    def class_name(cls) -> str:
        return "AdaFuseLLM"

    @property
    def engine(self) -> AdaFuseEngine:
        """The engine. The first access loads the members.

        Raises:
            LoadError: a member cannot be loaded.
        """
        return self._ensemble.engine()

    def warmup(self) -> Self:
        """Load the members now instead of on the first call; return the LLM."""
        self._ensemble.engine()
        return self

    def unload(self) -> None:
        """Release the members. The next call loads them again.

        This affects all LLMs that share the members. An engine passed as `engine` stays open.
        """
        self._ensemble.unload()

    @property
    @adapter_errors()
    def metadata(self) -> LLMMetadata:
        """Context window, output limit and model name. Reading it loads the members."""
        options = self._options({})
        backends = self._active_backends(options)
        windows = [b.context_window for b in backends if b.context_window is not None]
        return LLMMetadata(
            context_window=min(windows, default=LLMMetadata().context_window),
            num_output=self.engine.config.override(options).max_new_tokens,
            is_chat_model=all(backend.codec.has_chat_template for backend in backends),
            model_name=self._model_name,
        )

    @property
    @adapter_errors()
    def tokenizer(self) -> Callable[[str], list[int]]:
        """A function from a text to its tokens, for ``Settings.tokenizer``.

        It returns the tokens of the active member that needs the most tokens for the text. A text
        that fits by this count fits every member. Only the number of tokens is meaningful. Reading
        the property loads the members.
        """
        return LongestTokenizer(self._active_backends(self._options({})))

    @adapter_errors()
    def prompt_helper(self) -> PromptHelper:
        """Return a prompt helper that packs prompts by the members' own token counts.

        Set ``Settings.prompt_helper`` to it, or pass it to `get_response_synthesizer`. Without it,
        LlamaIndex counts tokens with a tokenizer of its own. If the members need more tokens, the
        prompts of a query engine may not fit, and the query fails. The helper also reserves space
        for the markers of the members' chat templates. It loads the members.
        """
        metadata, backends = self.metadata, self._active_backends(self._options({}))
        system = self.system_prompt or ""
        if metadata.is_chat_model:
            messages = [ChatMessage(role=role, content="x") for role in ("system", "user")]
            request = self._messages(self._extend_messages(messages), {})  # as in `predict`
            given = f"{system}x\nx"
        else:
            request, given = self._prompt("x", False, {}), f"{system}x"
        return make_prompt_helper(
            backends, request, given, metadata.context_window, metadata.num_output
        )

    def to_payload(self) -> dict[str, Any]:
        if self._ensemble.is_loaded:
            return super().to_payload()
        return {"class_name": self.class_name(), "model_name": self._model_name}

    # The eight entry points -------------------------------------------------------------------

    @adapter_errors()
    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        decode = self._decode(self._prompt(prompt, formatted, kwargs))
        return _completion_response(decode.result())

    @ends_when_closed
    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        decode = self._decode(self._prompt(prompt, formatted, kwargs))
        return (_completion_response(chunk) for chunk in decode.chunks())

    @aadapter_errors
    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        await self._aload()
        decode = self._decode(self._prompt(prompt, formatted, kwargs))
        return _completion_response(await decode.aresult())

    @aends_when_closed
    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        await self._aload()
        chunks = await self._decode(self._prompt(prompt, formatted, kwargs)).achunks()
        return (_completion_response(chunk) async for chunk in chunks)

    @adapter_errors()
    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        decode = self._decode(self._messages(messages, kwargs))
        return _chat_response(decode.result())

    @ends_when_closed
    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        decode = self._decode(self._messages(messages, kwargs))
        return (_chat_response(chunk) for chunk in decode.chunks())

    @aadapter_errors
    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        await self._aload()
        decode = self._decode(self._messages(messages, kwargs))
        return _chat_response(await decode.aresult())

    @aends_when_closed
    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        await self._aload()
        chunks = await self._decode(self._messages(messages, kwargs)).achunks()
        return (_chat_response(chunk) async for chunk in chunks)

    # Structured prediction --------------------------------------------------------------------

    @adapter_errors()
    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Return an object of `output_cls` from the members' reply to a prompt.

        The prompt includes the schema of the class. Code fences and text around the object are
        ignored. If a reply is not a valid object, the LLM requests another one, up to `retries`
        times.

        Raises:
            AdaFuseLLMError: no reply is a valid object (the cause is a `MalformedReplyError`), or
                the prompt or an option cannot be used.
        """
        attempts = self._attempts(output_cls, prompt, prompt_args)
        for messages in attempts:
            attempts.take(self.chat(messages, **(llm_kwargs or {})).message.content or "")
        dispatcher.event(LLMStructuredPredictEndEvent(output=attempts.output))
        return attempts.output

    @aadapter_errors
    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Return what `structured_predict` returns, without blocking the event loop."""
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
        """Yield partial objects during decoding, then the complete and valid object."""
        with adapter_errors():
            conversation = prompt.format_messages(llm=self, **prompt_args)
            attempts = Attempts(output_cls, conversation, self.retries)
            for messages in attempts:
                partial, text = Partial(output_cls), ""
                for chunk in self.stream_chat(messages, **(llm_kwargs or {})):
                    text = chunk.message.content or ""
                    if (obj := partial.take(text)) is not None:
                        yield obj
                attempts.take(text)
            yield attempts.output

    @aadapter_errors
    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        conversation = prompt.format_messages(llm=self, **prompt_args)
        attempts = Attempts(output_cls, conversation, self.retries)

        async def objects() -> AsyncGenerator[Any, None]:
            with adapter_errors():
                for messages in attempts:
                    partial, text = Partial(output_cls), ""
                    stream = await self.astream_chat(messages, **(llm_kwargs or {}))
                    async with aclosing(stream):
                        async for chunk in stream:
                            text = chunk.message.content or ""
                            if (obj := partial.take(text)) is not None:
                                yield obj
                    attempts.take(text)
                yield attempts.output

        return objects()

    # Tools ------------------------------------------------------------------------------------

    @adapter_errors()
    def predict_and_call(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        **kwargs: Any,
    ) -> AgentChatResponse:
        """Let the members select a tool (ReAct), call it, and return its output.

        If the members respond without calling a tool, return their response. Decoding stops where
        they would begin to invent a tool's result. If a step cannot be parsed, the LLM requests
        another one, up to `retries` times.

        Args:
            tools: tools that the members can call.
            user_msg: the user's message.
            chat_history: earlier messages.
            verbose: whether to print calls and their results.
            **kwargs: `react_chat_formatter`, `output_parser`, `tool_retriever`, `memory`, and
                options of `AdaFuseConfig`.

        Raises:
            AdaFuseLLMError: no step can be parsed (the cause is a `MalformedReplyError`), or an
                option cannot be used.
        """
        step = self._step_and_call(tools, user_msg, chat_history, verbose, kwargs)
        with ThreadPoolExecutor(max_workers=1) as pool:  # this thread may have a running event loop
            return pool.submit(copy_context().run, asyncio.run, step).result()

    @aadapter_errors
    async def apredict_and_call(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        **kwargs: Any,
    ) -> AgentChatResponse:
        """Return what `predict_and_call` returns, without blocking the event loop."""
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
        conversation = [*(chat_history or []), *([user_msg] if user_msg else [])]
        agent_keywords = ("react_chat_formatter", "output_parser", "tool_retriever", "memory")
        agent = {key: kwargs[key] for key in agent_keywords if kwargs.get(key) is not None}
        options = check_option_names(
            {k: v for k, v in kwargs.items() if k not in agent_keywords}, extra=agent_keywords
        )
        stop = options.get("stop", self._options({}).get("stop", ()))
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        llm = self.model_copy()
        llm._fixed_options = {**options, "stop": (*stop, OBSERVATION)}
        return await step_and_call(llm, tools, conversation, agent, self.retries, verbose=verbose)

    # Copies and pickles -----------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        for shared in (self._passed_engine, self.callback_manager, self.rate_limiter):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in AdaFuseConfig.model_fields and value is not None:
            value = getattr(AdaFuseConfig().override({name: value}), name)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        if self._passed_engine is not None:
            raise TypeError(
                "an LLM with a passed engine cannot be pickled, because pickles contain no "
                "weights; create the LLM with members=[...], which the other process can load"
            )
        return super().__getstate__()

    @field_serializer("members")
    def _serialize_members(self, members: tuple[MemberSpec, ...] | None) -> list[Any] | None:
        return self._ensemble.identity["members"] if members else None if members is None else []

    @field_serializer("dtype")
    def _serialize_dtype(self, dtype: Any) -> str:
        return str(dtype)

    # ------------------------------------------------------------------------------------------

    @property
    def _ensemble(self) -> Ensemble:
        if self._passed_engine is not None:
            return Ensemble(given=self._passed_engine)
        return Ensemble.of(self.members or (), **{key: getattr(self, key) for key in _LOADING})

    @property
    def _model_name(self) -> str:
        return "+".join(self.use or self._ensemble.names)

    def _options(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call: those of the LLM, updated with the call's overrides."""
        fields = {name: getattr(self, name, None) for name in AdaFuseConfig.model_fields}
        options = {name: value for name, value in fields.items() if value is not None}
        return {**options, **self._fixed_options, **check_option_names(overrides)}

    def _active_backends(self, options: Mapping[str, Any]) -> list[Backend]:
        """Return the members that decode with these options.

        Raises:
            InvalidOptionError: an option is out of range or does not match the members.
        """
        engine = self.engine
        active = engine.config.override(options).member_weights(engine.members)
        return [backend for backend in engine.backends if backend.name in active]

    def _prompt(self, prompt: str, formatted: bool, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request for a completion.

        If the prompt is not `formatted`, apply `completion_to_prompt` to it. The result becomes a
        user message, or the system prompt and the query wrapper are applied to it in the same order
        as in `predict`.
        """
        options = self._options(overrides)
        if not formatted:
            if self.completion_to_prompt is not None:
                prompt = self.completion_to_prompt(prompt)
            if self._completes_as_chat(options):
                message = ChatMessage(role=MessageRole.USER, content=prompt)
                return self._messages([message], overrides)
            prompt = self._extend_prompt(prompt)
        return {"prompt": prompt, **options}

    def _completes_as_chat(self, options: Mapping[str, Any]) -> bool:
        if self.complete_as_chat is not None:
            return self.complete_as_chat
        if self.completion_to_prompt not in (None, default_completion_to_prompt):
            return False
        return all(b.codec.has_chat_template for b in self._active_backends(options))

    def _messages(
        self, messages: Sequence[ChatMessage], overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the request for a chat.

        The request has messages, which each member formats with its own chat template. If the user
        set `messages_to_prompt`, the request has one prompt for all members instead.
        """
        options = self._options(overrides)
        with_prompts = add_prompts(messages, self.system_prompt, self.query_wrapper_prompt)
        if self.messages_to_prompt not in (None, generic_messages_to_prompt):
            return {"prompt": self.messages_to_prompt(with_prompts), **options}
        return {"messages": to_conversation(to_turns(with_prompts)), **options}

    def _decode(self, request: dict[str, Any]) -> Decode:
        return Decode(self.engine, request, emit_events=self.emit_events)

    async def _aload(self) -> None:
        """Load the members without blocking the event loop."""
        ensemble = self._ensemble
        if not ensemble.is_loaded:
            await asyncio.to_thread(ensemble.engine)

    def _attempts(
        self, output_cls: type[Model], prompt: BasePromptTemplate, prompt_args: dict[str, Any]
    ) -> Attempts[Model]:
        dispatcher.event(
            LLMStructuredPredictStartEvent(
                output_cls=output_cls, template=prompt, template_args=prompt_args
            )
        )
        conversation = prompt.format_messages(llm=self, **prompt_args)
        return Attempts(output_cls, conversation, self.retries)


def _completion_response(chunk: Chunk) -> CompletionResponse:
    return CompletionResponse(text=chunk.text, delta=chunk.delta, raw=chunk.raw)


def _chat_response(chunk: Chunk) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=chunk.text)
    return ChatResponse(message=message, delta=chunk.delta, raw=chunk.raw)
