"""Requests that run at the same time share forward passes, and their prompts' beginnings."""

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import dispatch_model

from adafuse_llm import AdaFuseEngine, MemberOutOfMemoryError, RuntimeConfig
from adafuse_llm.backends import Query
from adafuse_llm.backends.huggingface import HuggingFaceBackend, packing, passes, self_test
from adafuse_llm.backends.huggingface.tree_cache import Slab
from adafuse_llm.tree.tokens import TokenTree
from tests.reference import Options, decode
from tests.support.compare import SINGLE_TOLERANCE, TOLERANCE, assert_same
from tests.support.models import (
    FULL_AND_SLIDING,
    SINGLE_PRECISION,
    TINY,
    Recipe,
    model,
    reference,
    tokenizer,
)

HEADER = "The keeper said that the light is the light, and that the night is long. "
PROMPTS = (
    "The ferry to Orrin leaves at nine.",
    HEADER + "Who keeps the light?",
    "x",
    HEADER + "And so it was.\n\n - bread",
    "Caf\u00e9 \U0001f600 Orrin",
    HEADER * 2,
    "\u4e2d\u6587\u6ca1\u6709",
)
ENDLESS = Recipe("llama", seed=5, end_bias=-30.0)


def member(recipe: Recipe, **options: Any) -> HuggingFaceBackend:
    """A member of its own, which no other test has used."""
    return HuggingFaceBackend(model(recipe), tokenizer(recipe.kind), recipe.name, **options)


@contextlib.contextmanager
def counted_calls(recipe: Recipe) -> Iterator[list[int]]:
    """Tokens of every forward pass of the model while in the block."""
    calls: list[int] = []
    hook = model(recipe).register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield calls
    finally:
        hook.remove()


def check_batch(
    recipes: Sequence[Recipe], prompts: Sequence[str] = PROMPTS, **options: Any
) -> list[int]:
    """Decode all prompts at once; each must be what the reference makes of it alone.

    Return how many tokens of each prompt were cached.
    """
    tolerance = SINGLE_TOLERANCE if any(r.arch in SINGLE_PRECISION for r in recipes) else TOLERANCE
    with AdaFuseEngine([member(recipe) for recipe in recipes]) as engine:
        generations = engine.generate_batch(prompts, **options)
    for prompt, generation in zip(prompts, generations, strict=True):
        expected = decode([reference(recipe) for recipe in recipes], prompt, Options(**options))
        assert_same(generation, expected, tolerance)
    return [each.usage.cached_tokens[recipes[0].name] for each in generations]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma2", "gpt2", "falcon", "mamba"])
def test_many_requests_at_once_equal_the_reference(arch: str) -> None:
    pair = Recipe(arch, "sentencepiece", seed=7), Recipe("olmo2", "bytelevel", seed=8)
    check_batch(pair, margin_threshold=0.2, max_new_tokens=8)


@pytest.mark.parametrize(("arch", "fold_rows"), [("llama", 8), ("gemma3", 0)])
def test_small_passes_and_folded_heads_give_the_same_numbers(
    arch: str, fold_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "FOLD_ROWS", fold_rows)
    monkeypatch.setattr(passes, "PIECE_TOKENS", (16, 16))
    monkeypatch.setattr(passes, "PREFILL_TOKENS", 40)
    recipe = Recipe(arch, seed=3)
    check_batch([recipe], margin_threshold=0.2, max_new_tokens=10)
    engine = AdaFuseEngine([member(recipe, prefix_cache_bytes=0)])
    with engine, counted_calls(recipe) as calls:
        engine.generate_batch([HEADER * 3, HEADER * 5, "x", HEADER], max_new_tokens=2)
    assert max(calls) <= 40


@pytest.mark.quick
def test_requests_share_forward_passes() -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "margin_threshold": 0.2}
    with AdaFuseEngine([member(ENDLESS, prefix_cache_bytes=0)]) as engine:
        with counted_calls(ENDLESS) as calls:
            generations = engine.generate_batch(["The ferry to Orrin leaves"] * 8, **options)
        passes = [g.usage.forward_passes[ENDLESS.name] for g in generations]
        tokens = sum(g.usage.tokens_processed[ENDLESS.name] for g in generations)
    assert {*passes} == {len(calls)}, "eight requests in step need the passes of one"
    assert sum(calls) == tokens


