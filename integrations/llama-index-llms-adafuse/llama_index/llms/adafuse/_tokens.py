"""Token counts of the members, for LlamaIndex to pack texts into prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.utilities.token_counting import TokenCounter

from adafuse_llm import Engine, Request
from adafuse_llm.config import DecodeOptions

MESSAGE_TOKENS = 3
"""Tokens for the markers of a message, as in LlamaIndex's counts."""

MAX_SEEN = 1000
"""Number of texts whose tokens are remembered."""


class LongestTokenizer:
    """A tokenizer that encodes a text with the member that needs the most tokens for it.

    Only the number of tokens is meaningful, because each member has its own ids. The tokenizer
    remembers texts, because LlamaIndex encodes the same ones many times to pack a prompt. It has no
    method ``encode``, because LlamaIndex would call that method instead of the object.

    Args:
        engine: the engine.
        members: names of the members that count, at least one.
    """

    def __init__(self, engine: Engine, members: Sequence[str]) -> None:
        self._engine = engine
        self._members = tuple(members)
        self._seen: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        if (tokens := self._seen.get(text)) is None:
            if len(self._seen) >= MAX_SEEN:
                self._seen.clear()
            tokens = self._seen[text] = max(self.by_member(text).values(), key=len)
        return [*tokens]

    def by_member(self, text: str) -> dict[str, list[int]]:
        """Return the tokens of a text by member, without special tokens."""
        return self._engine.encode_text(text, use=self._members, weights=None)


class MemberTokenCounter(TokenCounter):
    """A counter that applies its tokenizer to messages too.

    The base class counts the content of messages with LlamaIndex's global tokenizer.
    """

    def estimate_tokens_in_messages(self, messages: list[ChatMessage]) -> int:
        return sum(
            self.get_string_tokens(message.role.value)
            + message.estimate_tokens(tokenizer=self.tokenizer)
            + MESSAGE_TOKENS
            for message in messages
        )


def make_prompt_helper(
    engine: Engine,
    request: Request,
    *,
    given: str,
    window: int,
    num_output: int,
) -> PromptHelper:
    """Create a prompt helper that packs prompts by the members' counts.

    Args:
        engine: the engine.
        request: an example of a request.
        given: the texts in the example that LlamaIndex counts. The helper reserves space for the
            rest of the example, such as the markers of chat templates.
        window: the smallest context window of the members, in tokens.
        num_output: maximum number of tokens of a response.
    """
    encoded = engine.encode_prompt(
        request.prompt, messages=request.messages, **cast("DecodeOptions", request.options)
    )
    tokenizer = LongestTokenizer(engine, tuple(encoded))
    counted = tokenizer.by_member(given)
    reserved = max(len(ids) - len(counted[name]) for name, ids in encoded.items())
    helper = PromptHelper(window - reserved, num_output, tokenizer=tokenizer)
    helper._token_counter = MemberTokenCounter(tokenizer)  # not in its public interface
    return helper
