"""LlamaIndex's callbacks around completions and chats, after a check of the prompt or the messages.

The callbacks describe messages before the LLM sees them, and fail on anything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from adafuse_llm import InvalidInputError
from adafuse_llm.errors import short_repr

Method = TypeVar("Method", bound=Callable[..., Any])


def completion_callback(method: Method) -> Method:
    """Decorate a completion as `llm_completion_callback` does, after a check of the prompt."""
    called: Any = llm_completion_callback()(method)

    @functools.wraps(called)
    def checked(llm: Any, prompt: str, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(prompt, str):
            raise InvalidInputError(
                f"prompt must be text; got {short_repr(prompt)}. For messages, call chat"
            )
        return called(llm, prompt, *args, **kwargs)

    return cast("Method", checked)


def chat_callback(method: Method) -> Method:
    """Decorate a chat as `llm_chat_callback` does, after a check of the messages."""
    called: Any = llm_chat_callback()(method)

    @functools.wraps(called)
    def checked(llm: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(messages, (str, ChatMessage, Mapping)) or not isinstance(messages, Iterable):
            raise InvalidInputError(
                f"messages must be a list of ChatMessage objects; got {short_repr(messages)}. For "
                "a text, call complete, or pass [ChatMessage(role='user', content='...')]"
            )
        messages = list(messages)
        for number, message in enumerate(messages):
            if not isinstance(message, ChatMessage):
                raise InvalidInputError(
                    f"message {number} must be a ChatMessage; got {short_repr(message)}. Pass "
                    "ChatMessage(role='user', content='...')"
                )
        return called(llm, messages, *args, **kwargs)

    return cast("Method", checked)
