"""The LangChain chat model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import PrivateAttr, StrictBool
from typing_extensions import Unpack

from adafuse_llm import Engine, Request
from adafuse_llm.adapters.conversation import to_conversation
from adafuse_llm.adapters.reply_form import ReplyForm, schema_of, to_flag, to_tool_choice
from adafuse_llm.config import CONSTRAINTS
from adafuse_llm.errors import InvalidOptionError
from langchain_adafuse._calls import Call, output_of
from langchain_adafuse._messages import (
    ToolLike,
    omitted_blocks,
    to_openai_tool,
    to_tools,
    to_turns,
)
from langchain_adafuse._model import EnsembleModel, ModelFields
from langchain_adafuse._replies import Replies
from langchain_adafuse._rounds import for_whole
from langchain_adafuse._structured import Method, Schema, structured_output

PROMPT_KEYWORDS = ("tools", "tool_choice", "response_format", "parallel_tool_calls")
"""Keywords of a call that describe the reply; all others are options."""


class ChatAdaFuse(EnsembleModel, BaseChatModel):
    """A LangChain chat model backed by an ensemble of local language models.

    For example::

        chat = ChatAdaFuse(members=["Qwen/Qwen2.5-7B-Instruct", "google/gemma-2-9b-it"])
        chat.invoke("Who founded the mill?").content

    Creating a model loads nothing. The first call, or `warmup`, loads the members. Each member
    reads the messages in the format of its own chat template. A stream has one chunk per committed
    span. ``response_metadata["adafuse_summary"]`` summarizes the rounds. With
    ``round_detail="full"``, ``additional_kwargs["adafuse_rounds"]`` has a record of each round.
    Token counts are those of the first active member; ``response_metadata["usage_by_member"]`` has
    the token counts and forward passes of each member.

    Reasoning between ``<think>`` and ``</think>`` is moved to
    ``additional_kwargs["reasoning_content"]``, also if the chat template writes the opening marker.
    Later calls pass it only to chat templates that read reasoning.

    The system message describes tools and schemas to the members. With the extra
    ``adafuse-llm[grammar]``, they also constrain decoding: the members call only tools that exist,
    with arguments that fit, and structured output fits its schema. Without the extra, the model
    parses and checks each reply afterwards (see `enforce`). A reply that consists of the JSON of
    valid calls becomes calls. If a reply looks like a call and is none,
    ``response_metadata["adafuse_warnings"]`` gives the reason.

    In assistant messages of other providers and in results of tools, members read text and JSON.
    Other content blocks, such as images, are omitted, and one warning per model names their types.

    Raises:
        ContextOverflowError: the messages do not fit a member's context window. In this case,
            nothing is decoded.
        RequestTimeoutError: the call takes longer than `timeout` seconds.
        MemberError: a member fails; the message names the member.
    """

    if TYPE_CHECKING:  # type checkers derive a constructor for each class that has none

        def __init__(self, **fields: Unpack[ModelFields]) -> None: ...

    enforce: Literal["auto"] | StrictBool = "auto"
    """Whether tools and response formats constrain decoding. ``"auto"`` constrains it if the extra
    ``adafuse-llm[grammar]`` is installed; if a schema cannot be enforced, a warning names the
    reason, and the members only read the schema. True raises an error instead. False never
    constrains decoding. Every call can override this field."""

    _per_call = (*EnsembleModel._per_call, "enforce")
    _described: set[tuple[str, ...]] = PrivateAttr(default_factory=set)
    """Groups of active members that were loaded before. The copies for calls share it."""
    _has_own_profile: bool = PrivateAttr(default=False)  # not one that the user gave

    @property
    def _llm_type(self) -> str:
        return "adafuse-chat"

    def get_num_tokens_from_messages(
        self,
        messages: list[BaseMessage],
        tools: Sequence[ToolLike] | None = None,
    ) -> int:
        """Count the tokens of the whole prompt in the first active member's chat template."""
        prompt = to_conversation(to_turns(messages), tools=to_tools(tools or ()))
        return len(self._first_tokens(messages=prompt))

    # Tools and schemas ------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools that it can call.

        Args:
            tools: functions, pydantic classes, TypedDicts, instances of `BaseTool`, or schemas.
            tool_choice: ``"auto"`` or None to let the members decide; ``"none"`` or False to omit
                the tools; ``"any"``, ``"required"`` or True to request a call of any tool; or the
                name of a tool, or a dict with its name, to request exactly one call of that tool.
                The choice becomes part of the prompt, and constrains decoding (see `enforce`).
            strict: whether the tools' schemas forbid additional arguments.
            **kwargs: passed to every call. With ``parallel_tool_calls=False``, the reply ends after
                its first call; if calls are not enforced, further calls are dropped.

        Raises:
            InvalidInputError: a tool has no schema, or `tool_choice` does not fit the tools.
        """
        formatted = [to_openai_tool(tool, strict=strict) for tool in tools]
        choice = to_tool_choice(tool_choice, [tool["function"]["name"] for tool in formatted])
        return self.bind(tools=formatted, tool_choice=choice, **kwargs)

    def with_structured_output(
        self,
        schema: Schema | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a runnable whose output fits a schema.

        The schema constrains decoding where it can be enforced (see `enforce`), so the reply fits.
        Otherwise the members only read it; LangChain's ``with_retry`` asks again if a reply does
        not fit. A stream yields partial objects until the reply is finished, then the complete
        object.

        Args:
            schema: a pydantic class, a TypedDict or a JSON schema. A JSON schema can be in a dict
                ``{"name": ..., "schema": ...}``, or in a ``response_format`` of OpenAI's API. For a
                pydantic class, the output is an instance of the class; otherwise, it is plain data.
                Only ``"json_mode"`` needs no schema.
            method: ``"json_schema"`` requests JSON that fits the schema; ``"function_calling"``
                requests a call of a tool with this schema; ``"json_mode"`` requests any JSON
                object, which your prompt must describe.
            include_raw: whether to return ``{"raw": message, "parsed": ..., "parsing_error": ...}``
                instead of the object, and to raise no error if no reply fits.
            strict: whether additional properties are errors.
            **kwargs: passed to every call.

        Raises:
            InvalidInputError: `schema` is missing.
            OutputParserException: the reply is cut off or does not fit the schema, and
                `include_raw` is False.
        """
        return structured_output(
            self, schema, method=method, include_raw=include_raw, strict=strict, **kwargs
        )

    # Decoding ---------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call, request = self._call(messages, stop, kwargs)
        replies, run = Replies(call), for_whole(run_manager)
        with closing(call.steps([request])) as steps:
            for step in steps:
                for chunk in replies.chunks(step):
                    if run:
                        run.on_llm_new_token("" if step.number else chunk.text, chunk=chunk)
        return replies.result()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call, request = self._call(messages, stop, kwargs)
        replies, run = Replies(call), for_whole(run_manager)
        async with aclosing(call.asteps([request])) as steps:
            async for step in steps:
                for chunk in replies.chunks(step):
                    if run:
                        await run.on_llm_new_token("" if step.number else chunk.text, chunk=chunk)
        return replies.result()

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call, request = self._call(messages, stop, kwargs, streams=True)
        replies = Replies(call, is_merged=run_manager is None)
        with closing(call.steps([request])) as steps:
            for step in steps:
                for chunk in replies.chunks(step):
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
        call, request = self._call(messages, stop, kwargs, streams=True)
        replies = Replies(call, is_merged=run_manager is None)
        async with aclosing(call.asteps([request])) as steps:
            async for step in steps:
                for chunk in replies.chunks(step):
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _streaming_disabled(self, **kwargs: Any) -> bool:
        """Never stream several responses to handlers. `stream` itself passes ``stream=True``."""
        if super()._streaming_disabled(**kwargs):
            return True
        return (
            not kwargs.get("stream") and self._for_call(None, _without_form(kwargs))._config.n > 1
        )

    def _call(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        keywords: Mapping[str, Any],
        *,
        streams: bool = False,
    ) -> tuple[Call, Request]:
        """Begin a call of the model with overrides, and return its request."""
        model = self._for_call(stop, _without_form(keywords))
        if blocks := omitted_blocks(messages):
            self._warn_once(
                "the messages contain blocks that are not text, which members do not read: "
                f"{', '.join(blocks)}"
            )
        form = _form_of(keywords)
        given = [name for name in CONSTRAINTS if getattr(model, name) is not None]
        if given and (form.calls_tools or form.schema is not None):
            raise InvalidOptionError(
                f"{given[0]} cannot be combined with "
                f"{'tools' if form.calls_tools else 'response_format'}, because both determine the "
                "form of the reply; pass only one of them"
            )
        prompt = to_conversation(
            to_turns(messages),
            tools=form.tools,
            tool_choice=form.choice,
            instructions=form.instructions,
        )
        return Call(model, form, streams=streams), Request(messages=prompt)

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        outputs = [output for output in llm_outputs if output]
        name = outputs[0]["model_name"] if outputs else self.model_name
        return output_of(name, [output["token_usage"] for output in outputs])

    # LangChain's cache key and model profile ---------------------------------------------------

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, "enforce": self.enforce}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """Return the cache key: the ensemble, all options, and keywords that change the prompt."""
        in_prompt = {key: kwargs.pop(key) for key in PROMPT_KEYWORDS if key in kwargs}
        key = [self._for_call(stop, kwargs).asdict(), in_prompt]
        return json.dumps(key, sort_keys=True, default=str)

    def _resolve_model_profile(self) -> ModelProfile:
        """Return the model's capabilities.

        The profile claims tool calls if a member has a chat template, and structured output and a
        forced tool choice if they can be enforced. The context window is the smallest of the active
        members, from their ``config.json``. If one of these files is not on this machine or has no
        window, the profile includes the window once the members are loaded.
        """
        self._has_own_profile = True
        window = self._ensemble.context_window(self._names)
        profile = ModelProfile(
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            image_url_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            pdf_inputs=False,
            reasoning_output=True,
            tool_call_streaming=False,
            temperature=True,
            **self._abilities(),
        )
        return profile if window is None else {**profile, "max_input_tokens": window}

    def _loaded(self) -> Engine:
        engine, names = super()._loaded(), self._names
        if names in self._described:
            return engine
        self._described.add(names)
        if self.profile is not None and self._has_own_profile:
            window = self._ensemble.context_window(names)
            if window is not None:
                self.profile.setdefault("max_input_tokens", window)
            self.profile.update(self._abilities())
        if self._ensemble.is_chat_model(names) is False:  # the engine warns of mixtures
            self._warn_once(
                f"members without a chat template: {', '.join(names)}. They read messages as plain "
                "text, in which each message begins with 'User:' or 'Assistant:'"
            )
        return engine

    def _abilities(self) -> ModelProfile:
        """Return the part of the profile that depends on the members. This loads nothing."""
        is_chat = self._ensemble.is_chat_model(self._names) is not False
        enforces = bool(self.enforce) and self._ensemble.can_enforce()
        return {
            "tool_calling": is_chat,
            "tool_choice": is_chat and enforces,
            "structured_output": enforces,
        }


def _form_of(keywords: Mapping[str, Any]) -> ReplyForm:
    """Return the form of replies that the keywords of a call ask for."""
    tools = to_tools(keywords.get("tools") or ())
    schema = schema_of(keywords.get("response_format"))
    return ReplyForm(
        tools,
        to_tool_choice(keywords.get("tool_choice"), [tool.name for tool in tools]),
        to_flag("parallel_tool_calls", keywords.get("parallel_tool_calls"), default=True),
        schema,
        completes=schema is None or "tools" not in keywords,  # agents parse the text themselves
    )


def _without_form(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call that do not describe the reply."""
    return {name: value for name, value in keywords.items() if name not in PROMPT_KEYWORDS}
