"""Changed distributions: the engine against the reference, which has transformers' processors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.compare import check
from tests.support.models import Recipe

PAIR = (
    Recipe("llama", "bytelevel", seed=31, end_bias=2.0),
    Recipe("gpt2", "sentencepiece", seed=32, space_bias=1.5),
)
TRIPLE = (*PAIR, Recipe("qwen3", "unigram", seed=33, spread=0.6))
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


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_r8_adjusted_decodes_equal_the_reference(options, branches):
    for members in (PAIR[:1], PAIR):
        for prompt in PROMPTS:
            check(
                members,
                prompt,
                margin_threshold=0.2,
                branching_factor=branches,
                max_new_tokens=20,
                **options,
            )
