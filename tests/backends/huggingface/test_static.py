"""Passes of fixed sizes over buffers that stay in place: the same results, and what CUDA graphs
rely on.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from adafuse_llm import AdaFuseEngine, InvalidOptionError, MemberSpec
from adafuse_llm.backends import NodeQuery
from adafuse_llm.backends.huggingface import HuggingFaceBackend, decoder, pools, static
from adafuse_llm.backends.huggingface.decoder import Decoder
from adafuse_llm.backends.huggingface.kv import RowCache
from adafuse_llm.backends.huggingface.slots import SlotRows
from adafuse_llm.backends.huggingface.static import StaticPasses
from adafuse_llm.tree import Node, TokenTree
from tests.reference import Options, decode
from tests.support.compare import SINGLE_TOLERANCE, TOLERANCE, assert_same
from tests.support.models import SINGLE_PRECISION, Recipe, model, reference, tokenizer

HEADER = "The keeper said that the light is the light, and that the night is long. "
PROMPTS = (
    "The ferry to Orrin leaves at nine.",
    HEADER + "Who keeps the light?",
    "x",
    HEADER + "And so it was.\n\n - bread",
    "Caf\u00e9 \U0001f600 Orrin",
    HEADER * 5,
    "\u4e2d\u6587\u6ca1\u6709",
)


def member(recipe: Recipe, **options: Any) -> HuggingFaceBackend:
    made = HuggingFaceBackend(
        model(recipe), tokenizer(recipe.kind), recipe.name, static_cache=True, **options
    )
    assert made.static_cache
    return made


def passes_of(made: HuggingFaceBackend) -> StaticPasses:
    assert isinstance(made._executor.passes, StaticPasses)
    return made._executor.passes


def check_batch(
    members: Sequence[HuggingFaceBackend],
    recipes: Sequence[Recipe],
    prompts: Sequence[str] = PROMPTS,
    **options: Any,
) -> None:
    """Decode all prompts at once; each must be what the reference makes of it alone."""
    tolerance = SINGLE_TOLERANCE if any(r.arch in SINGLE_PRECISION for r in recipes) else TOLERANCE
    with AdaFuseEngine(members) as engine:
        generations = engine.generate_batch(prompts, **options)
    for prompt, generation in zip(prompts, generations, strict=True):
        expected = decode([reference(recipe) for recipe in recipes], prompt, Options(**options))
        assert_same(generation, expected, tolerance)


@contextlib.contextmanager
def shapes_seen(recipe: Recipe) -> Iterator[list[tuple[int, int]]]:
    """Shapes of the token ids of every forward pass of the model while in the block."""
    shapes: list[tuple[int, int]] = []
    hook = model(recipe).register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    try:
        yield shapes
    finally:
        hook.remove()


# Results ---------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen3", "gemma3", "gpt2", "phi3"])
def test_many_requests_at_once_equal_the_reference(arch: str) -> None:
    recipe = Recipe(arch, ("bytelevel", "sentencepiece", "unigram")[len(arch) % 3], seed=7)
    check_batch([member(recipe)], [recipe], margin_threshold=0.2, max_new_tokens=14)


@pytest.mark.quick
def test_members_with_and_without_a_static_cache_work_together() -> None:
    recipes = [Recipe("llama", seed=21), Recipe("olmo2", "unigram", seed=22)]
    plain = HuggingFaceBackend(model(recipes[1]), tokenizer("unigram"), recipes[1].name)
    check_batch([member(recipes[0]), plain], recipes, margin_threshold=0.2, max_new_tokens=10)


def test_buffers_that_grow_and_requests_that_leave_the_pool_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[SlotRows] = []
    leave = SlotRows.leave
    monkeypatch.setattr(pools, "FIRST_ROWS", 8)
    monkeypatch.setattr(pools, "HEADROOM", 4)
    monkeypatch.setattr(static, "FIRST_SEEN", 4)
    monkeypatch.setattr(SlotRows, "leave", lambda slot: (left.append(slot), leave(slot)))
    for arch in ("llama", "mistral"):
        recipe = Recipe(arch, seed=23, end_bias=-30.0)
        made = member(recipe, prefix_cache_bytes=0)
        check_batch([made], [recipe], margin_threshold=0.2, max_new_tokens=24)
        pool = passes_of(made).pool
        assert pool.moves > 3
        assert left, "the longest prompts leave"
        assert all(slot.slots is None for slot in left)


def test_requests_join_and_leave_while_others_run() -> None:
    recipe = Recipe("qwen3", seed=24, end_bias=-30.0)
    made = member(recipe)
    budgets = (3, 40, 7, 25)
    with AdaFuseEngine([made]) as engine:
        streams = [
            engine.stream(p, max_new_tokens=n) for p, n in zip(PROMPTS, budgets, strict=False)
        ]
        for stream in streams:
            next(stream)
        late = engine.generate(PROMPTS[5], max_new_tokens=9)
        texts = [[*stream][-1].generation for stream in streams]
    for prompt, generation, budget in zip(PROMPTS, texts, budgets, strict=False):
        assert generation is not None
        expected = decode([reference(recipe)], prompt, Options(max_new_tokens=budget))
        assert_same(generation, expected, TOLERANCE)
    expected = decode([reference(recipe)], PROMPTS[5], Options(max_new_tokens=9))
    assert_same(late, expected, TOLERANCE)


def test_a_prompt_that_begins_like_an_earlier_one_is_read_from_there() -> None:
    recipe = Recipe("llama", seed=25)
    options: dict[str, Any] = {"max_new_tokens": 12, "margin_threshold": 0.2}
    with AdaFuseEngine([member(recipe)]) as engine:
        engine.generate(HEADER + "Who keeps it?", **options)
        again = engine.generate(HEADER + "And so it was.", **options)
        running = engine.stream(HEADER * 2 + "One", **options)
        next(running)
        neighbour = engine.generate(HEADER * 2 + "Two", **options)
        running.close()
    for generation, prompt in (
        (again, HEADER + "And so it was."),
        (neighbour, HEADER * 2 + "Two"),
    ):
        assert generation.usage.cached_tokens[recipe.name] > 16
        expected = decode([reference(recipe)], prompt, Options(**options))
        assert_same(generation, expected, TOLERANCE)


def test_kept_rows_are_copied_out_of_the_pool() -> None:
    recipe = Recipe("llama", seed=26)
    made = member(recipe)
    with AdaFuseEngine([made]) as engine:
        engine.generate(HEADER, max_new_tokens=2)
    (kept,) = made._prefixes._kept
    assert isinstance(kept.cache, RowCache)
    assert kept.size == kept.cache.row_bytes * len(kept.rows), "no more than the rows themselves"


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_trees_that_grow_and_are_cut_at_random_give_the_numbers_of_packed_passes(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "FIRST_ROWS", 16)
    monkeypatch.setattr(pools, "HEADROOM", 4)
    monkeypatch.setattr(static, "FIRST_SEEN", 8)
    recipe, rng = Recipe(arch, seed=41), random.Random(arch)
    packed = HuggingFaceBackend(model(recipe), tokenizer("bytelevel"), "packed")
    pair = packed, member(recipe, prefix_cache_bytes=2**14)
    live: list[tuple[TokenTree, TokenTree]] = []
    for _ in range(80):
        if len(live) < 9 and rng.random() < 0.4:
            ids = [rng.randrange(3, 400) for _ in range(rng.choice((1, 3, 20, 90, 300)))]
            live.append((TokenTree(ids), TokenTree(ids)))
        some = rng.sample(live, rng.randint(min(1, len(live)), len(live)))
        drafts = [
            [[rng.randrange(3, 400) for _ in range(rng.randint(1, 6))] for _ in range(4)]
            for _ in some
        ]
        answers = [
            made.evaluate(
                [
                    NodeQuery(trees[side], tuple(_nodes(trees[side], paths)), (), 3)
                    for trees, paths in zip(some, drafts, strict=True)
                ]
            )
            for side, made in enumerate(pair)
            if some
        ]
        for one, other in zip(*answers, strict=True):
            for left, right in zip(one.next, other.next, strict=True):
                assert left.logprobs == pytest.approx(right.logprobs, abs=TOLERANCE)
        for trees, paths in zip(some, drafts, strict=True):
            kept = rng.choice(paths)[: rng.randint(0, 6)]
            for tree in trees if kept else ():
                tree.commit(tree.grow(kept))
        for trees in [trees for trees in live if rng.random() < 0.06]:
            live.remove(trees)
            for tree, made in zip(trees, pair, strict=True):
                made.release(tree)
    assert passes_of(pair[1]).pool.moves > 3


def _nodes(tree: TokenTree, paths: Sequence[Sequence[int]]) -> dict[Node, None]:
    below = [node for path in paths for node in tree.path(tree.grow(path))]
    return dict.fromkeys([tree.root, *below])


# Sizes -----------------------------------------------------------------------------------------


def test_the_model_sees_few_shapes() -> None:
    recipe = Recipe("llama", seed=27, end_bias=-30.0)
    alone = AdaFuseEngine([member(recipe, prefix_cache_bytes=0)])
    with alone as engine, shapes_seen(recipe) as shapes:
        engine.generate_batch(["The ferry", "x", "rope"] * 3, max_new_tokens=30)
    assert len(shapes) > 20
    for requests, tokens in set(shapes):
        assert requests & (requests - 1) == 0
        assert tokens & (tokens - 1) == 0
    assert max(shapes)[0] == 16
    assert len(set(shapes)) <= 15


def test_long_prompts_and_passes_of_mere_padding_are_not_padded() -> None:
    recipe = Recipe("llama", seed=28, end_bias=-30.0)
    alone = AdaFuseEngine([member(recipe, prefix_cache_bytes=0)])
    with alone as engine, shapes_seen(recipe) as shapes:
        usage = engine.generate(HEADER * 4, max_new_tokens=4).usage
    assert shapes[0] == (1, usage.prompt_tokens[recipe.name])
    trees = [TokenTree(range(3, 33)), *(TokenTree([7]) for _ in range(15))]
    made = member(recipe, prefix_cache_bytes=0)
    with shapes_seen(recipe) as shapes:
        made.evaluate([NodeQuery(tree, (tree.root,), (), 2) for tree in trees])
    assert shapes == [(1, 45)], "16 slots of 32 tokens for 45 tokens are not worth it"


def test_short_pieces_keep_their_pass_beside_those_that_take_none() -> None:
    recipe, rng = Recipe("gemma3", seed=44), random.Random(44)
    packed = HuggingFaceBackend(model(recipe), tokenizer("bytelevel"), "packed")
    made = member(recipe, prefix_cache_bytes=0)
    prompts = [[rng.randrange(3, 400) for _ in range(n)] for n in (5, 100, 70, 9)]
    pairs = [(TokenTree(ids), TokenTree(ids)) for ids in prompts]

    def evaluate(chosen: Sequence[int], side: int) -> list[Any]:
        trees = [pairs[i][side] for i in chosen]
        return (packed, made)[side].evaluate(
            [NodeQuery(tree, tuple(_nodes(tree, [[9, 8], [7]])), (), 3) for tree in trees]
        )

    def same(chosen: Sequence[int]) -> list[tuple[int, int]]:
        expected = evaluate(chosen, 0)
        with shapes_seen(recipe) as shapes:
            answers = evaluate(chosen, 1)
        for one, other in zip(expected, answers, strict=True):
            for left, right in zip(one.next, other.next, strict=True):
                assert left.logprobs == pytest.approx(right.logprobs, abs=TOLERANCE)
        return shapes

    same([0, 1])
    with torch.inference_mode():
        pairs[1][1].state.form.cache.leave()  # type: ignore[attr-defined]
        passes_of(made).pool.vacate(1)
    for pair in pairs[:2]:
        for tree in pair:
            tree.commit(tree.grow([9, 8]))
    assert same([1, 0]) == [(1, 4), (1, 3)], "one in its slot, one by itself"
    assert same([3, 2]) == [(2, 16), (1, 70), (4, 4)], "9 tokens and 3, then 70; then 3"


# What recordings rely on -----------------------------------------------------------------------


class Recorder:
    """Stands for CUDA graphs: asserts that what they would repeat is at the same addresses."""

    def __init__(self, made: HuggingFaceBackend) -> None:
        self.passes = passes_of(made)
        self.recorded = self.replays = 0
        self.passes._record = self
        self.passes._recorded.clear()

    def addresses(self, inputs: static.Inputs) -> list[tuple[int, tuple[int, ...]]]:
        tensors = [inputs.ids, inputs.positions, inputs.rows, inputs.keep, *inputs.masks.values()]
        tensors += self.passes.pool.buffers()
        return [(tensor.data_ptr(), tuple(tensor.shape)) for tensor in tensors]

    def __call__(self, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))
        inputs = cells["inputs"].cell_contents
        result = call()  # makes the buffers, as a warm-up does
        before = self.addresses(inputs)
        self.recorded += 1

        def replay() -> torch.Tensor:
            assert self.addresses(inputs) == before
            self.replays += 1
            with torch.inference_mode():
                result.copy_(call())
            return result  # always the same tensor, overwritten by the next replay

        return replay


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_recordings_are_repeated_at_the_same_addresses(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "FIRST_ROWS", 64)
    monkeypatch.setattr(pools, "HEADROOM", 8)
    recipe = Recipe(arch, seed=29, end_bias=-30.0)
    made = member(recipe)
    recorder = Recorder(made)
    check_batch([made], [recipe], PROMPTS * 2, margin_threshold=0.2, max_new_tokens=30)
    assert recorder.recorded < recorder.replays / 2


def test_recordings_of_all_sizes_leave_their_logits_in_one_buffer() -> None:
    recipe = Recipe("llama", seed=43, end_bias=-30.0)
    made = member(recipe)
    results: list[torch.Tensor] = []

    def record(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        results.append(call())
        return call

    passes_of(made)._record = record
    check_batch([made], [recipe], PROMPTS, margin_threshold=0.2, max_new_tokens=30)
    storages = [result.untyped_storage() for result in results]
    buffers = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert len(results) > 2 * len(buffers)
    assert len(buffers) == len(set(buffers.values())), "another one only for a larger pass"


def test_only_the_latest_used_sizes_stay_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "MAX_RECORDED", 2)
    recipe = Recipe("llama", seed=30)
    made = member(recipe)
    check_batch([made], [recipe], max_new_tokens=8)
    assert len(passes_of(made)._recorded) == 2


def test_what_cannot_be_recorded_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    def record(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    recipe = Recipe("llama", seed=31)
    made = member(recipe)
    passes_of(made)._record = record
    passes_of(made)._recorded.clear()
    with caplog.at_level(logging.WARNING):
        check_batch([made], [recipe], max_new_tokens=8)
    warnings = [r for r in caplog.records if "not recorded" in r.getMessage()]
    assert len(warnings) == 1
    assert "not permitted when stream is capturing" in warnings[0].getMessage()


def test_a_request_whose_pass_failed_leaves_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe("llama", seed=32)
    made = member(recipe)
    layer = model(recipe).model.layers[1]

    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("in the second layer")

    with AdaFuseEngine([made]) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(layer, "forward", fail)
            with pytest.raises(Exception, match="out of memory"):
                engine.generate("The ferry", max_new_tokens=2)
        gc.collect()
        generation = engine.generate("The ferry", max_new_tokens=2)
    assert_same(
        generation, decode([reference(recipe)], "The ferry", Options(max_new_tokens=2)), 1e-6
    )
    gc.collect()
    pool = passes_of(made).pool
    with torch.inference_mode():
        pool.reserve({})
    assert not any(buffer.any() for buffer in pool.buffers())


# Options ---------------------------------------------------------------------------------------


@pytest.mark.quick
def test_options_that_cannot_be_together_are_refused() -> None:
    recipe = Recipe("llama", seed=33)
    with pytest.raises(InvalidOptionError, match="static_cache=True needs the tree form"):
        member(recipe, form="path")
    with pytest.raises(InvalidOptionError, match="pass static_cache=True, too"):
        HuggingFaceBackend(model(recipe), tokenizer("bytelevel"), "m", compile=True)
    with pytest.raises(InvalidOptionError, match="pass static_cache=True, too"):
        MemberSpec(path="m", compile=True)


@pytest.mark.parametrize(
    ("arch", "form"), [("mamba", "path"), ("gptj", "tree"), ("gemma2", "tree")]
)
def test_models_that_share_no_passes_go_without_and_say_so(
    arch: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = Recipe(arch, seed=34)
    made = HuggingFaceBackend(model(recipe), tokenizer("bytelevel"), arch, static_cache=True)
    assert (made.form, made.static_cache) == (form, False)
    assert f"member '{arch}' does not use a static cache" in caplog.text


def test_a_static_cache_that_gives_other_numbers_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = StaticPasses.run
    monkeypatch.setattr(StaticPasses, "run", lambda self, pieces: run(self, pieces).roll(1, -1))
    recipe = Recipe("llama", seed=35)
    made = HuggingFaceBackend(model(recipe), tokenizer("bytelevel"), "m", static_cache=True)
    assert (made.form, made.static_cache, made.shares_passes) == ("tree", False, True)
    assert "does not use a static cache: the logits differ" in caplog.text


def test_members_are_loaded_with_a_static_cache(tmp_path: Path) -> None:
    recipe = Recipe("llama", seed=36)
    model(recipe).save_pretrained(tmp_path)
    tokenizer("bytelevel").save_pretrained(tmp_path)
    with AdaFuseEngine.from_pretrained(
        [MemberSpec(path=str(tmp_path), static_cache=True)]
    ) as engine:
        (made,) = engine.backends
        assert isinstance(made, HuggingFaceBackend)
        assert made.static_cache
        assert engine.generate("x", max_new_tokens=2).text is not None


# Compilation and GPUs --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_passes_equal_the_reference() -> None:
    recipe = Recipe("gemma3", seed=37, end_bias=-30.0)
    made = member(recipe, compile=True)
    assert made.compiles
    check_batch([made], [recipe], PROMPTS[:2], max_new_tokens=6)


@pytest.mark.slow
def test_a_member_is_compiled_for_many_sizes_and_the_process_keeps_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo import config

    graphs: list[Any] = []
    limits: set[int] = set()
    compile_ = torch.compile

    @functools.wraps(compile_)
    def counted(module: Any, **options: Any) -> Callable[..., Any]:
        run = compile_(
            module, backend=lambda graph, inputs: (graphs.append(graph), graph)[1], **options
        )
        return lambda **inputs: (limits.add(config.recompile_limit), run(**inputs))[1]

    monkeypatch.setattr(torch, "compile", counted)
    default = config.recompile_limit
    monkeypatch.setattr(decoder, "COMPILED_SIZES", default + 2)
    for seed in (45, 46):  # members with the same code have sizes of their own
        plain = Decoder(model(Recipe("llama", seed=seed)))
        made = plain.compiled()
        graphs.clear()
        for size in range(1, default + 3):
            ids = torch.arange(size)[None]
            with torch.inference_mode():
                found, expected = (d.call(ids, ids, None, None) for d in (made, plain))
            assert torch.allclose(found, expected)
        assert len(graphs) == default + 2
    assert limits == {default}


def test_what_cannot_be_compiled_runs_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*args: Any, **options: Any) -> Callable[..., Any]:
        def call(**inputs: Any) -> Any:
            raise RuntimeError("No working C++ compiler found")

        return call

    monkeypatch.setattr(torch, "compile", no_compiler)
    recipe = Recipe("llama", seed=38)
    made = member(recipe, compile=True)
    assert not made.compiles
    assert "does not use compilation: RuntimeError: No working C++ compiler" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
def test_cuda_graphs_give_the_numbers_of_single_calls(
    arch: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replays: list[int] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(1), replay(graph))[1]
    )
    recipe = Recipe(arch, seed=39, end_bias=-30.0)
    copies = [_on_gpu(recipe) for _ in range(2)]
    known = tokenizer(recipe.kind)
    plain = HuggingFaceBackend(copies[0], known, recipe.name)
    recorded = HuggingFaceBackend(copies[1], known, recipe.name, static_cache=True)
    assert recorded.static_cache
    texts = []
    for made in (plain, recorded):
        with AdaFuseEngine([made]) as engine:
            texts.append([g.text for g in engine.generate_batch(PROMPTS, max_new_tokens=40)])
    assert texts[0] == texts[1]
    assert len(replays) > 20
    assert "not recorded" not in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_pass_on_a_gpu_waits_for_nothing_but_its_numbers() -> None:
    recipe = Recipe("llama", seed=40, end_bias=-30.0)
    made = HuggingFaceBackend(_on_gpu(recipe), tokenizer("bytelevel"), "m", static_cache=True)
    passes = passes_of(made)
    tree = TokenTree(range(5, 25))
    made.evaluate([NodeQuery(tree, (tree.root,), (), 2)])
    run = passes.run

    def strictly(pieces: Any) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(pieces)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for step in range(6):
        node = tree.grow([30 + step])
        if step == 3:
            passes.run = strictly  # type: ignore[method-assign]
        made.evaluate([NodeQuery(tree, (node,), (), 2)])
        tree.commit(node)


def _on_gpu(recipe: Recipe) -> Any:
    import copy

    return copy.deepcopy(model(recipe)).to("cuda")
