"""The test at load crosses a sliding window, so that wrong masks are found."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from adafuse_llm import UnsupportedModelError
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.backends.huggingface import trial as trials
from adafuse_llm.backends.huggingface.pieces import Piece
from tests.support.models import ARCHITECTURES, tokenizer

WINDOW = 40
"""More tokens than a test without a window has."""


@pytest.fixture(scope="module")
def member() -> Any:
    """A model with one layer of each type."""
    torch.manual_seed(0)
    size = len(tokenizer("bytelevel"))
    options = {**ARCHITECTURES["gemma3"][1], "sliding_window": WINDOW, "vocab_size": size}
    made = Gemma3ForCausalLM(Gemma3TextConfig(**options)).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.4)
    return made


def load(member: Any, form: str = "auto") -> HuggingFaceBackend:
    return HuggingFaceBackend(member, tokenizer("bytelevel"), "sliding", form=form)


def test_r15_a_right_window_passes(member: Any) -> None:
    assert load(member).form == "tree"
    assert load(member, "path").form == "path"


@pytest.mark.parametrize("error", [-1, 1, 1000])
def test_r15_a_wrong_window_is_found_at_load(
    member: Any, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    within = Piece.within
    monkeypatch.setattr(Piece, "within", lambda piece, window: within(piece, window + error))
    assert load(member).form == "path"
    with pytest.raises(UnsupportedModelError, match="tree form: the logits differ"):
        load(member, "tree")


def test_r15_a_window_that_would_take_too_long_is_named_in_the_log(
    member: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trials, "MAX_CROSSING_ON_CPU", 1000)
    with caplog.at_level(logging.INFO):
        load(member)
    assert f"does not cross the model's sliding window of {WINDOW} tokens" in caplog.text
