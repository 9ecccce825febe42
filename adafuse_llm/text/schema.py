"""Preparation of JSON schemas for a grammar compiler.

llguidance compiles a JSON schema to a grammar. It refuses most keywords that it cannot enforce, but
for some schemas it accepts documents that the schema forbids. `enforceable` closes these gaps. It
returns a schema that the compiler enforces fully, or it raises an error that names the keyword.

The returned schema is never wider than the given one. It can be narrower. For example, the bounds
of numbers are rounded inward to 12 digits, times have no leap second, and numbers are from
-(2**53 - 1) to 2**53 - 1 with at most 9 decimals. Every JSON library reads such integers exactly.

Compile the returned schema with `COMPILE_OPTIONS`. The result depends on them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_DOWN, ROUND_FLOOR, Decimal
from typing import Any, NoReturn
from urllib.parse import unquote

from adafuse_llm.errors import GrammarError, short_repr

COMPILE_OPTIONS: Mapping[str, Any] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
"""The options of llguidance with which a schema from `enforceable` is to be compiled.

There are no ``\\uXXXX`` escapes. Otherwise a response could spell the name of a property with an
escape, and the schema of that property would not apply.
"""

MAX_DEPTH = 100
"""Greatest number of lists and objects inside each other in a schema."""

MAX_VALUES = 100_000
"""Greatest number of values in a schema."""

MAX_CHARACTERS = 1_000_000
"""Greatest number of characters in all texts of a schema together."""

MAX_PATTERN = 10_000
"""Greatest number of characters in a pattern."""

_MAX_STEPS = 1_000_000
_MAX_INTEGER = 2**53
_SAFE_INTEGER = 2**53 - 1
_MAX_MULTIPLE = 2**16
_DIGITS = 12
_DECIMALS = (9, 8, 7, 6)
"""Numbers of decimals, the preferred one first."""

_LITERAL_DIGITS = 15
_SHORT_DECIMALS = 6

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_DRAFTS = {
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
}

_TOO_DEEP = (
    f"the JSON schema has more than {MAX_DEPTH} lists and objects inside each other. "
    "Move inner schemas to '$defs' and refer to them with '$ref'."
)
_LEAVE_OUT = "Leave it out and check the parsed response."

_DATE = (
    "((000[1-9]|00[1-9][0-9]|0[1-9][0-9][0-9]|[1-9][0-9][0-9][0-9])-"
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|"
    "02-(0[1-9]|1[0-9]|2[0-8]))|"
    "([0-9][0-9](0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
    "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_NUMBER = "[0-9]{1,6}"
_DAYS = f"{_NUMBER}D"
_MONTHS = f"{_NUMBER}M({_DAYS})?"
_YEARS = f"{_NUMBER}Y({_MONTHS})?"
_SECONDS = f"{_NUMBER}S"
_MINUTES = f"{_NUMBER}M({_SECONDS})?"
_HOURS = f"{_NUMBER}H({_MINUTES})?"
_CLOCK = f"T({_HOURS}|{_MINUTES}|{_SECONDS})"
_FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P(({_YEARS}|{_MONTHS}|{_DAYS})({_CLOCK})?|{_CLOCK}|{_NUMBER}W)$",
}
_COMPILED_FORMATS = frozenset({"email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
_FREE_FORMATS = frozenset({"binary", "password", "path"})
"""Formats that allow every text."""

_FORMAT_BOUNDS = {
    "email": r"^[^@]{1,64}@[^.]{1,63}(\.[^.]{1,63})*$",
    "uri": "^[^:]{1,40}:",
}
"""Patterns that bound the parts of a format inside which a text cannot end.

The parts of an email address are as long as RFC 5321 and RFC 1035 allow. The longest registered
scheme of a URI has 36 characters.
"""

_MAX_HOSTNAME = 253

_KEYWORDS_OF = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": (
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "unevaluatedItems",
    ),
    "object": (
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
    ),
}

_JOINING = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords of a schema whose other keywords join those of further schemas."""

_Place = tuple[str, ...]
_Schema = dict[str, Any] | bool


def enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that llguidance enforces fully, or refuse the schema.

    A document that the returned schema allows is allowed by the given schema too. The draft is
    the one that ``$schema`` names, from draft-04 to 2020-12, and 2020-12 without it. Formats are
    enforced. A number that has no bound on a side gets the bound -(2**53 - 1) or 2**53 - 1 there,
    and it has at most 9 decimals and no exponent, so that its digits end. Decimals are not limited
    beside `multipleOf`, in schemas with `allOf`, and if the bounds are too near. Patterns must mean
    the same to Python's `re` as to the compiler. Annotations and unknown keywords are left out.
    Parts that a ``$ref`` names are moved to ``$defs``.

    Args:
        schema: the JSON schema. It is not changed.

    Returns:
        A schema of draft 2020-12, to be compiled with `COMPILE_OPTIONS`.

    Raises:
        GrammarError: the schema is invalid, too large, or uses a keyword that cannot be enforced.
            The message names the keyword with its place, such as ``properties.age.minimum``.
    """
    if isinstance(schema, bool) or not isinstance(schema, Mapping):
        raise GrammarError(
            "a JSON schema must be an object, such as {'type': 'object', 'properties': {...}}; "
            f"got {short_repr(schema)}."
        )
    try:
        return _Preparation(_Copy().copy(schema, ())).run()
    except RecursionError:
        raise GrammarError(_TOO_DEEP) from None


def _show(place: _Place) -> str:
    shown = ".".join(part if len(part) <= 40 else f"{part[:37]}..." for part in place)
    return shown if len(shown) <= 200 else f"...{shown[-197:]}"


def _refuse(place: _Place, reason: str, remedy: str = _LEAVE_OUT) -> NoReturn:
    where = f"'{_show(place)}'" if place else "it"
    raise GrammarError(f"the JSON schema cannot be enforced: {where} {reason}. {remedy}")


class _Copy:
    """A copy of a schema as plain JSON values.

    It refuses values that are not JSON, texts that are not Unicode, and schemas that are cyclic, or
    too deep or large to be processed in a short time.
    """

    def __init__(self) -> None:
        self._values = 0
        self._characters = 0
        self._open: set[int] = set()

    def copy(self, value: Any, place: _Place) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            raise GrammarError(
                f"the JSON schema has more than {MAX_VALUES:,} values. Use a smaller schema."
            )
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(value, place)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            if not math.isfinite(value):
                _refuse(place, f"is {value}, which is no JSON number", "Use a finite number.")
            return float(value)
        return self._container(value, place)

    def _container(self, value: Any, place: _Place) -> Any:
        if not isinstance(value, (Mapping, list, tuple)):
            _refuse(
                place,
                f"is of type {type(value).__name__}, which is no JSON value",
                "Use texts, numbers, True, False, None, lists and dicts with texts as keys.",
            )
        if id(value) in self._open:
            _refuse(place, "contains itself", "Use '$ref' for recursion.")
        if len(place) >= MAX_DEPTH:
            raise GrammarError(_TOO_DEEP)
        self._open.add(id(value))
        copied: Any
        if isinstance(value, Mapping):
            copied = {}
            for key, item in value.items():
                if not isinstance(key, str):
                    _refuse(place, f"has the key {short_repr(key)}", "Keys must be texts.")
                name = self._text(key, place)
                copied[name] = self.copy(item, (*place, name))
        else:
            copied = [self.copy(item, (*place, str(n))) for n, item in enumerate(value)]
        self._open.discard(id(value))
        return copied

    def _text(self, text: str, place: _Place) -> str:
        text = str.__str__(text)
        self._characters += len(text)
        if self._characters > MAX_CHARACTERS:
            raise GrammarError(
                f"the JSON schema has more than {MAX_CHARACTERS:,} characters. "
                "Use a smaller schema."
            )
        if any("\ud800" <= char <= "\udfff" for char in text):
            _refuse(place, "has a text with a lone surrogate", "Use texts that are valid Unicode.")
        return text


class _Preparation:
    """The preparation of one schema.

    Attributes:
        root: the schema as plain JSON values.
        draft: the year or number of its draft.
        names: the name in the new ``$defs`` of each place to which a ``$ref`` points.
        definitions: the new ``$defs``.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.draft = self._draft(root)
        self.names: dict[_Place, str] = {}
        self.definitions: dict[str, _Schema] = {}
        self._todo: list[tuple[_Place, Any]] = []
        self._patterns: dict[str, str] = {}
        self._anchors: dict[str, _Place | None] | None = None
        self._steps = 0
        self._factors: list[Decimal] = []
        self._combines = False
        self._joins = False
        self._unbounded: list[tuple[dict[str, Any], float]] = []
        own = root.get(self._id_keyword)
        self._id = own.rstrip("#") if isinstance(own, str) else None

    @property
    def _id_keyword(self) -> str:
        return "id" if self.draft == 4 else "$id"

    @staticmethod
    def _draft(root: dict[str, Any]) -> int:
        if "$schema" not in root:
            return 2020
        name = root["$schema"]
        text = re.sub(r"^https?://", "", name).rstrip("#") if isinstance(name, str) else ""
        if text not in _DRAFTS:
            _refuse(
                ("$schema",),
                f"names no supported draft; got {short_repr(name)}",
                "Leave it out, or use 'https://json-schema.org/draft/2020-12/schema', 2019-09, "
                "draft-07, draft-06 or draft-04.",
            )
        return _DRAFTS[text]

    def run(self) -> dict[str, Any]:
        prepared = self._schema(self.root, ())
        assert isinstance(prepared, dict), "the root is no boolean"
        while self._todo:
            place, target = self._todo.pop()
            self.definitions[self.names[place]] = self._schema(target, place)
        self._check_factors()
        self._check_finite(prepared)
        if not (self._joins or self._factors):  # the compiler rounds the bounds of joint numbers
            for numbers, unit in self._unbounded:
                numbers["multipleOf"] = unit
        if self.definitions:
            prepared["$defs"] = self.definitions
        return prepared

    def _step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > _MAX_STEPS:
            raise GrammarError(
                "the JSON schema is too complex to be checked. Use fewer 'oneOf' options and fewer "
                "'$ref' references."
            )

    # Schemas

    def _schema(self, schema: Any, place: _Place, types: frozenset[str] = _TYPES) -> _Schema:
        """Return a schema as it is to be compiled.

        Args:
            schema: the schema.
            place: where it is.
            types: the types that the schemas around it allow for the same value.
        """
        self._step()
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            _refuse(
                place,
                f"must be a schema, which is an object, true or false; got {short_repr(schema)}",
                "Correct it.",
            )
        if place and "$schema" in schema and schema["$schema"] != self.root.get("$schema"):
            _refuse((*place, "$schema"), "differs from the draft of the whole schema", "Remove it.")
        if "$ref" in schema and self.draft <= 7:  # keywords beside it have no effect
            return {"$ref": self._ref(schema["$ref"], (*place, "$ref"))}
        own = self._types(schema, place)
        types &= own
        out: dict[str, Any] = {}
        if "type" in schema:
            out["type"] = schema["type"]
        if "$ref" in schema:
            out["$ref"] = self._ref(schema["$ref"], (*place, "$ref"))
        self._values(schema, place, out)
        self._typed(schema, place, out, own)
        self._combination(schema, place, out, types)
        return out

    def _typed(
        self, schema: dict[str, Any], place: _Place, out: dict[str, Any], own: frozenset[str]
    ) -> None:
        """Add the keywords that apply to the types of a schema."""
        if own & {"integer", "number"}:
            self._number(schema, place, out, integer="number" not in own)
        if "string" in own:
            self._string(schema, place, out)
        if "array" in own:
            self._array(schema, place, out)
        if "object" in own:
            self._object(schema, place, out)

    def _types(self, schema: dict[str, Any], place: _Place) -> frozenset[str]:
        if "type" not in schema:
            return _TYPES
        given = schema["type"]
        names = [given] if isinstance(given, str) else given
        if (
            not isinstance(names, list)
            or not names
            or not all(isinstance(name, str) and name in _TYPES for name in names)
        ):
            _refuse(
                (*place, "type"),
                f"must be one or more of {', '.join(sorted(_TYPES))}; got {short_repr(given)}",
                "Correct it.",
            )
        found = frozenset(names)
        return found | {"integer"} if "number" in found else found

    def _values(self, schema: dict[str, Any], place: _Place, out: dict[str, Any]) -> None:
        if "const" in schema:
            _check_literal(schema["const"], (*place, "const"))
            out["const"] = schema["const"]
        if "enum" in schema:
            values = schema["enum"]
            if not isinstance(values, list) or not values:
                _refuse(
                    (*place, "enum"),
                    f"must be a list of at least one value; got {short_repr(values)}",
                    "Name the allowed values.",
                )
            for number, value in enumerate(values):
                _check_literal(value, (*place, "enum", str(number)))
            out["enum"] = values

    # Numbers

    def _number(
        self, schema: dict[str, Any], place: _Place, out: dict[str, Any], *, integer: bool
    ) -> None:
        bounds = {
            keyword: self._bound(schema, place, keyword, integer=integer)
            for keyword in ("minimum", "maximum")
        }
        literal = "const" in schema or "enum" in schema
        joins = any(keyword in schema for keyword in _JOINING)
        self._joins |= "allOf" in schema or (
            joins and any(keyword in schema for keyword in _KEYWORDS_OF["number"])
        )
        unit = None
        if integer and not literal:
            bounds = _safe_bounds(**bounds)
        elif not literal and not joins and "type" in schema and "multipleOf" not in schema:
            bounds, unit = _decimal_bounds(**bounds)
        found = {keyword: bound for keyword, bound in bounds.items() if bound is not None}
        out.update(found)
        numbers = out
        if "multipleOf" in schema:
            out["multipleOf"] = _factor(schema["multipleOf"], (*place, "multipleOf"))
            self._factors.append(_decimal(out["multipleOf"]))
        elif not integer and not literal and (short := _short_numbers(**bounds)):
            # The compiler reads "maximum": 0.95 as a form of text that has no "0.9".
            numbers = dict(found)
            out.setdefault("allOf", []).append({"anyOf": [numbers, {"enum": short}]})
        if unit is not None:
            self._unbounded.append((numbers, unit))

    def _check_factors(self) -> None:
        """Refuse factors whose common multiples exceed the compiler's numbers."""
        if not self._combines or len(self._factors) < 2:
            return
        unit = 1 if all(factor == int(factor) for factor in self._factors) else 1000
        if math.lcm(*(int(factor * unit) for factor in self._factors)) >= _MAX_MULTIPLE:
            raise GrammarError(
                "the JSON schema cannot be enforced: the values of 'multipleOf' have a least "
                f"common multiple of {_MAX_MULTIPLE // unit:,} or more. Use smaller values, or "
                "leave them out and check the parsed response."
            )

    def _bound(
        self, schema: dict[str, Any], place: _Place, keyword: str, *, integer: bool
    ) -> int | float | None:
        """Return an inclusive bound that the compiler represents exactly, or None."""
        exclusive = f"exclusive{keyword.title()}"
        found: list[tuple[Decimal, bool]] = []
        if keyword in schema:
            number = _bound_number(schema[keyword], (*place, keyword))
            found.append((number, self.draft == 4 and schema.get(exclusive) is True))
        if exclusive in schema and (self.draft != 4 or not isinstance(schema[exclusive], bool)):
            found.append((_bound_number(schema[exclusive], (*place, exclusive)), True))
        if not found:
            return None
        rounding = ROUND_CEILING if keyword == "minimum" else ROUND_FLOOR
        inward = [
            _inward(number, rounding, excluded=excluded, integer=integer)
            for number, excluded in found
        ]
        bound = max(inward) if keyword == "minimum" else min(inward)
        if abs(bound) > _MAX_INTEGER:
            _refuse(
                (*place, exclusive),
                "leaves no number from -2**53 to 2**53",
                "Leave it out and check the parsed response, or use another bound.",
            )
        return _written(bound)

    # Texts

    def _string(self, schema: dict[str, Any], place: _Place, out: dict[str, Any]) -> None:
        for keyword in ("minLength", "maxLength"):
            if keyword in schema:
                out[keyword] = _count(schema[keyword], (*place, keyword))
        patterns: list[str] = []
        if "pattern" in schema:
            patterns += _patterns(schema["pattern"], (*place, "pattern"))
        if "format" in schema:
            name = schema["format"]
            if isinstance(name, str) and name in _FORMAT_PATTERNS:
                patterns.append(_FORMAT_PATTERNS[name])
            elif isinstance(name, str) and name in _COMPILED_FORMATS:
                out["format"] = name
                patterns += [_FORMAT_BOUNDS[name]] if name in _FORMAT_BOUNDS else []
            elif not isinstance(name, str) or name not in _FREE_FORMATS:
                allowed = sorted({*_FORMAT_PATTERNS, *_COMPILED_FORMATS, *_FREE_FORMATS})
                _refuse(
                    (*place, "format"),
                    f"must be one of {', '.join(allowed)}; got {short_repr(name)}",
                    "Use one of them or a pattern, or leave it out and check the parsed response.",
                )
            if name == "hostname":
                out["maxLength"] = min(out.get("maxLength", _MAX_HOSTNAME), _MAX_HOSTNAME)
        if patterns:
            out["pattern"] = patterns[0]
        out.setdefault("allOf", []).extend({"pattern": pattern} for pattern in patterns[1:])

    # Arrays

    def _array(self, schema: dict[str, Any], place: _Place, out: dict[str, Any]) -> None:
        for keyword in ("minItems", "maxItems"):
            if keyword in schema:
                out[keyword] = _count(schema[keyword], (*place, keyword))
        if "prefixItems" in schema and self.draft < 2020:
            _refuse(
                (*place, "prefixItems"),
                "is not part of the draft that '$schema' names",
                "Name draft 2020-12, or leave '$schema' out.",
            )
        items, rest = schema.get("items"), "items"
        first, prefix = schema.get("prefixItems"), "prefixItems"
        if isinstance(items, list):
            if self.draft == 2020:
                _refuse(
                    (*place, "items"),
                    "is a list, which draft 2020-12 does not allow",
                    "Rename it to 'prefixItems', or name an older draft in '$schema'.",
                )
            first, prefix, items, rest = items, "items", None, "additionalItems"
            items = schema.get(rest)
        if first is not None:
            out["prefixItems"] = self._list(first, (*place, prefix))
        if rest in schema:
            out["items"] = self._schema(items, (*place, rest))
        self._refused_of_arrays(schema, place)

    def _refused_of_arrays(self, schema: dict[str, Any], place: _Place) -> None:
        unique = schema.get("uniqueItems", False)
        if unique is not False and not (unique is True and schema.get("maxItems") in (0, 1)):
            _refuse((*place, "uniqueItems"), "is not supported")
        if "contains" in schema:
            _refuse((*place, "contains"), "is not supported")
        if schema.get("unevaluatedItems", True) not in (True, {}):
            _refuse((*place, "unevaluatedItems"), "is not supported", "Use 'items': false.")

    # Objects

    def _object(self, schema: dict[str, Any], place: _Place, out: dict[str, Any]) -> None:
        properties = _mapping(schema, "properties", place)
        patterns = _mapping(schema, "patternProperties", place)
        required = _names(schema.get("required", []), (*place, "required"))
        if required:
            out["required"] = required
        if properties:
            inner = (*place, "properties")
            out["properties"] = {
                name: self._schema(value, (*inner, name)) for name, value in properties.items()
            }
        if patterns:
            inner = (*place, "patternProperties")
            out["patternProperties"] = {}
            for pattern, value in patterns.items():
                rewritten, *others = _patterns(pattern, (*inner, pattern))
                self._patterns[rewritten] = pattern
                if others or rewritten in out["patternProperties"]:
                    _refuse((*inner, pattern), "cannot be combined with the other patterns")
                out["patternProperties"][rewritten] = self._schema(value, (*inner, pattern))
        if "additionalProperties" in schema:
            out["additionalProperties"] = self._schema(
                schema["additionalProperties"], (*place, "additionalProperties")
            )
        if schema.get("propertyNames", True) not in (True, {}):
            self._property_names(schema["propertyNames"], (*place, "propertyNames"), out)
        self._property_counts(schema, place, out)
        self._refused_of_objects(schema, place, required)

    def _property_names(self, schema: Any, place: _Place, out: dict[str, Any]) -> None:
        """Replace ``propertyNames`` by named properties, if it names all of them."""
        followed, _ = self._follow(schema, place)
        names: Any = None
        if isinstance(followed, dict):
            known = {"enum", "const", "type", "title", "description"}
            if followed.keys() <= known and followed.get("type", "string") == "string":
                names = [followed["const"]] if "const" in followed else followed.get("enum")
        if not isinstance(names, list) or "patternProperties" in out:
            _refuse(place, "is supported only as an 'enum' of names, without 'patternProperties'")
        allowed = [name for name in dict.fromkeys(map(_identity, names)) if name[0] == "text"]
        other = out.get("additionalProperties", True)
        named = out.get("properties", {})
        out["properties"] = dict.fromkeys(named, False) | {
            name: named.get(name, other) for _, name in allowed
        }
        out["additionalProperties"] = False

    def _property_counts(self, schema: dict[str, Any], place: _Place, out: dict[str, Any]) -> None:
        # A response can repeat the name of an additional property, so that counting pairs would
        # accept fewer properties than the minimum.
        if "minProperties" in schema:
            minimum = _count(schema["minProperties"], (*place, "minProperties"))
            if minimum > len(out.get("required", [])):
                _refuse(
                    (*place, "minProperties"),
                    "is greater than the number of names in 'required'",
                    "Name the properties in 'required', or leave it out and check the parsed "
                    "response.",
                )
        if "maxProperties" in schema:
            maximum = _count(schema["maxProperties"], (*place, "maxProperties"))
            closed = out.get("additionalProperties") is False and "patternProperties" not in out
            if closed and maximum >= len(out.get("properties", {})):
                return
            if out.get("properties"):
                _refuse((*place, "maxProperties"), "is not supported beside 'properties'")
            out["maxProperties"] = maximum

    def _refused_of_objects(
        self, schema: dict[str, Any], place: _Place, required: list[str]
    ) -> None:
        for name, needed in _mapping(schema, "dependentRequired", place).items():
            if not set(_names(needed, (*place, "dependentRequired", name))) <= set(required):
                _refuse(
                    (*place, "dependentRequired"),
                    "is not supported",
                    "Name the properties in 'required', or leave it out and check the parsed "
                    "response.",
                )
        for keyword in ("dependentSchemas", "dependencies"):
            if schema.get(keyword, {}) != {}:
                _refuse((*place, keyword), "is not supported")
        if schema.get("unevaluatedProperties", True) not in (True, {}):
            _refuse(
                (*place, "unevaluatedProperties"),
                "is not supported",
                "Use 'additionalProperties': false in one schema that names all properties.",
            )

    # Combinations

    def _list(self, schemas: Any, place: _Place, types: frozenset[str] = _TYPES) -> list[_Schema]:
        if not isinstance(schemas, list) or not schemas:
            _refuse(place, f"must be a list of schemas; got {short_repr(schemas)}", "Correct it.")
        return [self._schema(s, (*place, str(n)), types) for n, s in enumerate(schemas)]

    def _combination(
        self, schema: dict[str, Any], place: _Place, out: dict[str, Any], types: frozenset[str]
    ) -> None:
        every = out.pop("allOf", [])
        self._combines |= "$ref" in schema and "multipleOf" in schema
        self._combines |= any(keyword in schema for keyword in ("allOf", "anyOf", "oneOf"))
        if "allOf" in schema:
            every = self._list(schema["allOf"], (*place, "allOf"), types) + every
        if "anyOf" in schema:
            out["anyOf"] = self._list(schema["anyOf"], (*place, "anyOf"), types)
        if "oneOf" in schema:
            options = self._list(schema["oneOf"], (*place, "oneOf"), types)
            self._check_disjoint(schema["oneOf"], (*place, "oneOf"), types)
            if "anyOf" in out:
                every.append({"anyOf": options})
            else:
                out["anyOf"] = options
        if every:
            out["allOf"] = every
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                _refuse((*place, keyword), "is not supported", "Use '$ref'.")
        if schema.get("not", False) is not False:
            _refuse((*place, "not"), "is not supported")
        if "if" in schema and ("then" in schema or "else" in schema):
            _refuse(
                (*place, "if"),
                "is not supported",
                "Use 'anyOf' with one schema per case, or leave it out and check the parsed "
                "response.",
            )

    # oneOf

    def _check_disjoint(self, options: list[Any], place: _Place, types: frozenset[str]) -> None:
        """Refuse options of which more than one could allow a value."""
        values = [self._constants(option, (*place, str(n))) for n, option in enumerate(options)]
        seen: set[Any] = set()
        if all(value is not None for value in values):
            for number, value in enumerate(values):
                assert value is not None
                if seen & value:
                    self._overlap(place, number)
                seen |= value
            return
        for number, option in enumerate(options):
            one = option, (*place, str(number))
            for before, other in enumerate(options[:number]):
                if not self._disjoint(one, (other, (*place, str(before))), types, 0):
                    self._overlap(place, number)

    def _overlap(self, place: _Place, number: int) -> NoReturn:
        _refuse(
            (*place, str(number)),
            "may allow a value that another option of 'oneOf' allows too",
            "Use 'anyOf', or give each option a required property with a different 'const'.",
        )

    def _constants(self, schema: Any, place: _Place) -> frozenset[Any] | None:
        """Return identities of all values that a schema can allow, or None if it names none."""
        schema, _ = self._follow(schema, place)
        if isinstance(schema, dict):
            if "const" in schema:
                return frozenset({_identity(schema["const"])})
            if isinstance(schema.get("enum"), list):
                self._step(len(schema["enum"]))
                return frozenset(map(_identity, schema["enum"]))
        return None

    def _follow(self, schema: Any, place: _Place) -> tuple[Any, _Place]:
        """Follow references that stand alone."""
        for _ in range(20):
            self._step()
            if not (isinstance(schema, dict) and "$ref" in schema):
                break
            if self.draft > 7 and schema.keys() - {"$ref", "title", "description"}:
                break
            place, schema = self._find(schema["$ref"], (*place, "$ref"))
        return schema, place

    def _disjoint(
        self, one: tuple[Any, _Place], two: tuple[Any, _Place], types: frozenset[str], depth: int
    ) -> bool:
        """Return whether two schemas certainly allow no common value of some types."""
        self._step()
        (first, here), (second, there) = self._follow(*one), self._follow(*two)
        if first is False or second is False:
            return True
        if depth > 10 or not isinstance(first, dict) or not isinstance(second, dict):
            return False
        common = types & self._value_types(first, here) & self._value_types(second, there)
        if not common:
            return True
        values, others = self._constants(first, here), self._constants(second, there)
        if values is not None and others is not None and not values & others:
            return True
        if common == {"object"} and self._disjoint_properties(
            (first, here), (second, there), depth
        ):
            return True
        return self._disjoint_parts((first, here), (second, there), common, depth) or (
            self._disjoint_parts((second, there), (first, here), common, depth)
        )

    def _disjoint_parts(
        self, one: tuple[Any, _Place], two: tuple[Any, _Place], types: frozenset[str], depth: int
    ) -> bool:
        schema, place = one

        def parts(keyword: str) -> Iterator[bool]:
            found = schema.get(keyword)
            for number, part in enumerate(found if isinstance(found, list) else ()):
                inner = part, (*place, keyword, str(number))
                yield self._disjoint(inner, two, types, depth + 1)

        return any(parts("allOf")) or any(
            keyword in schema and schema[keyword] and all(parts(keyword))
            for keyword in ("anyOf", "oneOf")
        )

    def _disjoint_properties(
        self, one: tuple[Any, _Place], two: tuple[Any, _Place], depth: int
    ) -> bool:
        """Return whether a property that one of two schemas requires distinguishes them."""
        (first, here), (second, there) = one, two
        properties = first.get("properties"), second.get("properties")
        if not isinstance(properties[0], dict) or not isinstance(properties[1], dict):
            return False
        required: set[str] = set()
        self._step(len(properties[0]) + len(properties[1]))
        for schema, place in one, two:
            required.update(_names(schema.get("required", []), (*place, "required")))
        common = sorted(required & properties[0].keys() & properties[1].keys())
        return any(
            self._disjoint(
                (properties[0][name], (*here, "properties", name)),
                (properties[1][name], (*there, "properties", name)),
                _TYPES,
                depth + 1,
            )
            for name in common
        )

    def _value_types(self, schema: dict[str, Any], place: _Place) -> frozenset[str]:
        types = self._types(schema, place)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            types &= frozenset(name for value in values for name in _types_of(value))
        return types

    # References

    def _ref(self, ref: Any, place: _Place) -> str:
        found, target = self._find(ref, place)
        if found not in self.names:
            self.names[found] = str(len(self.names))
            self._todo.append((found, target))
        return f"#/$defs/{self.names[found]}"

    def _find(self, ref: Any, place: _Place) -> tuple[_Place, Any]:
        """Return the place and the schema to which a reference points."""
        if not isinstance(ref, str):
            _refuse(place, f"must be a text; got {short_repr(ref)}", "Correct it.")
        address, _, fragment = ref.partition("#")
        if address and address != self._id:
            _refuse(
                place,
                f"points to another document; got {short_repr(ref)}",
                "Copy that schema to '$defs' and use '#/$defs/NAME'.",
            )
        if self._has_identifier(place[:-1]):
            _refuse(
                place,
                f"is inside a schema with its own '{self._id_keyword}'",
                f"Remove the inner '{self._id_keyword}' and use '#/$defs/NAME'.",
            )
        if fragment and not fragment.startswith("/"):
            path = self._anchor(fragment)
        else:
            parts = unquote(fragment).split("/")[1:]
            path = tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)
        target = None if path is None else self._at(path)
        if path is None or not isinstance(target, (dict, bool)):
            _refuse(place, f"points to no schema; got {short_repr(ref)}", "Use '#/$defs/NAME'.")
        if self._has_identifier(path):
            _refuse(
                place,
                f"points into a schema with its own '{self._id_keyword}'",
                f"Remove the inner '{self._id_keyword}'.",
            )
        return path, target

    def _anchor(self, name: str) -> _Place | None:
        """Return the place of the one schema whose ``$anchor`` is a name, or None."""
        if self._anchors is None:
            self._anchors = {}
            for anchor, place in _anchors(self.root):
                self._anchors[anchor] = None if anchor in self._anchors else place
        return self._anchors.get(name)

    def _at(self, path: _Place) -> Any:
        value: Any = self.root
        for part in path:
            if isinstance(value, dict) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and part.isascii():
                index = int(part) if len(part) < 10 else len(value)
                value = value[index] if index < len(value) else None
            else:
                return None
        return value

    def _has_identifier(self, path: _Place) -> bool:
        """Return whether a schema below the root, along a path, has an identifier of its own."""
        self._step(len(path))
        value: Any = self.root
        for part in path:
            value = value[int(part)] if isinstance(value, list) else value[part]
            if isinstance(value, dict) and isinstance(value.get(self._id_keyword), str):
                return True
        return False

    # Finite documents

    def _check_finite(self, root: dict[str, Any]) -> None:
        """Refuse schemas of which every document would be infinite."""
        finite: set[str] = set()
        waiting: dict[str, set[str]] = {}
        todo = list(self.definitions)
        while todo:
            name = todo.pop()
            missing = set() if name in finite else self._missing(self.definitions[name], finite)
            if missing:
                for other in missing:
                    waiting.setdefault(other, set()).add(name)
            else:
                finite.add(name)
                todo.extend(waiting.pop(name, ()))
        infinite = [place for place, name in self.names.items() if name not in finite]
        if infinite:
            _refuse(
                infinite[0],
                "refers to itself without an end, so that no finite document is valid",
                "Make a property on the way optional, or allow null or an empty list.",
            )
        assert not self._missing(root, finite), "the root is finite if its references are"

    def _missing(self, schema: _Schema, finite: set[str]) -> set[str]:
        """Return references that keep a schema from a finite document; empty if there is one."""
        self._step()
        if isinstance(schema, bool):
            return set()
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in finite:
                return {name}
        missing = self._of_all(schema.get("allOf", ()), finite)
        if "anyOf" in schema:
            missing = missing or _of_any(self._missing(part, finite) for part in schema["anyOf"])
        given = schema.get("type", "null")
        names = {given} if isinstance(given, str) else set(given)
        if missing or "const" in schema or "enum" in schema or not names <= {"array", "object"}:
            return missing
        needed = {"array": _needed_items, "object": self._needed_properties}
        return _of_any(self._of_all(needed[name](schema), finite) for name in sorted(names))

    def _of_all(self, schemas: Iterable[_Schema], finite: set[str]) -> set[str]:
        missing = (self._missing(schema, finite) for schema in schemas)
        return next(filter(None, missing), set())

    def _needed_properties(self, schema: dict[str, Any]) -> Iterator[_Schema]:
        """Yield the schemas that the values of required properties must fit."""
        properties = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        for name in schema.get("required", []):
            self._step(1 + len(patterns))
            if name in properties:
                yield properties[name]
            else:
                yield schema.get("additionalProperties", True)
            for pattern, inner in patterns.items():
                if _matches(self._patterns[pattern], name):
                    yield inner


