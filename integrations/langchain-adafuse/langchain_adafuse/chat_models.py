"""The LangChain chat model."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import (
    Runnable,
    RunnableGenerator,
    RunnableLambda,
    RunnableMap,
    RunnablePassthrough,
)
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import PrivateAttr, StrictBool
from typing_extensions import Self

from adafuse_llm import Engine, Request, StreamEvent
from adafuse_llm.adapters.conversation import to_conversation
from adafuse_llm.adapters.reply import CallPiece, InvalidToolCall, ReplyReader, ToolCall
from adafuse_llm.adapters.reply_form import FORM_KEYWORDS, form_of, to_tool_choice
from adafuse_llm.config import CONSTRAINTS
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, short_repr
from langchain_adafuse._calls import CUT_KEY, ChatRoundChunk, ModelCall, ResponseChunks
from langchain_adafuse._messages import ToolLike, as_function, openai_tool, to_tools, to_turn
from langchain_adafuse._model import EnsembleModel

logger = logging.getLogger(__name__)

WARNINGS_KEY = "adafuse_warnings"
"""Key of the warnings about a reply and its calls in the ``response_metadata``."""


Schema = dict[str, Any] | type
"""A pydantic class, a TypedDict, or a dict with a JSON schema."""


class ChatAdaFuse(EnsembleModel, BaseChatModel):  # type: ignore[misc]  # messages are `given`
    """A LangChain chat model backed by an ensemble of local language models.

    For example::

        chat = ChatAdaFuse(members=["Qwen/Qwen2.5-7B-Instruct", "google/gemma-2-9b-it"])
        chat.invoke("Who founded the mill?").content

    The first call, or `warmup`, loads the members. Each of them reads the messages in the format of
    its own chat template. The system message describes schemas and, for templates without tools,
    the tools. A stream has chunks of committed text or calls, and a last one with the metadata.
    Reasoning is in the ``additional_kwargs`` of a message, as ``reasoning_content``.
    """

    def __init__(self, **fields: Any) -> None:  # else type checkers derive one without options
        super().__init__(**fields)

    enforce: Literal["auto"] | StrictBool = "auto"
    """Whether tools and response formats constrain decoding. ``"auto"``: with the extra
    ``adafuse-llm[grammar]``, they do; a warning names parts of a schema that cannot be enforced,
    which the members only read. True: they do, or an error names the reason. False: they do not.
    Every call can override this field."""

    tool_choice: str | bool | dict[str, Any] | None = None
    """The default `tool_choice` of `bind_tools`, and of calls that have tools."""
    parallel_tool_calls: bool | None = None
    """Whether a reply with tools can have several calls, unless `bind_tools` or the call chooses.
    Use False with small members, which repeat calls."""

    reasoning_effort: str | None = None
    """How much the members reason, such as ``"low"``, if their chat templates read it. ``"none"``
    also switches reasoning off. If the templates cannot use the value, there is a warning."""

    _per_call = (
        *EnsembleModel._per_call,
        *("enforce", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
    )
    _has_own_profile: bool = PrivateAttr(default=False)  # not one that the user gave

    @property
    def _llm_type(self) -> str:
        return "adafuse-chat"

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[ToolLike] | None = None
    ) -> int:
        """Count the tokens of the whole prompt, for the active member that needs the most.

        The messages can be any part of a conversation, in any order. If they have neither text nor
        calls, and there are no tools, the number is 0.
        """
        turns = [to_turn(message) for message in messages]
        described = to_tools(tools or ())
        if not described and not any(turn["content"] or turn.get("tool_calls") for turn in turns):
            return 0
        prompt = to_conversation(turns, tools=described, warn=logger.debug)
        return len(self._most_tokens(messages=prompt))

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
            tools: tools in any form that LangChain accepts.
            tool_choice: ``"auto"`` to let the members decide (the default, unless the model has a
                `tool_choice`); ``"none"`` or False to omit the tools; ``"any"``, ``"required"`` or
                True to request a call of any tool; or the name of a tool, or a dict with its name,
                to request exactly one call of that tool.
            strict: whether the tools' schemas forbid additional arguments.
            **kwargs: passed to every call, such as ``parallel_tool_calls=False``.

        Raises:
            InvalidInputError: a tool has no schema, or `tool_choice` does not fit the tools.
        """
        formatted = [openai_tool(tool, strict) for tool in tools]
        names = [tool.name for form in formatted for tool in to_tools([form])]
        choice = to_tool_choice(self.tool_choice if tool_choice is None else tool_choice, names)
        return self.bind(tools=formatted, tool_choice=choice, **kwargs)

    def with_structured_output(
        self,
        schema: Schema | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a runnable whose output fits a schema, which constrains decoding (see `enforce`).

        A stream yields plain data again and again while it grows, but an instance of a class only
        once, at the end of the reply.

        Args:
            schema: a pydantic class (the output is an instance of it), a TypedDict, or a JSON
                schema, possibly in a ``response_format`` of OpenAI's API.
            method: ``"json_schema"`` requests JSON that fits the schema; ``"function_calling"``
                requests a call of a tool with this schema; ``"json_mode"`` requests any JSON
                object, which your prompt must describe.
            include_raw: whether to return ``{"raw": message, "parsed": ..., "parsing_error": ...}``
                instead of the object, and to raise no error if the reply does not fit.
            strict: whether additional properties are errors.
            **kwargs: passed to every call.

        Raises:
            InvalidInputError: the schema or the method cannot be used.
            OutputParserException: the reply is cut off or does not fit the schema.
        """
        if method not in ("json_schema", "function_calling", "json_mode"):
            raise InvalidOptionError(
                f"method must be json_schema, function_calling or json_mode; got {method!r}"
            )
        if schema is None and method != "json_mode":
            raise InvalidInputError(f"method={method!r} needs a schema; got None")

        # convert a schema of any kind into the schema of a tool
        schema = {"type": "object"} if schema is None else schema
        tool = openai_tool(as_function(schema) if isinstance(schema, dict) else schema, strict)
        name, json_schema = tool["function"]["name"], convert_to_json_schema(tool)
        asked = {"kwargs": {"method": method, "strict": strict}, "schema": tool}
        parser: Runnable[Any, Any] = JsonOutputParser()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            of_class: PydanticOutputParser[Any] = PydanticOutputParser(pydantic_object=schema)
            parser = RunnableLambda(partial(_instance, parser=of_class))

        # bind the schema to all calls of the model, and choose the parser of its replies
        if method == "function_calling":
            is_value = {"enum", "const"} & json_schema.keys()
            if is_value or "object" not in json_schema.get("type", "object"):
                raise InvalidInputError(
                    "the arguments of a tool are an object, so method='function_calling' needs a "
                    f"schema of one; got {short_repr(schema)}. Use method='json_schema'."
                )
            bound = self.bind_tools(
                [tool], tool_choice=name, ls_structured_output_format=asked, **kwargs
            )
            parser = RunnableLambda(partial(_arguments, name=name)) | parser
        else:
            form: dict[str, Any] = {"type": "json_object"}
            if method == "json_schema":
                form = {"type": "json_schema", "json_schema": {"name": name, "schema": json_schema}}
            bound = self.bind(response_format=form, ls_structured_output_format=asked, **kwargs)
            parser = RunnableGenerator(_whole, _awhole) | parser
        if not include_raw:
            return bound | parser
        parsed = RunnablePassthrough.assign(
            parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
        )
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        raw = bound | RunnableMap(raw=RunnablePassthrough())  # a map drops the options of a call
        return raw | parsed.with_fallbacks([failed], exception_key="parsing_error")

    # Decoding ---------------------------------------------------------------------------------

    def _result(self, _call: ModelCall, generations: list[Any]) -> ChatResult:
        return ChatResult(generations=generations)

    def _streaming_disabled(self, **kwargs: Any) -> bool:
        """Disable streaming also for several responses, unless the method `stream` asks for it."""
        is_plural = not kwargs.get("stream") and kwargs.get("n", self._config.n) not in (None, 1)
        return is_plural or super()._streaming_disabled(**kwargs)

    def _call(
        self, given: list[BaseMessage], stop: list[str] | None, keywords: Mapping[str, Any]
    ) -> ModelCall:
        options = {name: keywords[name] for name in keywords if name not in FORM_KEYWORDS}
        model = self._for_call(stop, options)
        turns = [to_turn(message) for message in given]
        form = None
        described: dict[str, Any] = {}
        if len(options) < len(keywords):
            own = {"tool_choice": self.tool_choice, "parallel_tool_calls": self.parallel_tool_calls}
            asked = {**(own if keywords.get("tools") else {}), **keywords}
            form = form_of(to_tools(keywords.get("tools") or ()), asked)
            form.check_constraints(n for n in CONSTRAINTS if getattr(model, n) is not None)
            if model.enforce is not True:
                form = form.after(turns)
            described = {"tools": form.tools, "tool_choice": form.choice}
            described["instructions"] = form.instructions
        prompt = to_conversation(turns, **described, warn=self._warn_once)
        requests, effort = [Request(messages=prompt)], model.reasoning_effort
        return ModelCall(model, requests, ChatResponseChunks, form, effort)

    def _loaded(self) -> Engine:
        engine, names = self._ensemble.engine(), self._names
        if self._ensemble.is_chat_model(names) is False:  # the engine warns of mixtures
            self._warn_once(
                f"members without a chat template: {', '.join(names)}. They read messages as plain "
                "text, in which each message begins with 'User:' or 'Assistant:'"
            )
        return engine

    # LangChain's cache key and model profile ---------------------------------------------------

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        return json.dumps([self.asdict(), stop, kwargs], sort_keys=True, default=str)

    def _resolve_model_profile(self) -> ModelProfile:
        """Return the model's capabilities without loading members. LangChain calls this.

        `warmup` calls it again, because some capabilities show only when members are loaded.
        """
        self._has_own_profile = True
        ensemble, names = self._ensemble, self._names
        is_chat = ensemble.is_chat_model(names) is not False
        enforces = bool(self.enforce) and ensemble.can_enforce()
        window = ensemble.context_window(names)
        profile = ModelProfile(
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            reasoning_output=True,
            temperature=True,
            tool_calling=is_chat,
            tool_call_streaming=is_chat and enforces,
            tool_choice=is_chat and enforces,
            structured_output=enforces,
        )
        return profile if window is None else {**profile, "max_input_tokens": window}

    def warmup(self) -> Self:
        super().warmup()
        if self._has_own_profile:
            self.profile = self._resolve_model_profile()
        return self


@dataclass
class ChatResponseChunks(ResponseChunks):
    """A reply with text, reasoning and tool calls."""

    _calls: list[ToolCall | InvalidToolCall] = field(default_factory=list)
    _waiting: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        form = self.call.form
        self._reader = form.reader(self.call.options, as_text=False) if form else ReplyReader()

    def read(self, event: StreamEvent) -> list[ChatRoundChunk]:
        """Return the chunks of an event: text and reasoning, then calls, and at the end metadata.

        LangChain's event protocol recognizes malformed calls only in a chunk of their own.
        """
        (records, extras), whole = self.records(event), event.generation
        delta = self._reader.add(event.text, event.reply_prefix, whole)
        if delta.reasoning:
            extras["reasoning_content"] = delta.reasoning
        messages = []
        if delta.content or extras:
            messages.append(AIMessageChunk(content=delta.content, additional_kwargs=extras))
        pieces = [
            tool_call_chunk(
                name=part.name or None,
                args=part.arguments,
                id=None if part.name is None else f"call_{uuid.uuid4().hex}",
                index=part.number,
            )
            for part in delta.parts
            if isinstance(part, CallPiece)
        ]
        if pieces:
            messages.append(AIMessageChunk(content="", tool_call_chunks=pieces))
        self._calls += delta.calls
        if whole is not None:
            metadata, usage = self.metadata(whole)
            is_call = any(isinstance(call, ToolCall) for call in self._calls)
            if is_call and metadata["finish_reason"] == "stop":
                metadata["finish_reason"] = "tool_calls"
            if delta.warnings:
                logger.warning("%s", "; ".join(delta.warnings))
            if warnings := [*filter(None, [self.call.not_enforced]), *delta.warnings]:
                metadata[WARNINGS_KEY] = warnings
            messages.append(
                AIMessageChunk(
                    content="",
                    response_metadata=metadata,
                    usage_metadata=usage,
                    chunk_position="last",
                )
            )
        chunks = [ChatRoundChunk(message=message) for message in messages]
        self._waiting += records  # of rounds that write nothing yet, such as a part of a call
        if chunks:
            chunks[0].rounds, self._waiting = self._waiting, []
        self.chunks += chunks
        return chunks

    def generation(self) -> ChatGeneration:
        (generation,) = generate_from_stream(iter(self.chunks)).generations
        message: Any = generation.message
        errors = [call.error for call in self._calls if isinstance(call, InvalidToolCall)]
        for invalid, error in zip(message.invalid_tool_calls, errors, strict=True):
            invalid["error"] = error
        return generation


def _check_whole(message: AIMessage) -> AIMessage:
    """Refuse a reply that was cut off, because LangChain's parsers would close its brackets."""
    if cut := message.response_metadata.get(CUT_KEY):
        raise OutputParserException(f"the JSON is not whole: {cut}", llm_output=message.text)
    return message


def _whole(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    yield from map(_check_whole, messages)


async def _awhole(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    async for message in messages:
        yield _check_whole(message)


def _instance(message: AIMessage, parser: PydanticOutputParser[Any]) -> Any:
    """Return an instance of the parser's class from the text of a reply.

    Pydantic reads the text as JSON first, because a strict class takes a date or an enum only from
    JSON. If this fails, LangChain's parser reads the message.
    """
    try:
        return parser.pydantic_object.model_validate_json(message.text)
    except (AttributeError, ValueError):  # a class of pydantic 1; text around the object
        return parser.invoke(message)


def _arguments(message: AIMessage, name: str) -> AIMessage:
    """Return a message whose text is the arguments of the first call of the tool `name`."""
    for call in message.tool_calls:
        if call["name"] == name:
            return AIMessage(json.dumps(call["args"]))
    reason = "; ".join(message.response_metadata.get(WARNINGS_KEY, ()))
    raise OutputParserException(
        f"there is no valid call of the tool {name}. {reason}".rstrip(". "), llm_output=message.text
    )
