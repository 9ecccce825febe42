"""Responses that members draw: the engine against the reference, in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TopKLogitsWarper, TopPLogitsWarper

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, Generation
from adafuse_llm.backends.logits.draw import draw_one
from adafuse_llm.sampling import Draw, text_hash
from tests.decoding.cases import CONVERSATIONS, FORMS, FREE, PROMPTS, STARTS, TEXTS
from tests.reference import Options, Response, decode
from tests.reference_sampling import kept, seeds
from tests.support.compare import TOLERANCE, approximately, as_data, assert_same, check
from tests.support.models import (
    CHATTING,
    LOSSY,
    PAIR,
    TRIPLE,
    Recipe,
    backend,
    engine,
    reference,
    tokenizer,
)
from tests.support.sizes import sized

TEMPLATES = (*CHATTING, Recipe("qwen3", "unigram", seed=53))
OTHERS = (Recipe("qwen2", "gemma", seed=85), Recipe("llama", "legacy", seed=86))
PREFIXED = (Recipe("mistral", "prefixed", seed=87), Recipe("llama", "unigram", seed=88))
MIXES = (PAIR, TRIPLE, OTHERS, PREFIXED, LOSSY, TRIPLE[2:])
DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2},
    {"temperature": 1.5, "top_k": 12, "seed": -3},
    {"temperature": 2.5, "top_k": 40, "top_p": 0.6, "seed": 2**70},
)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("draws", DRAWS, ids=["one", "top_p", "top_k", "both"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_draws_after_every_prompt_equal_the_reference(prompt: str, draws: dict[str, Any]) -> None:
    number = PROMPTS.index(prompt) + DRAWS.index(draws)
    check(
        MIXES[number % len(MIXES)],
        prompt,
        **draws,
        margin_threshold=(0.2, 0.7, 0.02)[number % 3],
        max_words=(3, 1, 2)[number % 3],
        max_word_tokens=(16, 4)[number % 2],
        max_new_tokens=12,
    )


@pytest.mark.parametrize("messages", CONVERSATIONS[::2], ids=["user", "many"])
def test_draws_in_conversations_equal_the_reference(messages: list[dict[str, str]]) -> None:
    mixes = (TEMPLATES, TEMPLATES[:2], TEMPLATES[1:], OTHERS)
    for members, draws in zip(mixes, DRAWS, strict=True):
        check(members, messages=messages, **draws, margin_threshold=0.2, max_new_tokens=10)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("spaces", [1, 2, 5, 9])
def test_draws_after_spaces_equal_the_reference(spaces: int) -> None:
    for members in MIXES[spaces % 2 : 4 : 2]:
        prompt = "Answer:" + " " * spaces
        check(members, prompt, **DRAWS[spaces % 3], margin_threshold=0.2, max_new_tokens=8)


@pytest.mark.sweep(1)
def test_draws_of_characters_of_several_tokens_equal_the_reference() -> None:
    """The members draw the bytes of characters one by one, and may stop between them."""
    members = [
        Recipe(arch, kind, seed=seed, spread=0.2, space_bias=-4.0, end_bias=-9.0)
        for arch, kind, seed in (
            ("llama", "bytelevel", 91),
            ("gpt2", "sentencepiece", 92),
            ("qwen3", "unigram", 93),
        )
    ]
    broken = 0
    for chosen in (members, members[:2], members[:1], members[2:]):
        for seed in sized((0,), (0, 2)):
            generation = check(
                chosen,
                PROMPTS[3],
                temperature=1.0,
                top_k=60,
                seed=seed,
                margin_threshold=0.1,
                max_new_tokens=12,
                logprobs=True,
            )
            broken += "\ufffd" in generation.text
    assert broken >= sized(2, 4)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "stop", [("a",), ("er", "th"), ("\n",), (" t", "e ")], ids=["a", "er", "newline", "spaces"]
)
def test_stop_sequences_in_draws(stop: tuple[str, ...]) -> None:
    for number, prompt in enumerate(PROMPTS[:2]):
        generation = check(
            PAIR, prompt, **DRAWS[number], stop=stop, margin_threshold=0.2, max_new_tokens=12
        )
        assert not any(sequence in generation.text for sequence in stop)


def test_every_finish_reason_of_a_draw() -> None:
    eager = (
        Recipe("llama", "bytelevel", seed=41, end_bias=6.0),
        Recipe("qwen2", "sentencepiece", seed=42, end_bias=6.0),
    )
    reasons = {
        check(eager, prompt, **draws, margin_threshold=0.3, max_new_tokens=limit).finish_reason
        for prompt, draws, limit in zip(PROMPTS, DRAWS, (1, 60, 3, 60), strict=False)
    }
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("extra", [1, 3, 8])
def test_draws_in_small_context_windows(extra: int) -> None:
    room = len(tokenizer("bytelevel").encode("The ferry to")) + extra
    small = Recipe("llama", "bytelevel", seed=61, window=room)
    for members in ([small], [PAIR[1], small]):
        check(members, "The ferry to", **DRAWS[extra % 3], margin_threshold=0.2, max_new_tokens=30)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("start", STARTS, ids=["plain", "spaces", "newline", "messages"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_draws_of_every_form_equal_the_reference(
    form: dict[str, Any], start: dict[str, Any]
) -> None:
    pytest.importorskip("llguidance")
    number = FORMS.index(form) + STARTS.index(start)
    members = (*MIXES[:4], TEMPLATES[:2])[number % 5]
    language = Options(**form).language
    assert language is not None
    generation = check(
        members,
        **start,
        **form,
        **DRAWS[number % 4],
        margin_threshold=(0.9, 0.2)[number % 2],
        max_new_tokens=40,
        top_logprobs=number % 3,
    )
    assert language.holds(generation.text.encode())


@pytest.mark.parametrize("form", FORMS[:3], ids=lambda form: next(iter(form)))
def test_draws_of_a_form_at_every_limit_equal_the_reference(form: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    language = Options(**form).language
    assert language is not None
    members = MIXES[FORMS.index(form)]
    for start, extra in zip(STARTS[1:4:2], (0, 3), strict=True):
        response = Response(
            [reference(member) for member in members],
            start.get("prompt"),
            start.get("messages"),
            language,
        )
        limit = response.minimum() + extra
        generation = check(
            members, **start, **form, **DRAWS[extra % 2], max_new_tokens=limit, logprobs=True
        )
        assert language.holds(generation.text.encode())


def test_choices_are_not_drawn() -> None:
    choices = ("yes", "no", "perhaps not", "caf\u00e9")
    for start in STARTS[2:]:
        alone = check(PAIR, **start, choices=choices)
        assert check(PAIR, **start, choices=choices, temperature=2.0, seed=5).text == alone.text


# Log-probabilities ----------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("members", MIXES, ids=lambda members: members[0].name)
def test_log_probabilities_equal_the_reference(members: tuple[Recipe, ...]) -> None:
    shift = MIXES.index(members)
    starts: list[dict[str, Any]] = [*STARTS, {"prompt": PROMPTS[3]}, {"prompt": PROMPTS[4]}]
    for number in range(shift % 2, 6, 3):
        start = starts[(shift + number) % 6]
        options: dict[str, Any] = {"margin_threshold": 0.2, "max_new_tokens": 12, **start}
        draws = DRAWS[number % 4] if number % 2 else {}
        generation = check(members, **options, **draws, logprobs=True, top_logprobs=number % 4)
        assert all(each.logprobs for each in generation.rounds if each.text)
        plain = engine(*members).generate(**options, **draws)
        assert (plain.text, plain.finish_reason) == (generation.text, generation.finish_reason)


def test_log_probabilities_of_a_choice_equal_the_reference() -> None:
    for start in STARTS[1:4:2]:
        check(PAIR, **start, choices=("yes", "no", "perhaps"), logprobs=True, top_logprobs=20)


# The same draws whatever else is computed ------------------------------------------------------


def draws_of(number: int) -> dict[str, Any]:
    return {"margin_threshold": 0.2, "max_new_tokens": 12, **DRAWS[number % len(DRAWS)]}


def test_batches_threads_and_streams_draw_what_one_decode_draws() -> None:
    ensemble = engine(*TRIPLE)
    for number in range(2):
        options = draws_of(number)
        prompts = PROMPTS[number::2]
        alone = [as_data(ensemble.generate(prompt, **options)) for prompt in prompts]
        batch = ensemble.generate_batch(prompts, **options)
        with ThreadPoolExecutor(3) as threads:
            threaded = threads.map(lambda p: ensemble.generate(p, **options), prompts)  # noqa: B023
            assert [as_data(each) for each in threaded] == approximately(alone)
        assert [as_data(each) for each in batch] == approximately(alone)
        for prompt, expected in zip(prompts, alone, strict=True):
            *_, last = ensemble.stream(prompt, **options)
            assert last.generation is not None
            assert as_data(last.generation) == approximately(expected)


def test_a_temperature_near_zero_writes_what_is_likeliest() -> None:
    options: dict[str, Any] = {"margin_threshold": 0.2, "max_new_tokens": 16}
    for number, members in enumerate(MIXES):
        prompt = PROMPTS[1 + number % 3]
        ensemble = engine(*members)
        cold = ensemble.generate(prompt, temperature=1e-6, seed=3, **options)
        greedy = ensemble.generate(prompt, branching_factor=1, **options)
        assert as_data(cold) == approximately({**as_data(greedy), "seed": 3})


# Cuts -----------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 2, 7, 300])
def test_cuts_keep_the_tokens_that_transformers_keeps(size: int) -> None:
    """In the reference and in the engine, where no other token is ever drawn."""
    generator = torch.Generator().manual_seed(size)
    codes = [text_hash(str(token)) for token in range(size)]
    for top_k in (None, 1, 2, 5, 40, 1000):
        for top_p in (1e-6, 0.1, 0.5, 0.9, 0.999, 1.0):
            row = 3 * torch.randn(size, generator=generator, dtype=torch.float64)
            expected = row[None]
            if top_k is not None:
                expected = TopKLogitsWarper(top_k)(torch.empty(0), expected)
            if top_p < 1:
                expected = TopPLogitsWarper(top_p)(torch.empty(0), expected)
            found = kept(dict(enumerate(row.tolist())), top_k, top_p)
            allowed = expected[0].isfinite().nonzero()[:, 0].tolist()
            assert sorted(found) == allowed
            draws = [
                draw_one(row.tolist(), codes, Draw(text_hash(f"{key}"), 1.0, top_p, top_k))
                for key in range(40)
            ]
            assert set(draws) <= set(allowed)
            assert len(allowed) > 3 or set(draws) == set(allowed)


# Strategies -----------------------------------------------------------------------------------


def run(strategy: str, members: tuple[Recipe, ...], **options: Any) -> Generation:
    with AdaFuseEngine([backend(member) for member in members], strategy=strategy) as ensemble:
        return ensemble.generate(**options)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("number", range(4))
def test_a_single_member_draws_what_the_reference_draws(number: int) -> None:
    for start in STARTS[number % 2 :: 2]:
        for member in TRIPLE:
            options: dict[str, Any] = {"max_new_tokens": 10, **DRAWS[number]}
            prompt, messages = start.get("prompt"), start.get("messages")
            expected = decode([reference(member)], prompt, Options(**options), messages=messages)
            got = run("single", (member,), **start, **options)
            assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
            assert got.usage.completion_tokens == expected.completion_tokens


@pytest.mark.parametrize("words", [1, 3])
def test_a_fixed_number_of_words_draws_what_the_reference_draws(words: int) -> None:
    for members, prompt in ((PAIR, PROMPTS[0]), (TRIPLE, PROMPTS[3])):
        draws: dict[str, Any] = {"max_new_tokens": 12, **DRAWS[words]}
        expected = decode(
            [reference(member) for member in members],
            prompt,
            Options(margin_threshold=0, max_words=words, **draws),
        )
        assert_same(run(f"fixed-{words}", members, prompt=prompt, **draws), expected, TOLERANCE)


# Random requests ------------------------------------------------------------------------------

CONFIGS = st.fixed_dictionaries(
    {
        **FREE,
        "temperature": st.sampled_from([0.01, 0.3, 0.7, 1.0, 1.5, 4.0]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
        "top_k": st.sampled_from([None, 1, 2, 5, 40]),
        "seed": st.integers(-10, 10_000),
        "logprobs": st.booleans(),
        "top_logprobs": st.sampled_from([0, 0, 1, 3]),
        "branching_factor": st.sampled_from([1, 3]),
    }
)


@pytest.mark.sweep(1)
@settings(max_examples=sized(12, 1000))
@given(
    text=TEXTS,
    options=CONFIGS,
    members=st.sampled_from((*MIXES, TEMPLATES)),
    as_messages=st.booleans(),
    form=st.sampled_from([{}, {}, *FORMS]),
)
def test_random_draws_equal_the_reference(
    text: str,
    options: dict[str, Any],
    members: tuple[Recipe, ...],
    as_messages: bool,
    form: dict[str, Any],
) -> None:
    messages = [{"role": "user", "content": text}]
    is_chat = as_messages and bool(text.strip())
    start: dict[str, Any] = {"messages": messages} if is_chat else {"prompt": text}
    if form and members is not LOSSY:  # it has no token for some characters of the forms
        pytest.importorskip("llguidance")
        options |= {**form, "max_new_tokens": 60}
    check(members, **start, **options)


@pytest.mark.quick
def test_the_seeds_of_several_responses_are_those_of_the_reference() -> None:
    for seed in (0, 7, -1, 2**80):
        assert list(AdaFuseConfig(temperature=1.0, seed=seed, n=5).seeds()) == seeds(seed, 5)
