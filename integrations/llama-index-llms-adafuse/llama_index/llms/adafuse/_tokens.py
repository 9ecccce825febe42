"""Token counts of the members, for LlamaIndex to pack texts into prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

from llama_index.core.base.llms.types import ChatMessage, LLMMetadata
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.utilities.token_counting import TokenCounter

from adafuse_llm import Engine, Request
from adafuse_llm.config import DecodeOptions


def longest_tokenizer(engine: Engine, members: Sequence[str]) -> Callable[[str], list[int]]:
    """Return a function that encodes a text with the member that needs the most tokens for it.

    It remembers texts, because LlamaIndex encodes the same ones many times to pack a prompt.
    """

    @lru_cache(maxsize=1000)
    def encode(text: str) -> list[int]:
        return max(engine.encode_text(text, use=members, weights=None).values(), key=len)

    return lambda text: [*encode(text)]


class MemberTokenCounter(TokenCounter):
    """A counter that applies its tokenizer to messages too, where core applies a global one."""

    def estimate_tokens_in_messages(self, messages: list[ChatMessage]) -> int:
        return sum(
            self.get_string_tokens(message.role.value)
            + message.estimate_tokens(tokenizer=self.tokenizer)
            + 3  # markers of the message, as in core
            for message in messages
        )


def make_prompt_helper(
    engine: Engine, request: Request, given: str, metadata: LLMMetadata
) -> PromptHelper:
    """Create a prompt helper that packs prompts by the members' counts.

    It reserves space for what an example, `request`, has beside the texts that LlamaIndex counts,
    `given`: for example, the markers of chat templates.
    """
    options = cast("DecodeOptions", request.options)
    encoded = engine.encode_prompt(request.prompt, messages=request.messages, **options)
    counted = engine.encode_text(given, use=tuple(encoded), weights=None)
    reserved = max(len(ids) - len(counted[name]) for name, ids in encoded.items())
    tokenizer = longest_tokenizer(engine, tuple(encoded))
    window = metadata.context_window - reserved
    helper = PromptHelper(window, metadata.num_output, tokenizer=tokenizer)
    helper._token_counter = MemberTokenCounter(tokenizer)  # not in its public interface
    return helper
