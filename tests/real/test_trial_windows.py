"""The test at load crosses the sliding window of a real member."""

from __future__ import annotations

from typing import Any

import pytest

from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.backends.huggingface.pieces import Piece

pytestmark = pytest.mark.real


@pytest.mark.parametrize(("error", "form"), [(0, "tree"), (1, "path"), (100_000, "path")])
def test_a_wrong_window_of_512_tokens_is_found_at_load(
    real_backends: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: int, form: str
) -> None:
    within = Piece.within
    monkeypatch.setattr(Piece, "within", lambda piece, window: within(piece, window + error))
    gemma = real_backends["gemma"]
    again = HuggingFaceBackend(gemma._decoder.model, gemma._text.tokenizer, "gemma")
    assert again.form == form
