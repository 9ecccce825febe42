"""Bounds and factors of numbers that a grammar compiler represents exactly."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_DOWN, ROUND_FLOOR, Decimal
from typing import Any

from adafuse_llm.errors import GrammarError
from adafuse_llm.text.schema.values import (
    LITERAL_DIGITS,
    MAX_INTEGER,
    Path,
    decimal,
    digits,
    number,
    refuse,
    refuse_value,
)

_SAFE_INTEGER = 2**53 - 1
_DIGITS = 12
_DECIMALS = (9, 8, 7, 6)
"""Numbers of decimals, the preferred one first."""

_SHORT_DECIMALS = 6

_MAX_MULTIPLE = 2**16

KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
"""The keywords that limit numbers."""

Bounds = dict[str, int | float]
"""Inclusive bounds: ``minimum``, ``maximum``, both or none."""


class Numbers:
    """The numbers of all parts of a schema, which the compiler may have to combine."""

    def __init__(self) -> None:
        self._factors: list[float] = []
        self._units: list[tuple[dict[str, Any], float]] = []
        self._combines = False
        self._joins = False

    def note(self, schema: dict[str, Any]) -> None:
        """Note whether a part combines schemas."""
        self._combines |= "$ref" in schema and "multipleOf" in schema
        self._combines |= any(keyword in schema for keyword in ("allOf", "anyOf", "oneOf"))

    def add(
        self, schema: dict[str, Any], path: Path, out: dict[str, Any], *, integer: bool
    ) -> None:
        """Add what a part says of numbers to the schema that is to be compiled.

        Args:
            schema: the part.
            path: where it is.
            out: the part as it is to be compiled.
            integer: whether only integers are allowed.
        """
        bounds, unit = _bounds(schema, path, integer=integer), None
        literal = "const" in schema or "enum" in schema
        joins = any(keyword in schema for keyword in ("$ref", "allOf", "anyOf", "oneOf"))
        self._joins |= "allOf" in schema or (
            joins and any(keyword in schema for keyword in KEYWORDS)
        )
        if integer and not literal:
            bounds = _safe_bounds(**bounds)
        elif not literal and not joins and "type" in schema and "multipleOf" not in schema:
            bounds, unit = _decimal_bounds(bounds)
        out.update(bounds)
        numbers = out
        if "multipleOf" in schema:
            out["multipleOf"] = _factor(schema["multipleOf"], (*path, "multipleOf"))
            self._factors.append(out["multipleOf"])
        elif not integer and not literal and (short := _short_numbers(**bounds)):
            # The compiler reads "maximum": 0.95 as a form of text that has no "0.9".
            numbers = {**bounds}
            out["allOf"] = [{"anyOf": [numbers, {"enum": short}]}]
        if unit is not None:
            self._units.append((numbers, unit))

    def finish(self) -> None:
        """Limit decimals, and refuse factors whose multiples exceed the compiler's numbers."""
        whole = [int(factor) for factor in self._factors if factor == int(factor)]
        is_exact = len(whole) == len(self._factors) and math.lcm(*whole) < _MAX_MULTIPLE
        if self._combines and len(self._factors) > 1 and not is_exact:
            raise GrammarError(
                "the JSON schema cannot be enforced: several values of 'multipleOf' beside "
                "combined schemas must be integers with a least common multiple below "
                f"{_MAX_MULTIPLE:,}. Leave them out and check the parsed response."
            )
        if not (self._joins or self._factors):  # the compiler rounds the bounds of joint numbers
            for numbers, unit in self._units:
                numbers["multipleOf"] = unit


def _bounds(schema: dict[str, Any], path: Path, *, integer: bool) -> Bounds:
    """Return the bounds of a schema, rounded inward."""
    found: Bounds = {}
    for keyword, inner in ("minimum", max), ("maximum", min):
        exclusive = f"exclusive{keyword.title()}"
        bounds = [
            _inclusive(schema[name], (*path, name), integer=integer)
            for name in (keyword, exclusive)
            if name in schema
        ]
        if bounds:
            bound = inner(bounds)
            if abs(bound) > MAX_INTEGER:
                refuse((*path, exclusive), "leaves no number from -2**53 to 2**53")
            found[keyword] = _written(bound)
    return found


def _inclusive(value: Any, path: Path, *, integer: bool) -> Decimal:
    """Return an inclusive bound with few digits, which is the given one or on its inner side."""
    given = number(value)
    if given is None or abs(given) > MAX_INTEGER:
        refuse_value(path, "a number from -2**53 to 2**53", value, "Leave it out or correct it.")
    bound = decimal(given)
    excluded = path[-1].startswith("exclusive")
    if bound == bound.to_integral_value() and not excluded:
        return bound  # integers up to 2**53 are exact
    up = path[-1].lower().endswith("minimum")
    exponent = 3 - _DIGITS if not bound else max(bound.adjusted() + 1 - _DIGITS, -_DIGITS)
    unit = Decimal(1).scaleb(0 if integer else exponent)
    rounded = (bound / unit).to_integral_value(ROUND_CEILING if up else ROUND_FLOOR) * unit
    if excluded and rounded == bound:
        rounded += unit if up else -unit
    return rounded


def _safe_bounds(minimum: float | None = None, maximum: float | None = None) -> Bounds:
    """Return the bounds of integers. A bound that is missing becomes that of safe integers."""
    return {
        "minimum": min(-_SAFE_INTEGER, maximum or 0) if minimum is None else minimum,
        "maximum": max(_SAFE_INTEGER, minimum or 0) if maximum is None else maximum,
    }


def _decimal_bounds(bounds: Bounds) -> tuple[Bounds, float | None]:
    """Return the bounds of numbers with few decimals, and the unit of the last decimal.

    The bounds are multiples of the unit, and remain the same when the compiler rounds them to
    multiples. If there are none, return the given bounds and None.
    """
    lowest, highest = map(decimal, _safe_bounds(**bounds).values())
    for decimals in _DECIMALS:
        unit = Decimal(1).scaleb(-decimals)
        low = _written((lowest / unit).to_integral_value(ROUND_CEILING) * unit)
        high = _written((highest / unit).to_integral_value(ROUND_FLOOR) * unit)
        step = float(unit)
        kept = math.ceil(low / step) * step == low and math.floor(high / step) * step == high
        if low < high and kept:
            return {"minimum": low, "maximum": high}, step
    return bounds, None


def _short_numbers(minimum: float = -math.inf, maximum: float = math.inf) -> list[float]:
    """Return the numbers within bounds whose digits are the first digits of a bound."""
    found: dict[float, None] = {}
    for bound in (min(minimum, 0), max(maximum, 0)):
        for decimals in range(1, _SHORT_DECIMALS + 1):
            if math.isinf(bound) or decimal(bound) == round(decimal(bound), decimals):
                break
            short = decimal(bound).quantize(Decimal(1).scaleb(-decimals), ROUND_DOWN)
            within = minimum <= float(short) <= maximum
            if short and within and digits(short) <= LITERAL_DIGITS:
                found[float(short)] = None
    return list(found)


def _factor(value: Any, path: Path) -> int | float:
    """Return a factor such that floats divide as exactly as decimals do."""
    found = number(value)
    if found is not None and 0 < found <= MAX_INTEGER and found == int(found):
        return int(found)
    if found not in (0.5, 0.25, 0.125):
        refuse_value(
            path,
            "an integer from 1 to 2**53, 0.5, 0.25 or 0.125",
            value,
            "Use an integer, such as cents in place of 0.01, or leave it out and check the parsed "
            "response.",
        )
    return float(value)


def _written(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)