@pytest.mark.quick
def test_long_prompts_share_a_piece_which_is_short_while_another_request_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "PIECE_TOKENS", (16, 64))
    ours = member(ENDLESS, prefix_cache_bytes=0)
    trees, writer = [TokenTree(range(i, i + 100)) for i in (5, 105)], TokenTree([1, 2, 3])
    with counted_calls(ENDLESS) as calls:
        assert ours.read_piece(trees) == [False, False]
        ours.evaluate([Query(writer, (writer.root,), (), 2)])
        assert ours.read_piece(trees) == [False, False]
        ours.evaluate([Query(tree, (tree.root,), (), 2) for tree in trees])
    assert calls == [64, 3, 32, 64, 40]


def test_a_prompt_that_was_read_in_part_is_read_from_there_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "PIECE_TOKENS", (16, 16))
    ours, first, again = member(ENDLESS), TokenTree(range(5, 105)), TokenTree(range(5, 105))
    assert [ours.read_piece([first]) for _ in range(2)] == [[False], [False]]
    ours.release(first)
    (answer,) = ours.evaluate([Query(again, (again.root,), (), 2)])
    assert (answer.reused, answer.tokens) == (32, 68)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_layers_that_change_their_scores_share_passes(name: str) -> None:
    """A bound of the scores, and sinks; with a sliding window."""
    sizes: dict[str, Any] = {**TINY, **FULL_AND_SLIDING, "head_dim": 8, "vocab_size": 420}
    config: Any = transformers.Gemma2Config(**sizes, attn_logit_softcapping=2.0)
    if name == "gpt_oss":
        config = transformers.GptOssConfig(**sizes, num_local_experts=2, num_experts_per_tok=1)
    config._experts_implementation = "eager"  # grouped matrix products know no float64
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(0, 0.4)
    lines = [range(3, 33), range(7, 19)]
    with torch.inference_mode():
        usual = [plain(torch.tensor([[*ids]])).logits[0, -1] for ids in lines]
    made = HuggingFaceBackend(plain, tokenizer("bytelevel"), name)
    assert made.form == "tree"
    trees = [TokenTree(ids[:-2]) for ids in lines]
    made.evaluate([Query(tree, (tree.root,), (), 2) for tree in trees])
    tips = [tree.grow(ids[-2:]) for tree, ids in zip(trees, lines, strict=True)]
    found = made.evaluate([Query(t, (tip,), (), 2) for t, tip in zip(trees, tips, strict=True)])
    assert [result.passes for result in found] == [1, 1]
    for result, logits in zip(found, usual, strict=True):
        expected = logits.log_softmax(-1).topk(2).values.tolist()
        assert result.next[0].logprobs == pytest.approx(expected, abs=1e-5)


def test_a_model_works_as_usual_for_others_while_a_pass_runs_and_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = Recipe("llama", seed=20)
    made, plain, ids = member(recipe), model(recipe), torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        usual = plain(ids).logits
    layer, ours = plain.model.layers[1], threading.current_thread()
    forward, found = layer.forward, list[Any]()

    def use() -> None:
        with torch.inference_mode():
            found.extend((member(recipe).form, plain(ids).logits))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is ours:
            other = threading.Thread(target=use)
            other.start()
            other.join()
            if len(found) > 2:
                raise ZeroDivisionError
        return forward(*args, **kwargs)

    def evaluate() -> float:
        trees = [TokenTree([5, 6, 7, 8]), TokenTree([9, 10])]
        answers = made.evaluate([Query(tree, (tree.root,), (), 1) for tree in trees])
        return answers[0].next[0].logprobs[0]

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", interrupted)
        assert evaluate() == pytest.approx(float(usual[0, -1].log_softmax(-1).max()), abs=1e-9)
        with pytest.raises(ZeroDivisionError):
            evaluate()
    assert found[0] == found[2] == "tree"
    for logits in (found[1], found[3], plain(ids).logits):
        assert torch.equal(logits, usual)


class ChangedKeys(transformers.LlamaForCausalLM):
    """Attends to other keys than it caches, as models that repeat their keys do."""

    def forward(
        self, input_ids: Any, position_ids: Any = None, past_key_values: Any = None, **rest: Any
    ) -> Any:
        if (cache := past_key_values) is not None:
            update = type(cache).update
            cache.update = lambda *new: [rows.clone() for rows in update(cache, *new)]
        return super().forward(input_ids, position_ids=position_ids, past_key_values=cache, **rest)


