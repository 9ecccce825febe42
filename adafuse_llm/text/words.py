"""Find the ends of words (arXiv 2601.06022, §3.1 and §3.3).

A word is optional whitespace followed by other characters, and ends at the next whitespace. Scripts
without spaces between words have no such ends, so a word may have only a few of their letters. A
text that ends in U+FFFD may end inside a UTF-8 character, which further tokens can complete.
"""

from __future__ import annotations

import re
import unicodedata

from adafuse_llm.errors import InvalidInputError

REPLACEMENT = "\ufffd"
CHARACTER_TOKENS = 3
"""Number of tokens that a word may have beyond its limit to complete a UTF-8 character."""

UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u3005-\u3007\u3021-\u3029"
    "\u3031-\u303c\u3041-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf"
    "\ua9e0-\ua9ff\uaa60-\uaadf\uf900-\ufaff\uff66-\uff9f\U00016fe0-\U0001b2ff"
    "\U00020000-\U0003ffff]"
)
"""Matches a character of a script without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer,
Tai scripts, Chinese characters, kana, Bopomofo and Yi. Korean has spaces."""


def check_text(text: str, what: str) -> None:
    """Check that a text is valid Unicode, because no tokenizer encodes half a surrogate pair.

    Raises:
        InvalidInputError: the text is not valid. The message calls it `what`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{what} is not valid Unicode: it has half a surrogate pair at character "
            f"{error.start}. Decode the input as UTF-8 first."
        ) from None


def added(before: str, after: str) -> str:
    """Return what `after` adds to `before`, with a character that is incomplete in `before`."""
    if after.startswith(before):  # the usual case, and fast
        return after[len(before) :]
    return after[same_start(before, after) :]


def same_start(left: str, right: str) -> int:
    """Return how many characters at their beginning both texts share."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((size for size, (a, b) in pairs if a != b), min(len(left), len(right)))


def is_closed(word: str, tokens: int, limit: int) -> bool:
    """Return whether a word is complete, whichever token follows.

    A complete word ends in whitespace after other text, or has `limit` tokens. A word that ends
    inside a character may have up to `CHARACTER_TOKENS` more.
    """
    if tokens >= limit and (word[-1:] != REPLACEMENT or tokens >= limit + CHARACTER_TOKENS):
        return True
    return bool(word) and word[-1].isspace() and not word.isspace()


def ends_before(word: str, extended: str, letters: int) -> bool:
    """Return whether a word ends before the next token, which would make it `extended`.

    A word ends before whitespace. It also ends before a letter of a script without spaces, if it
    would then have more than `letters` such letters. A token that begins with a part of a
    character counts as at least one letter.
    """
    # a word has at least one visible character, and does not end inside a character
    if not word.strip():
        return False
    is_incomplete = word.endswith(REPLACEMENT)
    if is_incomplete and not extended.startswith(word):
        return False
    # whitespace ends a word, and belongs to the next one
    new = added(word, extended)
    if new[:1].isspace():
        return True
    if is_incomplete or not (new[:1] == REPLACEMENT or _unspaced_letters(new[:1])):
        return False
    return _unspaced_letters(word) + max(1, _unspaced_letters(new)) > letters


def has_end(word: str) -> bool:
    """Return whether a complete word needs whitespace, or the end of the text, after it.

    Words that end in whitespace, or have letters of a script without spaces, do not.
    """
    return not word[-1:].isspace() and not _unspaced_letters(word)


def _unspaced_letters(text: str) -> int:
    # combining marks are no letters
    letters = [] if text.isascii() else UNSPACED.findall(text)
    return sum(unicodedata.category(letter) in ("Lo", "Lm") for letter in letters)


def leading_space(text: str) -> str:
    """Return the whitespace at the beginning of `text`."""
    return text[: len(text) - len(text.lstrip())]
