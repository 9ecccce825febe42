"""Responses that members draw: the engine against the reference, in float64."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adafuse_llm import AdaFuseConfig, AdaFuseEngine
from tests.decoding.cases import (
    CONVERSATIONS,
    EAGER,
    FORMS,
    FREE,
    OTHERS,
    PREFIXED,
    PROMPTS,
    STARTS,
    TEMPLATES,
    TEXTS,
)
from tests.reference import Options, decode
from tests.reference_sampling import seeds
from tests.support.compare import approximately, as_data, check
from tests.support.models import LOSSY, PAIR, TRIPLE, Recipe, backend, engine, reference, tokenizer
from tests.support.sizes import sized

MIXES = (PAIR, TRIPLE, OTHERS, PREFIXED, LOSSY, TRIPLE[2:])
DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2},
    {"temperature": 1.5, "top_k": 12, "seed": -3},
    {"temperature": 2.5, "top_k": 40, "top_p": 0.6, "seed": 2**70},
)
SMALL = Recipe(
    "llama", "bytelevel", seed=61, window=len(tokenizer("bytelevel").encode("The ferry to")) + 3
)
CASES: dict[str, tuple[tuple[Recipe, ...], dict[str, Any]]] = {
    "prompt": (TRIPLE, {"prompt": PROMPTS[0], "max_word_tokens": 4}),
    "messages": (TEMPLATES, {"messages": CONVERSATIONS[2]}),
    "messages to others": (OTHERS, {"messages": CONVERSATIONS[0]}),
    "five spaces": (OTHERS, {"prompt": "Answer:     "}),
    "two spaces": (PREFIXED, {"prompt": "Answer:  ", "margin_threshold": 0.02}),
    "lost characters": (LOSSY, {"prompt": PROMPTS[4], "margin_threshold": 0.7}),
    "stop sequences": (PAIR, {"prompt": PROMPTS[0], "stop": (" t", "e ")}),
    "early end": (EAGER, {"prompt": PROMPTS[1], "max_new_tokens": 60}),
    "small window": ((PAIR[1], SMALL), {"prompt": "The ferry to", "max_new_tokens": 30}),
    "small window alone": ((SMALL,), {"prompt": "The ferry to", "max_new_tokens": 30}),
    "choices": (PAIR, {**STARTS[1], "choices": ("yes", "no"), "top_logprobs": 20}),
}


@pytest.mark.parametrize("case", CASES)
def test_draws_and_log_probabilities_equal_the_reference(case: str) -> None:
    members, options = CASES[case]
    number = list(CASES).index(case)
    options = {"margin_threshold": 0.2, "max_new_tokens": 12, **options, **DRAWS[number % 4]}
    generation = check(members, **{"logprobs": True, "top_logprobs": number % 4, **options})
    plain = engine(*members).generate(**options)
    assert (plain.text, plain.finish_reason) == (generation.text, generation.finish_reason)


def test_draws_of_characters_of_several_tokens_equal_the_reference() -> None:
    """The members draw the bytes of characters one by one, and may stop between them."""
    members = [
        Recipe(arch, kind, seed=seed, spread=0.2, space_bias=-4.0, end_bias=-9.0)
        for arch, kind, seed in (("llama", "bytelevel", 91), ("gpt2", "sentencepiece", 92))
    ]
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 60, "margin_threshold": 0.1}
    broken = 0
    for chosen, seed, size in ((members, 0, 8), (members[:1], 0, 8), (members[1:], 16, 1)):
        options |= {"seed": seed, "max_word_tokens": size}
        generation = check(chosen, PROMPTS[3], **options, max_new_tokens=12, logprobs=True)
        broken += "\ufffd" in generation.text
    assert broken


def test_a_temperature_near_zero_writes_what_is_likeliest() -> None:
    options: dict[str, Any] = {"margin_threshold": 0.2, "max_new_tokens": 16}
    for number, members in enumerate(MIXES):
        prompt = PROMPTS[1 + number % 3]
        ensemble = engine(*members)
        cold = ensemble.generate(prompt, temperature=1e-6, seed=3, **options)
        greedy = ensemble.generate(prompt, branching_factor=1, **options)
        assert as_data(cold) == approximately({**as_data(greedy), "seed": 3})


def test_a_single_member_draws_what_the_reference_draws() -> None:
    draws: dict[str, Any] = {"max_new_tokens": 12, **DRAWS[3]}
    expected = decode([reference(PAIR[1])], PROMPTS[3], Options(**draws))
    with AdaFuseEngine([backend(PAIR[1])], strategy="single") as ensemble:
        found = ensemble.generate(PROMPTS[3], **draws)
    assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
    assert found.usage.completion_tokens == expected.completion_tokens


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
