"""The public JSON Schema Test Suite: no document is accepted that its schema forbids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from adafuse_llm import AdaFuseConfig
from adafuse_llm.errors import GrammarError, InvalidOptionError
from tests.support.paths import SCHEMA_SUITE
from tests.support.schemas import is_valid, walk

pytest.importorskip("llguidance")

from adafuse_llm.text.grammar import Grammar, GrammarText

ORDERS = 24
"""How many orders of properties are tried for a document."""

SAMPLES = 12
"""Random texts of each grammar that a validator checks."""

EXEMPT = {
    # The engine reads classes of characters as ECMA 262 does, Python's expressions know all of
    # Unicode. The suite agrees with the engine.
    "ECMA 262 \\W matches everything but ascii letters"
}
"""Groups whose random texts are not checked."""

GROUPS = sorted(SCHEMA_SUITE.rglob("*.json"))


def start(schema: Any) -> GrammarText | None:
    """The empty response of a schema, or None where the schema is refused."""
    try:
        grammar = Grammar.of(AdaFuseConfig(json_schema=schema))
    except (GrammarError, InvalidOptionError):
        return None
    assert grammar is not None
    return grammar.text()


def orders(document: Any) -> Iterator[str]:
    """A document as text, with the properties of its outermost object in several orders."""
    if isinstance(document, dict):
        for items in itertools.islice(itertools.permutations(document.items()), ORDERS):
            yield json.dumps(dict(items), ensure_ascii=False)
    else:
        yield json.dumps(document, ensure_ascii=False)


@pytest.mark.skipif(not GROUPS, reason="the JSON Schema Test Suite is not here")
def test_no_document_of_the_suite_is_accepted_that_its_schema_forbids() -> None:
    enforced, wrong = 0, []
    for path in GROUPS:
        for group in json.loads(path.read_text(encoding="utf-8")):
            if (text := start(group["schema"])) is None:
                continue
            for case in group["tests"]:
                is_accepted = any(map(text.can_end, orders(case["data"])))
                enforced += is_accepted == case["valid"]
                if is_accepted and not case["valid"]:
                    wrong.append((path.name, group["description"], case["description"]))
    assert not wrong
    assert enforced > 800


@pytest.mark.skipif(not GROUPS, reason="the JSON Schema Test Suite is not here")
def test_random_texts_of_the_suites_schemas_are_valid() -> None:
    checked = 0
    for path in GROUPS:
        for group in json.loads(path.read_text(encoding="utf-8")):
            if not isinstance(group["schema"], dict) or group["description"] in EXEMPT:
                continue
            text = start(group["schema"])
            for seed in range(SAMPLES if text is not None else 0):
                found = walk(text, seed)
                if found is not None:
                    checked += 1
                    assert is_valid(group["schema"], found), (group["schema"], found)
    assert checked > 1000
