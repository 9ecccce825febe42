"""Every member holds exactly the text that the user wrote and gets, whatever its tokenizer."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from adafuse_llm import AdaFuseEngine, Generation
from tests.support.models import CHATML, STRICT, TOKENIZER_KINDS, Recipe
from tests.support.recorded import (
    RecordedFake,
    check_prompt_is_exact,
    check_reply_is_exact,
    check_scores,
    forget,
    recorded,
)
from tests.support.sizes import sized
from tests.support.tokenizers import LOSSLESS_KINDS, MORE_KINDS, REAL_KINDS, known_tokenizer

KINDS = (*TOKENIZER_KINDS, *MORE_KINDS, *REAL_KINDS)
SPANS = ("adafuse", "fixed-1", "fixed-3")
STRATEGIES = (*SPANS, "mixture")


@functools.cache
def ensemble(strategy: str, *recipes: Recipe) -> AdaFuseEngine:
    return AdaFuseEngine([recorded(recipe) for recipe in recipes], strategy=strategy)


def members_of(kind: str, template: str | None = None) -> tuple[Recipe, Recipe]:
    """Return a member with this kind of tokenizer, and a member with a byte-level tokenizer."""
    first = Recipe("llama", kind, 51, end_bias=0.0, space_bias=1.5, template=template, layers=1)
    return first, replace(first, arch="gpt2", kind="bytelevel", seed=52)


# Prompts --------------------------------------------------------------------------------------

CHARACTERS = st.one_of(
    st.characters(codec="ascii"),
    st.characters(codec="utf-8", exclude_characters="\ufffd"),
    st.characters(min_codepoint=0x10000, exclude_categories=("Cs", "Cn")),
    st.sampled_from("\u0301\u0308\u20dd\u093f\u200d\ufe0f\u00a0\u2003\u3000\u200b\ufeff\u2581"),
)
PARTS = st.one_of(
    st.sampled_from(
        (
            *("The ferry", " light", "x = {", "def f(x):", "\n", "\n\n", "\r\n", "\t", "\n\t\t"),
            *("\n    ", "\n        ", "    ", " ", "  ", ".", "9", "caf\u00e9", "cafe\u0301"),
            *("\u4e2d\u6587", "\U0001f469\u200d\U0001f680", "\u0939\u093f\u0928\u094d\u0926\u0940"),
            *("\u05e9\u05dc\u05d5\u05dd", "<|end|>", "<|im_start|>", "<|eot_id|>", "</s>", "<s>"),
            *("<unk>", "[END]", "<0x41>"),
        )
    ),
    st.text(CHARACTERS, min_size=1, max_size=3),
)
PROMPTS = st.tuples(
    st.lists(PARTS, min_size=1, max_size=6).map("".join), st.integers(0, 9).map(" ".__mul__)
).map("".join)
OPTIONS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 9)},
    optional={
        "margin_threshold": st.sampled_from([0.0, 0.2, 1.0]),
        "max_words": st.integers(1, 4),
        "branching_factor": st.integers(1, 4),
        "max_word_tokens": st.integers(1, 6),
        "max_word_letters": st.sampled_from([1, 2, 256]),
    },
)


def decode(
    engine: AdaFuseEngine,
    prompt: str | None,
    *,
    messages: Sequence[dict[str, str]] | None = None,
    **options: Any,
) -> Generation:
    """Decode, and keep the records of this request alone."""
    used = {*engine.strategy.options, "max_new_tokens", "stop"}
    forget(engine.backends)
    kept = {name: value for name, value in options.items() if name in used}
    return engine.generate(prompt, messages=messages, **kept)


def is_cut(generation: Generation) -> bool:
    """Whether the last winner may have been cut at a limit."""
    return generation.finish_reason == "length"


@pytest.mark.sweep(5)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(prompt=PROMPTS, options=OPTIONS)
@example(prompt="def f(x):\n    ", options={"max_new_tokens": 8})
@example(prompt="def f(x):\n\t", options={"max_new_tokens": 8})
@example(prompt="def f(x):\r\n", options={"max_new_tokens": 8})
@example(prompt="a </s> b", options={"max_new_tokens": 8})
@example(prompt="  The", options={"max_new_tokens": 8})
@example(prompt="Answer: ", options={"max_new_tokens": 8})
@example(prompt="Answer:         ", options={"max_new_tokens": 8})
@example(prompt="\U0001f600\U0001f600  ", options={"max_new_tokens": 8})
def test_members_hold_the_prompt_and_the_response(
    kind: str, prompt: str, options: dict[str, Any]
) -> None:
    known_tokenizer(kind)
    assume(prompt.rstrip(" "))
    engine = ensemble("adafuse", *members_of(kind))
    generation = decode(engine, prompt, **options)
    held = check_prompt_is_exact(engine.backends, prompt, generation)
    check_scores(engine, prompt, generation, held, cut=is_cut(generation))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@settings(max_examples=sized(2, 8))
@given(
    kind=st.sampled_from(sorted(LOSSLESS_KINDS - {*REAL_KINDS})), prompt=PROMPTS, options=OPTIONS
)
@example(kind="sentencepiece", prompt="def f(x):\n    ", options={"max_new_tokens": 8})
@example(kind="gemma", prompt="Answer: ", options={"max_new_tokens": 8})
def test_members_hold_the_text_with_every_strategy(
    strategy: str, kind: str, prompt: str, options: dict[str, Any]
) -> None:
    assume(prompt.rstrip(" "))
    engine = ensemble(strategy, *members_of(kind))
    generation = decode(engine, prompt, **options)
    held = check_prompt_is_exact(engine.backends, prompt, generation)
    if strategy in SPANS:
        check_scores(engine, prompt, generation, held, cut=is_cut(generation))


@settings(max_examples=60)
@given(prompt=PROMPTS)
def test_candidates_that_differ_in_whitespace_stay_apart(prompt: str) -> None:
    """One member writes the word at once, the other a newline first: two candidates."""
    plain = prompt.rstrip(" ")
    assume(plain)

    def rule(first: str) -> Any:
        return lambda text: {first: 0.9, "?": 0.1} if text == plain else {"<end>": 0.9, "?": 0.1}

    words = ["\nlight", " light", "light"]
    names = ("oak", "elm", "ash")
    members = [RecordedFake(n, rule(w), words) for n, w in zip(names, words, strict=True)]
    with AdaFuseEngine(members) as engine:
        generation = engine.generate(plain, max_words=1, margin_threshold=0.0, max_new_tokens=4)
    assert [c.text for c in generation.rounds[0].candidates] == words


@pytest.mark.parametrize(
    ("prompt", "likely", "text", "tokens"),
    [
        (
            "Answer: ",
            {"Answer:": {"x": 0.5, " light": 0.3, "   ": 0.1, "<end>": 0.1}},
            "light",
            [" light"],
        ),
        (
            "a:    ",
            {
                "a:": {"  ": 0.6, "q": 0.4},
                "a:  ": {" ": 0.5, "      z": 0.3, "z": 0.2},
                "a:   ": {"c": 0.6, " b": 0.4},
            },
            "b",
            ["  ", " ", " b"],
        ),
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
        forget([member])
        generation = engine.generate(prompt, max_words=1, branching_factor=1)
        check_prompt_is_exact([member], prompt, generation)
        record = next(iter(member.records.values()))
        written = [member.codec.decode([each]) for each in record.tree.ids[record.prompt :]]
    assert generation.text == text
    assert written == tokens
    chances = [
        likely[prompt.rstrip(" ") + "".join(tokens[:at])][each] for at, each in enumerate(tokens)
    ]
    own = [-math.log(chance) for chance in chances]
    nll = generation.rounds[0].candidates[generation.rounds[0].winner].nll["oak"]
    assert nll == pytest.approx(sum(own) / len(own)), "scores are the model's own"


def test_the_margin_is_that_of_the_allowed_tokens() -> None:
    likely = {"Answer:": {"x": 0.5, " light": 0.3, " lamp": 0.1, "<end>": 0.1}}
    end = {"<end>": 0.9, "?": 0.1}
    texts = [" light", " lamp", *string.printable]
    member = RecordedFake("oak", lambda text: likely.get(text, end), texts, is_complete=True)
    with AdaFuseEngine([member]) as engine:
        generation = engine.generate("Answer: ", max_words=1, margin_threshold=0.45)
    assert generation.text == "light"
    assert generation.rounds[0].margins["oak"] == pytest.approx((0.3 / 0.4 - 0.1 / 0.4,))


# Code -----------------------------------------------------------------------------------------


SOURCE = """class Light:
    def __init__(self, colour):
        self.colour = colour

    def turn(self):
        if self.colour:
            return "on"
        return None
