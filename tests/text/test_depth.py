"""Depth of grammars after their references are followed, and what is refused for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from adafuse_llm import AdaFuseConfig
from adafuse_llm.errors import GrammarError
from adafuse_llm.text import grammar as grammars
from adafuse_llm.text.depth import (
    MAX_CHARACTERS,
    MAX_NESTED_GRAMMARS,
    MAX_REGEX_DEPTH,
    MAX_RULE_DEPTH,
    MAX_SCHEMA_DEPTH,
    check_grammar,
    check_regex,
    check_schema,
)
from adafuse_llm.text.grammar import Grammar
from tests.support.hostile import (
    EXPRESSIONS,
    RULES,
    SCHEMAS,
    TERMINALS,
    chain,
    lark_chain,
    lark_json,
)

CHAINS = {**RULES, **TERMINALS}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """No native code may read a grammar."""
    monkeypatch.setattr(grammars, "compiled", lambda *_: pytest.fail("it was compiled"))


@pytest.mark.quick
@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("step", SCHEMAS)
def test_r3_v1_a_chain_of_references_is_refused_before_it_is_compiled(step: str) -> None:
    schema = chain(SCHEMAS[step], 1_200)
    with pytest.raises(GrammarError, match=f"levels deep.* the limit is {MAX_SCHEMA_DEPTH}"):
        Grammar.of(AdaFuseConfig(json_schema=schema))
    with pytest.raises(GrammarError, match=f"levels deep.* the limit is {MAX_SCHEMA_DEPTH}"):
        Grammar.of(AdaFuseConfig(grammar=lark_json(schema)))


@pytest.mark.quick
@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("rule", CHAINS)
def test_r3_v1_a_chain_of_rules_is_refused_before_it_is_compiled(rule: str) -> None:
    with pytest.raises(GrammarError, match=f"levels deep.* the limit is {MAX_RULE_DEPTH:,}"):
        Grammar.of(AdaFuseConfig(grammar=lark_chain(CHAINS[rule], 3_000)))


@pytest.mark.quick
@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("kind", EXPRESSIONS)
def test_r3_v1_a_deep_expression_is_refused_before_it_is_compiled(kind: str) -> None:
    regex = EXPRESSIONS[kind](MAX_REGEX_DEPTH + 1)
    quoted = json.dumps(regex)
    options: tuple[dict[str, Any], ...] = (
        {"regex": regex},
        {"grammar": f"start: /{regex}/"},
        {"grammar": f'start: %json {{"type": "string", "pattern": {quoted}}}'},
        {"grammar": f'start: %json {{"patternProperties": {{{quoted}: true}}}}'},
    )
    for option in options:
        with pytest.raises(GrammarError, match=f"levels deep; the limit is {MAX_REGEX_DEPTH}"):
            Grammar.of(AdaFuseConfig(**option))


@pytest.mark.parametrize("step", SCHEMAS)
def test_r3_v1_a_chain_below_the_limit_is_compiled(step: str) -> None:
    grammar = Grammar.of(AdaFuseConfig(json_schema=chain(SCHEMAS[step], MAX_SCHEMA_DEPTH // 4)))
    assert grammar is not None
    assert grammar.text().closing()


@pytest.mark.parametrize("rule", RULES)
def test_r3_v1_rules_below_the_limit_are_compiled(rule: str) -> None:
    length = MAX_RULE_DEPTH // 5
    grammar = Grammar.of(AdaFuseConfig(grammar=lark_chain(RULES[rule], length)))
    assert grammar is not None
    assert grammar.text().closing()


@pytest.mark.quick
def test_the_depth_of_a_schema_counts_lists_objects_and_references() -> None:
    assert check_schema({}) == 0
    assert check_schema({"properties": {"a": {"type": "string"}}}) == 2
    assert check_schema({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"items": {}}}}) == 4
    reference = {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"items": {"items": {}}}}}
    assert check_schema(reference) == 4
    assert check_schema({"pattern": "((x))"}) == 2
    assert check_schema({"$ref": "#/$defs/nothing"}) == 1


@pytest.mark.quick
def test_references_in_a_circle_count_together() -> None:
    tree = {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {"properties": {"forest": {"$ref": "#/$defs/forest"}}},
            "forest": {"items": {"$ref": "#/$defs/tree"}},
        },
    }
    assert check_schema(tree) == check_schema({"$ref": "#", **tree}) == 7
    names = [f"d{number}" for number in range(MAX_SCHEMA_DEPTH)]
    ring: dict[str, Any] = {
        "$ref": "#/$defs/d0",
        "$defs": {
            name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in ("d0", after)]}
            for name, after in zip(names, [*names[1:], "d0"], strict=True)
        },
    }
    with pytest.raises(GrammarError, match="levels deep"):
        check_schema(ring)


@pytest.mark.quick
@pytest.mark.parametrize("reference", ["a", "#a", "http://x/y", "x.json#/a"])
def test_references_that_are_no_paths_are_refused(reference: str) -> None:
    with pytest.raises(GrammarError, match=r"must be '#', or '#/\.\.\.'"):
        check_schema({"anyOf": [{"$ref": reference}]})


@pytest.mark.quick
def test_the_depth_of_rules_counts_rules_and_groups() -> None:
    deep = "(" * (MAX_RULE_DEPTH // 3) + '"x"' + ")" * (MAX_RULE_DEPTH // 3)
    check_grammar(f"start: a | b\na: {deep}\nb: {deep}\n")
    check_grammar(f"start: {deep} a\na: {deep}\n# a: b\nb: a\n")
    with pytest.raises(GrammarError, match="levels deep"):
        check_grammar(
            f"start: {deep[: MAX_RULE_DEPTH // 3]} a {')' * (MAX_RULE_DEPTH // 3)}\n"
            f"a: {deep[: MAX_RULE_DEPTH // 3]} b {')' * (MAX_RULE_DEPTH // 3)}\nb: {deep}\n"
        )


@pytest.mark.quick
@pytest.mark.parametrize(
    "rule",
    [
        'a{0}: "(((" "\\"(" /[(]{{2}}/ <[1-2]> a{1}\n',
        'a{0}[suffix=/x:\\/]/]: "x" # (((\n  | "y" a{1} // (((\n',
        'a{0} [\n capture ] : "x" a{1}\n',
        'a{0}: %json {{"const": "}}((("}} a{1}\n',
    ],
)
def test_no_text_hides_a_rule(rule: str) -> None:
    check_grammar(lark_chain(rule, MAX_RULE_DEPTH // 3))
    with pytest.raises(GrammarError, match="levels deep"):
        check_grammar(lark_chain(rule, MAX_RULE_DEPTH))


@pytest.mark.quick
def test_grammars_inside_each_other_count() -> None:
    lark = 'start: "x"'
    for _ in range(3):
        inner = lark_chain(RULES["rules"], MAX_RULE_DEPTH // 4).replace(
            '"y"', f"%lark {{\n{lark}\n}}"
        )
        lark = inner
    check_grammar(lark)
    outer = lark_chain(RULES["rules"], MAX_RULE_DEPTH // 4).replace('"y"', f"%lark {{\n{lark}\n}}")
    with pytest.raises(GrammarError, match="levels deep"):
        check_grammar(outer)
    for _ in range(MAX_NESTED_GRAMMARS + 1):
        lark = f"start: %lark {{\n{lark}\n}}\n"
    with pytest.raises(GrammarError, match="inside each other"):
        check_grammar(lark)


@pytest.mark.quick
def test_what_is_not_json_and_what_is_too_long_is_refused() -> None:
    with pytest.raises(GrammarError, match="%json must be followed by JSON"):
        check_grammar("start: %json {x}")
    with pytest.raises(GrammarError, match="%json must be followed by JSON"):
        check_grammar("start: %json " + "[" * 100_000)
    for check in (check_grammar, check_regex):
        with pytest.raises(GrammarError, match=f"the limit is {MAX_CHARACTERS:,}"):
            check("x" * (MAX_CHARACTERS + 1))
