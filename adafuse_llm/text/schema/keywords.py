"""The keywords of JSON schemas, and how a grammar compiler is told to enforce each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adafuse_llm.text.schema.disjoint import TYPES, Disjoint
from adafuse_llm.text.schema.formats import FORMATS
from adafuse_llm.text.schema.numbers import KEYWORDS as NUMBER_KEYWORDS
from adafuse_llm.text.schema.numbers import Numbers
from adafuse_llm.text.schema.patterns import compiler_patterns
from adafuse_llm.text.schema.references import Document
from adafuse_llm.text.schema.values import (
    LEAVE_OUT,
    Path,
    check_literal,
    count,
    names,
    refuse,
    refuse_value,
)

_VALUES = ("type", "const", "enum", "allOf", "anyOf", "oneOf", "$ref")
_TEXTS = ("minLength", "maxLength", "pattern", "format")
_ARRAYS = ("items", "prefixItems", "additionalItems", "minItems", "maxItems")
_OBJECTS = (
    *("properties", "patternProperties", "additionalProperties", "propertyNames", "required"),
    "minProperties",
)
_ENFORCED = frozenset({*_VALUES, *NUMBER_KEYWORDS, *_TEXTS, *_ARRAYS, *_OBJECTS})
"""The keywords that are enforced exactly. All others that limit values are refused."""

_LIMITS: Mapping[str, str] = {
    **dict.fromkeys((*_VALUES, "not", "if", "$dynamicRef", "$recursiveRef"), "value"),
    **dict.fromkeys(NUMBER_KEYWORDS, "number"),
    **dict.fromkeys(_TEXTS, "string"),
    **dict.fromkeys((*_ARRAYS, "uniqueItems", "contains", "unevaluatedItems"), "array"),
    **dict.fromkeys((*_OBJECTS, "maxProperties", "unevaluatedProperties"), "object"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), "object"),
}
"""All keywords of JSON Schema that limit values, each with the type of these values."""

_ANYTHING: tuple[Any, ...] = (True, {})
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("not", "uniqueItems"), (False,)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), _ANYTHING),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}
"""Values of refused keywords that limit nothing."""

_REQUIRE = "Name the properties in 'required', or leave it out and check the parsed response."
_REMEDIES: Mapping[str, str] = {
    "if": "Use 'anyOf' with one schema per case, or leave it out and check the parsed response.",
    "$dynamicRef": "Use '$ref'.",
    "$recursiveRef": "Use '$ref'.",
    "unevaluatedItems": "Use 'items': false.",
    "unevaluatedProperties": "Use 'additionalProperties': false in one schema that names all "
    "properties.",
    "dependentRequired": _REQUIRE,
}
"""What to do without a refused keyword, unless it is to leave it out."""

_Schema = dict[str, Any] | bool


class Preparation:
    """The preparation of one schema.

    Args:
        root: the schema as plain JSON values.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._document = Document(root)
        self._names: dict[Path, str] = {}
        self._todo: list[tuple[Path, Any]] = []
        self._one_ofs: list[tuple[list[Any], Path, frozenset[str]]] = []
        self._numbers = Numbers()

    def run(self) -> dict[str, Any]:
        """Return the schema as it is to be compiled."""
        prepared = self._schema(self._document.root, ())
        assert isinstance(prepared, dict), "the root is no boolean"
        definitions: dict[str, _Schema] = {}
        while self._todo:
            path, target = self._todo.pop()
            definitions[self._names[path]] = self._schema(target, path)
        self._check_one_ofs()
        self._numbers.finish()
        return {**prepared, "$defs": definitions} if definitions else prepared

    # Schemas

    def _schema(self, schema: Any, path: Path, types: frozenset[str] = TYPES) -> _Schema:
        """Return a schema as it is to be compiled.

        Args:
            schema: the schema.
            path: where it is.
            types: the types that the schemas around it allow for the same value.
        """
        self._document.step()
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            refuse_value(path, "a schema, which is an object, true or false", schema)
        self._document.check_part(schema, path)
        if "$ref" in schema and self._document.draft <= 7:  # keywords beside it have no effect
            return {"$ref": self._ref(schema["$ref"], path)}
        self._numbers.note(schema)
        own = _types(schema, path)
        _check_keywords(schema, path, own)
        out: dict[str, Any] = {
            key: schema[key] for key in ("type", "const", "enum") if key in schema
        }
        self._check_values(schema, path)
        if "$ref" in schema:
            out["$ref"] = self._ref(schema["$ref"], path)
        if own & {"integer", "number"}:
            self._numbers.add(schema, path, out, integer="number" not in own)
        if "string" in own:
            self._string(schema, path, out)
        if "array" in own:
            self._array(schema, path, out)
        if "object" in own:
            self._object(schema, path, out)
        self._combination(schema, path, out, types & own)
        return out

    def _check_values(self, schema: dict[str, Any], path: Path) -> None:
        values = schema.get("enum", [None])
        if not isinstance(values, list) or not values:
            refuse_value((*path, "enum"), "a list of at least one value", values)
        for keyword in "const", "enum":
            if keyword in schema:
                self._document.step(check_literal(schema[keyword], (*path, keyword)))

    def _list(self, schemas: Any, path: Path, types: frozenset[str] = TYPES) -> list[_Schema]:
        if not isinstance(schemas, list) or not schemas:
            refuse_value(path, "a list of schemas", schemas)
        return [self._schema(each, (*path, str(n)), types) for n, each in enumerate(schemas)]

    def _map(self, schema: dict[str, Any], keyword: str, path: Path) -> dict[str, _Schema]:
        found = schema.get(keyword, {})
        if not isinstance(found, dict):
            refuse_value((*path, keyword), "an object", found)
        return {name: self._schema(each, (*path, keyword, name)) for name, each in found.items()}

    # Types

    def _string(self, schema: dict[str, Any], path: Path, out: dict[str, Any]) -> None:
        _counts(schema, path, out, "minLength", "maxLength")
        patterns = []
        if "pattern" in schema:
            patterns += self._patterns(schema["pattern"], (*path, "pattern"))
        if "format" in schema:
            name = schema["format"]
            if not isinstance(name, str) or name not in FORMATS:
                allowed = f"one of {', '.join(sorted(FORMATS))}"
                refuse_value((*path, "format"), allowed, name, "Use one of them or a pattern.")
            form = dict(FORMATS[name])
            patterns += [form.pop("pattern")] if "pattern" in form else []
            if "maxLength" in form and "maxLength" in out:
                form["maxLength"] = min(form["maxLength"], out["maxLength"])
            out.update(form)
        if patterns:
            out["pattern"] = patterns[0]
            out["allOf"] = [*out.get("allOf", ()), *({"pattern": each} for each in patterns[1:])]

    def _patterns(self, pattern: Any, path: Path) -> list[str]:
        if not isinstance(pattern, str):
            refuse_value(path, "a text", pattern)
        self._document.step(len(pattern))
        return compiler_patterns(pattern, path)

    def _array(self, schema: dict[str, Any], path: Path, out: dict[str, Any]) -> None:
        _counts(schema, path, out, "minItems", "maxItems")
        prefix, rest = "prefixItems", "items"
        if isinstance(schema.get("items"), list):  # as before draft 2020-12
            prefix, rest = "items", "additionalItems"
        if "prefixItems" in schema and (prefix == "items" or self._document.draft < 2020):
            refuse(
                (*path, "prefixItems"),
                "is not part of the draft that '$schema' names, or stands beside a list in 'items'",
                "Use draft 2020-12 with a schema in 'items', or leave 'prefixItems' out.",
            )
        if prefix in schema:
            out["prefixItems"] = self._list(schema[prefix], (*path, prefix))
        if rest in schema:
            out["items"] = self._schema(schema[rest], (*path, rest))

    def _object(self, schema: dict[str, Any], path: Path, out: dict[str, Any]) -> None:
        required = names(schema.get("required", []), (*path, "required"))
        if required:
            out["required"] = required
        if properties := self._map(schema, "properties", path):
            out["properties"] = properties
        for pattern, each in self._map(schema, "patternProperties", path).items():
            place = (*path, "patternProperties", pattern)
            written, *others = self._patterns(pattern, place)
            known = out.setdefault("patternProperties", {})
            if others or written in known:
                refuse(place, "cannot be combined with the other patterns")
            known[written] = each
        if "additionalProperties" in schema:
            out["additionalProperties"] = self._schema(
                schema["additionalProperties"], (*path, "additionalProperties")
            )
        if schema.get("propertyNames", True) not in _ANYTHING:
            self._property_names(schema["propertyNames"], (*path, "propertyNames"), out)
        # A response can repeat the name of an additional property, so that counting pairs would
        # accept fewer properties than the minimum.
        if count(schema.get("minProperties", 0), (*path, "minProperties")) > len(required):
            refuse(
                (*path, "minProperties"),
                "is greater than the number of names in 'required'",
                _REQUIRE,
            )

    def _property_names(self, schema: Any, path: Path, out: dict[str, Any]) -> None:
        """Replace ``propertyNames`` by named properties, if it names all of them."""
        followed = self._document.follow(schema)
        allowed: Any = None
        if isinstance(followed, dict):
            known = {"enum", "const", "type", "title", "description"}
            if followed.keys() <= known and followed.get("type", "string") == "string":
                allowed = [followed["const"]] if "const" in followed else followed.get("enum")
        if not isinstance(allowed, list) or "patternProperties" in out:
            refuse(path, "is supported only as an 'enum' of names, without 'patternProperties'")
        other = out.get("additionalProperties", True)
        named = out.get("properties", {})
        out["properties"] = dict.fromkeys(named, False) | {
            name: named.get(name, other) for name in allowed if isinstance(name, str)
        }
        out["additionalProperties"] = False

    # Combinations

    def _combination(
        self, schema: dict[str, Any], path: Path, out: dict[str, Any], types: frozenset[str]
    ) -> None:
        every = out.pop("allOf", [])
        if "allOf" in schema:
            every = self._list(schema["allOf"], (*path, "allOf"), types) + every
        if "anyOf" in schema:
            out["anyOf"] = self._list(schema["anyOf"], (*path, "anyOf"), types)
        if "oneOf" in schema:
            options = self._list(schema["oneOf"], (*path, "oneOf"), types)
            self._one_ofs.append((schema["oneOf"], (*path, "oneOf"), types))
            if "anyOf" in out:
                every.append({"anyOf": options})
            else:
                out["anyOf"] = options
        if every:
            out["allOf"] = every

    def _check_one_ofs(self) -> None:
        """Refuse options of ``oneOf`` of which more than one could allow a value."""
        disjoint = Disjoint(self._document)
        for options, path, types in self._one_ofs:
            number = disjoint.overlap(options, types)
            if number is not None:
                refuse(
                    (*path, str(number)),
                    "may allow a value that another option of 'oneOf' allows too",
                    "Use 'anyOf', or give each option a required property with a different "
                    "'const'.",
                )

    def _ref(self, ref: Any, path: Path) -> str:
        found, target = self._document.find(ref, (*path, "$ref"))
        if found not in self._names:
            self._names[found] = str(len(self._names))
            self._todo.append((found, target))
        return f"#/$defs/{self._names[found]}"