@pytest.mark.parametrize("kind", [ChangedKeys, transformers.FalconForCausalLM])
def test_a_model_with_an_attention_of_its_own_has_the_path_form(kind: Any) -> None:
    options: dict[str, Any] = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32}
    if kind is transformers.FalconForCausalLM:
        options |= {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}
    torch.manual_seed(0)
    config = kind.config_class(vocab_size=512, intermediate_size=48, **options)
    made = HuggingFaceBackend(kind(config).double().eval(), tokenizer("bytelevel"), "own")
    assert made.form == "path"
    assert made.model.config._attn_implementation == "sdpa"
    tree = TokenTree(range(20))
    (answer,) = made.evaluate([Query(tree, (tree.root,), (), 1)])
    with torch.inference_mode():
        plain = made._decoder.plain(tree.ids).log_softmax(-1)
    assert answer.next[0].logprobs[0] == pytest.approx(float(plain.max()), abs=1e-9)


# Beginnings -----------------------------------------------------------------------------------


def cached(engine: AdaFuseEngine, text: str, **options: Any) -> int:
    """Answer a prompt. Return the number of cached tokens."""
    options = {"max_new_tokens": 2, **options}
    (tokens,) = engine.generate(text, **options).usage.cached_tokens.values()
    return tokens


@pytest.mark.quick
def test_a_prompt_that_begins_like_an_earlier_one_is_read_from_there() -> None:
    recipe = Recipe("qwen3", seed=9)
    options: dict[str, Any] = {"max_new_tokens": 12, "margin_threshold": 0.2}
    name, text = recipe.name, HEADER + "And so it was."
    with AdaFuseEngine([member(recipe)]) as engine:
        first = engine.generate(HEADER + "Who keeps it?", **options)
        again, same = (engine.generate(text, **options) for _ in range(2))
    header = len(tokenizer(recipe.kind).encode(HEADER.rstrip()))
    prompt, read = first.usage.prompt_tokens[name], first.usage.tokens_processed[name]
    assert prompt <= read <= prompt + 5 * first.usage.completion_tokens[name]
    assert first.usage.cached_tokens[name] == 0
    assert header <= again.usage.cached_tokens[name] < again.usage.prompt_tokens[name]
    assert same.usage.cached_tokens[name] == same.usage.prompt_tokens[name] - 1
    assert again.usage.tokens_processed[name] < read
    expected = decode([reference(recipe)], text, Options(**options))
    for generation in (again, same):
        assert_same(generation, expected, TOLERANCE)


def test_a_conversation_goes_on_from_the_rows_of_its_last_reply() -> None:
    """Rows of a finished response are in order, whatever was tried and dropped on the way."""
    kept = member(Recipe("llama", seed=12))
    tree = TokenTree(range(5, 25))
    kept.evaluate([Query(tree, (tree.root,), (), 2)])
    for step in range(12):
        tips = [tree.grow([30 + step, token]) for token in range(40 + step, 45 + step)]
        kept.evaluate([Query(tree, tuple(node for tip in tips for node in tree.path(tip)), (), 2)])
        tree.commit(tips[step % 5])
    kept.release(tree)
    longer = TokenTree([*tree.ids, 7, 8, 9])
    (answer,) = kept.evaluate([Query(longer, (longer.root,), (), 2)])
    assert (answer.reused, answer.tokens) == (len(tree.ids), 3)
    with torch.inference_mode():
        plain = model(Recipe("llama", seed=12))(torch.tensor([longer.ids])).logits[0, -1]
    assert answer.next[0].logprobs[0] == pytest.approx(float(plain.log_softmax(-1).max()))


def test_prompts_of_one_batch_that_begin_alike_are_read_once() -> None:
    recipe = Recipe("llama", seed=13)
    prompts = [HEADER * 2 + end for end in ("One", "Two", "Three", "Four")]
    first, *others = sorted(check_batch([recipe], prompts, max_new_tokens=4))
    assert first == 0
    assert min(others) > 0.8 * len(tokenizer(recipe.kind).encode(prompts[0]))


def test_rows_of_a_running_request_serve_others_until_the_cache_is_cleared() -> None:
    ours = member(ENDLESS)
    with AdaFuseEngine([ours]) as engine:
        running = engine.stream(HEADER + "One", max_new_tokens=200)
        next(running)
        assert cached(engine, HEADER + "Two") > 0
        ours.clear_prefix_cache()
        assert cached(engine, HEADER + "Three") == 0
        ours.clear_prefix_cache()
        list(running)
        assert cached(engine, HEADER + "Four") == 0


