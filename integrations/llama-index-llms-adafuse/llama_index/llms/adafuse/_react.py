"""Requests of ReAct agents: how to recognize them, and where their replies end or are cut off."""

from __future__ import annotations

import json
from collections.abc import Sequence

from llama_index.core.base.llms.types import ChatMessage, MessageRole

OBSERVATION = "\nObservation:"
"""The text that ends a ReAct agent's step. A model that writes more invents a tool's result."""

STEP = ("Action:", "Action Input:", "Observation")
"""Texts in every system message that describes the steps which LlamaIndex's agents can parse."""


def describes_steps(messages: Sequence[ChatMessage]) -> bool:
    """Return whether a system message describes the steps of a ReAct agent."""
    systems = [
        message.content or ""
        for message in messages
        if message.role in (MessageRole.SYSTEM, MessageRole.DEVELOPER)
    ]
    return any(all(text in system for text in STEP) for system in systems)


def with_observation(stop: Sequence[str]) -> tuple[str, ...]:
    """Return stop sequences with `OBSERVATION` among them."""
    return tuple(dict.fromkeys((*stop, OBSERVATION)))


def without_cut_input(text: str) -> str:
    """Return a step without the input of a tool that a limit cut off. Agents would repair it."""
    step, marker, given = text.rpartition("Action Input:")
    try:
        json.JSONDecoder().raw_decode(given.strip())
    except (ValueError, RecursionError):  # no JSON, or too deep
        return step if marker else text
    return text
