"""Replies that are the JSON of tool calls without markers, in the frameworks and the server."""

from __future__ import annotations

import json
from functools import reduce
from operator import add as joined
from typing import Any

import openai
import pytest
from llama_index.core.tools import FunctionTool
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import InvalidInputError
from adafuse_llm.adapters.reply_form import to_tool_choice
from adafuse_llm.serving import create_app
from langchain_adafuse import ChatAdaFuse
from tests.support.scripted import scripted_engine
from tests.support.serving import served

ARGUMENTS = {"a": 12, "b": 7}
CALL = json.dumps({"name": "add", "arguments": ARGUMENTS})
QUESTION = "What is 12 plus 7?"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ASKED: dict[str, Any] = {
    "model": "adafuse",
    "messages": [{"role": "user", "content": QUESTION}],
    "tools": [TOOL],
}

Found = tuple[list[Any], Any, list[str]]
"""Arguments of calls, text, and warnings of a response."""


def of_langchain(engine: Any) -> list[Found]:
    bound = ChatAdaFuse(engine=engine).bind_tools([add])
    messages: list[Any] = [bound.invoke(QUESTION), reduce(joined, list(bound.stream(QUESTION)))]
    return [
        (
            [call["args"] for call in each.tool_calls],
            each.content,
            each.response_metadata.get("adafuse_warnings", []),
        )
        for each in messages
    ]


def of_llama_index(engine: Any) -> list[Found]:
    llm = AdaFuseLLM(engine=engine)
    asked: tuple[Any, ...] = ([FunctionTool.from_defaults(add)], QUESTION)
    *_, last = llm.stream_chat_with_tools(*asked)
    return [
        (
            [
                call.tool_kwargs
                for call in llm.get_tool_calls_from_response(each, error_on_no_tool_call=False)
            ],
            each.message.content,
            each.additional_kwargs.get("adafuse_warnings", []),
        )
        for each in (llm.chat_with_tools(*asked), last)
    ]


def of_server(engine: Any) -> list[Found]:
    with served(create_app(engine)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        whole = client.chat.completions.create(**ASKED)
        *_, last = parts = list(client.chat.completions.create(**ASKED, stream=True))
    streamed = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    message = whole.choices[0].message
    return [
        (
            [json.loads(call.function.arguments) for call in calls],
            content,
            (end.model_extra or {}).get("adafuse", {}).get("warnings", []),
        )
        for calls, content, end in (
            (message.tool_calls or [], message.content, whole),
            (streamed, text, last),
        )
    ]


@pytest.mark.parametrize("door", [of_langchain, of_llama_index, of_server])
def test_bare_calls_are_calls_and_what_only_looks_like_one_has_a_warning(door: Any) -> None:
    with scripted_engine(lambda prompt: f"```json\n{CALL}\n```") as engine:
        for calls, text, warnings in door(engine):
            assert (calls, text or "", warnings) == ([ARGUMENTS], "", [])
    with scripted_engine(lambda prompt: CALL.replace("add", "sum")) as engine:
        for calls, text, (warning,) in door(engine):
            assert (calls, text) == ([], CALL.replace("add", "sum"))
            assert "'sum'" in warning


@pytest.mark.parametrize(
    ("choice", "names", "resolved"),
    [
        (None, ["add"], "auto"),
        (True, ["add"], "required"),
        (False, ["add"], "none"),
        ("any", ["add"], "required"),
        ("any", ["add", "any"], "any"),
        ({"type": "function", "function": {"name": "any"}}, ["any"], "any"),
        ({"type": "any"}, ["add"], "required"),
        ({"type": "tool", "name": "add"}, ["add"], "add"),
    ],
)
def test_a_tool_choice_is_read_in_all_its_forms(
    choice: Any, names: list[str], resolved: str
) -> None:
    assert to_tool_choice(choice, names) == resolved
    assert to_tool_choice(to_tool_choice(choice, names), names) == resolved
    with pytest.raises(InvalidInputError, match="tool_choice"):
        to_tool_choice("sub", names)
