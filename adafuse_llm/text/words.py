"""Find the ends of words (§3.1, §3.3).

A word is optional leading whitespace followed by non-whitespace, and ends at the next whitespace.
A member writes a word token by token, but these functions see only text. A text that ends in U+FFFD
may end inside a UTF-8 character. Such a word is not complete while another token can complete the
character.
"""

from __future__ import annotations

from adafuse_llm.errors import InvalidInputError

REPLACEMENT = "\ufffd"
CHARACTER_TOKENS = 3
"""Number of tokens that a word may have above its limit to complete a UTF-8 character."""


def check_text(text: str, what: str) -> None:
    """Raise an error if a text is not valid Unicode, which no tokenizer can encode.

    Args:
        text: the text.
        what: name of the text in the error message.

    Raises:
        InvalidInputError: the text contains half of a surrogate pair, which is typical of badly
            decoded input.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{what} is not valid Unicode: it has half a surrogate pair at character "
            f"{error.start}. Decode the input as UTF-8 first."
        ) from None


def added(before: str, after: str) -> str:
    """Return the text that `after` adds to `before`.

    If `before` ends inside a character and `after` completes it, the character counts as added.
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
    """Return whether `text` may end inside a UTF-8 character."""
    return text.endswith(REPLACEMENT)


def is_closed(word: str, tokens: int, limit: int) -> bool:
    """Return whether a word is complete, whichever token follows.

    A word is complete if it ends in whitespace or has `limit` tokens. A word that ends inside a
    character may have up to `CHARACTER_TOKENS` more tokens.
    """
    if tokens >= limit and (not is_incomplete(word) or tokens >= limit + CHARACTER_TOKENS):
        return True
    return bool(word) and word[-1].isspace() and not word.isspace()


def ends_before(word: str, extended: str) -> bool:
    """Return whether a word is complete because the next token begins with whitespace.

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
    """Return the whitespace at the beginning of `text`."""
    return text[: len(text) - len(text.lstrip())]
