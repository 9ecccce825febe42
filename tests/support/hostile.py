"""Grammars that crash, block or fill a compiler, by size; and random requests of strangers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
Options = dict[str, Any]


def chain(step: Callable[[Schema], Schema], length: int) -> Schema:
    """Return a schema of definitions, each of which `step` makes for a reference to the next."""
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
"""Steps of chains, by name."""

RULES: dict[str, str] = {
    "rules": 'a{0}: "x" a{1}\n',
    "aliases": "a{0}: a{1}\n",
    "alternatives": 'a{0}: "x" a{1} | "z"\n',
    "groups": 'a{0}: ("x" (("y" a{1})))\n',
    "attributes": 'a{0} [capture]: "x" a{1} // a0: "\n',
}
"""Rules of a Lark grammar that refer to the next rule, by name."""

TERMINALS: dict[str, str] = {
    "terminals": 'A{0}: "x" A{1}\n',
    "both": "A{0}: /[a-z]*/ & A{1}\n",
    "not": "A{0}: ~A{1}\n",
}

EXPRESSIONS: dict[str, Callable[[int], str]] = {
    "groups": lambda size: "(" * size + "x" + ")" * size,
    "alternatives": lambda size: "(y|" * size + "x" + ")" * size,
    "stars": lambda size: "(" * size + "x" + ")*" * size,
    "repetitions": lambda size: "a" + "{1,2}" * size,
    "classes": lambda size: "[" * size + "a" + "]" * size,
}
"""Regular expressions of a depth, by name."""

SWELLING = (".*a.{20}b", "(.*a.{12}b.*c.{9}d)+", "(.*a.{8}b){3}", r"(\w*\d\w{14}\D)+")
"""Short regular expressions whose states are many."""


def lark_chain(rule: str, length: int) -> str:
    """Return a Lark grammar whose rules refer to each other, `length` of them in a row."""
    name = "A" if rule.startswith("A") else "a"
    rules = "".join(rule.format(number, number + 1) for number in range(length))
    return f'start: {name}0\n{rules}{name}{length}: "y"\n'


def lark_json(schema: Schema) -> str:
    """Return a Lark grammar of a JSON schema as it is."""
    return f"start: %json {json.dumps(schema)}\n"


# Random requests -------------------------------------------------------------------------------

SIZES = (3, 20, 90, 150, 400, 900, 1_500, 4_000, 12_000)
"""Sizes of chains and of other structures: some below the limits, some above."""

ATOMS = ("a", ".", "[a-z]", r"\w", r"\d", r"\p{L}", "[^b]", "(a|bc)", "(?:xy)?", "x|y", r"\s", "é")
QUANTIFIERS = ("", "", "*", "+", "?", "{2}", "{1,9}", "{20}", "{0,300}", "{1000}", "*?", "{1,2}{3}")
KEYWORDS = ("anyOf", "oneOf", "allOf", "not", "items", "properties", "prefixItems", "contains")


def request_of(seed: int, number: int) -> Options:
    """Return the options of a case: ``json_schema``, ``regex`` or ``grammar``."""
    dice = random.Random(f"{seed} {number}")
    return dice.choice(KINDS)(dice)


def _chain(dice: random.Random) -> Options:
    """References, rules or groups, one within another."""
    size = dice.choice(SIZES)
    schema = chain(dice.choice([*SCHEMAS.values()]), min(size, SIZES[-2]))
    forms: list[Options] = [
        {"json_schema": schema},
        {"grammar": lark_json(schema)},
        {"grammar": lark_chain(dice.choice([*RULES.values(), *TERMINALS.values()]), size)},
        {"regex": dice.choice([*EXPRESSIONS.values()])(size)},
    ]
    return dice.choice(forms)


def _swelling(dice: random.Random) -> Options:
    regex = dice.choice(SWELLING)
    for digit in "12":
        regex = regex.replace(digit, str(dice.randrange(1, 4)))
    if dice.random() < 0.3:
        return {"grammar": f'start: a+\na: /{regex}/ "!" | /{regex}c/ "?"\n'}
    return {"regex": regex}


def _expression(dice: random.Random) -> Options:
    """A random expression, now and then with many conjunctions or a broken end."""
    parts = [dice.choice(ATOMS) + dice.choice(QUANTIFIERS) for _ in range(dice.randrange(1, 30))]
    regex = "".join(parts)
    if dice.random() < 0.3:
        regex = f"({regex}){dice.choice(QUANTIFIERS)}"
    if dice.random() < 0.1:
        regex = regex[: dice.randrange(len(regex) + 1)]
    if dice.random() < 0.2:
        ors = " & ".join(f"/(.*{a}.{{{n}}}{a}.*|{regex})/" for n, a in enumerate("abcdefg", 3))
        return {"grammar": f"start: A\nA: {ors}\n"}
    return {"regex": regex or "x"}


def _schema(dice: random.Random) -> Options:
    """A random schema whose definitions refer to each other, also in circles."""
    names = [f"d{number}" for number in range(dice.choice((1, 3, 10, 60)))]
    leaves: list[Callable[[], Any]] = [
        lambda: {"$ref": f"#/$defs/{dice.choice(names)}"},
        lambda: {"type": "string", "pattern": _expression(dice).get("regex", "^a*$")[:60]},
        lambda: {"type": "string", "minLength": dice.choice((0, 5, 3_000))},
        lambda: {"enum": list(range(dice.choice((1, 50, 3_000))))},
        lambda: {"type": "number", "multipleOf": dice.choice((3, 7, 0.5))},
        lambda: True,
    ]

    def schema(depth: int) -> Any:
        if depth <= 0 or dice.random() < 0.2:
            return dice.choice(leaves)()
        keyword = dice.choice(KEYWORDS)
        inside = [schema(depth - 1) for _ in range(dice.choice((1, 2, 3, 12)))]
        if keyword == "properties":
            named = {f"p{number}": each for number, each in enumerate(inside)}
            return {"type": "object", "properties": named, "required": ["p0"]}
        if keyword in ("items", "not", "contains"):
            return {"type": "array", keyword: inside[0], "minItems": dice.choice((0, 2, 900))}
        return {keyword: inside}

    root = {"items": schema(4), "$defs": {name: schema(3) for name in names}}
    return {"grammar": lark_json(root)} if dice.random() < 0.3 else {"json_schema": root}


def _wide(dice: random.Random) -> Options:
    """Many alternatives, or combinations whose number of cases is a product."""
    names = [f"x{number}" for number in range(dice.choice((300, 3_000, 30_000)))]
    parts = [
        {"anyOf": [{"type": "string", "minLength": 3 * one + other} for other in range(8)]}
        for one in range(dice.choice((3, 8, 16)))
    ]
    forms: list[Options] = [
        {"grammar": "start: " + " | ".join(f'"{name}"' for name in names) + "\n"},
        {"regex": "|".join(names)},
        {"json_schema": {"properties": {name: {"type": "string"} for name in names[::10]}}},
        {"json_schema": {"enum": names}},
        {"json_schema": {dice.choice(("allOf", "anyOf", "oneOf")): parts}},
    ]
    return dice.choice(forms)


def _ambiguous(dice: random.Random) -> Options:
    """Grammars with many derivations of the same text."""
    rules = [
        'start: e\ne: e e | e e e | "a" | ""\n',
        'start: a+\na: b* c*\nb: "x"* a?\nc: "x"+ | b b b\n',
        f"start: a{{0,{dice.choice((9, 200, 5_000))}}}\na: /[a-z]*/ b\nb: /[a-m]*/ | a?\n",
        'start: e\ne: "(" e ")" e | e e | "x"{1,50}\n',
        'start: e\ne: e "+" e | e "*" e | /[0-9]+/ | /[0-9a-f]+/ | /.+/\n',
    ]
    return {"grammar": dice.choice(rules)}


def _broken(dice: random.Random) -> Options:
    """A grammar in which some characters are others."""
    ((option, source),) = request_of(dice.randrange(1 << 30), 0).items()
    characters = [*(source if isinstance(source, str) else json.dumps(source))[:20_000]]
    for _ in range(dice.choice((1, 3, 30))):
        characters[dice.randrange(len(characters))] = dice.choice('(){}[]|"/\\%:&~*\n a1\x00é')
    return {"regex" if option == "regex" else "grammar": "".join(characters)}


KINDS = (_chain, _chain, _chain, _swelling, _expression, _schema, _wide, _ambiguous, _broken)
"""The functions that make the options of a case."""
