"""Between text and one member's tokens.

Committed tokens are never re-tokenized, so the text of new tokens and the tokens of new text are
both taken *as a continuation* of what stands before them. A tokenizer that adds a space at the
start of a string, strips one, or merges across the boundary is handled by looking at what its
own `decode` says: an encoding counts only if it decodes, in place, to exactly the text.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from adafuse_llm.forks import after_fork
from adafuse_llm.text.chat import check_messages, fit, render_plain
from adafuse_llm.text.words import REPLACEMENT, added

CONTEXT_TOKENS = 8
"""Tokens of context that decoding a continuation takes along, if they begin with a character."""

ANCHORS = ("", "\n", "a", ".", " a")
"""Texts tried before a continuation, so that it is encoded as something that follows."""


@runtime_checkable
class TextCodec(Protocol):
    """Text to tokens and back for one member. Thread-safe; owns no request state."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_messages` uses a template of the member's own."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens of a prompt, with the special tokens the member expects around it. Control
        tokens spelled out in `text` stay text.
        """
        ...

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation up to where the assistant is to write."""
        ...

    def encode_continuation(self, context: Sequence[int], text: str) -> tuple[list[int], bool]:
        """Tokens for `text` where it follows `context`.

        Returns:
            The tokens, and whether they are exact:
            ``decode(context + tokens) == decode(context) + text``.
        """
        ...

    def decode_continuation(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        """Text that `tokens` add after `context`; U+FFFD stands for an unfinished character."""
        ...


class TokenizerCodec:
    """The codec of a Hugging Face tokenizer (fast or slow). The tokenizer is not changed.

    Args:
        tokenizer: a ``PreTrainedTokenizerBase``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        after_fork(self._renew)
        added_tokens = tokenizer.added_tokens_decoder.items()
        special = {int(i): str(t) for i, t in added_tokens if t.special}
        special.pop(tokenizer.unk_token_id, None)  # stands for what has no token, which is text
        template = str(getattr(tokenizer, "chat_template", None) or "")
        written = {int(i): str(t) for i, t in added_tokens if str(t).strip() and str(t) in template}
        # In a prompt nothing is a control token. In a response only special ones are not text:
        # others, such as <think>, are what the member would have written itself.
        self._in_prompt = _Spelled({**written, **special})
        self._in_response = _Spelled(special)

    def _renew(self) -> None:
        self._lock = threading.Lock()  # tokenizers hold per-call settings

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def encode_prompt(self, text: str) -> list[int]:
        tokens = self._encode(text, add_special_tokens=True)
        plain = self._encode(text)
        if self._in_prompt.ids.isdisjoint(plain):
            return tokens
        starts = (i for i in range(len(tokens)) if tokens[i : i + len(plain)] == plain)
        start = next(starts, 0)
        before, after = tokens[:start], tokens[start + len(plain) :]
        return [*before, *self._encode_text(before, text, self._in_prompt)[0], *after]

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        checked = check_messages(messages)
        if not self.has_chat_template:
            return self.encode_prompt(render_plain(checked))
        fitting = fit(checked, self._render)
        with self._lock:
            ids = self._tokenizer.apply_chat_template(
                fitting,
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
                sanitize_control_tokens=True,
            )
        return [int(token) for token in ids]

    def encode_continuation(self, context: Sequence[int], text: str) -> tuple[list[int], bool]:
        return self._encode_text(context, text, self._in_response)

    def _encode_text(
        self, context: Sequence[int], text: str, spelled: _Spelled
    ) -> tuple[list[int], bool]:
        """As `encode_continuation`, without the tokens of `spelled`."""
        inexact: list[int] = []
        for anchor in ANCHORS:
            before = self._encode(anchor) if anchor else []
            whole = self._encode(anchor + text)
            tokens = whole[len(before) :]
            if whole[: len(before)] != before or not spelled.ids.isdisjoint(tokens):
                continue
            if self.decode_continuation(context, tokens) == text:
                return tokens, True
            inexact = inexact or tokens
        if match := spelled.pattern.search(text):  # taken apart, it cannot be read as one token
            cut = match.start() + 1
            head, head_exact = self._encode_text(context, text[:cut], spelled)
            tail, tail_exact = self._encode_text([*context, *head], text[cut:], spelled)
            return [*head, *tail], head_exact and tail_exact
        return inexact or self._encode(text), False

    def decode_continuation(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        size = CONTEXT_TOKENS
        before = self._decode(context[-size:])
        while before.startswith(REPLACEMENT) and size < len(context):
            size *= 2  # cut inside a character, or a run of bytes that is decoded as one
            before = self._decode(context[-size:])
        return added(before, self._decode([*context[-size:], *tokens]))

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        with self._lock:
            ids = self._tokenizer.encode(
                text, add_special_tokens=add_special_tokens, split_special_tokens=True
            )
        return [int(token) for token in ids]

    def _decode(self, tokens: Sequence[int]) -> str:
        with self._lock:
            text = self._tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return str(text)

    def _render(self, messages: list[dict[str, Any]]) -> str:
        with self._lock:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        return str(text)


class _Spelled:
    """Tokens that plain text may not turn into, and where text spells one.

    Single bytes are among the spellings: Unigram vocabularies hold them as pieces.
    """

    def __init__(self, tokens: Mapping[int, str]) -> None:
        self.ids = frozenset(tokens)
        texts = sorted((t for t in tokens.values() if len(t) > 1), key=len, reverse=True)
        self.pattern = re.compile("|".join([*map(re.escape, texts), "<0x[0-9A-F]{2}>"]))
