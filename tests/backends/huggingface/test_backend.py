"""The Hugging Face member: its forms, what it refuses, and what it does after a failure."""

from typing import Any

import psutil
import pytest
import torch
import transformers

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, UnsupportedModelError
from adafuse_llm.backends import Query
from adafuse_llm.backends.huggingface import HuggingFaceBackend, backend, self_test
from adafuse_llm.backends.huggingface.tree_cache import TreeForm, bytes_per_token
from adafuse_llm.tree.tokens import Node, TokenTree
from tests.support.models import TINY, Recipe, model, tokenizer

PROMPT = "The ferry to Orrin leaves at nine. It carries twelve people and the post. " * 3


def member(made: Any = None, form: str | None = None) -> HuggingFaceBackend:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_test, "FORMS", (form,) if form else self_test.FORMS)
        return HuggingFaceBackend(made or model(Recipe()), tokenizer("bytelevel"), "m")


def check(ours: HuggingFaceBackend, tree: TokenTree, *nodes: Node) -> int:
    """Compare numbers with those of plain passes. Return the number of tokens of the query."""
    (answer,) = ours.evaluate([Query(tree, nodes, (), 2)])
    for node, summary in zip(nodes, answer.next, strict=True):
        with torch.inference_mode():
            plain = ours._decoder.plain([*tree.ids, *tree.tokens(node)]).log_softmax(-1)
        assert summary.logprobs[0] == pytest.approx(float(plain.max()), abs=1e-5), node
    return answer.tokens


@pytest.mark.parametrize("form", ["tree", "path"])
def test_what_was_evaluated_of_a_winner_is_kept_where_its_last_token_was_only_scored(form):
    ours = member(form=form)
    tree = TokenTree(ours.codec.encode_prompt("The ferry to Orrin"))
    line = tree.path(tree.grow([5, 6, 7, 8]))
    ours.evaluate([Query(tree, (tree.root, *line[:3]), (line[3],), top=2)])
    tree.commit(line[3])
    assert check(ours, tree, tree.root) == 1


@pytest.mark.quick
def test_a_wrong_mode_or_token_is_refused():
    training = type(model(Recipe()))(model(Recipe()).config).train()
    with pytest.raises(UnsupportedModelError, match="training mode"):
        member(training)
    tree = TokenTree([1, 2])
    unknown = tree.child(tree.root, 10**6)
    for query in (Query(tree, (unknown,), (), 2), Query(tree, (), (unknown,), 2)):
        with pytest.raises(ValueError, match="token 1000000 is outside"):  # before a GPU sees it
            member().evaluate([query])