"""
PIECES = (
    ["    ", "        ", "\n", "\n    ", "self", "return", "def ", "if ", "):\n"],
    [" ", "  ", "   ", "\n\n", " self", " return", ":\n", " = ", "()"],
    ["\t", "\n        ", "    def", "    if", "            ", ".\n", " and", " in "],
)


LOST = "\u00bf?"


def writes_on(pieces: Sequence[str], *sources: str) -> Any:
    """A rule that writes one of the sources on from wherever the text ends.

    The first source that begins with the text is the likeliest, then the next one. If no source
    begins with the text, the rule is lost. Every other token has a small probability.
    """
    others = dict.fromkeys([*pieces, *sorted({*"".join(sources)}), "<end>", LOST], 1e-5)

    def rule(text: str) -> dict[str, float]:
        rests = [source[len(text) :] for source in sources if source.startswith(text)]
        if not rests:
            return {**others, LOST: 0.9}
        likely = dict(others)
        for rest, chance in reversed([*zip(rests, (0.85, 0.05), strict=False)]):
            begins = [piece for piece in pieces if rest.startswith(piece)]
            likely[max([*begins, rest[:1] or "<end>"], key=len)] = chance
        return likely

    return rule


@pytest.mark.sweep(1)
@pytest.mark.parametrize("cut", range(1, len(SOURCE), sized(9, 1)))
def test_members_that_know_a_file_complete_it_from_any_place(cut: int) -> None:
    """Three members, each with other tokens for indentation, write the rest of the file.

    The third would write the same with more indentation, and is outvoted.
    """
    prompt, rest = SOURCE[:cut], SOURCE[cut:]
    sources = ([SOURCE], [SOURCE], [f"{prompt}    {rest}", SOURCE])
    members = [
        RecordedFake(name, writes_on(pieces, *own), pieces)
        for name, own, pieces in zip(("oak", "elm", "ash"), sources, PIECES, strict=True)
    ]
    with AdaFuseEngine(members) as engine:
        generation = engine.generate(prompt, max_new_tokens=1000)
    assert (generation.text, generation.finish_reason) == (rest, "stop")
    check_prompt_is_exact(members, prompt, generation)


# Replies to messages --------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("template", [None, CHATML, STRICT], ids=["plain", "chatml", "strict"])
@pytest.mark.parametrize("kind", ["bytelevel", "sentencepiece", "unigram", "gemma"])
@settings(max_examples=6)
@given(question=PROMPTS, options=OPTIONS)
@example(question="Who keeps the light?", options={"max_new_tokens": 12})
def test_replies_show_no_whitespace_before_the_first_character(
    kind: str, template: str | None, question: str, options: dict[str, Any]
) -> None:
    assume(question.strip())
    engine = ensemble("adafuse", *members_of(kind, template))
    asked = [{"role": "user", "content": question}]
    generation = decode(engine, None, messages=asked, **options)
    check_reply_is_exact(engine.backends, generation)
    texts = [(c.text.lstrip(), c.ends) for c in generation.rounds[0].candidates]
    assert len(set(texts)) == len(texts), f"whitespace tells {texts} apart"
    used = {name: value for name, value in options.items() if name != "stop"}
    shown = [event.text for event in engine.stream(messages=asked, **used)]
    assert "".join(shown) == generation.text
    assert not "".join(shown)[:1].isspace()


LEADING = st.text(st.sampled_from(" \n\t\u00a0"), max_size=4)


@settings(max_examples=120)
@given(
    leading=st.lists(LEADING, min_size=2, max_size=3),
    reply=st.sampled_from(["The lamp.", "x", "\u4e2d\u6587", "a\n  b", ""]),
    max_words=st.integers(1, 3),
)
@example(leading=["\n\n", ""], reply="The lamp.", max_words=1)
@example(leading=["  ", " "], reply="The lamp.", max_words=2)
@example(leading=["\n", "\n"], reply="", max_words=1)
def test_members_begin_a_reply_in_their_own_way(
    leading: list[str], reply: str, max_words: int
) -> None:
    """Members write the same reply after whitespace of their own: one candidate, one text."""
    assume(reply or len(set(leading)) == 1)  # whitespace alone is a candidate of its own

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
            ids = next(iter(member.records.values())).tree.ids
            assert member.codec.decode(ids).endswith("Assistant:" + space + reply)