@pytest.mark.parametrize(
    ("form", "rows", "kept"), [("tree", 50, 50), ("tree", 0, 0), ("path", 99, 0)]
)
def test_as_many_rows_are_kept_as_the_limit_and_the_form_allow(
    form: str, rows: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "FORMS", (form,))
    limit = rows * member(ENDLESS).cache_bytes(1) // 3  # a third of it is rows
    with AdaFuseEngine([member(ENDLESS, prefix_cache_bytes=limit)]) as engine:
        assert [cached(engine, HEADER * 4) for _ in range(2)] == [0, kept]


@pytest.mark.parametrize("failures", [1, 2])
def test_kept_rows_make_room_for_a_pass_that_runs_out_of_memory(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, sizes = member(ENDLESS), list[int]()
    layer = model(ENDLESS).model.layers[1]
    forward = layer.forward

    def scarce(*args: Any, **kwargs: Any) -> Any:
        sizes.append(len(kept._kept))
        if len(sizes) <= failures:
            raise torch.OutOfMemoryError("in the second layer")
        return forward(*args, **kwargs)

    with AdaFuseEngine([kept], runtime=RuntimeConfig(drafting=False)) as engine:
        engine.generate(HEADER, max_new_tokens=2)
        monkeypatch.setattr(layer, "forward", scarce)
        if failures > 1:
            with pytest.raises(MemberOutOfMemoryError):
                engine.generate(PROMPTS[0], max_new_tokens=2)
            return
        generation = engine.generate(PROMPTS[0], max_new_tokens=2)
    assert sizes[0] > 0
    assert not any(sizes[1:])
    expected = decode([reference(ENDLESS)], PROMPTS[0], Options(max_new_tokens=2))
    assert_same(generation, expected, TOLERANCE)


# Slots ----------------------------------------------------------------------------------------


def test_the_slot_of_a_prompt_with_nan_serves_other_requests() -> None:
    ours = member(ENDLESS, prefix_cache_bytes=0)
    running, broken, *trees = map(TokenTree, ([6] * 50, [5] * 50, [6, 4, 3] * 2, [6, 4, 1] * 5))
    ours.evaluate([Query(running, (running.root,), (), 2)])

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.where((args[0] == 5)[..., None], torch.nan, output)

    hook = model(ENDLESS).get_input_embeddings().register_forward_hook(spoil)
    ours._pieces = (17, 17)
    ours.read_piece([broken])
    hook.remove()
    ours.release(broken)
    del broken
    results = ours.evaluate([Query(tree, (tree.root,), (), 2) for tree in trees])
    assert not any(result.has_nan for result in results)


def test_slots_can_be_added_after_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    slab, rows = Slab(capacity=2), torch.ones(1, 1, 2, 1)
    for index in range(2):
        for buffer in slab.layer(index, rows, rows):
            buffer[:] = 1
    calls, new_zeros = list[int](), torch.Tensor.new_zeros

    def scarce(*args: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("in the second layer")
        return new_zeros(*args)

    monkeypatch.setattr(torch.Tensor, "new_zeros", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        slab.grow(3)
    slab.grow(2)
    assert slab.free == [0, 1]
    buffers = [buffer for index in range(2) for buffer in slab.layer(index, rows, rows)]
    assert [buffer[0, :2, 0, 0].tolist() for buffer in buffers] == [[1, 0]] * 4


# Several devices ------------------------------------------------------------------------------


def test_a_model_whose_weights_are_in_several_places_shares_passes(tmp_path: Path) -> None:
    recipe = Recipe("llama", seed=10)
    spread = copy.deepcopy(model(recipe))
    places = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm"], "cpu")
    layers = [f"model.layers.{number}" for number in range(len(spread.model.layers))]
    places |= {**dict.fromkeys(layers, "disk"), "lm_head": "cpu"}
    dispatch_model(spread, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    kept = set()
    spread.register_forward_pre_hook(
        lambda module, args, kwargs: kept.add(type(kwargs.get("logits_to_keep"))), with_kwargs=True
    )
    made = HuggingFaceBackend(spread, tokenizer(recipe.kind), recipe.name)
    assert made.form == "tree"
    with AdaFuseEngine([made]) as engine, AdaFuseEngine([member(recipe)]) as usual:
        texts = [each.text for each in engine.generate_batch(PROMPTS, max_new_tokens=12)]
        assert texts == [each.text for each in usual.generate_batch(PROMPTS, max_new_tokens=12)]
    assert list in kept
    assert torch.Tensor not in kept
