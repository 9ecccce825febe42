"""The Hugging Face member: refusals, failures, and nodes that cross a model's limits."""

from __future__ import annotations

import psutil
import pytest
import torch
import transformers

from adafuse_llm import UnsupportedModelError
from adafuse_llm.backends import Query
from adafuse_llm.backends.huggingface import HuggingFaceBackend, passes
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.tree import TokenTree
from tests.support.models import Recipe, backend, model, tokenizer


@pytest.mark.parametrize("form", ["tree", "path"])
def test_what_was_evaluated_of_a_winner_is_kept_where_its_last_token_was_only_scored(form):
    member = backend(Recipe("llama"), form)
    tree = TokenTree(member.codec.encode_prompt("The ferry to Orrin"))
    line = tree.path(tree.grow([5, 6, 7, 8]))
    member.evaluate([Query(tree, (tree.root, *line[:3]), (line[3],), top=2)])
    tree.commit(line[3])
    (answer,) = member.evaluate([Query(tree, (tree.root,), (), top=2)])
    assert answer.tokens == 1
    plain = member._decoder.plain(tree.ids).flatten().log_softmax(-1)
    assert answer.next[0].logprobs == pytest.approx(plain.topk(2).values.tolist(), abs=1e-10)


@pytest.mark.quick
def test_a_model_in_training_mode_or_an_unknown_form_is_refused():
    training = type(model(Recipe("llama")))(model(Recipe("llama")).config).train()
    with pytest.raises(UnsupportedModelError, match="training mode"):
        HuggingFaceBackend(training, tokenizer("bytelevel"), "busy")
    with pytest.raises(InvalidOptionError, match="auto, tree, path"):
        HuggingFaceBackend(model(Recipe("llama")), tokenizer("bytelevel"), "m", form="forest")


def with_longrope(arch):
    """A model whose frequencies change over beyond 24 tokens, in all layers or in some."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0, 5.0, 7.0, 9.0],
        "original_max_position_embeddings": 24,
    }
    if arch == "phi3":
        config = transformers.Phi3Config(
            **sizes, rope_parameters=rope, original_max_position_embeddings=24
        )
        made = transformers.Phi3ForCausalLM(config)
    else:
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        config = transformers.Gemma3TextConfig(
            **sizes,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"sliding_attention": plain, "full_attention": rope},
        )
        made = transformers.Gemma3ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.double().eval().parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.5)
    return made


@pytest.mark.parametrize("form", ["tree", "path"])
@pytest.mark.parametrize("arch", ["phi3", "gemma3"])
def test_longrope_positions_change_over_for_all_tokens_at_once(arch, form, monkeypatch):
    """Past the original window every key is recomputed, in a prompt and while decoding; tokens
    short of it are unmoved by nodes beyond.
    """
    monkeypatch.setattr(passes, "PIECE_TOKENS", (8, 8))
    member = HuggingFaceBackend(with_longrope(arch), tokenizer("bytelevel"), arch, form=form)
    assert member.form == form

    def check(tree, nodes):
        (answer,) = member.evaluate([Query(tree, tuple(nodes), (), 2)])
        for node, summary in zip(nodes, answer.next, strict=True):
            with torch.inference_mode():
                plain = member._decoder.plain([*tree.ids, *tree.tokens(node)]).log_softmax(-1)
            assert summary.logprobs[0] == pytest.approx(float(plain.max()), abs=1e-5), node

    for length in (20, 30):
        tree = TokenTree([(5 * i + 1) % 60 for i in range(length)])
        for step in range(8):
            check(tree, [tree.root])
            tree.commit(tree.grow([(7 * step + 2) % 60]))
    tree = TokenTree([(5 * i + 1) % 60 for i in range(20)])
    for step in range(6):
        tips = [tree.grow([(token + step + i) % 60 for i in range(7)]) for token in (3, 40)]
        check(tree, [tree.root, *(node for tip in tips for node in tree.path(tip))])
        check(tree, [tree.grow([9], tips[0]), tree.grow([9, 8], tips[1])])
        tree.commit(tree.path(tips[1])[0])


def test_an_ask_that_failed_halfway_can_be_asked_again(monkeypatch):
    member = HuggingFaceBackend(model(Recipe("llama")), tokenizer("bytelevel"), "m")
    prompt = member.codec.encode_prompt("The ferry to Orrin")
    tree = TokenTree(prompt)
    member.evaluate([Query(tree, (tree.root,), (), 2)])
    ask = Query(tree, tuple(tree.path(tree.grow([5, 6]))), (), 2)
    layer = member.model.model.layers[1]

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("in the second layer")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", fail)
        with pytest.raises(torch.OutOfMemoryError):
            member.evaluate([ask])
    (answer,) = member.evaluate([ask])
    for summary, tokens in zip(answer.next, ([5], [5, 6]), strict=True):
        plain = member._decoder.plain([*prompt, *tokens])
        assert summary.tokens[0] == int(plain.argmax())


def test_the_vocabulary_is_decoded_once(monkeypatch):
    member = HuggingFaceBackend(model(Recipe("llama")), tokenizer("bytelevel"), "m")
    texts = member.token_texts
    monkeypatch.setattr(member.codec, "decode_continuation", lambda *_: pytest.fail("again"))
    assert member.token_texts == texts


def test_free_memory_is_asked_of_the_members_device_only(monkeypatch):
    member = HuggingFaceBackend(model(Recipe("llama")), tokenizer("bytelevel"), "m")
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: asked.append(d) or (7, 9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("looks at every GPU"))
    # what PyTorch keeps for reuse is free, too
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda d: {torch.device("cuda:1"): 50}[d])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda d: {torch.device("cuda:1"): 30}[d])
    assert 0 < member.free_bytes() <= psutil.virtual_memory().total
    monkeypatch.setattr(member._passes, "token_bytes", {torch.device("cuda:1"): 12})
    assert member.free_bytes() == 7 + 50 - 30
    assert asked == [torch.device("cuda:1")]


def test_a_token_outside_the_embeddings_is_an_error_before_the_model_sees_it():
    member = backend(Recipe("llama"))
    tree = TokenTree([1, 2, 10**6])
    with pytest.raises(ValueError, match="token 1000000 is outside the model's"):
        member.evaluate([Query(tree, (tree.root,), (), 2)])
