"""Embedded members as GGUF members (finch has a Unigram tokenizer), and the models they are."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adafuse_llm.backends.llamacpp import LlamaCppBackend
from adafuse_llm.embedded import member_paths
from tests.support.gguf_files import embedded_gguf

PATHS = {path.name: path for path in member_paths()[:2]}
NAMES = tuple(PATHS)
EXACT: dict[str, Any] = {"flash_attention": False, "cache_type": "f32"}
TOLERANCE = 1e-4
"""Difference of scores between 32-bit numbers and the 64-bit numbers of the reference."""


@functools.cache
def tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(PATHS[name])


@functools.cache
def model(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(PATHS[name]).eval()


def gguf(name: str = "wren", *, kind: str = "f32", **options: Any) -> LlamaCppBackend:
    """An embedded member as a new GGUF member."""
    settings = {"context": 4096, "threads": 1, **(EXACT if kind == "f32" else {}), **options}
    return LlamaCppBackend(embedded_gguf(name, kind), name, **settings)


@functools.cache
def members() -> tuple[LlamaCppBackend, ...]:
    return tuple(map(gguf, NAMES))


def plain_logits(name: str, ids: Sequence[int]) -> list[float]:
    """The logits of the model without any cache."""
    with torch.no_grad():
        row: list[float] = model(name)(torch.tensor([list(ids)])).logits[0, -1].tolist()
    return row
