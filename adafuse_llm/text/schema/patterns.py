"""Patterns of texts that mean the same to a grammar compiler, Python and JavaScript.

The three differ in what is a digit, a letter or a space. What a pattern allows here, all of them
allow. A pattern is parsed by Python's `re`, and written in the syntax of the compiler.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from adafuse_llm.text.schema.values import UNWRITABLE, Path, refuse

if sys.version_info >= (3, 11):
    from re import _parser as _re_parser  # type: ignore[attr-defined]
else:
    import sre_parse as _re_parser

MAX_PATTERN = 10_000
"""Greatest number of characters in a pattern."""

_NO_ONLY = "^(?!^[-+.]*$)"
"""How pydantic begins the pattern of a decimal: the text must not consist of signs and dots."""

_ESCAPE = r"\\(?:[dDwWsStnrfv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^0-9A-Za-z])"
_CLASS = rf"\[\^?(?!\])(?:{_ESCAPE}|(?!&&|--|~~|\|\|)[^\\\[\]])*\]"
_UNAMBIGUOUS = re.compile(rf"(?:{_ESCAPE}|{_CLASS}|(?!\{{,|\(\?[a-zL-])[^\\\[])*")
"""Patterns without flags, and without what Python and JavaScript read differently."""

_SPACES = (
    r"\x{9}\x{A}\x{C}\x{D}\x{20}\x{A0}\x{1680}\x{2000}-\x{200A}"
    r"\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
)
_ANY = r"[^\x{A}\x{D}\x{2028}\x{2029}]"
_INCLUDED = {
    "CATEGORY_DIGIT": "0-9",
    "CATEGORY_WORD": "0-9A-Za-z_",
    "CATEGORY_SPACE": _SPACES,
    "CATEGORY_NOT_DIGIT": r"[^\p{Nd}]",
    "CATEGORY_NOT_WORD": r"[^\p{L}\p{N}_]",
    "CATEGORY_NOT_SPACE": r"[^\s\x{FEFF}]",
}
"""Classes with the characters that all three count as a digit, and so on."""

_EXCLUDED = {
    "CATEGORY_DIGIT": r"\p{Nd}",
    "CATEGORY_WORD": r"\p{L}\p{N}_",
    "CATEGORY_SPACE": r"\s\x{FEFF}",
    "CATEGORY_NOT_DIGIT": "[^0-9]",
    "CATEGORY_NOT_WORD": "[^0-9A-Za-z_]",
    "CATEGORY_NOT_SPACE": f"[^{_SPACES}]",
}
"""Classes with the characters that any of the three counts as a digit, and so on."""

_WRITABLE = ((8, 10), (12, 13), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, sys.maxunicode))
"""The characters that a response can contain, as ranges."""

_ENDS = {"AT_BEGINNING": "^", "AT_END": "$"}
_ATOMS = frozenset({"LITERAL", "NOT_LITERAL", "ANY", "IN", "SUBPATTERN", "BRANCH"})
"""Parts that are repeated as they are written, without a group around them."""


class _UnsupportedError(Exception):
    """A pattern has a part that the compiler cannot enforce."""


def compiler_patterns(pattern: str, path: Path) -> list[str]:
    r"""Return patterns for the compiler that together mean what a pattern means.

    The compiler would skip a character that JSON can write only as ``\uXXXX``. So no pattern names
    such a character. A class that excludes characters excludes these, too: if it allowed every
    control character, the compiler would allow every escape, such as that of a quotation mark.
    """
    if len(pattern) > MAX_PATTERN:
        refuse(path, f"has more than {MAX_PATTERN:,} characters", "Use a shorter pattern.")
    if pattern.startswith(_NO_ONLY):
        rest = "^" + pattern[len(_NO_ONLY) :]
        return [*compiler_patterns(rest, path), *compiler_patterns("[^+.-]", path)]
    remedy = "Use a simpler pattern, or check the parsed response."
    try:
        written = _translated(pattern)
    except _UnsupportedError as error:
        refuse(path, str(error), remedy)
    except (re.error, OverflowError, RecursionError) as error:
        refuse(path, f"cannot be read by Python's re: {error}", remedy)
    return [written]


def _translated(pattern: str) -> str:
    if not _UNAMBIGUOUS.fullmatch(pattern):
        raise _UnsupportedError(
            "has an escape, a class of characters or a flag that is not supported"
        )
    return _sequence(_re_parser.parse(pattern))


def _sequence(parts: Any) -> str:
    return "".join(_part(str(kind), value) for kind, value in parts)


def _group(parts: Any) -> str:
    text = _sequence(parts)
    return text if len(parts) == 1 and str(parts[0][0]) in _ATOMS else f"(?:{text})"


def _part(kind: str, value: Any) -> str:
    match kind, value:
        case "LITERAL", _:
            _class([(kind, value)])
            written = _character(value)
        case "NOT_LITERAL", _:
            written = _class([("NEGATE", None), (kind, value)])
        case "ANY", _:
            written = _ANY
        case "IN", _:
            written = _class(value)
        case "AT", _ if str(value) in _ENDS:
            written = _ENDS[str(value)]
        case "BRANCH", (_, options):
            written = f"(?:{'|'.join(map(_sequence, options))})"
        case "SUBPATTERN", (_, _, _, inner):
            written = _group(inner)
        case (("MAX_REPEAT" | "MIN_REPEAT"), (least, most, inner)):
            limit = "" if most == _re_parser.MAXREPEAT else most
            written = f"{_group(inner)}{{{least},{limit}}}"
        case "ASSERT" | "ASSERT_NOT", _:
            raise _UnsupportedError("has a lookahead or lookbehind, which is not supported")
        case _:
            name = kind.lower().replace("_", " ")
            raise _UnsupportedError(f"has a part that is not supported ({name})")
    return written


def _class(items: list[tuple[Any, Any]]) -> str:
    """Return a class of characters. Each item is a character, a range or a named class."""
    negated = str(items[0][0]) == "NEGATE"
    out = [f"^{UNWRITABLE}"] if negated else []
    for kind, value in items[negated:]:
        if str(kind) == "CATEGORY":
            out.append((_EXCLUDED if negated else _INCLUDED)[str(value)])
        else:
            low, high = value if str(kind) == "RANGE" else (value, value)
            ranges = [(max(low, first), min(high, last)) for first, last in _WRITABLE]
            out += (f"{_character(low)}-{_character(high)}" for low, high in ranges if low <= high)
    if not out:
        raise _UnsupportedError("has a character that a response cannot contain")
    return f"[{''.join(out)}]"


def _character(code: int) -> str:
    char = chr(code)
    return char if char.isalnum() and char.isascii() else f"\\x{{{code:X}}}"
