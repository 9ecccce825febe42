"""Patterns of texts that mean the same to a grammar compiler, Python and JavaScript.

The three differ in what is a digit, a letter or a space. What a pattern allows here, all of them
allow. A pattern is parsed by Python's `re`, and written in the syntax of the compiler.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NoReturn

from adafuse_llm.text.schema.values import Path, refuse

if sys.version_info >= (3, 11):
    from re import _parser as _re_parser  # type: ignore[attr-defined]
else:
    import sre_parse as _re_parser

MAX_PATTERN = 10_000
"""Greatest number of characters in a pattern."""

_NO_ONLY = "^(?!^[-+.]*$)"
"""How pydantic begins the pattern of a decimal: the text must not consist of signs and dots."""

_ESCAPE = r"\\(?:[dDwWsStnrfv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^0-9A-Za-z])"
_UNAMBIGUOUS = re.compile(
    rf"(?:{_ESCAPE}|\[\^?(?!\])(?:{_ESCAPE}|(?!&&|--|~~|\|\|)[^\\\[\]])*\]|(?!\{{,)[^\\\[])*"
)
"""Patterns without escapes and classes that Python and JavaScript read differently."""

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

_ENDS = {"AT_BEGINNING": "^", "AT_END": "$"}
_ATOMS = frozenset({"LITERAL", "NOT_LITERAL", "ANY", "IN", "SUBPATTERN", "BRANCH"})
"""Parts that are repeated as they are written, without a group around them."""

_NAMES = {"assert": "lookahead or lookbehind", "assert_not": "lookahead or lookbehind"}


def compiler_patterns(pattern: str, path: Path) -> list[str]:
    """Return patterns for the compiler that together mean what a pattern means."""
    if len(pattern) > MAX_PATTERN:
        refuse(path, f"has more than {MAX_PATTERN:,} characters", "Use a shorter pattern.")
    if pattern.startswith(_NO_ONLY):
        rest = "^" + pattern[len(_NO_ONLY) :]
        return [*compiler_patterns(rest, path), *compiler_patterns("[^+.-]", path)]
    writer = _Writer(path)
    if not _UNAMBIGUOUS.fullmatch(pattern):
        writer.refuse("has an escape or a class of characters that is not supported")
    try:
        parsed = _re_parser.parse(pattern)
        written = writer.sequence(parsed)
    except (re.error, OverflowError, RecursionError) as error:
        writer.refuse(f"cannot be read by Python's re: {error}")
    if parsed.state.flags != re.UNICODE:
        writer.refuse("has flags such as '(?i)', which are not supported")
    return [written]


class _Writer:
    """Writes parsed patterns in the syntax of the compiler.

    Each class that excludes characters excludes NUL, too: if a class allowed every control
    character, the compiler would allow every escape, such as that of a quotation mark.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def refuse(self, reason: str) -> NoReturn:
        refuse(self._path, reason, "Use a simpler pattern, or check the parsed response.")

    def sequence(self, parts: Any) -> str:
        return "".join(self._part(str(kind).lower(), value) for kind, value in parts)

    def _part(self, kind: str, value: Any) -> str:
        match kind, value:
            case "literal", _:
                written = self._character(value)
            case "not_literal", _:
                written = rf"[^\x00{self._character(value, excluded=True)}]"
            case "any", _:
                written = _ANY
            case "in", _:
                written = self._class(value)
            case "at", _ if str(value) in _ENDS:
                written = _ENDS[str(value)]
            case "branch", (_, options):
                written = f"(?:{'|'.join(map(self.sequence, options))})"
            case "subpattern", (_, 0, 0, inner):
                written = self._group(inner)
            case (("max_repeat" | "min_repeat"), (least, most, inner)):
                limit = "" if most == _re_parser.MAXREPEAT else most
                written = f"{self._group(inner)}{{{least},{limit}}}"
            case _:
                shown = _NAMES.get(kind, kind.replace("_", " "))
                self.refuse(f"has a {shown}, which is not supported")
        return written

    def _group(self, parts: Any) -> str:
        text = self.sequence(parts)
        return text if len(parts) == 1 and str(parts[0][0]) in _ATOMS else f"(?:{text})"

    def _class(self, items: list[tuple[Any, Any]]) -> str:
        negated = str(items[0][0]) == "NEGATE"
        out = [r"^\x00"] if negated else []
        characters: list[tuple[int, int]] = []
        for kind, value in items[negated:]:
            if str(kind) == "CATEGORY":
                out.append((_EXCLUDED if negated else _INCLUDED)[str(value)])
                if "NOT" in str(value):
                    characters.append((0, sys.maxunicode))
            else:
                low, high = value if str(kind) == "RANGE" else (value, value)
                characters.append((low, high))
                shown = (self._character(each, excluded=True) for each in (low, high))
                out.append("-".join(dict.fromkeys(shown)))
        has_escapes = all(_has(characters, char) for char in ('"', "\\"))
        if not negated and not has_escapes and _has(characters, "\0"):
            self.refuse("has the character NUL")
        return f"[{''.join(out)}]"

    def _character(self, code: int, *, excluded: bool = False) -> str:
        if 0xD800 <= code <= 0xDFFF:
            self.refuse("has a surrogate")
        if code == 0 and not excluded:
            self.refuse("has the character NUL")
        char = chr(code)
        return char if char.isalnum() and char.isascii() else f"\\x{{{code:X}}}"


def _has(ranges: list[tuple[int, int]], char: str) -> bool:
    return any(low <= ord(char) <= high for low, high in ranges)
