"""The two forms of the Hugging Face backend from the inside: chunks, rows, refusals."""

from __future__ import annotations

import psutil
import pytest
import torch
import transformers

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, UnsupportedModelError
from adafuse_llm.backends import NodeQuery
from adafuse_llm.backends.huggingface import HuggingFaceBackend, forms
from adafuse_llm.backends.huggingface.state import likeliest
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.tree import TokenTree
from tests.support.compare import check
from tests.support.models import Recipe, backend, engine, model, tokenizer

PROMPT = "The ferry to Orrin leaves at nine. It carries twelve people and the post. " * 3


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma2", "gpt2"])
def test_a_prompt_in_chunks_gives_the_same_numbers(arch, monkeypatch):
    monkeypatch.setattr(forms, "PREFILL_TOKENS", 7)
    backend(Recipe(arch)).clear_prefix_cache()
    generation = check([Recipe(arch)], PROMPT, max_new_tokens=12, margin_threshold=0.2)
    prompt_tokens = next(iter(generation.usage.prompt_tokens.values()))
    assert next(iter(generation.usage.forward_passes.values())) > prompt_tokens // 7


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

    class Watched(forms.TreeForm):
        def reroot(self):
            super().reroot()
            alive = int(self._trunk.sum()) + len({r for ln in self._lines.values() for r in ln})
            assert self.cache.rows == len(self._trunk) == len(self._positions)
            assert 4 * (self.cache.rows - alive) <= self.cache.rows
            seen.append(self.cache.rows)

    member = HuggingFaceBackend(model(Recipe("llama")), tokenizer("bytelevel"), "watched")
    member._new_form = lambda tree, form, rows=None: Watched(  # type: ignore[method-assign, assignment, misc]
        tree, chunked=True, cache=rows
    )
    config = AdaFuseConfig(margin_threshold=1, max_new_tokens=120, branching_factor=5)
    generation = AdaFuseEngine([member], config).generate("The ferry")
    assert len(seen) >= 20
    sequence = (
        generation.usage.prompt_tokens["watched"] + generation.usage.completion_tokens["watched"]
    )
    assert max(seen) < 3 * sequence, "rows of losers pile up"


@pytest.mark.quick
def test_ties_go_to_the_lower_token_id():
    logits = torch.tensor(
        [[0.0, 3.0, 1.0, 3.0, 3.0, 2.0], [5.0, 4.0, 4.0, 4.0, 4.0, 4.0], [1.0, 1.0, 2.0, 0, 0, 0]]
    )
    values, tokens, tied = likeliest(logits, 3)
    assert tied[:, 0].tolist() == [False, True, False]
    values, tokens, _ = likeliest(logits, 3, by_sorting=True)
    assert tokens.tolist() == [[1, 3, 4], [0, 1, 2], [2, 0, 1]]
    assert values.tolist() == [[3.0, 3.0, 3.0], [5.0, 4.0, 4.0], [2.0, 1.0, 1.0]]
    random = torch.randint(0, 40, (200, 37)).float()
    _, found, tied = likeliest(random, 5)
    _, resolved, _ = likeliest(random, 5, by_sorting=True)
    assert 0 < int(tied.sum()) < 200
    rows = zip(random.tolist(), found.tolist(), resolved.tolist(), tied[:, 0].tolist(), strict=True)
    for row, fast, sure, unsure in rows:
        expected = sorted(range(37), key=lambda i: (-row[i], i))[:5]
        assert sure == expected
        assert unsure or fast == expected


def test_a_path_member_recomputes_a_state_it_gave_away():
    """Children of a node whose state moved on to another child are still right."""
    member = backend(Recipe("llama"), "path")
    prompt = member.codec.encode_prompt("The ferry to Orrin")
    tree = TokenTree(prompt)
    form = forms.PathForm(member._decoder, tree)
    with torch.inference_mode():
        form.extend([tree.root])
        chain = tree.path(tree.grow([5, 6, 7]))
        form.extend(chain)
        late = tree.child(chain[0], 9)
        logits = form.extend([late])
        plain = member._plain([*prompt, *tree.tokens(late)])
        assert torch.allclose(logits, plain, atol=1e-10)
        tree.commit(chain[0])
        form.reroot()
        again = tree.child(tree.root, 11)
        expected = member._plain([*tree.ids, 11])
        assert torch.allclose(form.extend([again]), expected, atol=1e-10)


