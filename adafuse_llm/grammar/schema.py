"""JSON schemas that a grammar compiler enforces exactly.

llguidance enforces most keywords of a schema, and refuses most others. `enforceable` refuses or
narrows the rest. Its result can be narrower than the schema, but never wider. For example, times
have no leap second, numbers are within 2**53 and have at most 9 decimals, and an array of values of
an ``enum`` has at most as many items as the ``enum`` has values, unless the schema sets a limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, NoReturn
from urllib.parse import unquote

from adafuse_llm.errors import GrammarError, short_repr

COMPILE_OPTIONS: Mapping[str, Any] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": True,
}
"""The options of llguidance for schemas from `enforceable`. They permit no ``\\uXXXX``, which could
spell the name of a property so that its schema does not apply. ``oneOf`` counts as ``anyOf``, so
`enforceable` checks that no two schemas of a ``oneOf`` overlap."""

_CHECK = "Leave it out and check the parsed response."
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("not", "if", "then", "else", "uniqueItems", "dependencies"), _CHECK),
    **dict.fromkeys(("contains", "minContains", "maxContains", "unevaluatedItems"), _CHECK),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "unevaluatedProperties"), _CHECK),
    **dict.fromkeys(("disallow", "divisibleBy", "extends"), "Use draft 2020-12."),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), "Use '$ref'."),
    "$id": "Only the whole schema can have it.",
}
"""The keywords that `enforceable` refuses, each with what to do instead."""

_NUMBERS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
_DEFINITIONS, _JOINED = {"$defs", "definitions"}, {"$ref", "anyOf", "oneOf"}
_MAPS = ("properties", "patternProperties", *_DEFINITIONS)
_FIXED, _COMBINED = ("$ref", "const", "enum"), ("allOf", "anyOf", "oneOf")
_LISTS = (*_COMBINED, "prefixItems")
_SCHEMAS = (*_LISTS, "items", "additionalItems", "additionalProperties", "propertyNames")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_KEPT = (*_FIXED, *_COUNTS, "type", "required")
_CLASSES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(_MAPS, (dict,)),
    **dict.fromkeys((*_LISTS, "enum", "required"), (list,)),
    **dict.fromkeys(("pattern", "format", "$ref"), (str,)),
    **dict.fromkeys(_NUMBERS, (int, float)),
    "type": (str, list),
}
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_REFERENCE = {"$ref", "title", "description"}
_DECIMALS, _DIGITS, _MAX_INTEGER, _FEW = 9, 15, 2**53, 12
_LEAP = "([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
_DATE = f"^([1-9][0-9]{{3}}-(0[13-9]|1|02-[01]|02-2[0-8])|{_LEAP}-02-29)"
_TIME = r":[0-9]{2}:[0-5][0-9](\.[0-9]{1,6})?[Z+-]"
_FORMATS: Mapping[str, str | None] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}.*T.*{_TIME}",
    "duration": "^([^0-9]|[0-9]{1,6}[^0-9])*$",
    "email": r"^[^@]{1,64}@[^.]{1,63}(\.[^.]{1,63})*$",
    "hostname": "^.{1,253}$",
    "uri": "^[^:]{1,40}:",
    **dict.fromkeys(("ipv4", "ipv6", "uuid"), ""),
    **dict.fromkeys(("binary", "password", "path")),
}
"""By format, the pattern that texts must fit besides the compiler's rule: days and seconds must
exist, and parts must be short, because a text cannot end inside one. None: any text fits."""

_CONTROLS = r"\x00-\x07\x0B\x0E-\x1F\x7F"  # characters that a response cannot contain
_DOT = r"[^\x{A}\x{D}\x{2028}\x{2029}]"
_WRITTEN = {r"\s": r"[\s--\x85]", r"\S": r"[^\s\x{FEFF}]", "[^": rf"[^[{_CONTROLS}\x85\uFEFF]"}
"""By part of a pattern, its replacement, which the compiler reads as JavaScript reads the part. A
``[^...]`` also excludes control characters; else, the compiler would let it match every escape."""
_HEX = "[0-9a-fA-F]"
_ESCAPE = rf"\\(?:[dDwWsStnrf]|x(?![017]){_HEX}{{2}}|u(?!00[017]){_HEX}{{4}}|[ -/:;=?@\[-`{{-~])"
_CLASS = rf"\[\^?(?!\])(?:{_ESCAPE}|(?!&&|--|~~|\|\|)[^\\\[\]{_CONTROLS}])*\]"
_READABLE = re.compile(rf"(?:{_ESCAPE}|{_CLASS}|\(\?:|(?!\{{,|\(\?|[*+?}}]\+)[^\\\[{_CONTROLS}])*")
"""Matches the supported patterns: no flags, look-around, back-references or control characters."""
_LOOKAHEAD = "^(?!^[-+.]*$)"  # so begins the pattern of pydantic's decimals
Path = tuple[str, ...]
Parts = dict[Path, tuple[dict[str, Any], dict[str, Any]]]  # as given, and as compiled


def enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that llguidance enforces with `COMPILE_OPTIONS`. It allows no more values.

    Raises:
        GrammarError: the schema is invalid, or uses a keyword that cannot be enforced. The message
            names the keyword with its path, such as ``properties.age.minimum``.
    """
    if not isinstance(schema, dict):
        _refuse((), f"must be an object, such as {{'type': 'object'}}; got {short_repr(schema)}")
    parts: Parts = {}
    try:
        prepared: dict[str, Any] = _prepared(schema, (), parts)
    except RecursionError:
        _refuse((), "is nested too deeply", "Move inner schemas to '$defs' and use '$ref'.")
    # the compiler does not enforce "multipleOf" where it combines parts of a schema
    is_joint = any(
        "allOf" in given or (_JOINED & out.keys() and out.keys() - _JOINED - _DEFINITIONS)
        for given, out in parts.values()
    )
    for path, (given, out) in parts.items():
        if "$ref" in out and _pointer(out["$ref"]) not in parts:
            _refuse((*path, "$ref"), "must be '#/...' with the path to a schema", "Correct it.")
        if "prefixItems" in out and "2020-12" not in str(schema.get("$schema", "2020-12")):
            _refuse((*path, "prefixItems"), "belongs to draft 2020-12", "Use a list in 'items'.")
        if "multipleOf" in given and is_joint:
            _refuse((*path, "multipleOf"), "is not supported beside schemas that are combined")
        if "oneOf" in out and not _are_exclusive(given["oneOf"], parts):
            _refuse((*path, "oneOf"), "has schemas that may overlap", "Use 'anyOf'.")
        values = _target(given.get("items"), parts).get("enum")
        if values is not None and not {"minItems", "maxItems", "prefixItems"} & given.keys():
            out["maxItems"] = len(values)  # else a small model repeats them without end
        if out.pop("propertyNames", None) is not None:
            _limit_names(given["propertyNames"], (*path, "propertyNames"), out, parts)
    return prepared


