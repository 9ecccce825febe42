"""Structured output: request replies that fit a schema, parse them, and request corrections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    convert_to_messages,
)
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.json import parse_partial_json
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ValidationError
from pydantic.v1 import ValidationError as ValidationErrorV1

from adafuse_llm import AdaFuseConfig
from adafuse_llm.adapters.structured import correction, find_json, partial_json
from adafuse_llm.errors import InvalidInputError, InvalidOptionError
from langchain_adafuse._messages import to_openai_tool, with_call_errors
from langchain_adafuse._metadata import CLOSING_KEY
from langchain_adafuse._schema import check_schema, problems
from langchain_adafuse._schema_forms import Schema, prepare

Method = Literal["json_schema", "function_calling", "json_mode"]
METHODS = ("json_schema", "function_calling", "json_mode")

ANY_OBJECT: dict[str, Any] = {"title": "Object", "type": "object"}
"""The schema of ``"json_mode"`` without a schema."""

PARTIAL_TYPES: dict[str | None, tuple[type, ...]] = {
    None: (dict, list),
    "object": (dict,),
    "array": (list,),
}
"""The types of partial values, by the type of the final value in JSON schema."""


@dataclass(frozen=True)
class Reader:
    """A parser of replies that must fit a schema.

    Args:
        schema: a pydantic class (v1 or v2) or a JSON schema.
        tool: name of the tool that the reply must call; None if the reply's text must be JSON.
        kind: the type of the value in JSON schema, such as ``"object"``; None if it is not known.
    """

    schema: Schema
    tool: str | None
    kind: str | None = None

    def read(self, message: AIMessage) -> Any:
        """Return the object in a reply.

        Raises:
            ValueError: the reply has no object, or the object does not fit the schema.
        """
        if self.tool is not None:
            return self._validate(self._tool_arguments(message))
        is_cut = message.response_metadata.get("finish_reason") == "length"
        return self._validate(find_json(message.text, closing=_closing(message), is_cut=is_cut))

    def read_partly(self, message: AIMessage) -> Any:
        """Return the partial object in an unfinished reply, or None if the reply has none yet.

        A partial object or list has the type of the final value.
        """
        if self.tool is not None:
            return None
        try:
            text = message.text.removesuffix(_closing(message))
            partial = parse_partial_json(partial_json(text))
            if not isinstance(partial, PARTIAL_TYPES.get(self.kind, ())):
                return None
            return partial if isinstance(self.schema, dict) else self._validate(partial)
        except ValueError:
            return None

    def _tool_arguments(self, message: AIMessage) -> dict[str, Any]:
        for call in message.tool_calls:
            if call["name"] == self.tool:
                return call["args"]
        if invalid := with_call_errors(message).invalid_tool_calls:
            error = invalid[0].get("error") or "it is malformed"
            raise ValueError(f"the call of the tool {self.tool} cannot be read: {error}")
        raise ValueError(f"there is no call of the tool {self.tool}")

    def _validate(self, value: Any) -> Any:
        if isinstance(self.schema, dict):
            if errors := problems(value, self.schema):
                raise ValueError("; ".join(errors))
            return value
        schema: Any = self.schema
        validate = getattr(schema, "model_validate", None) or schema.parse_obj
        try:
            return validate(value)
        except (ValidationError, ValidationErrorV1) as error:
            reasons = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ValueError("; ".join(reasons)) from error


class StructuredOutput(Runnable[LanguageModelInput, Any]):
    """A runnable that returns objects, created by `ChatAdaFuse.with_structured_output`."""

    def __init__(
        self,
        model: Runnable[LanguageModelInput, AIMessage],
        reader: Reader,
        *,
        include_raw: bool,
        max_repairs: int,
    ) -> None:
        if isinstance(max_repairs, bool) or not isinstance(max_repairs, int) or max_repairs < 0:
            raise InvalidOptionError(
                f"max_repairs must be a whole number of at least 0; got {max_repairs!r}"
            )
        self.model = model
        self.reader = reader
        self.include_raw = include_raw
        self.max_repairs = max_repairs

    @classmethod
    def of(
        cls,
        chat: BaseChatModel,
        schema: Schema | None,
        *,
        method: Method,
        strict: bool | None,
        include_raw: bool,
        max_repairs: int,
        **bound: Any,
    ) -> StructuredOutput:
        """Bind a schema to a chat model.

        Raises:
            InvalidOptionError: `method` is unknown, or `strict` is used with ``"json_mode"``.
            InvalidInputError: `schema` contains no JSON schema or an invalid one, or `method` is
                ``"function_calling"`` and the schema is not one of an object.
        """
        if method not in METHODS:
            raise InvalidOptionError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
        if method == "json_mode" and strict is not None:
            raise InvalidOptionError(
                "strict cannot be used with method='json_mode', which adds no schema to the prompt"
            )
        if schema is None:
            if method != "json_mode":
                raise InvalidInputError(
                    f"method={method!r} needs a schema; got None. Pass one, or use "
                    "method='json_mode' for any JSON object"
                )
            schema = ANY_OBJECT
        schema = prepare(schema)
        json_schema = convert_to_json_schema(to_openai_tool(schema, strict=strict))
        is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
        if not is_class:  # a class validates its objects itself
            check_schema(json_schema)
        ls_format = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        bound["ls_structured_output_format"] = ls_format
        tool = None
        if method == "function_calling":
            if json_schema.get("type", "object") != "object":
                raise InvalidInputError(
                    "method='function_calling' needs a schema of an object, because the arguments "
                    f"of a tool are an object; got the type {json_schema['type']!r}. Use "
                    "method='json_schema'"
                )
            tool = str(json_schema["title"])
            model = chat.bind_tools([schema], tool_choice=tool, strict=strict, **bound)
        elif method == "json_schema":
            named_schema = {"name": json_schema["title"], "schema": json_schema, "strict": strict}
            response_format = {"type": "json_schema", "json_schema": named_schema}
            model = chat.bind(response_format=response_format, **bound)
        else:
            model = chat.bind(response_format={"type": "json_object"}, **bound)
        kind = json_schema.get("type", "object" if "properties" in json_schema else None)
        reader = Reader(
            schema if is_class else json_schema, tool, kind if isinstance(kind, str) else None
        )
        return cls(model, reader, include_raw=include_raw, max_repairs=max_repairs)

    def invoke(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        return self._call_with_config(self._invoke, input, config, **kwargs)

    async def ainvoke(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        return await self._acall_with_config(self._ainvoke, input, config, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        outputs = self._transform_stream_with_config(iter([input]), self._stream, config, **kwargs)
        yield from outputs

    async def astream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        async def inputs() -> AsyncIterator[LanguageModelInput]:
            yield input

        async for output in self._atransform_stream_with_config(
            inputs(), self._astream, config, **kwargs
        ):
            yield output

    def _invoke(
        self,
        prompt: LanguageModelInput,
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> Any:
        attempt = Attempt(self, prompt)
        while not attempt.is_over:
            options = {**kwargs, **attempt.options}
            attempt.take(self.model.invoke(attempt.messages, config, **options))
        return attempt.result()

    async def _ainvoke(
        self,
        prompt: LanguageModelInput,
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> Any:
        attempt = Attempt(self, prompt)
        while not attempt.is_over:
            options = {**kwargs, **attempt.options}
            attempt.take(await self.model.ainvoke(attempt.messages, config, **options))
        return attempt.result()

    def _stream(
        self,
        prompts: Iterator[LanguageModelInput],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> Iterator[Any]:
        attempt = Attempt(self, next(prompts))
        while not attempt.is_over:
            written: Any = None
            options = {**kwargs, **attempt.options}
            for chunk in self.model.stream(attempt.messages, config, **options):
                written = chunk if written is None else written + chunk
                yield from attempt.progress(written)
            attempt.take(written)
        yield from attempt.last()

    async def _astream(
        self,
        prompts: AsyncIterator[LanguageModelInput],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        attempt = Attempt(self, await anext(prompts))
        while not attempt.is_over:
            written: Any = None
            options = {**kwargs, **attempt.options}
            async for chunk in self.model.astream(attempt.messages, config, **options):
                written = chunk if written is None else written + chunk
                for partial in attempt.progress(written):
                    yield partial
            attempt.take(written)
        for result in attempt.last():
            yield result


class Attempt:
    """A request for an object, with its repairs. It ends when a reply fits, or no repair is left.

    Attributes:
        messages: the messages to send to the model next.
        options: the options of the call to the model next. A correction of a reply that was drawn
            has a new seed, derived from the reply's. With the same seed, the members would draw
            much of the same text again.
        is_over: whether the request has ended.
    """

    def __init__(self, output: StructuredOutput, prompt: LanguageModelInput) -> None:
        self.messages = _messages(prompt)
        self.options: dict[str, Any] = {}
        self.is_over = False
        self._output = output
        self._repairs_left = output.max_repairs
        self._raw: AIMessage | None = None
        self._parsed: Any = None
        self._error: ValueError | None = None
        self._last_partial: Any = None

    def take(self, raw: AIMessage) -> None:
        """Parse a reply. If it does not fit, add it and a correction request to `messages`."""
        self._raw, self._parsed, self._error = raw, None, None
        try:
            self._parsed = self._output.reader.read(raw)
        except InvalidInputError:  # of the schema, which no other reply mends
            raise
        except ValueError as error:
            self._error = error
            request = correction(str(error), tool=self._output.reader.tool)
            self.messages = [*self.messages, raw, HumanMessage(request)]
            if (seed := raw.response_metadata.get("seed")) is not None:
                self.options = {"seed": AdaFuseConfig(seed=seed, n=2).seeds()[1]}
        is_last = self._repairs_left == 0 or bool(_closing(raw))  # the next would be as long
        self.is_over = self._error is None or is_last
        self._repairs_left -= 1

    def progress(self, written: AIMessageChunk) -> Iterator[Any]:
        """Yield the partial object in an unfinished reply, if it has changed."""
        partial = self._output.reader.read_partly(written)
        if partial is None or partial == self._last_partial:
            return
        self._last_partial = partial
        yield self._format(written, partial, None)

    def result(self) -> Any:
        """Return the object. With `include_raw`, return a dict with the message, object and error.

        Raises:
            OutputParserException: no reply fits the schema, and `include_raw` is False.
        """
        assert self._raw is not None
        if self._error is not None and not self._output.include_raw:
            raise OutputParserException(
                f"no reply fits the schema (max_repairs={self._output.max_repairs}): {self._error}",
                llm_output=self._raw.text,
            ) from self._error
        return self._format(self._raw, self._parsed, self._error)

    def last(self) -> Iterator[Any]:
        """Yield the result, unless `progress` already yielded it."""
        result = self.result()
        if self._output.include_raw or self._parsed != self._last_partial:
            yield result

    def _format(self, raw: AIMessage, parsed: Any, error: ValueError | None) -> Any:
        if not self._output.include_raw:
            return parsed
        return {"raw": raw, "parsed": parsed, "parsing_error": error}


def _closing(message: AIMessage) -> str:
    """Return the end of a reply that the engine made up."""
    return str(message.response_metadata.get(CLOSING_KEY, ""))


def _messages(prompt: LanguageModelInput) -> list[BaseMessage]:
    if isinstance(prompt, str):
        return [HumanMessage(prompt)]
    return prompt.to_messages() if isinstance(prompt, PromptValue) else convert_to_messages(prompt)
