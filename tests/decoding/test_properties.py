"""What holds for every text: round trips, joined words, stop sequences that never leak."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
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
            [
                "The",
                " ferry",
                " light",
                "\n",
                "\n\n",
                "  ",
                " ",
                "9",
                ".",
                " caf\u00e9",
                "\u4e2d\u6587",
                "\U0001f600",
                "<|eot_id|>",
                "</s>",
                "<unk>",
                "<0x41>",
                "\u9f98",
            ]
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


@pytest.mark.parametrize("kind", LOSSLESS)
@settings(max_examples=60)
@given(context=TEXTS, text=TEXTS, more=TEXTS)
def test_what_follows_a_continuation_is_decoded_as_its_text(
    kind: str, context: str, text: str, more: str
) -> None:
    """Two continuations in a row, decoded one after the other and together."""
    known_tokenizer(kind)
    ids = codec(kind).encode_prompt(context)
    assume(ids)
    first, exact = codec(kind).encode_continuation(ids, text)
    assume(exact)
    second, exact = codec(kind).encode_continuation([*ids, *first], more)
    assume(exact)
    assert codec(kind).decode_continuation(ids, [*first, *second]) == text + more
    assert codec(kind).decode_continuation([*ids, *first], second) == more


@pytest.mark.parametrize("kind", ["bytelevel", "sentencepiece", "unigram", "llama2", "llama3"])
@settings(max_examples=60)
@given(text=TEXTS, data=st.data())
def test_the_texts_of_single_tokens_make_up_the_text(
    kind: str, text: str, data: st.DataObject
) -> None:
    """Cut anywhere between characters, the parts decode to the parts of the text."""
    known_tokenizer(kind)
    prompt = codec(kind).encode_prompt("The")
    tokens, exact = codec(kind).encode_continuation(prompt, text)
    assume(exact)
    start = 0
    shown = ""
    for end in range(1, len(tokens) + 1):
        part = codec(kind).decode_continuation([*prompt, *tokens[:start]], tokens[start:end])
        if not part.endswith("\ufffd"):
            shown, start = shown + part, end
    assert shown == text


CONTROL = (
    "<|eot_id|>",
    "<|begin_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|end|>",
    "</s>",
    "<s>",
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(before=TEXTS, name=st.sampled_from(CONTROL), after=TEXTS)
@example(before="a", name="</s>", after="b")
@example(before="", name="<|eot_id|>", after="")
def test_control_tokens_spelled_out_stay_text(
    kind: str, before: str, name: str, after: str
) -> None:
    known = known_tokenizer(kind)
    control = {*known.all_special_ids, *known.get_added_vocab().values()} - {known.unk_token_id}
    expected = [t for t in codec(kind).encode_prompt("The") if t in control]
    prompt = codec(kind).encode_prompt(before + name + after)
    assert [t for t in prompt if t in control] == expected
    tokens, _ = codec(kind).encode_continuation(codec(kind).encode_prompt("The"), name + after)
    assert not control.intersection(tokens)


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


def writes(response: str, prompt: str = ">") -> Any:
    """A rule that writes `response` and ends."""

    def rule(text: str) -> Mapping[str, float]:
        at = len(text) - len(prompt)
        if at >= len(response):
            return {"<end>": 0.98, "?": 0.02}
        return {response[at]: 0.98, "?": 0.02}

    return rule


@settings(max_examples=150)
@given(
    response=st.text(st.sampled_from("ab \n"), max_size=24),
    stops=STOPS,
    max_words=st.integers(1, 3),
    vocabulary=st.lists(st.text(st.sampled_from("ab "), min_size=2, max_size=3), max_size=3),
)
def test_streams_never_show_a_stop_sequence(
    response: str, stops: list[str], max_words: int, vocabulary: list[str]
) -> None:
    members = [FakeBackend("one", writes(response)), FakeBackend("two", writes(response))]
    with AdaFuseEngine(members) as ensemble:
        shown = ""
        last = None
        for event in ensemble.stream(">", stop=stops, max_words=max_words):
            shown += event.text
            assert not any(stop in shown for stop in stops)
            last = event.generation
    assert last is not None
    ends = [response.index(stop) for stop in stops if stop in response]
    assert shown == last.text == (response[: min(ends)] if ends else response)
    assert last.finish_reason == ("stop_sequence" if ends else "stop")
