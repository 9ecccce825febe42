"""The public JSON Schema Test Suite: no document is accepted that its schema forbids."""

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

from adafuse_llm.grammar.grammar import Grammar

ORDERS, SAMPLES = 24, 12
"""How many orders of the properties of a document, and how many random texts, are tried."""

EXEMPT = {
    # The engine reads classes of characters as ECMA 262 does, Python's expressions know all of
    # Unicode. The suite agrees with the engine.
    "ECMA 262 \\W matches everything but ascii letters"
}
"""Groups whose random texts are not checked."""

FILES = sorted(SCHEMA_SUITE.rglob("*.json"))


def spellings(document: Any) -> Iterator[str]:
    """A document as text, with the properties of its outermost object in several orders."""
    if isinstance(document, dict):
        for items in itertools.islice(itertools.permutations(document.items()), ORDERS):
            yield json.dumps(dict(items), ensure_ascii=False)
    else:
        yield json.dumps(document, ensure_ascii=False)


@pytest.mark.skipif(not FILES, reason="the JSON Schema Test Suite is not here")
def test_no_text_is_accepted_or_written_that_a_schema_of_the_suite_forbids() -> None:
    enforced, checked, wrong = 0, 0, []
    for group in (group for path in FILES for group in json.loads(path.read_text("utf-8"))):
        schema, name = group["schema"], group["description"]
        try:
            text = Grammar.of(AdaFuseConfig(json_schema=schema)).text()  # type: ignore[union-attr]
        except (GrammarError, InvalidOptionError):
            continue
        for case in group["tests"]:
            is_accepted = any(map(text.can_end, spellings(case["data"])))
            enforced += is_accepted == case["valid"]
            if is_accepted and not case["valid"]:
                wrong.append((name, case["description"]))
        for seed in range(SAMPLES if isinstance(schema, dict) and name not in EXEMPT else 0):
            if (written := walk(text, seed)) is not None:
                checked += 1
                assert is_valid(schema, written), (schema, written)
    assert not wrong
    assert enforced > 800
    assert checked > 1000
