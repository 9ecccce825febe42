"""Every member holds exactly the text that the user wrote and gets, within `max_new_tokens`."""

import functools
import string
from dataclasses import replace
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from tests.support.models import Recipe
from tests.support.recorded import RecordedModel, check_prompt_is_exact, forget
from tests.support.sizes import sized

KINDS = ("bytelevel", "sentencepiece", "unigram", "gemma", "legacy", "prefixed", "llama2", "llama3")
"""Kinds of tokenizers that can write every text after another text."""

STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("adafuse", {"branching_factor": 3}),
    ("adafuse", {"margin_threshold": 0, "max_words": 1}),
    ("adafuse", {"margin_threshold": 0, "max_words": 3}),
    ("mixture", {}),
)


@functools.cache
def member(recipe: Recipe) -> RecordedModel:
    return RecordedModel(recipe)


def members_of(kind: str) -> list[RecordedModel]:
    """Return a member with this kind of tokenizer, and a member with a byte-level tokenizer."""
    first = Recipe("llama", kind, 51, end_bias=0.0, space_bias=1.5, layers=1)
    return [member(first), member(replace(first, arch="gpt2", kind="bytelevel", seed=52))]


# Prompts --------------------------------------------------------------------------------------

PROMPTS = (
    *("def f(x):\n    ", "def f(x):\n\t", "def f(x):\r\n", "a </s> b", "  The", "Answer: "),
    *("Answer:         ", "\U0001f600\U0001f600  ", "cafe\u0301 \u4e2d\u6587"),
    "<|im_start|>a\u2581b",
)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", KINDS)
def test_members_hold_the_prompt_and_the_response(kind: str) -> None:
    members = members_of(kind)
    with AdaFuseEngine(members) as engine:
        for place in range(KINDS.index(kind) % 5, len(PROMPTS), sized(5, 1)):
            (strategy, options), prompt = STRATEGIES[place % 4], PROMPTS[place]
            forget(members)
            done = engine.with_strategy(strategy).generate(prompt, max_new_tokens=8, **options)
            check_prompt_is_exact(members, prompt, done)


# Limits ---------------------------------------------------------------------------------------


def test_spaces_of_the_prompt_do_not_count_as_tokens() -> None:
    """The member writes the indentation with three tokens before its two letters."""

    def rule(text: str) -> dict[str, float]:
        indented = text.endswith(("\n   ", "x"))
        return {"x": 0.9, "?": 0.1} if indented else {" ": 0.9, "?": 0.1}

    member = FakeBackend("oak", rule, string.printable, is_complete=True)
    with AdaFuseEngine([member]) as engine:
        done = engine.generate("if a:\n   ", max_new_tokens=2)
    assert (done.text, done.finish_reason) == ("xx", "length")
    assert done.usage.completion_tokens == {"oak": 2}


def test_a_member_that_cannot_write_the_spaces_of_a_prompt_counts_all_its_tokens() -> None:
    member = FakeBackend("a", lambda _: {"ab": 0.6, "c": 0.4})
    assert member.space_tokens(5) is None
    assert AdaFuseEngine([member]).generate("Go:     ", max_new_tokens=3).text == "ababab"
