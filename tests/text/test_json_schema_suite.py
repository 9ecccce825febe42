"""The public JSON Schema Test Suite: no document is accepted that its schema forbids."""

from __future__ import annotations

import itertools
import json
from collections import Counter
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
    "ECMA 262 \\W matches everything but ascii letters",
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
    table: dict[str, Counter[str]] = {}
    wrong = []
    for path in GROUPS:
        name = path.relative_to(SCHEMA_SUITE).as_posix()
        counts = table.setdefault(name, Counter())
        for group in json.loads(path.read_text(encoding="utf-8")):
            text = start(group["schema"])
            for case in group["tests"]:
                if text is None:
                    counts["refused"] += 1
                    continue
                first, *others = orders(case["data"])
                if text.can_end(first):
                    counts["enforced" if case["valid"] else "WRONG"] += 1
                    if not case["valid"]:
                        wrong.append((name, group["description"], case["description"]))
                elif not case["valid"]:
                    counts["enforced"] += 1
                elif any(text.can_end(other) for other in others):
                    counts["other order"] += 1
                else:
                    counts["rejected"] += 1
    columns = ("enforced", "refused", "other order", "rejected", "WRONG")
    print(f"{'JSON Schema Test Suite':44}" + "".join(f"{column:>13}" for column in columns))
    for name, counts in [*table.items(), ("all", sum(table.values(), Counter()))]:
        print(f"{name:44}" + "".join(f"{counts[column]:13}" for column in columns))
    assert not wrong
    assert sum(counts["enforced"] for counts in table.values()) > 800


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
