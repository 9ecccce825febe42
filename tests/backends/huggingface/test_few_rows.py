"""Linear layers of passes over a few tokens."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from adafuse_llm.backends.base import Query
from adafuse_llm.backends.huggingface import HuggingFaceBackend, few_rows
from adafuse_llm.tree.tokens import TokenTree
from tests.support.models import Recipe, model, tokenizer

pytestmark = pytest.mark.quick

SIZE = 96


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the inputs of PyTorch's own linear layers."""
    found: list[tuple[int, ...]] = []
    real = functional.linear

    def linear(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        found.append(tuple(x.shape))
        return real(x, *rest)

    monkeypatch.setattr(functional, "linear", linear)
    monkeypatch.setattr(few_rows, "MIN_WEIGHTS", 1)
    return found


@pytest.mark.parametrize(("tokens", "bias"), [(1, True), (2, False), (8, True), (9, False)])
def test_the_product_is_that_of_the_layer(tokens: int, bias: bool, shapes: list[Any]) -> None:
    layer = nn.Linear(SIZE, 64, bias=bias)
    x = torch.randn(1, tokens, SIZE)
    expected = layer(x)
    shapes.clear()
    with few_rows.few_rows(few_rows.slow_layers(layer), tokens):
        found = layer(x)
        assert len(shapes) == (tokens in {1, 9})
        layer(x[:, :1])  # the output layer gets only the kept rows
        assert shapes[-1] == (1, 1, SIZE)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["double", "small", "hook", "subclass"])
def test_other_layers_are_left_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = type("Other", (nn.Linear,), {})(SIZE, 64) if kind == "subclass" else nn.Linear(SIZE, 64)
    if kind == "double":
        layer = layer.double()
    if kind == "hook":
        layer.__dict__["forward"] = lambda x: nn.Linear.forward(layer, x)
    if kind != "small":
        monkeypatch.setattr(few_rows, "MIN_WEIGHTS", 1)
    assert not few_rows.slow_layers(layer)


def test_passes_of_a_member_use_it_and_leave_the_model_as_it_was(shapes: list[Any]) -> None:
    made = copy.deepcopy(model(Recipe())).float()
    member = HuggingFaceBackend(made, tokenizer("bytelevel"), "one")
    tree = TokenTree(list(range(20, 40)))
    member.evaluate([Query(tree, (tree.root,), (), 2)])
    nodes = [tree.child(tree.root, token) for token in (30, 31, 32)]
    shapes.clear()
    (found,) = member.evaluate([Query(tree, tuple(nodes), (), 2)])
    assert not shapes
    assert all("forward" not in layer.__dict__ for layer in made.modules())
    plain = made(torch.tensor([[*range(20, 40), 31]])).logits[0, -1].log_softmax(-1)
    assert found.next[1].logprobs[0] == pytest.approx(plain.max().item(), abs=1e-4)