def _of_any(missing: Iterable[set[str]]) -> set[str]:
    """Return what is missing if one of several alternatives suffices."""
    found = list(missing)
    return set().union(*found) if all(found) else set()


def _matches(pattern: str, name: str) -> bool:
    """Return whether a name matches a pattern, and True if it would take long to find out."""
    repeats = len(re.findall(r"[*+?{]", pattern))
    if repeats > 2 or max(len(pattern), len(name)) > 100 or "(" in pattern or "|" in pattern:
        return True
    return re.search(pattern, name) is not None


def _needed_items(schema: dict[str, Any]) -> Iterable[_Schema]:
    minimum = schema.get("minItems", 0)
    prefix = schema.get("prefixItems", [])
    needed = prefix[:minimum]
    return [*needed, schema["items"]] if minimum > len(prefix) and "items" in schema else needed


def _anchors(value: Any, place: _Place = ()) -> Iterator[tuple[str, _Place]]:
    """Yield each ``$anchor`` with the place of its schema, except those inside plain values."""
    if isinstance(value, dict):
        if isinstance(value.get("$anchor"), str):
            yield value["$anchor"], place
        for key, item in value.items():
            if key not in ("const", "enum", "default", "examples"):
                yield from _anchors(item, (*place, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _anchors(item, (*place, str(number)))


# Values of keywords


def _mapping(schema: dict[str, Any], keyword: str, place: _Place) -> dict[str, Any]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        _refuse((*place, keyword), f"must be an object; got {short_repr(value)}", "Correct it.")
    return value


def _names(value: Any, place: _Place) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        _refuse(place, f"must be a list of names; got {short_repr(value)}", "Correct it.")
    return list(dict.fromkeys(value))


def _count(value: Any, place: _Place) -> int:
    number = _number_of(value)
    if number is None or number < 0 or number > _MAX_INTEGER or number != int(number):
        _refuse(
            place, f"must be a whole number from 0 to 2**53; got {short_repr(value)}", "Correct it."
        )
    return int(number)


def _number_of(value: Any) -> int | float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _decimal(value: float) -> Decimal:
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))


