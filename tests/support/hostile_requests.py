"""Random requests of strangers whose schemas, expressions and grammars are meant to do harm."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.support.hostile import (
    EXPRESSIONS,
    RULES,
    SCHEMAS,
    SWELLING,
    TERMINALS,
    chain,
    lark_chain,
    lark_json,
)

Options = dict[str, Any]

SIZES = (3, 20, 90, 150, 400, 900, 1_500, 4_000, 12_000)
"""Sizes of chains and of other structures: some below the limits, some above."""

ATOMS = ("a", ".", "[a-z]", r"\w", r"\d", r"\p{L}", "[^b]", "(a|bc)", "(?:xy)?", "x|y", r"\s", "é")
QUANTIFIERS = ("", "", "*", "+", "?", "{2}", "{1,9}", "{20}", "{0,300}", "{1000}", "*?", "{1,2}{3}")
KEYWORDS = ("anyOf", "oneOf", "allOf", "not", "items", "properties", "prefixItems", "contains")


def request_of(seed: int, number: int) -> tuple[str, Options]:
    """Return the kind of a case, and its options: ``json_schema``, ``regex`` or ``grammar``."""
    dice = random.Random(f"{seed} {number}")
    kind = dice.choice(list(KINDS))
    return kind, KINDS[kind](dice)


def _schema_chain(dice: random.Random) -> Options:
    schema = chain(dice.choice(list(SCHEMAS.values())), dice.choice(SIZES[:-1]))
    if dice.random() < 0.3:
        return {"grammar": lark_json(schema)}
    return {"json_schema": schema}


def _rule_chain(dice: random.Random) -> Options:
    rule = dice.choice([*RULES.values(), *TERMINALS.values()])
    return {"grammar": lark_chain(rule, dice.choice(SIZES))}


def _deep_expression(dice: random.Random) -> Options:
    return {"regex": dice.choice(list(EXPRESSIONS.values()))(dice.choice(SIZES))}


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


def _products(dice: random.Random) -> Options:
    """Combinations whose number of cases is a product."""
    wide, many = dice.choice((2, 4, 8)), dice.choice((3, 8, 16))
    parts = [
        {"anyOf": [{"type": "string", "minLength": 3 * one + other} for other in range(wide)]}
        for one in range(many)
    ]
    return {"json_schema": {dice.choice(("allOf", "anyOf", "oneOf")): parts}}


def _wide(dice: random.Random) -> Options:
    names = [f"x{number}" for number in range(dice.choice((300, 3_000, 30_000)))]
    forms: list[Options] = [
        {"grammar": "start: " + " | ".join(f'"{name}"' for name in names) + "\n"},
        {"regex": "|".join(names)},
        {"json_schema": {"properties": {name: {"type": "string"} for name in names[::10]}}},
        {"json_schema": {"enum": names}},
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
    _, options = request_of(dice.randrange(1 << 30), 0)
    option, source = next(iter(options.items()))
    text = source if isinstance(source, str) else json.dumps(source)
    characters = list(text[:20_000])
    for _ in range(dice.choice((1, 3, 30))):
        characters[dice.randrange(len(characters))] = dice.choice('(){}[]|"/\\%:&~*\n a1\x00é')
    option = "grammar" if option == "json_schema" else option
    return {option: "".join(characters)}


KINDS: dict[str, Callable[[random.Random], Options]] = {
    "chain of references": _schema_chain,
    "chain of rules": _rule_chain,
    "deep expression": _deep_expression,
    "swelling expression": _swelling,
    "random expression": _expression,
    "random schema": _schema,
    "product": _products,
    "wide": _wide,
    "ambiguous": _ambiguous,
    "broken": _broken,
}
"""Kinds of cases, with the functions that make their options."""
