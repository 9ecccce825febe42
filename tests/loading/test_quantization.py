"""Quantized members: what loads, and what is refused.

The embedded members are quantized here. Methods whose package is absent are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from adafuse_llm import AdaFuseEngine, InvalidOptionError, LoadError, TransformersMember
from adafuse_llm.backends.huggingface.rows import TreeForm
from adafuse_llm.embedded import member_paths

WREN, HERON, FINCH = member_paths()
PROMPT = """Answer from the passages. If they do not say, answer: not stated.

[1] The Silesse Mill was founded by Jenbert Zalwyn. It opens at 8:45 every day of the week.

Question: Who founded the Silesse Mill?
Answer:"""
ANSWER = " Jenbert Zalwyn"


@dataclass(frozen=True)
class Case:
    """A quantization that runs on a CPU.

    Attributes:
        weight: type of a quantized weight.
    """

    config: Callable[[], Any]
    weight: str


def four_bits() -> Any:
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def int8() -> Any:
    ao = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(ao.Int8WeightOnlyConfig())


@pytest.fixture(params=[Case(four_bits, "Params4bit"), Case(int8, "Int8Tensor")], ids=["nf4", "ao"])
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def load(*members: Path | TransformersMember, **options: Any) -> AdaFuseEngine:
    return AdaFuseEngine.from_pretrained(
        [m if isinstance(m, TransformersMember) else str(m) for m in members], **options
    )


def quantized(path: Path, config: Any, **options: Any) -> TransformersMember:
    return TransformersMember(path=str(path), quantization_config=config, **options)


def weight_types(engine: AdaFuseEngine, member: int = 0) -> set[str]:
    """Types of the weights of the layers' matrices."""
    model = engine.backends[member].model  # type: ignore[attr-defined]
    return {type(p).__name__ for n, p in model.named_parameters() if n.endswith("_proj.weight")}


# What they compute ----------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "dtype"), [(WREN, "float32"), (FINCH, "bfloat16")])
def test_a_quantized_member_has_quantized_weights_and_takes_the_tree_form(
    path: Path, case: Case, dtype: str
) -> None:
    with load(quantized(path, case.config(), dtype=dtype)) as engine:
        assert weight_types(engine) == {case.weight}
        assert engine.backends[0].form == "tree"  # type: ignore[attr-defined]
        assert engine.generate("The mill", max_new_tokens=4).rounds


def test_a_quantized_member_with_wrong_numbers_is_not_taken_for_an_imprecise_one(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a mask that shows every branch of a tree to every other, the tree form is refused."""
    right = TreeForm._piece

    def wrong(self: TreeForm, pending: Any, below: Any) -> Any:
        piece = right(self, pending, below)
        return piece if piece.visible is None else replace(piece, visible=piece.visible | True)

    monkeypatch.setattr(TreeForm, "_piece", wrong)
    with load(quantized(WREN, case.config())) as engine:
        assert engine.backends[0].form == "path"  # type: ignore[attr-defined]


def test_quantized_and_plain_members_decode_together(case: Case) -> None:
    with load(quantized(WREN, case.config()), HERON) as engine:
        assert weight_types(engine, 0) == {case.weight}
        assert weight_types(engine, 1) == {"Parameter"}
        generation = engine.generate(PROMPT, max_new_tokens=16)
        assert generation.text == ANSWER
        assert all(set(r.candidates[r.winner].nll) == {"wren", "heron"} for r in generation.rounds)


def test_a_checkpoint_that_is_quantized_already_needs_no_configuration(
    case: Case, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        WREN, dtype=torch.bfloat16, quantization_config=case.config()
    )
    model.save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(WREN).save_pretrained(tmp_path / "small")
    with load(tmp_path / "small", FINCH, device_map="auto") as engine:
        assert weight_types(engine) == {case.weight}
        assert engine.generate(PROMPT, max_new_tokens=16).text == ANSWER


# What cannot be loaded ------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("wrong", ["4bit", 4, transformers.BitsAndBytesConfig, object()])
def test_what_is_no_quantization_configuration_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(InvalidOptionError, match=r"wren.*quantization_config.*BitsAndBytesConfig"):
        quantized(WREN, wrong)


@pytest.mark.parametrize("wrong", [{}, {"bits": 4}, {"quant_method": "made-up"}])
def test_a_method_that_transformers_does_not_know_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match=r"'wren'.*quant_method.*got"):
        load(quantized(WREN, wrong))
