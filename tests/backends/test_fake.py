"""The fake backend."""

from __future__ import annotations

import pytest

from adafuse_llm.backends import Backend, FakeBackend

pytestmark = pytest.mark.quick


def always(text: str) -> dict[str, float]:
    return {"<end>": 0.9, "a": 0.1}


def test_fakes_are_backends() -> None:
    assert isinstance(FakeBackend("x", always), Backend)
