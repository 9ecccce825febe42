"""What the pages for newcomers say about models, memory, time and errors is right."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from adafuse_llm.backends.gguf.header import TENSOR_TYPES
from adafuse_llm.cli import create_app
from adafuse_llm.cli.ask import UNFAMILIAR
from tests.support.commands import runner
from tests.support.models import ARCHITECTURES, Recipe, backend
from tests.support.paths import ROOT
from tests.support.templates import FAMILIES

DOCS = ROOT / "docs"

HELP = (DOCS / "will-it-help.md").read_text(encoding="utf-8")
SUPPORTED = (DOCS / "supported.md").read_text(encoding="utf-8")
FAQ = (DOCS / "faq.md").read_text(encoding="utf-8")
SPEED = (DOCS / "speed.md").read_text(encoding="utf-8")

TYPES = {each.name: each.size / each.weights for each in TENSOR_TYPES.values()}
"""Bytes per weight of tensors in GGUF files."""


def rows(page: str, first: str) -> Iterator[list[str]]:
    """The cells of the rows of a table, after the row that begins with `first`."""
    _, found, table = page.partition(f"\n| {first} |")
    assert found, first
    for line in table.split("\n\n")[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def number(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text))


SHAPE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
CONFIGS = {
    "Llama 3.1 8B": LlamaConfig(
        vocab_size=128256, intermediate_size=14336, num_hidden_layers=32, **SHAPE
    ),
    "Qwen3 8B": Qwen3Config(
        vocab_size=151936, intermediate_size=12288, num_hidden_layers=36, head_dim=128, **SHAPE
    ),
}
"""What the `config.json` of these models says about their shapes."""


@cache
def shapes(name: str) -> tuple[tuple[str, int, bool], ...]:
    """The name, the size and whether it is a matrix, of every tensor of a model."""
    config: Any = CONFIGS[name]
    config.tie_word_embeddings = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return tuple(
        (name, weight.numel(), weight.ndim == 2) for name, weight in model.named_parameters()
    )


def weight_bytes(model: str, kind: str) -> float:
    layers = CONFIGS[model].num_hidden_layers
    return sum(
        size * _bytes_each(kind, name, layers, is_matrix=is_matrix)
        for name, size, is_matrix in shapes(model)
    )


def _bytes_each(kind: str, name: str, layers: int, *, is_matrix: bool) -> float:
    is_quantized = is_matrix and "layers" in name
    if kind == "bf16":
        return 2
    if kind.startswith("8 bit"):
        return 1 if is_quantized else 2
    if kind.startswith("4 bit"):
        return 4.5 / 8 if is_quantized else 2
    if not is_matrix:
        return TYPES["F32"]
    if kind.startswith("GGUF Q8_0"):
        return TYPES["Q8_0"]
    assert kind.startswith("GGUF Q4_K_M")
    if "lm_head" in name:
        return TYPES["Q6_K"]
    found = re.search(r"layers\.(\d+)\.", name)
    if found and ("v_proj" in name or "down_proj" in name):  # llama.cpp keeps more bits of these
        layer, eighth = int(found[1]), layers // 8
        if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
            return TYPES["Q6_K"]
    return TYPES["Q4_K"]


def token_bytes(model: str) -> int:
    config: Any = CONFIGS[model]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * size * 2


def test_memory_follows_from_the_shapes() -> None:
    checked = 0
    for kind, weights, thousand, whole in rows(HELP, "members in"):
        size = sum(weight_bytes(model, kind) for model in CONFIGS) / 1e9
        reserved = 1 if kind.startswith("GGUF") else 2
        cache = reserved * sum(map(token_bytes, CONFIGS)) / 1e6  # GB per 1,000 tokens
        assert number(weights) == pytest.approx(size, abs=0.051), kind
        assert number(thousand) == pytest.approx(cache, abs=0.0051), kind
        assert number(whole) == pytest.approx(size + 16 * cache, abs=0.051), kind
        checked += 1
    assert checked == 5


def test_bytes_per_token_follow_from_layers_and_heads() -> None:
    found = list(rows(HELP, "architecture"))
    for name, layers, heads, size, kilobytes in found:
        bytes_each = 2 * int(layers) * int(heads) * int(size) * 2
        assert float(kilobytes) == round(bytes_each / 1000), name
    assert len(found) == 5


def test_time_follows_from_sizes_and_measured_passes() -> None:
    measured = re.search(r"\| forward passes / those of .*? \| ([\d.]+), ([\d.]+) \|", SPEED)
    assert measured is not None
    for passes in measured.groups():
        assert re.search(rf"\b{passes}\s", HELP)
    checked = 0
    for kind, device, alone, *together in rows(HELP, "pair of 8 B"):
        bandwidth = number(device.partition(",")[2])  # GB/s
        size = sum(
            weight_bytes(model, f"GGUF {kind}" if "Q" in kind else kind) for model in CONFIGS
        )
        milliseconds = size / 1e6 / bandwidth
        assert number(alone) == pytest.approx(milliseconds / 2, abs=0.051)
        for value, passes in zip(together, measured.groups(), strict=True):
            assert number(value) == pytest.approx(milliseconds * float(passes), abs=0.051)
        checked += 1
    assert checked == 2


def test_the_table_of_architectures_is_that_of_the_tests() -> None:
    listed: dict[str, tuple[str, str]] = {}
    for names, _, form, sharing in rows(SUPPORTED, "architecture"):
        listed |= {name.strip(): (form, sharing) for name in names.split(",")}
    del listed["StableLm"]  # an embedded member
    assert set(listed) == {prefix for prefix, _ in ARCHITECTURES.values()}
    for arch, (prefix, _) in ARCHITECTURES.items():
        executor = backend(Recipe(arch=arch))._executor
        shares = type(executor.passes).__name__ == "PackedPasses"
        assert listed[prefix] == (executor.form, "yes" if shares else "no"), prefix


def test_the_families_of_templates_are_those_of_the_tests() -> None:
    found = re.search(r"<!-- families -->(.*?)<!-- end -->", SUPPORTED, re.DOTALL)
    assert found is not None
    words = re.sub(r"[^a-z0-9]", "", found[1].lower().replace("v1 and v3", "1, mistral 3"))
    for name in FAMILIES:
        assert re.sub(r"[^a-z0-9]", "", name) in words, name


def test_adafuse_info_prints_what_the_page_shows() -> None:
    (shown,) = re.findall(r"\$ adafuse info\n(.*?)```", SUPPORTED, re.DOTALL)
    printed = runner(create_app())("info").stdout
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


@cache
def texts() -> str:
    """All constant texts of the package, one per line."""
    found = []
    for path in (ROOT / "adafuse_llm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                ]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_the_errors_are_those_of_the_code() -> None:
    messages = [cells[0].strip("`") for cells in rows(FAQ, "message")]
    blocks = re.findall(r"```text\n(.*?)\n```", FAQ, re.DOTALL)
    assert UNFAMILIAR in blocks
    messages += [block for block in blocks if block != UNFAMILIAR]
    assert len(messages) >= 18
    for message in messages:
        pieces = [piece.strip(" .") for piece in re.split(r"…|: |, |\. ", message)]
        assert all(piece in texts() for piece in pieces), message
        assert any(len(piece) > 20 for piece in pieces), message
