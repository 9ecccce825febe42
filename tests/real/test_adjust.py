"""Penalties, biases and minimum lengths on real members."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adafuse_llm import AdaFuseEngine, RuntimeConfig
from adafuse_llm.backends.huggingface import HuggingFaceBackend

pytestmark = pytest.mark.real

NAMES = ("smollm", "gemma", "qwen")
PROMPTS = ("The old lighthouse keeper climbed the stairs and", "A list of words: cat, cat, cat,")
BIASES = {" and": -4.0, " the": 1.5, " the sea": 3.0}
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 4,
    "min_new_tokens": 12,
    "logit_bias": BIASES,
}

Engine = Callable[..., AdaFuseEngine]


def generated(model: Any, backend: HuggingFaceBackend, prompt: str, **options: Any) -> str:
    """The text of transformers' own greedy decoding, without the end token."""
    ids = backend.codec.encode_prompt(prompt)
    output = model.generate(torch.tensor([ids]), do_sample=False, pad_token_id=0, **options)[
        0
    ].tolist()
    new = [token for token in output[len(ids) :] if token not in backend.end_ids]
    return backend.codec.decode_continuation(ids, new)


def biased(backend: HuggingFaceBackend) -> dict[tuple[int, ...], float]:
    before = backend.codec.encode_prompt("\n")
    return {
        tuple(backend.codec.encode_continuation(before, text)[0]): bias
        for text, bias in BIASES.items()
    }


@pytest.mark.parametrize(("name", "prompt"), [*zip(NAMES, (*PROMPTS, PROMPTS[1]), strict=True)])
def test_one_member_equals_generate(
    name: str,
    prompt: str,
    real_engine: Engine,
    real_models: dict[str, tuple[Any, Any]],
    real_backends: dict[str, HuggingFaceBackend],
) -> None:
    model, backend = real_models[name][0], real_backends[name]
    given = {**PENALTIES, "sequence_bias": biased(backend), "max_new_tokens": 32}
    del given["logit_bias"]
    plain = generated(model, backend, prompt, max_new_tokens=32)
    expected = generated(model, backend, prompt, **given)
    assert expected != plain
    for drafting in (False, True):
        engine = real_engine(name, runtime=RuntimeConfig(drafting=drafting))
        result = engine.generate(prompt, branching_factor=1, max_new_tokens=32, **PENALTIES)
        assert result.text == expected
