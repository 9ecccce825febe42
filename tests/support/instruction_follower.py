"""Replies of an obliging model to prompts about tools, schemas and small talk."""

from __future__ import annotations

import json
import re
from typing import Any

JOKE = {"setup": "Why do cats make good sailors?", "punchline": "They land on their feet."}
TOLD = re.compile(r'^\{"name": "(\w+)", "description"', re.MULTILINE)


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as members write it."""
    told = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{told}\n</tool_call>"


def answer(prompt: str) -> str:
    """What an obliging model replies to the prompts of LangChain's standard tests."""
    tools = TOLD.findall(prompt)
    question = re.split(r"\[INST\]|<\|im_start\|>user", prompt)[-1]
    if '<tool_response>\n{"name"' in question:
        return "The tool says so."
    if "magic_function_no_args" in tools:
        return call("magic_function_no_args")
    if "magic_function" in tools:
        return call("magic_function", input=3)
    if "greeting_generator" in tools:
        return call("greeting_generator", answer_style="Pirate")
    if "unicode_customer" in tools:
        (named,) = re.findall("named '([^']+)'", question)
        return call("unicode_customer", customer_name=named, description="a company")
    if "get_weather" in tools:
        return call("get_weather", location="San Francisco, CA")
    if "my_adder_tool" in tools:
        return call("my_adder_tool", a=3, b=4)
    if "joke" in question and "JSON" in prompt:
        return json.dumps(JOKE)
    return "Good day to you, and welcome."
