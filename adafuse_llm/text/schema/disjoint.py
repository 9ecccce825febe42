"""Whether the schemas of a ``oneOf`` certainly allow no common value."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from adafuse_llm.text.schema.references import Document
from adafuse_llm.text.schema.values import identity

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

_MAX_DEPTH = 10


class Disjoint:
    """A comparison of schemas.

    Args:
        document: the whole schema, all of whose parts are valid.
    """

    def __init__(self, document: Document) -> None:
        self._document = document

    def overlap(self, options: list[Any], types: frozenset[str]) -> int | None:
        """Return the number of the first option that may allow a value of an earlier option.

        Args:
            options: schemas.
            types: the types of the values that count.
        """
        values = [self._constants(self._document.follow(option)) for option in options]
        constants = [value for value in values if value is not None]
        if len(constants) == len(options):
            seen: set[Any] = set()
            for number, value in enumerate(constants):
                if seen & value:
                    return number
                seen |= value
            return None
        for number, option in enumerate(options):
            if not all(self._are(option, other, types, 0) for other in options[:number]):
                return number
        return None

    def _are(self, one: Any, two: Any, types: frozenset[str], depth: int) -> bool:
        """Return whether two schemas certainly allow no common value of some types."""
        one, two = self._document.follow(one), self._document.follow(two)
        if one is False or two is False:
            return True
        if depth > _MAX_DEPTH or one is True or two is True:
            return False
        types = types & _types(one) & _types(two)
        values, others = self._constants(one), self._constants(two)
        if not types or (values is not None and others is not None and not values & others):
            return True
        if types == {"object"} and any(
            self._are(first, second, TYPES, depth + 1) for first, second in self._required(one, two)
        ):
            return True
        return self._by_parts(one, two, types, depth) or self._by_parts(two, one, types, depth)

    def _by_parts(
        self, whole: dict[str, Any], other: Any, types: frozenset[str], depth: int
    ) -> bool:
        """Return whether the parts of a combined schema make it disjoint from another schema."""

        def are(keyword: str) -> Iterator[bool]:
            return (self._are(part, other, types, depth + 1) for part in whole.get(keyword, ()))

        return any(are("allOf")) or any(
            keyword in whole and all(are(keyword)) for keyword in ("anyOf", "oneOf")
        )

    def _required(self, one: dict[str, Any], two: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield what two schemas say of the properties that at least one of them requires."""
        first, second = one.get("properties", {}), two.get("properties", {})
        for name in (*one.get("required", ()), *two.get("required", ())):
            self._document.step()
            if name in first and name in second:
                yield first[name], second[name]

    def _constants(self, schema: Any) -> frozenset[Any] | None:
        """Return identities of all values that a schema can allow, or None if it names none."""
        values = _values(schema) if isinstance(schema, dict) else None
        self._document.step(len(values or ()))
        return None if values is None else frozenset(map(identity, values))


def _values(schema: dict[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """Return types that include those of all values that a schema allows."""
    given = schema.get("type", TYPES)
    types = frozenset([given] if isinstance(given, str) else given)
    types |= {"integer"} if "number" in types else set()
    values = _values(schema)
    return types if values is None else types.intersection(chain(*map(_types_of, values)))


def _types_of(value: Any) -> tuple[str, ...]:
    if isinstance(value, (int, float)):
        return ("boolean",) if isinstance(value, bool) else ("integer", "number")
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return (names.get(type(value), "null"),)
