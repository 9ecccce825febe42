"""Token counts of the members, for LlamaIndex to pack texts into prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.utilities.token_counting import TokenCounter

from adafuse_llm.backends import Backend
from adafuse_llm.text.codec import encode_conversation
from adafuse_llm.text.reply_start import start_replies

CONTEXT = "\n"
"""Text before the counted text, because the count may differ at the start of a prompt."""

MESSAGE_TOKENS = 3
"""Tokens for the markers of a message, as in LlamaIndex's counts."""


class LongestTokenizer:
    """A tokenizer that encodes a text with the member that needs the most tokens for it.

    Only the number of tokens is meaningful, because each member has its own ids.

    Args:
        backends: at least one member.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        codecs = [backend.codec for backend in backends]
        self._codecs = [(codec, codec.encode_prompt(CONTEXT)) for codec in codecs]

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        encodings = (codec.encode_continuation(before, text)[0] for codec, before in self._codecs)
        return max(encodings, key=len)


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
    backends: Sequence[Backend],
    members: Sequence[str],
    request: dict[str, Any],
    *,
    given: str,
    window: int,
    num_output: int,
) -> PromptHelper:
    """Create a prompt helper that packs prompts by the members' counts.

    Args:
        backends: the active members.
        members: names of all members.
        request: an example of a request, with ``prompt`` or ``messages``.
        given: the texts in the example that LlamaIndex counts. The helper reserves space for the
            rest of the example, such as the markers of chat templates.
        window: the smallest context window of the members, in tokens.
        num_output: maximum number of tokens of a response.
    """
    tokenizer = LongestTokenizer(backends)
    encoded = _encode(backends, members, request)
    reserved = max(
        len(ids) - len(LongestTokenizer([backend])(given))
        for backend, ids in zip(backends, encoded, strict=True)
    )
    helper = PromptHelper(window - reserved, num_output, tokenizer=tokenizer)
    helper._token_counter = MemberTokenCounter(tokenizer)
    return helper


def _encode(
    backends: Sequence[Backend], members: Sequence[str], request: dict[str, Any]
) -> list[list[int]]:
    """Return the tokens of a request's prompt, for each backend."""
    if "messages" not in request:
        return [backend.codec.encode_prompt(request["prompt"]) for backend in backends]
    conversation = request["messages"]
    codecs = {backend.name: backend.codec for backend in backends}
    variables = request.get("chat_template_kwargs")
    starts, _ = start_replies(codecs, conversation, variables, members)
    return [
        encode_conversation(backend.codec, conversation, starts[backend.name])
        for backend in backends
    ]
