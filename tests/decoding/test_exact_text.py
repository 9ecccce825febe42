"""Every member holds exactly the text that the user wrote and gets, within `max_new_tokens`."""

import functools
import math
import string
from dataclasses import replace
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from tests.support.models import Recipe
from tests.support.recorded import (
    RecordedFake,
    RecordedModel,
    check_prompt_is_exact,
    check_reply_is_exact,
    forget,
)
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


@pytest.mark.quick
def test_candidates_that_differ_in_whitespace_stay_apart() -> None:
    """One member writes the word at once, the other a newline first: two candidates."""

    def rule(first: str) -> Any:
        return lambda text: {first: 0.9, "?": 0.1} if text == "a" else {"<end>": 0.9, "?": 0.1}

    words = ["\nlight", " light", "light"]
    names = ("oak", "elm", "ash")
    members = [RecordedFake(n, rule(w), words) for n, w in zip(names, words, strict=True)]
    with AdaFuseEngine(members) as engine:
        generation = engine.generate("a", max_words=1, margin_threshold=0.0, max_new_tokens=4)
    assert [c.text for c in generation.rounds[0].candidates] == words


PIECES = {
    "a:": {"  ": 0.6, "q": 0.4},
    "a:  ": {" ": 0.5, "      z": 0.3, "z": 0.2},
    "a:   ": {"c": 0.6, " b": 0.4},
}


@pytest.mark.parametrize(
    ("prompt", "likely", "text", "tokens"),
    [
        ("a: ", {"a:": {"x": 0.5, " light": 0.3, "   ": 0.2}}, "light", [" light"]),
        ("a:    ", PIECES, "b", ["  ", " ", " b"]),
        ("a: ", {"a:": {"<end>": 0.9, " b": 0.1}}, "b", [" b"]),
        ("a:  ", {"a:": {"     b": 0.3, "  ": 0.2, "b": 0.5}}, "   b", ["     b"]),
    ],
    ids=["word", "pieces", "end", "longer"],
)
def test_spaces_at_the_end_of_a_prompt_are_healed(
    prompt: str, likely: dict[str, dict[str, float]], text: str, tokens: list[str]
) -> None:
    """Until they are written, the member chooses among the tokens that continue them."""
    end = {"<end>": 0.9, "?": 0.1}
    texts = [*tokens, *{text for chances in likely.values() for text in chances}, *string.printable]
    member = RecordedFake(
        "oak", lambda written: likely.get(written, end), [*dict.fromkeys(texts)], is_complete=True
    )
    with AdaFuseEngine([member]) as engine:
        generation = engine.generate(prompt, max_words=1, branching_factor=1)
    check_prompt_is_exact([member], prompt, generation)
    assert member.tree is not None
    written = [member.decode([each]) for each in member.tree.ids[member.tree.prompt_tokens :]]
    assert generation.text == text
    assert written == tokens
    chances = [
        likely[prompt.rstrip(" ") + "".join(tokens[:at])][each] for at, each in enumerate(tokens)
    ]
    own = [-math.log(chance) for chance in chances]
    nll = generation.rounds[0].candidates[generation.rounds[0].winner].nll["oak"]
    assert nll == pytest.approx(sum(own) / len(own)), "scores are the model's own"


# Replies to messages --------------------------------------------------------------------------


@pytest.mark.parametrize("max_words", [1, 2, 3])
@pytest.mark.parametrize(
    ("leading", "reply"),
    [
        (["\n\n", ""], "The lamp."),
        (["  ", " ", "\u00a0\t"], "a\n  b"),
        (["\n", "  \n"], "\u4e2d\u6587"),
        (["\n", "\n"], ""),
    ],
)
def test_members_begin_a_reply_in_their_own_way(
    leading: list[str], reply: str, max_words: int
) -> None:
    """Members write the same reply after whitespace of their own: one candidate, one text."""

    def writes(whole: str) -> Any:
        def rule(text: str) -> dict[str, float]:
            written = text[text.rindex("Assistant:") + len("Assistant:") :]
            if written == whole:
                return {"<end>": 0.9, "?": 0.1}
            if not whole.startswith(written):
                return {"?": 0.9, "<end>": 0.1}
            return {whole[len(written)]: 0.9, "?": 0.1}

        return rule

    members = [
        RecordedFake(f"m{number}", writes(space + reply)) for number, space in enumerate(leading)
    ]
    asked = [{"role": "user", "content": "Who keeps the light?"}]
    with AdaFuseEngine(members) as engine:
        events = list(engine.stream(messages=asked, max_words=max_words, max_word_tokens=30))
    generation = events[-1].generation
    assert generation is not None
    assert generation.text == reply
    assert "".join(event.text for event in events) == reply
    check_reply_is_exact(members, generation)
    if reply:
        assert all(len(each.candidates) == 1 for each in generation.rounds)
        for member, space in zip(members, leading, strict=True):
            assert member.read().endswith("Assistant:" + space + reply)


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
