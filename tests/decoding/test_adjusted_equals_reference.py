"""Changed distributions: the engine against the reference, which has transformers' processors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.compare import check
from tests.support.models import PAIR, TRIPLE, Recipe, backend, model
from tests.support.sizes import sized

PROMPTS = (
    "The ferry to Orrin leaves at nine.",
    "a a a a b b b b a a a ",
    "Question: who keeps the light?\nAnswer:  ",
)

OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.7},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 0.7, "presence_penalty": -1.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "no token twice": {"no_repeat_ngram_size": 1},
    "min_new_tokens": {"min_new_tokens": 9},
    "logit_bias": {"logit_bias": {" the": 20.0, "a": -7.5, " light": 9.0, "Orrin": 12.0}},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 6,
        "logit_bias": {" the": 4.0, "e": -3.0, " keeps the": 6.0},
    },
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_adjusted_decodes_equal_the_reference(options: dict[str, Any], branches: int) -> None:
    for members in (PAIR[:1], PAIR):
        for prompt in PROMPTS:
            decoding = {"branching_factor": branches, "max_new_tokens": sized(10, 20), **options}
            check(members, prompt, margin_threshold=0.2, **decoding)


@pytest.mark.sweep(1)
def test_all_options_at_a_time_equal_the_reference() -> None:
    """With drafting and without, greedily, drawn, and in a given form."""
    adjusted = {**OPTIONS["all"], "margin_threshold": 0.2, "max_new_tokens": sized(8, 14)}
    check(TRIPLE, PROMPTS[1], **adjusted, branching_factor=3)
    check(PAIR, PROMPTS[2], **adjusted, temperature=1.2, min_p=0.02, seed=5)
    check(PAIR, PROMPTS[0], **adjusted, regex="( [a-z]{2,5}){4}")
    check(PAIR, PROMPTS[0], **adjusted, top_logprobs=2)


def test_choices_have_the_members_own_probabilities() -> None:
    check(PAIR, PROMPTS[0], choices=(" the light", " Orrin"), **OPTIONS["all"])


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
            check([own, PAIR[1]], PROMPTS[1], max_new_tokens=16, branching_factor=2, **given)
    finally:
        backend.cache_clear()