def _bound_number(value: Any, place: _Place) -> Decimal:
    number = _number_of(value)
    if number is None:
        _refuse(place, f"must be a number; got {short_repr(value)}", "Correct it.")
    if abs(number) > _MAX_INTEGER:
        _refuse(
            place,
            f"must be from -2**53 to 2**53; got {short_repr(value)}",
            "Leave it out and check the parsed response, or use a nearer bound.",
        )
    return _decimal(number)


def _inward(number: Decimal, rounding: str, *, excluded: bool, integer: bool) -> Decimal:
    """Return an inclusive bound on the inner side of a bound, with few digits."""
    exponent = 0 if integer else max(number.adjusted() + 1 - _DIGITS, -_DIGITS)
    if number == number.to_integral_value() and not excluded:
        return number  # integers up to 2**53 are exact
    unit = Decimal(1).scaleb(exponent if integer or number else 3 - _DIGITS)
    rounded = (number / unit).to_integral_value(rounding=rounding) * unit
    if excluded and rounded == number:
        rounded += unit if rounding == ROUND_CEILING else -unit
    return rounded


def _safe_bounds(minimum: float | None, maximum: float | None) -> dict[str, int | float | None]:
    """Return the bounds of integers. A bound that is missing becomes that of safe integers."""
    return {
        "minimum": min(-_SAFE_INTEGER, maximum or 0) if minimum is None else minimum,
        "maximum": max(_SAFE_INTEGER, minimum or 0) if maximum is None else maximum,
    }


