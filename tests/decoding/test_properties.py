"""What holds for every text: round trips, joined words, stop sequences that never leak."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from adafuse_llm.text.codec import TokenizerCodec
from adafuse_llm.text.stops import Transcript
from tests.support.compare import approximately, as_data
from tests.support.models import PAIR, TOKENIZER_KINDS, engine
from tests.support.sizes import sized
from tests.support.tokenizers import known_tokenizer

LOSSLESS = ("bytelevel", "sentencepiece", "unigram", "llama2", "llama3")
KINDS = (*TOKENIZER_KINDS, "llama2", "llama3")


@functools.cache
def codec(kind: str) -> TokenizerCodec:
    return TokenizerCodec(known_tokenizer(kind))


def full_decode(kind: str, ids: list[int]) -> str:
    text = known_tokenizer(kind).decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


ALPHABET = st.one_of(
    st.sampled_from([*" \n\t.,aeTh'\"<|>_\u2581\u00e9\u4e2d\U0001f600\u00a0\u200d\ufeff\r"]),
    st.characters(codec="utf-8", exclude_characters="\ufffd"),
)
TEXTS = st.one_of(
    st.text(ALPHABET, max_size=14),
    st.lists(
        st.sampled_from(
            (
                *("The", " ferry", " light", "\n", "\n\n", "  ", " ", "9", ".", " caf\u00e9"),
                *("\u4e2d\u6587", "\U0001f600", "<|eot_id|>", "</s>", "<unk>", "<0x41>", "\u9f98"),
            )
        ),
        max_size=8,
    ).map("".join),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120)
@given(context=TEXTS, text=TEXTS)
@example(context="A\u9f98\u9f98\u9f98", text="\n")
@example(context="\U0001f600\U0001f600\U0001f600", text=" a")
@example(context="a", text="<|eot_id|>")
@example(context="a", text="</s>")
@example(context="a", text="\ufeffb")
@example(context="x ", text=" y")
@example(context="x\n", text="  y")
@example(context=" ", text="  ")
def test_an_exact_continuation_decodes_to_its_text(kind: str, context: str, text: str) -> None:
    known_tokenizer(kind)
    ids = codec(kind).encode_prompt(context)
    assume(ids)
    tokens, exact = codec(kind).encode_continuation(ids, text)
    if exact:
        assert full_decode(kind, [*ids, *tokens]) == full_decode(kind, ids) + text
    if kind in LOSSLESS:
        assert exact, (context, text)


# Words and texts ------------------------------------------------------------------------------

PROMPTS = st.text(
    st.sampled_from([*"aeiortn .,\n9", "\u00e9", "\u4e2d"]), min_size=1, max_size=12
).filter(lambda text: bool(text.rstrip(" ")))
OPTIONS = st.fixed_dictionaries(
    {
        "margin_threshold": st.sampled_from([0.0, 0.2, 0.7]),
        "max_words": st.integers(1, 3),
        "max_new_tokens": st.integers(1, 16),
        "stop": st.lists(st.sampled_from(["e", "\n", " t", "th", "o b", "ab"]), max_size=2),
    }
)


@pytest.mark.sweep(1)
@settings(max_examples=sized(12, 30))
@given(prompt=PROMPTS, options=OPTIONS)
def test_rounds_join_to_the_text_and_streams_show_it(prompt: str, options: dict[str, Any]) -> None:
    ensemble = engine(*PAIR)
    generation = ensemble.generate(prompt, **options)
    joined = "".join(r.text for r in generation.rounds)
    assert joined.startswith(generation.text)
    if generation.finish_reason == "stop_sequence":
        cut = joined[len(generation.text) :]
        assert any(cut.startswith(stop) for stop in options["stop"])
    else:
        assert joined == generation.text
    assert not any(stop in generation.text for stop in options["stop"])

    events = list(ensemble.stream(prompt, **options))
    assert "".join(event.text for event in events) == generation.text
    assert all(event.generation is None for event in events[:-1])
    final = events[-1].generation
    assert final is not None
    assert as_data(final) == approximately(as_data(generation))
    assert tuple(event.round for event in events) == final.rounds
    for event in events:
        assert event.round is not None
        won = event.round.candidates[event.round.winner]
        assert won.text.startswith(event.round.text)
        assert won.text == event.round.text or event.generation is not None


@pytest.mark.sweep(1)
@settings(max_examples=sized(16, 40))
@given(prompt=PROMPTS, options=OPTIONS)
def test_spaces_that_a_member_writes_may_as_well_end_the_prompt(
    prompt: str, options: dict[str, Any]
) -> None:
    for recipe in PAIR:
        ensemble = engine(recipe)
        options |= {"branching_factor": 1, "max_new_tokens": 8, "stop": []}
        base = prompt.rstrip(" ")
        plain = ensemble.generate(base, **options)
        spaces = len(plain.text) - len(plain.text.lstrip(" "))
        spaced = ensemble.generate(base + " " * spaces, **options)
        assert spaced.text.startswith(plain.text[spaces:])


# Stop sequences -------------------------------------------------------------------------------

LETTERS = st.text(st.sampled_from("ab \n"), max_size=5)
STOPS = st.lists(st.text(st.sampled_from("ab \n"), min_size=1, max_size=4), max_size=3)


@settings(max_examples=400)
@given(spans=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_a_transcript_shows_the_text_up_to_the_stop_and_nothing_of_it(
    spans: list[str], stops: list[str]
) -> None:
    transcript = Transcript(stops)
    shown = ""
    whole = ""
    for span in spans:
        whole += span
        shown += transcript.push(span)
        ends = [whole.index(stop) for stop in stops if stop in whole]
        assert bool(transcript.stopped) == bool(ends)
        assert transcript.text == (whole[: min(ends)] if ends else whole)
        assert transcript.text.startswith(shown)
        if ends:
            break
        # whatever is shown could not have become part of a stop sequence
        assert not any(
            shown.endswith(stop[:size]) and whole == shown
            for stop in stops
            for size in range(1, len(stop))
        )
    shown += transcript.flush()
    assert shown == transcript.text
    assert not any(stop in shown for stop in stops)
