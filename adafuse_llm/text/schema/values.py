"""Plain JSON values of a schema, with limits, and the refusal of a schema."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any, NoReturn

from adafuse_llm.errors import GrammarError, short_repr

MAX_DEPTH = 100
"""Greatest number of lists and objects inside each other in a schema."""

MAX_VALUES = 100_000
"""Greatest number of values in a schema."""

MAX_CHARACTERS = 1_000_000
"""Greatest number of characters in all texts of a schema together."""

MAX_INTEGER = 2**53
"""Greatest absolute value of a number in a schema."""

LITERAL_DIGITS = 15
"""Greatest number of digits of a number that a response has to contain."""

UNWRITABLE = r"\x00-\x07\x0B\x0E-\x1F\x7F"
"""The control characters that a response cannot contain, as in a class of a pattern."""

LEAVE_OUT = "Leave it out and check the parsed response."
TOO_DEEP = (
    f"the JSON schema has more than {MAX_DEPTH} lists and objects inside each other. "
    "Move inner schemas to '$defs' and refer to them with '$ref'."
)

_SURROGATE = re.compile("[\ud800-\udfff]")

Path = tuple[str, ...]
"""The keys that lead from a schema to a part of it."""


def refuse(path: Path, reason: str, remedy: str = LEAVE_OUT) -> NoReturn:
    """Raise an error about a part of a schema.

    Args:
        path: the path to the part.
        reason: what is wrong with it, and what is allowed.
        remedy: what to do.
    """
    shown = ".".join(key if len(key) <= 40 else f"{key[:37]}..." for key in path)
    shown = shown if len(shown) <= 200 else f"...{shown[-197:]}"
    where = f"'{shown}'" if path else "it"
    raise GrammarError(f"the JSON schema cannot be enforced: {where} {reason}. {remedy}")


def refuse_value(path: Path, allowed: str, value: Any, remedy: str = "Correct it.") -> NoReturn:
    """Raise an error about a value that is not what is allowed."""
    refuse(path, f"must be {allowed}; got {short_repr(value)}", remedy)


def check_json(schema: Any) -> None:
    """Refuse a schema that is no JSON, or too deep or large to be processed in a short time."""
    values = characters = 0
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, value = waiting.pop()
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        texts = list(value) if isinstance(value, dict) else [value]
        values += 1
        characters += sum(len(text) for text in texts if isinstance(text, str))
        for size, limit, what in (
            (values, MAX_VALUES, "values"),
            (characters, MAX_CHARACTERS, "characters"),
        ):
            if size > limit:
                raise GrammarError(
                    f"the JSON schema has more than {limit:,} {what}. Use a smaller schema."
                )
        if any(isinstance(text, str) and _SURROGATE.search(text) for text in texts):
            refuse(path, "has a text with a lone surrogate", "Use texts that are valid Unicode.")
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            wrong = next(key for key in value if not isinstance(key, str))
            refuse(
                path, f"has a key that is no text; got {short_repr(wrong)}", "Use texts as keys."
            )
        if isinstance(inner, dict):
            if len(path) >= MAX_DEPTH:
                raise GrammarError(TOO_DEEP)
            waiting += (((*path, str(key)), each) for key, each in inner.items())
        elif not isinstance(value, (str, int, float, type(None))) or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            refuse_value(path, "a JSON value", value)


def names(value: Any, path: Path) -> list[str]:
    """Return a list of names without repetitions."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        refuse_value(path, "a list of names", value)
    return list(dict.fromkeys(value))


def number(value: Any) -> int | float | None:
    """Return a number, or None if the value is no number."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def count(value: Any, path: Path) -> int:
    """Return a whole number that is not negative."""
    found = number(value)
    if found is None or not 0 <= found <= MAX_INTEGER or found != int(found):
        refuse_value(path, "a whole number from 0 to 2**53", value)
    return int(found)


def decimal(value: float) -> Decimal:
    """Return a number as JSON writes it."""
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))


def digits(value: Decimal) -> int:
    """Return the number of digits of a number."""
    return len(value.normalize().as_tuple().digits)


def check_literal(value: Any, path: Path) -> int:
    """Refuse values that no response can have, or that the compiler would round.

    Returns:
        The number of values inside the value, and itself.
    """
    if isinstance(value, list):
        return 1 + sum(check_literal(each, (*path, str(n))) for n, each in enumerate(value))
    if isinstance(value, dict):
        keys = sum(check_literal(key, path) for key in value)
        return 1 + keys + sum(check_literal(each, (*path, key)) for key, each in value.items())
    if isinstance(value, str) and (found := re.search(f"[{UNWRITABLE}]", value)):
        refuse(
            path,
            f"has the control character {found[0]!r}, which a response cannot contain",
            "Remove the character. Tabs and line ends are allowed.",
        )
    if (given := number(value)) is not None:
        remedy = "Use fewer digits, or a text for the value."
        if abs(given) > MAX_INTEGER:
            refuse_value(path, "from -2**53 to 2**53", value, remedy)
        if isinstance(given, float) and digits(decimal(given)) > LITERAL_DIGITS:
            refuse_value(path, f"a number of at most {LITERAL_DIGITS} digits", value, remedy)
    return 1


def identity(value: Any) -> tuple[Any, ...]:
    """Return a tuple that is equal for equal JSON values, where 1 is 1.0 and not true."""
    if isinstance(value, list):
        return ("list", *map(identity, value))
    if isinstance(value, dict):
        return ("object", *sorted((name, identity(each)) for name, each in value.items()))
    return isinstance(value, bool), value
