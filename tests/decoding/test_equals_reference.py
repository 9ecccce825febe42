"""The engine against an independent transcription of the algorithm, in float64."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from tests.decoding.cases import CONVERSATIONS, FREE, PROMPTS, TEMPLATES, TEXTS
from tests.support.compare import check
from tests.support.models import (
    ARCHITECTURES,
    LOSSY,
    PAIR,
    TOKENIZER_KINDS,
    TRIPLE,
    Recipe,
    backend,
    model,
    tokenizer,
)
from tests.support.sizes import sized

ARCHS = list(ARCHITECTURES)


def recipe(arch: str) -> Recipe:
    """A member whose tokenizer and randomness follow from its place in the list."""
    place = ARCHS.index(arch)
    return Recipe(arch, TOKENIZER_KINDS[place % 3], seed=place)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("number", range(len(ARCHS)), ids=ARCHS)
def test_every_architecture_alone_and_with_its_neighbours(number: int) -> None:
    """The neighbours in the list have tokenizers of the other kinds."""
    members = [recipe(ARCHS[(number + i) % len(ARCHS)]) for i in range(3)]
    for count in (1, 2 + number % 2):
        check(
            members[:count],
            PROMPTS[(number + count) % len(PROMPTS)],
            margin_threshold=(0.3, 0.05, 0.7)[number % 3],
            branching_factor=(3, 2, 5, 1)[number % 4],
            max_words=(3, 1, 2)[number % 3],
            max_new_tokens=sized(12, 24),
        )


TWINS = (PAIR[0], Recipe(PAIR[0].arch, PAIR[0].kind, PAIR[0].seed + 10, spread=PAIR[0].spread))
BOUNDARIES: dict[str, tuple[Sequence[Recipe], dict[str, Any]]] = {
    "no margin is needed": (PAIR, {"margin_threshold": 0.0, "max_word_tokens": 4}),
    "no margin suffices": (TRIPLE, {"margin_threshold": 1.0, "max_new_tokens": 5}),
    "words of one token": (PAIR, {"max_word_tokens": 1, "branching_factor": 5}),
    "equal scores": (TWINS, {}),
    "no weight": (PAIR, {"weights": (0.0, 2.0)}),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", BOUNDARIES)
def test_options_at_their_boundaries(case: str) -> None:
    members, options = BOUNDARIES[case]
    for prompt in PROMPTS[1:5:3]:
        check(members, prompt, **{"margin_threshold": 0.3, "max_new_tokens": 10, **options})


@pytest.mark.quick
def test_a_margin_that_equals_the_threshold_suffices() -> None:
    """Two tokens are equally likely, so the margin is 0."""
    member = FakeBackend("one", lambda _: {" a": 0.5, " b": 0.5}, [" a", " b"])
    with AdaFuseEngine([member]) as ensemble:
        for threshold, spans in ((0.0, 1), (0.1, 2)):
            options: dict[str, Any] = {"margin_threshold": threshold, "branching_factor": 2}
            found = ensemble.generate("x", max_new_tokens=2, **options)
            assert len(found.rounds[0].candidates) == spans


def test_conversations_with_and_without_templates() -> None:
    groups = (TEMPLATES, TEMPLATES[:2], TEMPLATES[1:])
    for chosen, messages in zip(groups, CONVERSATIONS, strict=True):
        check(chosen, messages=messages, margin_threshold=0.2, max_new_tokens=12)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("short", "extra"), [("llama", 1), ("llama", 5), ("gpt2", 6), ("qwen3", 1), ("lfm2", 8)]
)
def test_windows_that_end_soon_after_the_prompt(short: str, extra: int) -> None:
    kind = TOKENIZER_KINDS[("llama", "gpt2", "qwen3", "lfm2").index(short) % 3]
    prompt = "The ferry to"
    room = len(tokenizer(kind).encode(prompt)) + extra
    small = Recipe(short, kind, seed=61, window=room)
    assert backend(small).context_window == room
    for margin_threshold, members in (
        (0.0, [small]),
        (0.2, [PAIR[0], small]),
        (1.0, [small, PAIR[1]]),
    ):
        check(members, prompt, margin_threshold=margin_threshold, max_new_tokens=40)


def test_a_sliding_window_model_far_past_its_window() -> None:
    member = recipe("mistral")
    assert model(member).config.sliding_window == 8
    check([member, PAIR[0]], PROMPTS[0] * 3, max_new_tokens=sized(24, 60), margin_threshold=0.2)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("archs", [("llama", "qwen3"), ("lfm2", "mistral")])
def test_long_decodes_with_many_rounds(archs: tuple[str, str]) -> None:
    """Many commits, so that trees are re-rooted and caches compacted again and again."""
    members = [
        Recipe(arch, kind, seed=seed, space_bias=5.0, end_bias=-20.0)  # short words, and no end
        for seed, (arch, kind) in enumerate(zip(archs, TOKENIZER_KINDS, strict=False), start=71)
    ]
    new = sized(40, 150)
    generation = check(
        members,
        PROMPTS[0] * 20 if "llama" in archs else "The keeper",
        margin_threshold=0.5,
        max_words=2,
        branching_factor=2,
        max_new_tokens=new,
    )
    assert len(generation.rounds) >= new // 2
    assert generation.finish_reason == "length"


# Changed distributions, for which the reference has the processors of transformers --------------

REPEATING = (
    "The ferry to Orrin leaves at nine.",
    "a a a a b b b b a a a ",
    "Question: who keeps the light?\nAnswer:  ",
)

ALL: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "no_repeat_ngram_size": 3,
    "min_new_tokens": 6,
    "logit_bias": {" the": 4.0, "e": -3.0, " keeps the": 6.0},
}
ADJUSTMENTS: dict[str, dict[str, Any]] = {
    "reward": {"repetition_penalty": 0.7},
    "frequency_penalty": {"frequency_penalty": 0.7, "presence_penalty": -1.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 9},
    "logit_bias": {"logit_bias": {" the": 20.0, "a": -7.5, " light": 9.0, "Orrin": 12.0}},
    "all": ALL,
    "all and draws": {**ALL, "temperature": 1.2, "min_p": 0.02, "seed": 5},
    "all and a form": {**ALL, "regex": "( [a-z]{2,5}){4}"},
    "all and log-probabilities": {**ALL, "top_logprobs": 2},
    "all and choices": {**ALL, "choices": (" the light", " Orrin")},
}


@pytest.mark.parametrize("number", range(len(ADJUSTMENTS)), ids=ADJUSTMENTS)
def test_adjusted_decodes_equal_the_reference(number: int) -> None:
    options = {"margin_threshold": 0.2, "max_new_tokens": 10, **[*ADJUSTMENTS.values()][number]}
    branches = 3 if number % 2 else 1
    check(PAIR[: 1 + branches // 3], REPEATING[number % 3], branching_factor=branches, **options)


def test_a_generation_config_is_followed_unless_a_call_sets_the_option() -> None:
    own = Recipe("llama", "bytelevel", seed=131, end_bias=2.0)
    config = model(own).generation_config
    tokens = backend(own).codec.encode_continuation((), " the light")[0]
    config.update(
        repetition_penalty=1.5,
        no_repeat_ngram_size=3,
        min_new_tokens=5,
        bad_words_ids=[tokens, tokens[:1]],
        suppress_tokens=[tokens[-1]],
        begin_suppress_tokens=[7, 8],
        sequence_bias=[[[9], 2.0], [[9, 10], 3.0]],
    )
    backend.cache_clear()
    try:
        replaced: dict[str, Any] = {"repetition_penalty": 1.0, "min_new_tokens": 0}
        for given in ({}, replaced):
            check([own, PAIR[1]], REPEATING[1], max_new_tokens=16, branching_factor=2, **given)
    finally:
        backend.cache_clear()


# Random requests ------------------------------------------------------------------------------

SEVERAL = (
    PAIR,
    (Recipe("gemma2", "unigram", seed=81), Recipe("llama", "sentencepiece", seed=82)),
    (Recipe("mamba2", "bytelevel", seed=83), Recipe("qwen2", "unigram", seed=84)),
    LOSSY,
)


@pytest.mark.sweep(1)
@settings(max_examples=sized(20, 1500))
@given(
    text=TEXTS,
    options=st.fixed_dictionaries(FREE),
    members=st.one_of(
        st.sampled_from(SEVERAL),
        st.lists(st.sampled_from(ARCHS).map(recipe), min_size=1, max_size=sized(1, 3), unique=True),
    ),
)
def test_random_prompts_and_options(
    text: str, options: dict[str, Any], members: Sequence[Recipe]
) -> None:
    check(members, text, **options)
