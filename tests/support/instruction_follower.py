"""Replies of an obliging model to prompts about tools, schemas and small talk."""

import json
from typing import Any

JOKE = {"setup": "Why do cats make good sailors?", "punchline": "They land on their feet."}


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as members write it."""
    told = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{told}\n</tool_call>"


def answer(prompt: str) -> str:
    """What an obliging model replies."""
    if '{"name": "get_weather", "description"' in prompt:
        return call("get_weather", location="San Francisco, CA")
    if "joke" in prompt and "JSON" in prompt:
        return json.dumps(JOKE)
    return "Good day to you, and welcome."
