"""Structured output: LangChain's parsers behind a model that is asked for a schema."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from operator import itemgetter
from typing import Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import (
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.runnables import (
    Runnable,
    RunnableGenerator,
    RunnableLambda,
    RunnableMap,
    RunnablePassthrough,
)
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from adafuse_llm.adapters.reply import CUT
from adafuse_llm.errors import InvalidInputError, InvalidOptionError
from langchain_adafuse._messages import to_openai_tool
from langchain_adafuse._replies import with_call_errors

Schema = dict[str, Any] | type
"""A pydantic class, a TypedDict, or a dict with a JSON schema."""

Method = Literal["json_schema", "function_calling", "json_mode"]
METHODS = ("json_schema", "function_calling", "json_mode")


def structured_output(
    model: BaseChatModel,
    schema: Schema | None,
    *,
    method: Method,
    strict: bool | None,
    include_raw: bool,
    **bound: Any,
) -> Runnable[LanguageModelInput, Any]:
    """Return a runnable that asks a chat model for a schema and parses its replies.

    Raises:
        InvalidOptionError: `method` is unknown.
        InvalidInputError: `schema` is missing or has no JSON schema, or `method` is
            ``"function_calling"`` and the schema is not one of an object.
    """
    if method not in METHODS:
        raise InvalidOptionError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    if schema is None:
        if method != "json_mode":
            raise InvalidInputError(
                f"method={method!r} needs a schema; got None. Pass one, or use method='json_mode' "
                "for any JSON object"
            )
        schema = {"title": "Object", "type": "object"}
    if isinstance(schema, dict):
        schema = _unwrapped(schema)
    json_schema = convert_to_json_schema(to_openai_tool(schema, strict=strict))
    name = str(json_schema["title"])
    kwargs = {"method": method, "strict": strict}
    bound["ls_structured_output_format"] = {"kwargs": kwargs, "schema": schema}
    parser: Runnable[Any, Any]
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    model_class: Any = schema if is_class else None
    if method == "function_calling":
        if json_schema.get("type", "object") != "object":
            raise InvalidInputError(
                "method='function_calling' needs a schema of an object, because the arguments of a "
                f"tool are an object; got the type {json_schema['type']!r}. Use "
                "method='json_schema'"
            )
        asked = model.bind_tools([schema], tool_choice=name, strict=strict, **bound)
        check: Runnable[Any, Any] = RunnableLambda(partial(_called, name=name))
        if model_class is None:
            parser = check | JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        else:
            parser = check | PydanticToolsParser(tools=[model_class], first_tool_only=True)
    else:
        form: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            named = {"name": name, "schema": json_schema, "strict": strict}
            form = {"type": "json_schema", "json_schema": named}
        asked = model.bind(response_format=form, **bound)
        parser = JsonOutputParser()
        if model_class is not None:
            parser = PydanticOutputParser(pydantic_object=model_class)
        parser = RunnableGenerator(_whole, _awhole) | parser
    return _with_raw(asked, parser) if include_raw else asked | parser


def _with_raw(
    asked: Runnable[LanguageModelInput, Any], parser: Runnable[Any, Any]
) -> Runnable[LanguageModelInput, Any]:
    """Return a runnable that gives the message, the object, and the error of the parser."""
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=asked) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _unwrapped(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema in a dict, which may be a ``response_format`` or have a name apart."""
    schema = schema.get("json_schema", schema) if schema.get("type") == "json_schema" else schema
    if isinstance(inner := schema.get("schema"), dict):
        return {"title": schema.get("name", "output"), **inner}
    if {"name", "function", "title", "parameters", "input_schema"} & schema.keys():
        return schema
    return {"title": "output", **schema}


def _check_whole(message: AIMessage) -> AIMessage:
    """Refuse a reply that was cut off, because LangChain's parsers would close its brackets.

    Raises:
        OutputParserException: it was.
    """
    if cut := CUT.get(message.response_metadata.get("finish_reason", "")):
        raise OutputParserException(f"the JSON is not whole: {cut}", llm_output=message.text)
    return message


def _whole(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    yield from map(_check_whole, messages)


async def _awhole(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    async for message in messages:
        yield _check_whole(message)


def _called(message: AIMessage, name: str) -> AIMessage:
    """Refuse a reply without a valid call of a tool.

    Raises:
        OutputParserException: it has none.
    """
    if not any(call["name"] == name for call in message.tool_calls):
        errors = [call["error"] for call in with_call_errors(message).invalid_tool_calls]
        reason = f": {errors[0]}" if errors else ""
        raise OutputParserException(
            f"there is no valid call of the tool {name}{reason}", llm_output=message.text
        )
    return message
