"""Comparison of the engine with the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from adafuse_llm import Generation
from tests.reference import Options, ReferenceGeneration, decode
from tests.support.models import SINGLE_PRECISION, Recipe, engine, reference

TOLERANCE = 1e-6
SINGLE_TOLERANCE = 2e-5


def check(
    recipes: Sequence[Recipe],
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> Generation:
    """Decode with the engine, with drafting and without, and with the reference; fail where they
    differ.
    """
    single = any(recipe.arch in SINGLE_PRECISION for recipe in recipes)
    expected = decode(
        [reference(recipe) for recipe in recipes], prompt, Options(**options), messages=messages
    )
    for drafting in (False, True):
        ensemble = engine(*recipes, drafting=drafting)
        actual = ensemble.generate(prompt, messages=messages, **options)
        assert_same(actual, expected, SINGLE_TOLERANCE if single else TOLERANCE)
    return actual


def assert_same(actual: Generation, expected: ReferenceGeneration, tolerance: float) -> None:
    """Same spans, winners, tokens by text, and finish reason; numbers within `tolerance`."""
    for number, (got, want) in enumerate(zip(actual.rounds, expected.rounds, strict=False)):
        where = f"round {number}"
        assert got.index == number
        assert got.forced == want.forced, where
        assert {name: len(m) for name, m in got.margins.items()} == {
            name: len(m) for name, m in want.margins.items()
        }, where
        for name, margins in want.margins.items():
            assert got.margins[name] == pytest.approx(margins, abs=tolerance, rel=0), where
        assert [(c.text, c.ends, list(c.proposers)) for c in got.candidates] == [
            (c.text, c.ends, c.proposers) for c in want.candidates
        ], where
        for mine, theirs in zip(got.candidates, want.candidates, strict=True):
            assert mine.nll == pytest.approx(theirs.nll, abs=tolerance, rel=0), where
            assert (mine.score is None) == (theirs.score is None), where
            if theirs.score is not None:
                assert mine.score == pytest.approx(theirs.score, abs=tolerance, rel=0), where
                assert mine.logprob == pytest.approx(
                    theirs.logprob, rel=tolerance, abs=tolerance
                ), where
        assert got.winner == want.winner, where
        assert got.text == want.text, where
        assert set(got.logprobs) == set(want.logprobs), where
        for name, tokens in want.logprobs.items():
            for token, other in zip(got.logprobs[name], tokens, strict=True):
                assert token.text == other.text, where
                assert token.logprob == pytest.approx(other.logprob, abs=tolerance, rel=0), where
                assert [each.text for each in token.top] == [text for text, _ in other.top], where
                assert [each.logprob for each in token.top] == pytest.approx(
                    [logprob for _, logprob in other.top], abs=tolerance, rel=0
                ), where
    assert len(actual.rounds) == len(expected.rounds)
    assert actual.text == expected.text
    assert actual.finish_reason == expected.finish_reason
    assert actual.seed == expected.seed
    assert actual.logprob == pytest.approx(expected.logprob, rel=tolerance, abs=tolerance)
    assert actual.member_logprobs == pytest.approx(
        expected.member_logprobs, rel=tolerance, abs=tolerance
    )
    assert actual.usage.prompt_tokens == expected.prompt_tokens
    assert actual.usage.completion_tokens == expected.completion_tokens


def as_data(generation: Generation) -> dict[str, Any]:
    """A generation as plain values, without what may differ between equal decodes."""
    data = generation.model_dump()
    for cost in ("forward_passes", "tokens_processed", "cached_tokens"):
        del data["usage"][cost]
    for entry in data["rounds"]:
        del entry["elapsed"]
    return data


def approximately(data: Any) -> Any:
    """`data` with every float compared within 1e-9."""
    if isinstance(data, dict):
        return {key: approximately(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(approximately(value) for value in data)
    return pytest.approx(data, abs=1e-9, rel=0) if isinstance(data, float) else data