def _decimal_bounds(
    minimum: float | None, maximum: float | None
) -> tuple[dict[str, float | None], float | None]:
    """Return the bounds of numbers with few decimals, and the unit of the last decimal.

    The bounds are multiples of the unit, and remain the same when the compiler rounds them to
    multiples. If there are none, return the given bounds and None.
    """
    bounds = _safe_bounds(minimum, maximum)
    lowest, highest = (_decimal(bounds[keyword] or 0) for keyword in ("minimum", "maximum"))
    for decimals in _DECIMALS:
        unit = Decimal(1).scaleb(-decimals)
        low = _written((lowest / unit).to_integral_value(ROUND_CEILING) * unit)
        high = _written((highest / unit).to_integral_value(ROUND_FLOOR) * unit)
        step = float(unit)
        if (
            low < high
            and math.ceil(low / step) * step == low
            and math.floor(high / step) * step == high
        ):
            return {"minimum": low, "maximum": high}, step
    return {"minimum": minimum, "maximum": maximum}, None


def _written(number: Decimal) -> int | float:
    return int(number) if number == number.to_integral_value() else float(number)


def _short_numbers(minimum: float | None, maximum: float | None) -> list[float]:
    """Return the numbers within bounds whose digits are the first digits of a bound.

    Args:
        minimum: the inclusive lower bound.
        maximum: the inclusive upper bound.
    """
    found: list[float] = []
    for bound in (
        _decimal(minimum) if minimum is not None and minimum < 0 else None,
        _decimal(maximum) if maximum is not None and maximum > 0 else None,
    ):
        for decimals in range(1, _SHORT_DECIMALS + 1):
            if bound is None or bound == round(bound, decimals):
                break
            number = float(bound.quantize(Decimal(1).scaleb(-decimals), ROUND_DOWN))
            digits = _decimal(number).normalize().as_tuple().digits
            within = (minimum is None or minimum <= number) and (
                maximum is None or number <= maximum
            )
            if number and within and len(digits) <= _LITERAL_DIGITS and number not in found:
                found.append(number)
    return found


