"""The tree form: chunks of prompts, and rows of dropped nodes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from adafuse_llm import AdaFuseConfig, AdaFuseEngine
from adafuse_llm.backends.huggingface import HuggingFaceBackend, passes
from adafuse_llm.backends.huggingface.rows import TreeForm
from tests.reference import Options, decode
from tests.support.compare import assert_same, check
from tests.support.models import Recipe, backend, engine, model, reference, tokenizer

PROMPT = "The ferry to Orrin leaves at nine. It carries twelve people and the post. " * 3


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma2", "gpt2"])
def test_a_prompt_in_chunks_gives_the_same_numbers(arch, monkeypatch):
    monkeypatch.setattr(passes, "PIECE_TOKENS", (7, 7))
    backend(Recipe(arch)).clear_prefix_cache()
    options: dict[str, Any] = {"max_new_tokens": 12, "margin_threshold": 0.2}
    generation = engine(Recipe(arch)).generate(PROMPT, **options)
    check([Recipe(arch)], PROMPT, **options)
    prompt_tokens = next(iter(generation.usage.prompt_tokens.values()))
    assert next(iter(generation.usage.forward_passes.values())) > prompt_tokens // 7


def test_a_cancelled_prompt_stops_at_a_piece_and_a_later_request_goes_on_from_there(monkeypatch):
    monkeypatch.setattr(passes, "PIECE_TOKENS", (16, 16))
    recipe, cancel, sizes = Recipe("llama", seed=43), threading.Event(), []

    def count(module, args, kwargs):
        sizes.append(kwargs["input_ids"].shape[1])
        if sizes == [16, 16]:
            cancel.set()
            time.sleep(0.2)  # the scheduler looks every 0.05 seconds

    member = HuggingFaceBackend(model(recipe), tokenizer(recipe.kind), recipe.name)
    hook = model(recipe).register_forward_pre_hook(count, with_kwargs=True)
    with AdaFuseEngine([member]) as engine:
        assert engine.generate(PROMPT, cancel=cancel).finish_reason == "cancelled"
        engine.generate("x", max_new_tokens=1)
        assert sizes[:3] == [16, 16, 1]
        generation = engine.generate(PROMPT, max_new_tokens=12)
    hook.remove()
    assert generation.usage.cached_tokens[recipe.name] == 32
    expected = decode([reference(recipe)], PROMPT, Options(max_new_tokens=12))
    assert_same(generation, expected, 1e-6)


@pytest.mark.quick
def test_every_prompt_token_is_processed_once():
    recipe = Recipe("llama")
    backend(recipe).clear_prefix_cache()
    generation = engine(recipe).generate(PROMPT, max_new_tokens=1, branching_factor=1, max_words=1)
    usage = generation.usage
    prompt, done = usage.prompt_tokens[recipe.name], usage.tokens_processed[recipe.name]
    assert prompt <= done <= prompt + usage.completion_tokens[recipe.name] + 1


def test_dead_rows_never_exceed_a_quarter_of_the_buffer_after_a_commit():
    seen = []

    class Watched(TreeForm):
        def reroot(self):
            super().reroot()
            alive = int(self._trunk.sum()) + len({r for ln in self._lines.values() for r in ln})
            assert self.rows.count == len(self._trunk) == len(self._positions)
            assert 4 * (self.rows.count - alive) <= self.rows.count
            seen.append(self.rows.count)

    member = HuggingFaceBackend(model(Recipe("llama")), tokenizer("bytelevel"), "watched")
    member._passes.new_form = Watched  # type: ignore[method-assign]
    config = AdaFuseConfig(margin_threshold=1, max_new_tokens=120, branching_factor=5)
    generation = AdaFuseEngine([member], config).generate("The ferry")
    assert len(seen) >= 20
    sequence = (
        generation.usage.prompt_tokens["watched"] + generation.usage.completion_tokens["watched"]
    )
    assert max(seen) < 3 * sequence, "rows of losers pile up"
