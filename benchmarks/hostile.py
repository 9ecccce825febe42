"""Grammars of any size that could crash a compiler, block it, or fill its memory."""

import json
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]


def chain(step: Callable[[Schema], Schema], length: int) -> Schema:
    """Return a schema of definitions. `step` makes each of them from a reference to the next."""
    names = [f"d{number}" for number in range(length + 1)]
    links = [{"$ref": f"#/$defs/{name}"} for name in names]
    definitions = {name: step(link) for name, link in zip(names, links[1:], strict=False)}
    return {**links[0], "$defs": {**definitions, names[-1]: {"type": "string"}}}


SCHEMAS: dict[str, Callable[[Schema], Schema]] = {
    "references": lambda link: link,
    "objects": lambda link: {"type": "object", "properties": {"x": link}, "required": ["x"]},
    "arrays": lambda link: {"type": "array", "items": link},
    "anyOf": lambda link: {"anyOf": [link, {"type": "null"}]},
    "allOf": lambda link: {"allOf": [link, {"minLength": 1}]},
}
"""Functions that make a schema from a reference, for `chain`, by name."""

RULES: dict[str, str] = {
    "rules": 'a{0}: "x" a{1}\n',
    "aliases": "a{0}: a{1}\n",
    "alternatives": 'a{0}: "x" a{1} | "z"\n',
    "groups": 'a{0}: ("x" (("y" a{1})))\n',
    "attributes": 'a{0} [capture]: "x" a{1} // a0: "\n',
}
"""Rules of a Lark grammar that refer to the next rule, by name."""

SWELLING = (".*a.{20}b", "(.*a.{12}b.*c.{9}d)+", "(.*a.{8}b){3}", r"(\w*\d\w{14}\D)+")
"""Short regular expressions with many states."""


def lark_chain(rule: str, length: int) -> str:
    """Return a Lark grammar whose rules refer to each other, `length` of them in a row."""
    name = "A" if rule.startswith("A") else "a"
    rules = "".join(rule.format(number, number + 1) for number in range(length))
    return f'start: {name}0\n{rules}{name}{length}: "y"\n'


def lark_json(schema: Schema) -> str:
    """Return a Lark grammar that contains a JSON schema."""
    return f"start: %json {json.dumps(schema)}\n"
