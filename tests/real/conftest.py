"""Engines of the real members, which all tests of this folder share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from benchmarks.real import members
from tests.real.reference import CachedMember, reference_of


@pytest.fixture(scope="session")
def real_folders() -> dict[str, Path]:
    """The transformers checkpoints, by the members' short names."""
    return members.real_folders()


@pytest.fixture(scope="session")
def real_files() -> dict[str, Path]:
    """The GGUF files, by the members' short names."""
    return members.real_files()


@pytest.fixture(scope="session")
def real_models(real_folders: dict[str, Path]) -> dict[str, tuple[Any, Any]]:
    """The models in float32 with their tokenizers, loaded once by transformers itself."""
    return {
        name: (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(),
            AutoTokenizer.from_pretrained(path),
        )
        for name, path in real_folders.items()
    }


@pytest.fixture(scope="session")
def real_backends(real_models: dict[str, tuple[Any, Any]]) -> dict[str, HuggingFaceBackend]:
    """The members, which share the weights of `real_models`."""
    return {
        name: HuggingFaceBackend(model, tokenizer, name)
        for name, (model, tokenizer) in real_models.items()
    }


@pytest.fixture(scope="session")
def real_engine(
    real_backends: dict[str, HuggingFaceBackend],
) -> Iterator[Callable[..., AdaFuseEngine]]:
    """Return an engine of the named members; keyword arguments are the engine's own."""
    engines: list[AdaFuseEngine] = []

    def engine(*names: str, **options: Any) -> AdaFuseEngine:
        engines.append(AdaFuseEngine([real_backends[name] for name in names], **options))
        return engines[-1]

    yield engine
    for each in engines:
        each.close()


@pytest.fixture
def references(
    real_backends: dict[str, HuggingFaceBackend], real_models: dict[str, tuple[Any, Any]]
) -> Iterator[dict[str, CachedMember]]:
    """The reference's members, which share the weights. They forget all after each test."""
    known = {name: reference_of(each, *real_models[name]) for name, each in real_backends.items()}
    yield known
    for member in known.values():
        member.forget()


@pytest.fixture(scope="session")
def real_gguf(real_files: dict[str, Path]) -> dict[str, Any]:
    """The GGUF files as members with repeatable results."""
    from adafuse_llm.backends.llamacpp import LlamaCppBackend

    return {
        name: LlamaCppBackend(path, name, context=4096, repeatable=True)
        for name, path in real_files.items()
    }
