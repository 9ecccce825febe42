"""Drawn tokens: arrays give the tokens that the scalar functions give."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from adafuse_llm.backends import gumbel
from adafuse_llm.backends.logits import draw
from adafuse_llm.sampling import Draw, text_hash

pytestmark = pytest.mark.quick

CODES = [text_hash(str(token)) for token in range(700)]


@pytest.mark.parametrize("top_k", [None, 1, 3, 50, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 0.999])
def test_many_nodes_at_a_time_draw_what_each_draws_alone(
    top_p: float, top_k: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw, "FIRST_LIKELY", 4)  # the cuts need several attempts
    generator = torch.Generator().manual_seed(0)
    for number, spread in enumerate((0.01, 1.0, 5.0)):
        logits = torch.randn(8, 700, generator=generator) * spread
        logits[1] = logits[1].round()  # many tokens are equally likely
        logits[2, 5:] = -math.inf
        logits[3] = 0.0
        draws = [
            Draw(
                text_hash(f"{number} {row}"),
                (0.1, 0.7, 1.0, 2.0)[row % 4],
                top_p,
                top_k,
                (0.0, 0.0, 0.05, 0.9)[row // 2],
            )
            for row in range(8)
        ]
        found = draw.drawn(logits, [*draws[:7], None], draw.signed(CODES))
        alone = [
            gumbel.drawn(row.double().tolist(), CODES, each)
            for row, each in zip(logits, draws, strict=True)
        ]
        assert found.flatten().tolist() == [*alone[:7], -1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, None), (0.9, None), (1.0, 50), (0.9, 50)])
def test_a_gpu_draws_what_a_cpu_draws(top_p: float, top_k: int | None) -> None:
    logits = torch.randn(64, 700, generator=torch.Generator().manual_seed(0))
    draws = [Draw(text_hash(str(row)), 1.0, top_p, top_k) for row in range(64)]
    codes = draw.signed(CODES)
    on_gpu = draw.drawn(logits.cuda(), draws, codes.cuda())
    assert on_gpu.tolist() == draw.drawn(logits, draws, codes).tolist()


def test_the_noise_is_the_same_in_arrays() -> None:
    keys = [0, 1, 2**63, 2**64 - 1]
    bits = draw.signed(keys)[:, None] ^ draw.signed(CODES)
    expected = np.stack([gumbel.noise(key, CODES) for key in keys])
    torch.testing.assert_close(draw._noise(bits), torch.from_numpy(expected))