def with_longrope(arch: str) -> Any:
    """A model whose frequencies change over beyond 24 tokens, in all layers or in some."""
    sizes = {**TINY, "vocab_size": 64, "head_dim": 8, "pad_token_id": 0, "eos_token_id": None}
    change: dict[str, Any] = {"original_max_position_embeddings": 24}
    rope = {**change, "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4}
    rope["long_factor"] = [3.0, 5.0, 7.0, 9.0]
    if arch == "phi3":
        config: Any = transformers.Phi3Config(**sizes, **change, rope_parameters=rope)
    else:
        usual = {"rope_type": "default", "rope_theta": 10000.0}
        layers = {"sliding_attention": usual, "full_attention": rope}
        config = transformers.Gemma3TextConfig(
            **sizes, layer_types=[*layers], rope_parameters=layers
        )
    made: Any = transformers.AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.double().eval().parameters():
            parameter.normal_(0, 0.5)
    return made


@pytest.mark.parametrize(("arch", "form"), [("phi3", "path"), ("gemma3", "tree")])
def test_the_window_ends_where_longrope_positions_change(arch: str, form: str) -> None:
    ours = member(with_longrope(arch), form=form)
    assert (ours.form, ours.context_window) == (form, 24)
    tree = TokenTree([(5 * i + 1) % 60 for i in range(20)])
    tips = [tree.grow([token, 7, 8, 9]) for token in (3, 40)]
    check(ours, tree, tree.root, *(node for tip in tips for node in tree.path(tip)))


@pytest.mark.parametrize("is_error", [True, False])
def test_a_failed_query_and_one_with_nan_can_be_asked_again_and_nothing_of_them_is_kept(
    is_error, monkeypatch
):
    ours = member()
    prompt = ours.codec.encode_prompt(PROMPT)
    tree = TokenTree(prompt)
    check(ours, tree, tree.root)
    nodes = tree.path(tree.grow([5, 6]))

    def fail(hidden, *args, **kwargs):
        if is_error:
            raise torch.OutOfMemoryError("in the second layer")
        return hidden * torch.nan

    with monkeypatch.context() as patch:
        patch.setattr(ours.model.model.layers[1], "forward", fail)
        if is_error:
            with pytest.raises(torch.OutOfMemoryError):
                check(ours, tree, *nodes)
        else:
            assert ours.evaluate([Query(tree, tuple(nodes), (), 2)])[0].has_nan
    ours.release(tree)
    other = TokenTree(prompt)
    assert check(ours, other, other.root) == len(prompt)
    check(ours, tree, *nodes)


def test_the_device_that_is_full_first_says_how_much_memory_is_free(monkeypatch):
    ours, gpu = member(), torch.device("cuda:1")
    assert 0 < ours.free_bytes() <= psutil.virtual_memory().total
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {gpu: (7, 9)}[device])
    # what PyTorch keeps for reuse is free, too
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: {gpu: 50}[device])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: {gpu: 30}[device])
    monkeypatch.setattr(ours._passes, "token_bytes", {gpu: 12})
    assert ours.free_bytes() == 7 + 50 - 30
    free = {"cpu": 1000, "meta": 300}
    monkeypatch.setattr(backend, "_free_bytes", lambda device: free[device.type])
    layers = [torch.empty(1, 2, 5, 8), *[torch.empty(1, 2, 5, 8, device="meta")] * 3]
    monkeypatch.setattr(ours._passes, "token_bytes", bytes_per_token(layers))
    assert ours.free_bytes() == 400


def test_rows_of_dropped_branches_do_not_pile_up():
    seen = []

    class Watched(TreeForm):
        def reroot(self, *args):
            super().reroot(*args)
            seen.append(self.kv.count)

    ours = member()
    ours._passes.new_request = Watched  # type: ignore[method-assign]
    config = AdaFuseConfig(margin_threshold=1, max_new_tokens=120, branching_factor=5)
    usage = AdaFuseEngine([ours], config).generate("The ferry").usage
    assert len(seen) >= 20
    assert max(seen) < 3 * (usage.prompt_tokens["m"] + usage.completion_tokens["m"])


@pytest.mark.parametrize(
    ("dtype", "error", "accepted"),
    [(torch.bfloat16, 0.012, True), (torch.bfloat16, 0.1, False), (torch.float64, 0.012, False)],
)
def test_a_model_may_compute_other_numbers_with_a_cache_only_as_far_as_a_gpu_rounds(
    dtype, error, accepted
):
    class Rounded(type(model(Recipe()))):  # type: ignore[misc]
        def forward(self, *args, use_cache=None, past_key_values=None, **kwargs):
            output = super().forward(
                *args, use_cache=use_cache, past_key_values=past_key_values, **kwargs
            )
            if use_cache or past_key_values is not None:
                torch.manual_seed(0)
                noise = torch.randn_like(output.logits) * output.logits.std()
                output.logits += error / 0.8 * noise  # the mean of |noise| is 0.8 of its deviation
            return output

    rounded = Rounded(model(Recipe()).config).to(dtype).eval()
    if accepted:
        assert member(rounded).form == "tree"
    else:
        with pytest.raises(UnsupportedModelError, match=r"'m'.*tree form: .*differ.*path form"):
            member(rounded)
