"""The ensemble as a LangChain chat model."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, cast

from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForLLMRun,
    CallbackManager,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.uuid import uuid7
from pydantic import PrivateAttr
from typing_extensions import Self, Unpack

from adafuse_llm import AdaFuseEngine, StreamEvent
from adafuse_llm.adapters.conversation import to_messages
from adafuse_llm.adapters.structured import schema_instructions
from adafuse_llm.errors import InvalidInputError
from adafuse_llm.text.chat import Message
from langchain_adafuse._messages import Reply, ToolLike, to_tool_choice, to_tools, to_turns
from langchain_adafuse._model import EnsembleModel, ModelFields, Told, usage_of
from langchain_adafuse._rounds import ModelRun
from langchain_adafuse._structured import Method, Schema, StructuredOutput

IN_THE_PROMPT = ("tools", "tool_choice", "response_format")
"""Keywords of a call that members read; all others are options."""


class ChatAdaFuse(EnsembleModel, BaseChatModel):
    """A LangChain chat model whose every reply is written by an ensemble of local models.

    For example::

        chat = ChatAdaFuse(members=["Qwen/Qwen2.5-7B-Instruct", "google/gemma-2-9b-it"])
        chat.invoke("Who founded the mill?").content

    Making one loads nothing; the first call does (or `warmup`). Every member reads the messages in
    its own chat template. One chunk is streamed per committed span; the records of the rounds are
    in ``additional_kwargs["adafuse_rounds"]``. Token counts are the first member's, and
    ``response_metadata["usage_by_member"]`` has everyone's, forward passes included. Reasoning
    between ``<think>`` and ``</think>`` goes to ``additional_kwargs["reasoning_content"]`` and is
    not read again. Tools and schemas are described to the members in the system message; what they
    write is checked, not forced.

    Raises:
        ContextOverflowError: the messages do not fit a member's window; nothing was computed.
        TimeoutError: `timeout` seconds have passed.
        MemberError: a member failed; its name is in the message.
    """

    if TYPE_CHECKING:  # type checkers derive a constructor for each class that has none

        def __init__(self, **fields: Unpack[ModelFields]) -> None: ...

    _run: ModelRun | None = PrivateAttr(default=None)

    @property
    def _llm_type(self) -> str:
        return "adafuse-chat"

    def get_num_tokens_from_messages(
        self,
        messages: list[BaseMessage],
        tools: Sequence[ToolLike] | None = None,
    ) -> int:
        """Tokens of the prompt for the first member that decodes, its template's included."""
        prompt = to_messages(to_turns(messages), tools=to_tools(tools or ()))
        return len(self._first_codec().encode_messages(prompt))

    # Tools and schemas ------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that it can call.

        Args:
            tools: functions, pydantic classes, TypedDicts, instances of `BaseTool`, or schemas.
            tool_choice: ``"auto"``; ``"none"`` or False; ``"any"``, ``"required"`` or True; the
                name of a tool, or a dict with it. The members are told so.
            strict: whether schemas forbid arguments that they do not name.
            **kwargs: passed to every call.
        """
        formatted = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        choice = to_tool_choice(tool_choice, [tool["function"]["name"] for tool in formatted])
        return self.bind(tools=formatted, tool_choice=choice, **kwargs)

    def with_structured_output(
        self,
        schema: Schema,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        max_repairs: int = 2,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model with replies that fit a schema.

        A stream yields what has been written so far, as far as it can be read; last comes the
        whole. A reply that does not fit is shown to the members with what is wrong, up to
        `max_repairs` times.

        Args:
            schema: a pydantic class (v1 or v2), whose instances are returned; a TypedDict or a JSON
                schema, for a dict.
            method: ``"json_schema"`` tells the members the schema; ``"function_calling"`` asks for
                a call of a tool with it; ``"json_mode"`` asks for JSON and leaves it to your prompt
                to say which.
            include_raw: return ``{"raw": message, "parsed": ..., "parsing_error": ...}`` instead,
                and raise nothing.
            strict: whether properties that the schema does not name are errors.
            max_repairs: most further rounds.
            **kwargs: passed to every call.

        Raises:
            OutputParserException: no reply fitted the schema (when called).
        """
        return StructuredOutput.of(
            self,
            schema,
            method=method,
            include_raw=include_raw,
            strict=strict,
            max_repairs=max_repairs,
            **kwargs,
        )

    # Decoding ---------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._chunks(messages, stop, run_manager, kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async with aclosing(self._achunks(messages, stop, run_manager, kwargs)) as chunks:
            return generate_from_stream(iter([chunk async for chunk in chunks]))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with closing(self._chunks(messages, stop, run_manager, kwargs)) as chunks:
            for chunk in chunks:
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with aclosing(self._achunks(messages, stop, run_manager, kwargs)) as chunks:
            async for chunk in chunks:
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _chunks(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run: CallbackManagerForLLMRun | None,
        said: Mapping[str, Any],
    ) -> Generator[ChatGenerationChunk, None, None]:
        call, prompt, reply = self._prepare(messages, stop, said)
        with closing(call._decode(run or self._run, messages=prompt)) as events:
            for event, told in events:
                yield from call._read(reply, event, told)

    async def _achunks(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run: AsyncCallbackManagerForLLMRun | None,
        said: Mapping[str, Any],
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        call, prompt, reply = self._prepare(messages, stop, said)
        async with aclosing(call._adecode(run or self._run, messages=prompt)) as events:
            async for event, told in events:
                for chunk in call._read(reply, event, told):
                    yield chunk

    def _prepare(
        self, messages: list[BaseMessage], stop: list[str] | None, said: Mapping[str, Any]
    ) -> tuple[Self, list[Message], Reply]:
        """The model as a call wants it, what the members read, and what takes the reply apart."""
        call = self._for_call(stop, {k: v for k, v in said.items() if k not in IN_THE_PROMPT})
        tools = to_tools(said.get("tools") or ())
        choice = to_tool_choice(said.get("tool_choice"), [tool.name for tool in tools])
        prompt = to_messages(
            to_turns(messages),
            tools=tools,
            tool_choice=choice,
            instructions=_instructions(said.get("response_format")),
        )
        return call, prompt, Reply(tools=bool(tools) and choice != "none")

    def _read(self, reply: Reply, event: StreamEvent, told: Told) -> list[ChatGenerationChunk]:
        if (done := event.generation) is None:
            return reply.chunks(event, told)
        return reply.chunks(event, told, self._metadata(done), usage_of(done))

    # Runs: `BaseChatModel` streams without telling `_stream` whose run it is --------------------

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """As `BaseChatModel.stream`."""
        config = ensure_config(config)
        manager = CallbackManager.configure(*self._handlers(config))
        run = CallbackManagerForLLMRun(**_run_of(manager, config))
        config = {**config, "callbacks": manager, "run_id": run.run_id}
        streamed = super(ChatAdaFuse, self._on(run)).stream(input, config, stop=stop, **kwargs)
        with closing(cast("Any", streamed)) as chunks:
            yield from chunks

    async def astream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """As `BaseChatModel.astream`."""
        config = ensure_config(config)
        manager = AsyncCallbackManager.configure(*self._handlers(config))
        run = AsyncCallbackManagerForLLMRun(**_run_of(manager, config))
        config = {**config, "callbacks": manager, "run_id": run.run_id}
        streamed = super(ChatAdaFuse, self._on(run)).astream(input, config, stop=stop, **kwargs)
        async with aclosing(cast("Any", streamed)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return super(ChatAdaFuse, self._on(run_manager))._generate_with_cache(
            messages, stop, run_manager, **kwargs
        )

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await super(ChatAdaFuse, self._on(run_manager))._agenerate_with_cache(
            messages, stop, run_manager, **kwargs
        )

    def _on(self, run: ModelRun | None) -> Self:
        """This model, telling its rounds to a run."""
        model = self.model_copy()
        model._run = run
        return model

    def _handlers(self, config: RunnableConfig) -> tuple[Any, ...]:
        """Arguments of `CallbackManager.configure`."""
        return (
            *(config.get("callbacks"), self.callbacks, self.verbose),
            *(config.get("tags"), self.tags),
            *(config.get("metadata"), self.metadata),
        )

    # What LangChain asks of a model -------------------------------------------------------------

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of caches: the ensemble, all options, and what the prompt holds but messages."""
        read = {key: kwargs.pop(key) for key in IN_THE_PROMPT if key in kwargs}
        key = [self._for_call(stop, kwargs).asdict(), read]
        return json.dumps(key, sort_keys=True, default=str)

    def _resolve_model_profile(self) -> ModelProfile:
        """What the model can do. Tools and schemas are asked for in words, so that a schema is not
        enforced; the window is known once the members are loaded.
        """
        window = self._loaded().context_window if self._ensemble.is_loaded else None
        profile = ModelProfile(
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            image_url_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            pdf_inputs=False,
            reasoning_output=True,
            tool_calling=True,
            tool_choice=False,
            tool_call_streaming=True,
            structured_output=False,
            temperature=False,
        )
        return profile if window is None else {**profile, "max_input_tokens": window}

    def _loaded(self) -> AdaFuseEngine:
        engine = super()._loaded()
        if self.profile is not None and engine.context_window is not None:
            self.profile.setdefault("max_input_tokens", engine.context_window)
        return engine


def _run_of(
    manager: CallbackManager | AsyncCallbackManager, config: RunnableConfig
) -> dict[str, Any]:
    """The run that `BaseChatModel` is going to start."""
    return {
        "run_id": config.get("run_id") or uuid7(),
        "handlers": manager.handlers,
        "inheritable_handlers": manager.inheritable_handlers,
        "parent_run_id": manager.parent_run_id,
        "tags": manager.tags,
        "metadata": manager.metadata,
    }


def _instructions(response_format: Mapping[str, Any] | None) -> str:
    """What members are told of the form of their reply."""
    match response_format:
        case None | {"type": "text"}:
            return ""
        case {"type": "json_object"}:
            return schema_instructions({"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return schema_instructions(schema)
    raise InvalidInputError(
        "response_format must be {'type': 'json_schema', 'json_schema': {'schema': ...}}, "
        f"{{'type': 'json_object'}} or {{'type': 'text'}}; got {response_format!r:.80}"
    )
