"""Linear layers of passes over a few tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from adafuse_llm.backends.base import Query
from adafuse_llm.backends.huggingface import HuggingFaceBackend, few_rows
from adafuse_llm.backends.huggingface.few_rows import FewRows
from adafuse_llm.tree import TokenTree
from tests.support.models import Recipe, model, tokenizer

SHAPE = 96, 64


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Collect the shapes of the inputs of PyTorch's own linear layers."""
    shapes: list[tuple[int, ...]] = []
    real = functional.linear

    def linear(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return real(x, *rest)

    monkeypatch.setattr(functional, "linear", linear)
    monkeypatch.setattr(few_rows, "MIN_WEIGHTS", 1)
    yield shapes


@pytest.mark.quick
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9])
def test_the_product_is_that_of_the_layer(
    tokens: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(*SHAPE, bias=bias)
    x = torch.randn(1, tokens, SHAPE[0])
    expected = layer(x)
    with counted(monkeypatch) as shapes:
        rows = FewRows(nn.Sequential(layer))
        with rows.during(tokens):
            found = layer(x)
    assert len(shapes) == (tokens in {1, 9})
    assert found.shape == expected.shape and found.is_contiguous()
    torch.testing.assert_close(found, expected)


@pytest.mark.quick
def test_rows_that_a_layer_gets_decide_within_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(*SHAPE)
    with counted(monkeypatch) as shapes, FewRows(layer).during(3):
        layer(torch.randn(1, 1, SHAPE[0]))  # the output layer gets only the kept rows
        layer(torch.randn(3, SHAPE[0]))
        layer(torch.randn(3, 4, SHAPE[0]))
    assert shapes == [(1, 1, SHAPE[0]), (3, 4, SHAPE[0])]


@pytest.mark.quick
def test_a_model_is_unchanged_after_a_pass_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(*SHAPE)
    before = dict(layer.__dict__)
    with counted(monkeypatch):
        rows = FewRows(layer)
        with pytest.raises(ValueError, match="boom"), rows.during(2):
            assert layer.__dict__ != before
            raise ValueError("boom")
    assert layer.__dict__ == before


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["double", "small", "hook", "subclass"])
def test_other_layers_are_left_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(nn.Linear):
        pass

    layer = Other(*SHAPE) if kind == "subclass" else nn.Linear(*SHAPE)
    if kind == "double":
        layer = layer.double()
    if kind == "hook":
        layer.__dict__["forward"] = lambda x: nn.Linear.forward(layer, x)
    if kind != "small":
        monkeypatch.setattr(few_rows, "MIN_WEIGHTS", 1)
    before = dict(layer.__dict__)
    with FewRows(layer).during(2):
        assert layer.__dict__ == before
    assert layer.__dict__ == before


def test_passes_of_a_member_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as shapes:
        recipe = Recipe("llama", "bytelevel")
        made = copy.deepcopy(model(recipe)).float()
        member = HuggingFaceBackend(made, tokenizer("bytelevel"), "one")
        tree = TokenTree(list(range(20, 40)))
        first = member.evaluate([Query(tree, (tree.root,), (), 2)])
        nodes = [tree.child(tree.root, token) for token in (30, 31, 32)]
        shapes.clear()
        found = member.evaluate([Query(tree, tuple(nodes), (), 2)])
        assert not shapes
        assert all("forward" not in layer.__dict__ for layer in made.modules())
        plain = made(torch.tensor([[*range(20, 40), 31]])).logits[0, -1].log_softmax(-1)
    assert first[0].passes == found[0].passes == 1
    assert found[0].next[1].logprobs[0] == pytest.approx(plain.max().item(), abs=1e-4)