def _factor(value: Any, place: _Place) -> int | float:
    """Return a factor such that floats divide as exactly as decimals do."""
    number = _number_of(value)
    if number is None or number <= 0:
        _refuse(place, f"must be a number above 0; got {short_repr(value)}", "Correct it.")
    if number == int(number) and number <= _MAX_INTEGER:
        return int(number)
    if number in (0.5, 0.25, 0.125):
        return float(number)
    _refuse(
        place,
        f"must be an integer up to 2**53, 0.5, 0.25 or 0.125; got {short_repr(value)}",
        "Use an integer, such as cents in place of 0.01, or leave it out and check the parsed "
        "response.",
    )


def _check_literal(value: Any, place: _Place) -> None:
    """Refuse values that no response can have, or that the compiler would round."""
    if isinstance(value, str):
        _check_literal_text(value, place)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_literal(item, (*place, str(index)))
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_literal_text(name, place)
            _check_literal(item, (*place, name))
    elif (number := _number_of(value)) is not None:
        if abs(number) > _MAX_INTEGER:
            _refuse(
                place,
                f"must be from -2**53 to 2**53; got {short_repr(value)}",
                "Use a text for the value.",
            )
        digits = _decimal(number).normalize().as_tuple().digits
        if isinstance(number, float) and len(digits) > _LITERAL_DIGITS:
            _refuse(
                place,
                f"must have at most {_LITERAL_DIGITS} digits; got {short_repr(value)}",
                "Use fewer digits, or a text for the value.",
            )


