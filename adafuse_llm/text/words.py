"""Where a word ends (§3.1, §3.3).

A word is optional leading whitespace followed by non-whitespace, cut where the text itself puts
whitespace. It grows token by token in its member's vocabulary; these functions see only text.
Text that ends in U+FFFD may end inside a UTF-8 character and is not cut there while another
token could still complete it.
"""

from __future__ import annotations

from adafuse_llm.errors import InvalidInputError

REPLACEMENT = "\ufffd"
CHARACTER_TOKENS = 3
"""Tokens a word may exceed its limit by to complete a UTF-8 character (four bytes at most)."""


def check_text(text: str, what: str) -> None:
    """Refuse text that no tokenizer can take.

    Args:
        text: the text.
        what: its name in the message.

    Raises:
        InvalidInputError: it holds half of a surrogate pair, as badly decoded input does.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{what} is not valid Unicode: half a surrogate pair at character {error.start}. "
            "Decode the input as UTF-8 first."
        ) from None


def added(before: str, after: str) -> str:
    """What `after` adds to `before`; where `before` ended inside a character that `after`
    completes, the completed character counts as added.
    """
    if after.startswith(before):
        return after[len(before) :]
    same = 0
    for left, right in zip(before, after, strict=False):
        if left != right:
            break
        same += 1
    return after[same:]


def is_incomplete(text: str) -> bool:
    """Whether `text` may end inside a UTF-8 character."""
    return text.endswith(REPLACEMENT)


def is_closed(word: str, tokens: int, limit: int) -> bool:
    """Whether a word is complete whatever follows: it carries its own trailing whitespace, or it
    has `limit` tokens (and, if it ends inside a character, `CHARACTER_TOKENS` more).
    """
    if tokens >= limit and (not is_incomplete(word) or tokens >= limit + CHARACTER_TOKENS):
        return True
    return bool(word) and word[-1].isspace() and not word.isspace()


def ends_before(word: str, extended: str) -> bool:
    """Whether a word is complete because the next token begins with whitespace.

    Args:
        word: text of the word.
        extended: text of the word and the next token.
    """
    if not word.strip():
        return False
    if is_incomplete(word) and not extended.startswith(word):
        return False
    return added(word, extended)[:1].isspace()


def leading_space(text: str) -> str:
    """The whitespace `text` begins with."""
    return text[: len(text) - len(text.lstrip())]
