"""Comparison of the engine with the reference."""

import functools
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
    close = functools.partial(pytest.approx, abs=tolerance, rel=0)
    for number, (got, want) in enumerate(zip(actual.rounds, expected.rounds, strict=False)):
        where = f"round {number}"
        assert (got.index, got.forced) == (number, want.forced), where
        assert {*got.margins} == {*want.margins}, where
        for name, margins in want.margins.items():
            assert [*got.margins[name]] == close([*margins]), where
        assert [(c.text, c.ends, list(c.proposers)) for c in got.candidates] == [
            (c.text, c.ends, c.proposers) for c in want.candidates
        ], where
        for mine, theirs in zip(got.candidates, want.candidates, strict=True):
            assert mine.nll == close(theirs.nll), where
            assert mine.score == close(theirs.score), where
            if theirs.score is not None:
                assert mine.logprob == close(theirs.logprob, rel=tolerance), where
        assert (got.winner, got.text) == (want.winner, want.text), where
        assert {*got.logprobs} == {*want.logprobs}, where
        for name, tokens in want.logprobs.items():
            for token, other in zip(got.logprobs[name], tokens, strict=True):
                texts, logprobs = zip((other.text, other.logprob), *other.top, strict=True)
                found: list[Any] = [token, *token.top]
                assert [each.text for each in found] == [*texts], where
                assert [each.logprob for each in found] == close([*logprobs]), where
    assert len(actual.rounds) == len(expected.rounds)
    assert actual.text == expected.text
    assert actual.finish_reason == expected.finish_reason
    assert actual.seed == expected.seed
    assert actual.logprob == close(expected.logprob, rel=tolerance)
    assert actual.member_logprobs == close(expected.member_logprobs, rel=tolerance)
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