def _prepared(schema: Any, path: Path, parts: Parts) -> Any:
    if isinstance(schema, list):
        return [_prepared(each, (*path, str(n)), parts) for n, each in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    schema = {key: each for key, each in schema.items() if not is_absent(key, each)}
    # keep inner schemas, constants and limits, but no annotations
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        place = (*path, keyword)
        _check_keyword(keyword, value, place)
        if keyword in _MAPS:
            is_pattern = keyword == "patternProperties"
            names = [_pattern(name, place) for name in value] if is_pattern else value
            inner = [_prepared(value[name], (*place, name), parts) for name in value]
            kept[keyword] = dict(zip(names, inner, strict=True))
        elif keyword in _SCHEMAS:
            kept[keyword] = _prepared(value, place, parts)
        elif keyword in _KEPT:
            _check_constant(value, place)
            kept[keyword] = value
    if not isinstance(kept.get("items"), list):  # lists are tuples, as before draft 2020-12
        kept.pop("additionalItems", None)
    # without a type, a schema also allows numbers and strings
    types = schema.get("type", "number or string")
    if "number" in types or "integer" in types:
        _add_bounds(schema, path, kept)
    if "string" in types:
        _add_patterns(schema, path, kept)
    # The compiler reads keywords in order. Those that belong together must be neighbors.
    out = dict(sorted(kept.items(), key=lambda item: item[0] in _FIXED + _COMBINED))
    parts[path] = schema, out
    return out


def is_absent(keyword: str, value: Any) -> bool:
    """Return whether `value` stands for an absent keyword, as null does, and [] for a map."""
    return keyword != "const" and (value is None or (keyword in _MAPS and value == []))


def _check_keyword(keyword: str, value: Any, path: Path) -> None:
    if keyword in _REFUSED and (keyword, value) != ("uniqueItems", False) and path != ("$id",):
        _refuse(path, "is not supported", _REFUSED[keyword])
    if keyword == "minProperties" and value not in (0, 1):  # names can be repeated
        _refuse(path, "is supported only up to 1", "Use 'required', or check the parsed response.")
    if type(value) not in _CLASSES.get(keyword, (type(value),)):
        _refuse(path, f"has the wrong type; got {short_repr(value)}", "Correct it.")
    if keyword == "enum" and not value:
        _refuse(path, "allows no value", "Correct it.")
    kinds = (value if isinstance(value, list) else [value]) if keyword == "type" else []
    if any(kind not in _TYPES for kind in kinds):
        _refuse(path, f"must be of {', '.join(_TYPES)}; got {short_repr(value)}", "Correct it.")


def _check_constant(value: Any, path: Path) -> None:
    # a response must be able to contain the value, and the compiler must not round it
    inner = list(value.values()) if isinstance(value, dict) else value
    for each in inner if isinstance(inner, list) else ():
        _check_constant(each, path)
    if isinstance(value, str) and re.search(f"[{_CONTROLS}]", value):
        _refuse(path, "has a control character, which a response cannot contain")
    is_number = type(value) in (int, float)
    if is_number and len(Decimal(str(value)).normalize().as_tuple().digits) > _DIGITS:
        _refuse(path, f"has a number of more than {_DIGITS} digits")


def _add_bounds(schema: dict[str, Any], path: Path, out: dict[str, Any]) -> None:
    # give numbers bounds and a limit of decimals, because the compiler needs both
    numbers = {key: Decimal(str(schema[key])) for key in _NUMBERS if key in schema}
    is_literal = "const" in schema or "enum" in schema
    if not numbers and (is_literal or "type" not in schema):
        return
    exact = {k: n for k, n in numbers.items() if "exclusive" in k or n != n.to_integral_value()}
    digits = max((number.adjusted() + 1 for number in exact.values()), default=0)
    unit = Decimal(1).scaleb(-max(0, min(_DECIMALS, _DIGITS - digits)))
    # The compiler divides only small numbers exactly, and only by binary fractions, not by 0.01.
    fraction = Decimal("0.125")
    most = _MAX_INTEGER * (fraction if "multipleOf" in exact else 1)
    for keyword, number in numbers.items():
        step = max(unit, fraction) if keyword == "multipleOf" else unit
        least = step if keyword == "multipleOf" else -most
        if not least <= schema[keyword] <= most or number % step:
            _refuse((*path, keyword), f"must be within {most:.0f} and a multiple of {step:f}")
    # Below a maximum of 9.5, the compiler would accept 9 in spite of an exclusive minimum of 9.
    low = max(numbers.get("minimum", 1 - most), numbers.get("exclusiveMinimum", -most) + unit)
    high = min(numbers.get("maximum", most - 1), numbers.get("exclusiveMaximum", most) - unit)
    for keyword, bound in (("minimum", low), ("maximum", high)):
        out[keyword] = float(bound) if bound % 1 else int(bound)
    if "multipleOf" in schema:
        out["multipleOf"] = schema["multipleOf"]
    if "number" in schema.get("type", "number") and not is_literal:
        out.setdefault("multipleOf", float(unit))


def _add_patterns(schema: dict[str, Any], path: Path, out: dict[str, Any]) -> None:
    pattern, name = schema.get("pattern", ""), schema.get("format", "path")
    if name not in _FORMATS:
        _refuse((*path, "format"), f"must be one of {', '.join(_FORMATS)}; got {name!r:.40}")
    patterns = [_FORMATS[name]]
    if _FORMATS[name] is not None:
        out["format"] = name
    if pattern.startswith(_LOOKAHEAD):
        pattern = f"^{pattern.removeprefix(_LOOKAHEAD)}"
        patterns.append("[^-+.]")
    # one pattern stands in the schema itself, and the others in `allOf`
    for each in filter(None, [_pattern(pattern, (*path, "pattern")), *patterns]):
        if "pattern" in out:
            out["allOf"] = [*out.get("allOf", ()), {"pattern": each}]
        out.setdefault("pattern", each)


def _pattern(pattern: str, path: Path) -> str:
    if not _READABLE.fullmatch(pattern):
        _refuse(path, "has a flag, lookahead, or another part that is not supported")
    pattern = re.sub(rf"{_CLASS}|\\.|(\.)", lambda match: _DOT if match[1] else match[0], pattern)
    return re.sub(r"\\.|\[\^", lambda match: _WRITTEN.get(match[0], match[0]), pattern)


def _limit_names(schema: Any, path: Path, out: dict[str, Any], parts: Parts) -> None:
    # the allowed names come from an enum or a constant
    target = _target(schema, parts)
    names = target.get("enum", [target.get("const")])
    limits = target.keys() - {"title", "description", "enum" if "enum" in target else "const"}
    if target.get("type") == "string":
        limits.remove("type")
    if not limits and names == [None]:
        return
    others = {"properties", "patternProperties"} & out.keys()
    if limits or others or not all(isinstance(name, str) for name in names):
        _refuse(path, "is supported only as an 'enum' of names, beside 'additionalProperties'")
    # properties with these names get the schema of additional ones, and others are forbidden
    pattern = _pattern(f"^({'|'.join(map(re.escape, names))})$", path)
    out["patternProperties"] = {pattern: out.get("additionalProperties", True)}
    out |= {"maxProperties": len(names), **out, "additionalProperties": False}


def _are_exclusive(schemas: list[Any], parts: Parts) -> bool:
    if len(schemas) < 2:
        return True
    # list the alternatives of each schema
    groups = [_alternatives(schema, parts, set()) for schema in schemas]
    every = [option for group in groups for option in group]

    def are_different(values: Callable[[dict[str, Any]], list[Any]]) -> bool:
        own = [dict.fromkeys(v for option in group for v in values(option)) for group in groups]
        flat = [value for each in own for value in each]
        return None not in flat and len(flat) == len(set(flat))  # None stands for other values

    def kind(option: dict[str, Any]) -> list[Any]:
        name = option.get("type")
        return [{"integer": "number"}.get(name, name) if isinstance(name, str) else None]

    def constants(name: str, option: dict[str, Any]) -> list[Any]:
        return _constants(option.get("properties", {}).get(name), parts)

    # schemas are exclusive if their types differ, or their constants, or the constants of a
    # property that all of them require
    required = every[0].get("required", ())[:_FEW]
    names = [n for n in required if all(n in option.get("required", ()) for option in every)]
    ways = [kind, lambda option: _constants(option, parts)]
    if all(option.get("type") == "object" for option in every):
        ways += (partial(constants, str(name)) for name in names)
    return any(map(are_different, ways))


def _alternatives(schema: Any, parts: Parts, seen: set[int]) -> list[dict[str, Any]]:
    target = _target(schema, parts)
    # a schema that is only a "oneOf" stands for its alternatives, unless it contains itself
    is_nested = {"oneOf"} <= target.keys() <= {"oneOf", "discriminator", *_REFERENCE}
    if is_nested and id(target) not in seen:
        seen.add(id(target))
        return [option for each in target["oneOf"] for option in _alternatives(each, parts, seen)]
    return [target]


def _constants(schema: Any, parts: Parts) -> list[Any]:
    schema = _target(schema, parts)
    # None stands for values that are not constant texts or integers
    values = [schema["const"]] if "const" in schema else schema.get("enum", [None])
    return values if all(isinstance(value, (str, int)) for value in values) else [None]


def _target(schema: Any, parts: Parts) -> dict[str, Any]:
    for _ in range(_FEW):
        if isinstance(schema, dict) and {"$ref"} <= schema.keys() <= _REFERENCE:
            schema, _ = parts.get(_pointer(schema["$ref"]), (schema, {}))
    if schema is False:  # no value fits
        return {"enum": []}
    return schema if isinstance(schema, dict) else {}


def _pointer(ref: str) -> Path:
    start, *keys = unquote(ref).split("/")
    path = tuple(key.replace("~1", "/").replace("~0", "~") for key in keys)
    return path if start == "#" else ("",)  # no schema has this path


def _refuse(path: Path, reason: str, remedy: str = _CHECK) -> NoReturn:
    where = f"'{'.'.join(path)[-200:]}'" if path else "it"
    error = GrammarError(f"the JSON schema cannot be enforced: {where} {reason}. {remedy}")
    error.path = path
    raise error
