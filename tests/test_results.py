"""Results: frozen, and JSON without NaN."""

from __future__ import annotations

import json

import pytest

from adafuse_llm import (
    AdaFuseEngine,
    Generation,
)
from adafuse_llm.backends import FakeBackend

pytestmark = pytest.mark.quick


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in JSON")


def test_results_are_json_without_nan() -> None:
    """Also where a member can say nothing about a candidate."""

    def only_a(text: str) -> dict[str, float]:
        return {"a": 0.5, "b": 0.5, " ": 0.0} if text == ">" else {"<end>": 1.0}

    def only_c(text: str) -> dict[str, float]:
        return {"c": 0.6, "d": 0.4} if text == ">" else {"<end>": 1.0}

    with AdaFuseEngine([FakeBackend("one", only_a), FakeBackend("two", only_c)]) as ensemble:
        generation = ensemble.generate(">")
    data = json.loads(generation.model_dump_json(), parse_constant=refuse)
    assert data["text"] == generation.text == str(generation)
    assert data["rounds"][0]["candidates"][0]["nll"].keys() == {"one"}
    assert Generation.model_validate(data) == generation