def _check_literal_text(text: str, place: _Place) -> None:
    wrong = next((char for char in text if _is_unwritable(char)), None)
    if wrong is not None:
        _refuse(
            place,
            f"has the control character {wrong!r}, which a response cannot contain",
            "Remove the character. Tabs and line ends are allowed.",
        )


def _is_unwritable(char: str) -> bool:
    return (char < " " and char not in "\b\t\n\f\r") or char == "\x7f"


def _types_of(value: Any) -> tuple[str, ...]:
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, (int, float)):
        return ("integer", "number")
    if isinstance(value, str):
        return ("string",)
    return ("array",) if isinstance(value, list) else ("object",)


def _identity(value: Any) -> tuple[str, Any]:
    """Return a value that is equal for equal JSON values, where 1 is 1.0 and not true."""
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, (int, float)):
        return "number", value
    if isinstance(value, str):
        return "text", value
    if isinstance(value, list):
        return "list", tuple(map(_identity, value))
    if isinstance(value, dict):
        return "object", frozenset((name, _identity(item)) for name, item in value.items())
    return "null", None


# Patterns

_NO_ONLY = "^(?!^[-+.]*$)"
"""How pydantic begins the pattern of a decimal: the text must not consist of signs and dots."""


def _patterns(pattern: Any, place: _Place) -> list[str]:
    """Return patterns that together mean what a pattern means to Python's `re`."""
    if not isinstance(pattern, str):
        _refuse(place, f"must be a text; got {short_repr(pattern)}", "Correct it.")
    if len(pattern) > MAX_PATTERN:
        _refuse(place, f"has more than {MAX_PATTERN:,} characters", "Use a shorter pattern.")
    if pattern.startswith(_NO_ONLY):
        rest = "^" + pattern[len(_NO_ONLY) :]
        return [_Pattern(rest, place).rewrite(), _Pattern("[^+.-]", place).rewrite()]
    return [_Pattern(pattern, place).rewrite()]


_REPEAT = re.compile(r"[*+?]|\{[0-9]+(,[0-9]*)?\}")
_SIMPLE_ESCAPES = "dwstnrfv"
# The compiler, Python and JavaScript, whose patterns JSON schemas use, differ in what is a digit, a
# letter or a space. What a pattern allows here, all of them allow.
_SPACES = (
    r"\x{9}\x{A}\x{C}\x{D}\x{20}\x{A0}\x{1680}\x{2000}-\x{200A}"
    r"\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
)
_NO_SPACE = r"[^\s\x{FEFF}]"
_NO_DIGIT = r"[^\p{Nd}]"
_NO_LETTER = r"[^\p{L}\p{N}_]"
_ANY = r"[^\x{A}\x{D}\x{2028}\x{2029}]"
_INCLUDED = {r"\s": _SPACES, r"\S": _NO_SPACE, r"\D": _NO_DIGIT, r"\W": _NO_LETTER}
_EXCLUDED = {r"\s": r"\s\x{FEFF}", r"\S": f"[^{_SPACES}]", r"\d": r"\p{Nd}", r"\w": r"\p{L}\p{N}_"}