def _types(schema: dict[str, Any], path: Path) -> frozenset[str]:
    if "type" not in schema:
        return TYPES
    given = schema["type"]
    found = [given] if isinstance(given, str) else given
    if (
        not isinstance(found, list)
        or not found
        or not all(isinstance(name, str) and name in TYPES for name in found)
    ):
        refuse_value((*path, "type"), f"one or more of {', '.join(sorted(TYPES))}", given)
    return frozenset(found) | ({"integer"} if "number" in found else set())


def _check_keywords(schema: dict[str, Any], path: Path, types: frozenset[str]) -> None:
    """Refuse keywords that limit values of some types and cannot be enforced."""
    for keyword, value in schema.items():
        if (
            keyword not in _ENFORCED
            and _LIMITS.get(keyword) in {"value", *types}
            and value not in _WITHOUT_EFFECT.get(keyword, ())
            and not (keyword == "if" and not {"then", "else"} & schema.keys())
            and not (keyword == "uniqueItems" and schema.get("maxItems") in (0, 1))
        ):
            refuse((*path, keyword), "is not supported", _REMEDIES.get(keyword, LEAVE_OUT))


def _counts(schema: dict[str, Any], path: Path, out: dict[str, Any], *keywords: str) -> None:
    for keyword in keywords:
        if keyword in schema:
            out[keyword] = count(schema[keyword], (*path, keyword))