@pytest.mark.parametrize("form", ["tree", "path"])
def test_what_was_evaluated_of_a_winner_is_kept_where_its_last_token_was_only_scored(form):
    member = backend(Recipe("llama"), form)
    tree = TokenTree(member.codec.encode_prompt("The ferry to Orrin"))
    line = tree.path(tree.grow([5, 6, 7, 8]))
    member.evaluate([NodeQuery(tree, (tree.root, *line[:3]), (line[3],), top=2)])
    tree.commit(line[3])
    (answer,) = member.evaluate([NodeQuery(tree, (tree.root,), (), top=2)])
    assert answer.tokens == 1
    plain = member._plain(tree.ids).flatten().log_softmax(-1)
    assert answer.next[0].logprobs == pytest.approx(plain.topk(2).values.tolist(), abs=1e-10)


def test_a_member_that_fits_no_form_is_refused_with_the_reason():
    member = model(Recipe("llama", seed=77))

    class Moody(type(member)):  # type: ignore[misc]
        """Computes something else without a cache: no cached run can agree."""

        def forward(self, input_ids=None, use_cache=None, past_key_values=None, **kwargs):
            output = super().forward(
                input_ids=input_ids, use_cache=use_cache, past_key_values=past_key_values, **kwargs
            )
            if not use_cache:
                output.logits[..., ::2] += 50
            return output

    odd = Moody(member.config).double().eval()
    with pytest.raises(
        UnsupportedModelError, match=r"'odd'.*tree form: .*differ.*path form: .*differ"
    ):
        HuggingFaceBackend(odd, tokenizer("bytelevel"), "odd")


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
    monkeypatch.setattr(forms, "PREFILL_TOKENS", 8)
    member = HuggingFaceBackend(with_longrope(arch), tokenizer("bytelevel"), arch, form=form)
    assert member._decoder.rope_edge == 24
    assert not member.shares_passes

    def check(tree, nodes):
        (answer,) = member.evaluate([NodeQuery(tree, tuple(nodes), (), 2)])
        for node, summary in zip(nodes, answer.next, strict=True):
            with torch.inference_mode():
                plain = member._plain([*tree.ids, *tree.tokens(node)]).log_softmax(-1)
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
    member.evaluate([NodeQuery(tree, (tree.root,), (), 2)])
    ask = NodeQuery(tree, tuple(tree.path(tree.grow([5, 6]))), (), 2)
    layer = member.model.model.layers[1]

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("in the second layer")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", fail)
        with pytest.raises(torch.OutOfMemoryError):
            member.evaluate([ask])
    (answer,) = member.evaluate([ask])
    for summary, tokens in zip(answer.next, ([5], [5, 6]), strict=True):
        plain = member._plain([*prompt, *tokens])
        assert summary.tokens[0] == int(plain.argmax())


def test_free_memory_is_asked_of_the_members_device_only(monkeypatch):
    member = HuggingFaceBackend(model(Recipe("llama")), tokenizer("bytelevel"), "m")
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: asked.append(d) or (7, 9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("looks at every GPU"))
    assert 0 < member.free_bytes() <= psutil.virtual_memory().total
    monkeypatch.setattr(member, "_shares", {torch.device("cuda:1"): 1.0})
    assert member.free_bytes() == 7
    assert asked == [torch.device("cuda:1")]


def test_a_token_outside_the_embeddings_is_an_error_before_the_model_sees_it():
    member = backend(Recipe("llama"))
    tree = TokenTree([1, 2, 10**6])
    with pytest.raises(ValueError, match="token 1000000 is outside the model's"):
        member.evaluate([NodeQuery(tree, (tree.root,), (), 2)])
