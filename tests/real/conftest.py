"""Engines of the real members, which all tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine, MemberSpec
from benchmarks.real import members


@pytest.fixture(scope="session")
def real_folders() -> dict[str, Path]:
    """The transformers checkpoints, by the members' short names."""
    return members.real_folders()


@pytest.fixture(scope="session")
def real_files() -> dict[str, Path]:
    """The GGUF files, by the members' short names."""
    return members.real_files()


@pytest.fixture(scope="session")
def real_backends(real_folders: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """The three transformers members in float32, loaded once."""
    specs = [MemberSpec(str(path), name=name) for name, path in real_folders.items()]
    with AdaFuseEngine.from_pretrained(specs, dtype="float32") as engine:
        yield dict(zip(engine.members, engine.backends, strict=True))


@pytest.fixture(scope="session")
def real_engine(real_backends: dict[str, Any]) -> Iterator[Callable[..., AdaFuseEngine]]:
    """Return an engine of the named members; keyword arguments are the engine's own."""
    engines: list[AdaFuseEngine] = []

    def engine(*names: str, **options: Any) -> AdaFuseEngine:
        engines.append(AdaFuseEngine([real_backends[name] for name in names], **options))
        return engines[-1]

    yield engine
    for each in engines:
        each.close()
