"""Texts that a member's tokenizer changes.

Some tokenizers normalize text, or have no tokens for some characters. The member then reads another
text than the other members, and it cannot score a candidate with such a text.
"""

from __future__ import annotations

from itertools import takewhile

from adafuse_llm.text.codec import TextCodec

CONTEXT = "a b"
"""Text before a text that is checked."""

SHOWN = 24
"""Maximum number of characters that a difference shows."""


def change_of(codec: TextCodec, text: str) -> str | None:
    """Return what a tokenizer changes in a continuation, or None if it changes nothing."""
    context = codec.encode_prompt(CONTEXT)
    tokens, is_exact = codec.encode_continuation(context, text)
    return None if is_exact else difference(text, codec.decode_continuation(context, tokens))


def difference(text: str, read: str) -> str:
    """Describe how `read` differs from `text`, in ASCII, from the first difference to the last."""
    size = min(len(text), len(read))
    before = _same(zip(text, read, strict=False))
    after = min(size - before, _same(zip(reversed(text), reversed(read), strict=False)))
    given, changed = text[before : len(text) - after], read[before : len(read) - after]
    return f"{_shown(given)} becomes {_shown(changed)}"


def _same(pairs: zip[tuple[str, str]]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _shown(text: str) -> str:
    return ascii(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
