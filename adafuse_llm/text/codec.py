"""Conversion between text and the tokens of one member.

Committed tokens are never tokenized again. New tokens are therefore decoded, and new text is
encoded, *as a continuation* of the tokens before them. Some tokenizers add or strip a space at the
start of a string, or merge characters of old and new text into one token. An encoding is exact if
its tokens, decoded after the context, give exactly the text.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar, runtime_checkable

from adafuse_llm.errors import InvalidInputError
from adafuse_llm.forks import after_fork
from adafuse_llm.text.chat import check_messages, fit, render_plain
from adafuse_llm.text.deadline import run_within
from adafuse_llm.text.words import REPLACEMENT, added

T = TypeVar("T")

CONTEXT_TOKENS = 8
"""Number of context tokens that are decoded together with a continuation. More tokens are used if
the context would begin inside a character."""

ANCHORS = ("", "\n", "a", ".", " a")
"""Texts to put before a continuation, so that the tokenizer does not encode the continuation as the
start of a text. The first of these texts that gives an exact encoding is used."""

RENDER_SECONDS = 5.0
"""Maximum seconds for which a chat template may render one conversation."""


@runtime_checkable
class TextCodec(Protocol):
    """Conversion between text and one member's tokens.

    A codec is thread-safe and keeps no state of requests.
    """

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_messages` uses the member's own chat template."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt, including the special tokens that the member expects.

        Control tokens in `text` are treated as plain text.
        """
        ...

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, up to the start of the assistant's reply."""
        ...

    def encode_continuation(self, context: Sequence[int], text: str) -> tuple[list[int], bool]:
        """Encode `text` as a continuation of `context`.

        Returns:
            The tokens, and whether they are exact:
            ``decode(context + tokens) == decode(context) + text``.
        """
        ...

    def decode_continuation(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that `tokens` add to `context`.

        U+FFFD stands for an incomplete character.
        """
        ...


class TokenizerCodec:
    """A codec for a Hugging Face tokenizer (fast or slow). It does not change the tokenizer.

    Args:
        tokenizer: a ``PreTrainedTokenizerBase``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._is_fast = bool(getattr(tokenizer, "is_fast", False))
        has_template = bool(getattr(tokenizer, "chat_template", None))
        self._chat_tokenizer: Any = _separate_copy(tokenizer) if has_template else None
        after_fork(self._create_lock)
        added_tokens = tokenizer.added_tokens_decoder.items()
        special = {int(i): str(t) for i, t in added_tokens if t.special}
        special.pop(tokenizer.unk_token_id, None)  # it encodes text that has no other token
        template = str(getattr(tokenizer, "chat_template", None) or "")
        markers = {int(i): str(t) for i, t in added_tokens if str(t).strip() and str(t) in template}
        # Text in a prompt must not become a special token or a marker of the template. Text in a
        # response must not become a special token. It may become a marker, because members write
        # some markers themselves, such as <think>.
        self._in_prompt = _ControlTokens({**markers, **special})
        self._in_response = _ControlTokens(special)
        self._encode("")  # stores the setting before several threads use the tokenizer

    def _create_lock(self) -> None:
        # A call stores its settings in the tokenizer. Fast tokenizers are thread-safe as long as no
        # setting changes, and conversations, which change it, have a copy of the tokenizer.
        is_safe = self._is_fast and self._chat_tokenizer is not self._tokenizer
        self._lock: AbstractContextManager[Any] = nullcontext() if is_safe else threading.Lock()
        self._chat_lock = threading.Lock() if is_safe else self._lock

    @property
    def has_chat_template(self) -> bool:
        return self._chat_tokenizer is not None

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
        fitted = self._within_deadline(lambda: fit(checked, self._render))
        with self._chat_lock:
            ids = self._chat_tokenizer.apply_chat_template(
                fitted,
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
                sanitize_control_tokens=True,
            )
        return [int(token) for token in ids]

    def encode_continuation(self, context: Sequence[int], text: str) -> tuple[list[int], bool]:
        return self._encode_text(context, text, self._in_response)

    def _encode_text(
        self, context: Sequence[int], text: str, control: _ControlTokens
    ) -> tuple[list[int], bool]:
        """Encode `text` as a continuation of `context`, and avoid the tokens of `control`."""
        inexact: list[int] = []
        for anchor in ANCHORS:
            before = self._encode(anchor) if anchor else []
            whole = self._encode(anchor + text)
            tokens = whole[len(before) :]
            if whole[: len(before)] != before or not control.ids.isdisjoint(tokens):
                continue
            if self.decode_continuation(context, tokens) == text:
                return tokens, True
            inexact = inexact or tokens
        if match := control.pattern.search(text):  # split it, so that it does not become one token
            cut = match.start() + 1
            head, head_exact = self._encode_text(context, text[:cut], control)
            tail, tail_exact = self._encode_text([*context, *head], text[cut:], control)
            return [*head, *tail], head_exact and tail_exact
        return inexact or self._encode(text), False

    def decode_continuation(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        size = CONTEXT_TOKENS
        before = self._decode(context[-size:])
        while before.startswith(REPLACEMENT) and size < len(context):
            # the context begins inside a character, or between bytes that belong together
            size *= 2
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
        text = self._chat_tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return str(text)

    def _within_deadline(self, render: Callable[[], T]) -> T:
        """Call a function that only renders the template, without a lock, and return its result.

        Raises:
            InvalidInputError: the function takes longer than `RENDER_SECONDS`.
        """
        try:
            return run_within(RENDER_SECONDS, render)
        except TimeoutError as error:
            path = getattr(self._tokenizer, "name_or_path", "")
            raise InvalidInputError(
                f"the chat template{f' of {path!r}' if path else ''} was stopped, because it "
                f"rendered these messages for more than {RENDER_SECONDS:g} seconds. Check the "
                "template for endless loops, or use another member."
            ) from error


def _separate_copy(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer, or the tokenizer itself if it cannot be copied."""
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # some parts of tokenizers that are written in Python cannot be copied
        return tokenizer


class _ControlTokens:
    """Tokens that the encoding of plain text must not contain.

    Args:
        tokens: spellings of the tokens by id.

    Attributes:
        ids: ids of the tokens.
        pattern: matches the spelling of one of these tokens, or of a byte, such as ``<0x0A>``.
            Unigram vocabularies contain such spellings of bytes as pieces.
    """

    def __init__(self, tokens: Mapping[int, str]) -> None:
        self.ids = frozenset(tokens)
        texts = sorted((t for t in tokens.values() if len(t) > 1), key=len, reverse=True)
        self.pattern = re.compile("|".join([*map(re.escape, texts), "<0x[0-9A-F]{2}>"]))