class _Pattern:
    """A regular expression that is rewritten from left to right.

    It refuses what Python and the compiler read differently. Each class that excludes characters
    gets the character NUL too: if a class allowed every control character, the compiler would allow
    every escape, such as that of a quotation mark.
    """

    def __init__(self, text: str, place: _Place) -> None:
        self.text = text
        self.place = place
        self.index = 0
        self.out: list[str] = []

    def rewrite(self) -> str:
        parsers: dict[str, Callable[[], None]] = {
            "\\": self._escape,
            "[": self._class,
            "(": self._group,
        }
        while self.index < len(self.text):
            char = self.text[self.index]
            if char in parsers:
                parsers[char]()
            elif char in "*+?{":
                self._repeat()
            elif char == "\0":
                self._refuse("has the character NUL")
            elif char == ".":
                self.out.append(_ANY)
                self.index += 1
            else:
                self._keep(1)
        try:
            re.compile(self.text)
        except (re.error, OverflowError, RecursionError) as error:
            self._refuse(f"cannot be read by Python's re: {error}")
        return "".join(self.out)

    def _refuse(self, reason: str) -> NoReturn:
        _refuse(self.place, reason, "Use a simpler pattern, or check the parsed response.")

    def _keep(self, length: int) -> None:
        self.out.append(self.text[self.index : self.index + length])
        self.index += length

    def _group(self) -> None:
        named = re.compile(r"\(\?P<[A-Za-z_][A-Za-z0-9_]*>").match(self.text, self.index)
        if named:
            self.index = named.end()
            self.out.append("(?:")
        elif self.text.startswith("(?:", self.index):
            self._keep(3)
        elif self.text.startswith(("(?=", "(?!", "(?<=", "(?<!"), self.index):
            self._refuse("has a lookahead or lookbehind, which is not supported")
        elif self.text.startswith("(?", self.index):
            self._refuse("has a group or flag that begins with '(?', which is not supported")
        else:
            self._keep(1)

    def _repeat(self) -> None:
        found = _REPEAT.match(self.text, self.index)
        if not found:
            self._refuse("has '{' without a repetition such as '{2}' or '{2,5}'")
        self._keep(found.end() - self.index)
        if self.text.startswith("?", self.index):
            self._keep(1)
        if self.text.startswith("+", self.index):
            self._refuse("has a possessive repetition, which is not supported")

    def _escape(self) -> None:
        found = self._read_escape()
        if found == r"\s":
            self.out.append(f"[{_SPACES}]")
        elif found == "\0":
            self._refuse("has the character NUL")
        else:
            self.out.append(_INCLUDED.get(found, found))

    def _read_escape(self) -> str:
        r"""Read an escape and return it as the compiler reads it, or NUL for that character."""
        rest = self.text[self.index + 1 : self.index + 6]
        code = re.match(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})", rest)
        if code:
            number = int(code[1] or code[2], 16)
            self.index += 1 + code.end()
            if 0xD800 <= number <= 0xDFFF:
                self._refuse("has a surrogate")
            return f"\\x{{{number:X}}}" if number else "\0"
        char = rest[:1]
        if not char or not (
            char in _SIMPLE_ESCAPES + "DWS"
            or (char.isascii() and char.isprintable() and not char.isalnum() and char not in "<>")
        ):
            self._refuse(f"has the escape {short_repr(chr(92) + char)}, which is not supported")
        self.index += 2
        return f"\\{char}" if char.isalnum() else _literal(char)

    def _class(self) -> None:
        """Rewrite a class of characters."""
        start = self.index
        negated = self.text.startswith("[^", start)
        self.index += 2 if negated else 1
        items = [r"\x00"] if negated else []
        lows: list[tuple[str, str]] = []
        while True:
            if self.index >= len(self.text):
                self._refuse("has a class of characters without an end")
            if self.text[self.index] == "]":
                break
            low = self._class_item()
            high = low
            self._check_operator()
            is_range = (
                self.text.startswith("-", self.index)
                and self.index + 1 < len(self.text)
                and self.text[self.index + 1] != "]"
            )
            if is_range:
                self.index += 1
                high = self._class_item()
                if len(low) > 1 or len(high) > 1:
                    self._refuse("has a range of characters with the escape of a class")
            lows.append((low, high))
            items.append(self._shown_item(low, high, negated=negated))
        if not lows:
            self._refuse("has a class of characters that begins with ']'")
        self.index += 1
        if not negated and _has(lows, "\0") and not (_has(lows, '"') and _has(lows, "\\")):
            self._refuse("has the character NUL")
        self.out.append(rf"[{'^' if negated else ''}{''.join(items)}]")

    def _check_operator(self) -> None:
        if self.text.startswith(("&&", "--", "~~", "||"), self.index):
            self._refuse("has '&&', '--', '~~' or '||' inside a class of characters")

    def _class_item(self) -> str:
        """Return a character of a class, or an escape that stands for several characters."""
        char = self.text[self.index]
        if char == "[":
            self._refuse("has '[' inside a class of characters; write '\\['")
        self._check_operator()
        if char != "\\":
            self.index += 1
            return char
        found = self._read_escape()
        if found.startswith("\\x{"):
            return chr(int(found[3:-1], 16))
        if found[-1] in "tnrfv" and len(found) == 2:
            return {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}[found[-1]]
        if len(found) == 2 and found[1] in "dwsDWS":
            return found
        return found[-1]

    def _shown_item(self, low: str, high: str, *, negated: bool) -> str:
        if len(low) == 1:
            return _literal(low) if low == high else f"{_literal(low)}-{_literal(high)}"
        return (_EXCLUDED if negated else _INCLUDED).get(low, low)


def _literal(char: str) -> str:
    """Return a character as it is written in a pattern of the compiler."""
    return char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):X}}}"


def _has(ranges: Sequence[tuple[str, str]], char: str) -> bool:
    """Return whether a class has a character that is no digit, letter or space."""
    return any(
        low <= char <= high if len(low) == 1 else low in ("\\D", "\\S", "\\W")
        for low, high in ranges
    )
