"""Short texts that match the regular expressions of a grammar, for the search in `closing`."""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

MAX_HINT = 100
"""Maximum number of characters of a text."""

MAX_HINTS = 16
"""Maximum number of texts."""

_parser = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_PATTERN = re.compile(r'"pattern": ("(?:[^"\\]|\\.)*")')
_REGEX = re.compile(r"^start: /(.*)/$", re.MULTILINE)
_RUST = (
    (r"\\x\{(\w+)\}", lambda found: f"\\u{found[1]:0>4}"),
    (r"\[\^\[[^\]]*\]", "[^"),
    (r"--\\x85", ""),
)
"""How `schema` writes classes in Rust's syntax, and what Python can read."""
_OTHERS = "a0 _-~"
_CATEGORIES = {"CATEGORY_DIGIT": "0", "CATEGORY_SPACE": " ", "CATEGORY_NOT_WORD": " "}


def hints(lark: str) -> list[bytes]:
    """Return short texts that match the regular expressions of a grammar, as its texts have them.

    A search that looks one byte ahead cannot find a match of ``[0-9]{3}`` in an expression that
    permits any text before it: which bytes may follow changes only when the match is whole.

    Args:
        lark: the grammar in llguidance's dialect of Lark.
    """
    found = [*map(_match, _REGEX.findall(lark))]
    for string in _PATTERN.findall(lark):
        with suppress(ValueError):  # in a grammar that has no JSON schema
            found.append(json.dumps(_match(json.loads(string)), ensure_ascii=False)[1:-1])
    texts = [each for each in dict.fromkeys(found) if each]
    return [each.encode(errors="ignore") for each in texts[:MAX_HINTS]]


def _match(pattern: str) -> str:
    """Return a short text that matches, or none if Python cannot read the expression."""
    for written, readable in _RUST:
        pattern = re.sub(written, readable, pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _shortest(_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError, ValueError):
        return ""


def _shortest(parts: Iterable[tuple[Any, Any]]) -> str:
    text = "".join(_part(str(kind), value) for kind, value in parts)
    if len(text) > MAX_HINT:
        raise ValueError("the match is too long")
    return text


def _part(kind: str, value: Any) -> str:
    if kind == "LITERAL":
        return chr(value)
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        least, _, parts = value
        return _shortest(parts) * min(int(least), MAX_HINT + 1)
    if kind == "SUBPATTERN":
        return _shortest(value[-1])
    if kind == "BRANCH":
        return min(map(_shortest, value[1]), key=len)
    if kind == "IN":
        return _character(value)
    return "a" if kind in ("ANY", "NOT_LITERAL") else ""


def _character(items: Any) -> str:
    """Return a character of a class."""
    kinds = [(str(kind), value) for kind, value in items]
    if kinds[0][0] != "NEGATE":
        kind, value = kinds[0]
        if kind == "CATEGORY":
            return _CATEGORIES.get(str(value), "a")
        return chr(value if kind == "LITERAL" else value[0])
    ends = [
        value if kind == "RANGE" else (value, value)
        for kind, value in kinds
        if kind in ("RANGE", "LITERAL")
    ]
    return next(
        (each for each in _OTHERS if not any(low <= ord(each) <= high for low, high in ends)), "a"
    )
