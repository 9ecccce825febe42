"""Quantized members, made of the embedded ones: what loads, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from adafuse_llm import AdaFuseEngine, TransformersMember
from adafuse_llm.backends.huggingface.tree_cache import TreeForm
from adafuse_llm.embedded import member_paths

WREN, HERON, FINCH = member_paths()
PROMPT = """Answer from the passages. If they do not say, answer: not stated.

[1] The Silesse Mill was founded by Jenbert Zalwyn. It opens at 8:45 every day of the week.

Question: Who founded the Silesse Mill?
Answer:"""
ANSWER = " Jenbert Zalwyn"


Case = tuple[Any, str]
"""A quantization that runs on a CPU, and the type of a quantized weight."""


@pytest.fixture(params=["nf4", "ao"])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes")
        config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        return config, "Params4bit"
    ao = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(ao.Int8WeightOnlyConfig()), "Int8Tensor"


def load(quantization: Any, *more: Path) -> AdaFuseEngine:
    """An engine of wren, which is quantized, and more members."""
    wren = TransformersMember(str(WREN), quantization_config=quantization)
    return AdaFuseEngine.from_pretrained([wren, *map(str, more)])


def weight_types(engine: AdaFuseEngine, member: int = 0) -> set[str]:
    """Types of the weights of the layers' matrices."""
    model = engine.backends[member].model  # type: ignore[attr-defined]
    return {type(p).__name__ for n, p in model.named_parameters() if n.endswith("_proj.weight")}


def test_a_quantized_member_with_wrong_numbers_is_not_taken_for_an_imprecise_one(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a mask that shows every branch of a tree to every other, the tree form is refused."""
    right = TreeForm._piece

    def wrong(self: TreeForm, pending: Any, below: Any) -> Any:
        piece = right(self, pending, below)
        return piece if piece.visible is None else replace(piece, visible=piece.visible | True)

    monkeypatch.setattr(TreeForm, "_piece", wrong)
    with load(case[0]) as engine:
        assert engine.backends[0].form == "path"  # type: ignore[attr-defined]


def test_quantized_and_plain_members_decode_together(case: Case) -> None:
    with load(case[0], HERON) as engine:
        assert weight_types(engine, 0) == {case[1]}
        assert weight_types(engine, 1) == {"Parameter"}
        assert engine.backends[0].form == "tree"  # type: ignore[attr-defined]
        generation = engine.generate(PROMPT, max_new_tokens=16)
        assert generation.text == ANSWER
        assert all(set(r.candidates[r.winner].nll) == {"wren", "heron"} for r in generation.rounds)


def test_a_checkpoint_that_is_quantized_already_needs_no_configuration(
    case: Case, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        WREN, dtype=torch.bfloat16, quantization_config=case[0]
    )
    model.save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(WREN).save_pretrained(tmp_path / "small")
    paths = [str(tmp_path / "small"), str(FINCH)]
    with AdaFuseEngine.from_pretrained(paths, device_map="auto") as engine:
        assert weight_types(engine) == {case[1]}
        assert engine.generate(PROMPT, max_new_tokens=16).text == ANSWER
