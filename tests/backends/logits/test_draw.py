"""Tokens that are drawn from logits, or listed as the likeliest."""

from __future__ import annotations

import math

import pytest
import torch

from adafuse_llm.backends.logits import draw
from adafuse_llm.sampling import Draw, text_hash
from tests import reference_sampling

pytestmark = pytest.mark.quick

CODES = [text_hash(str(token)) for token in range(700)]


@pytest.mark.parametrize("top_k", [None, 1, 3, 50, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 0.999])
def test_many_nodes_at_a_time_draw_what_the_reference_draws_alone(
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
            reference_sampling.draw(
                {token: value for token, value in enumerate(row.tolist()) if value > -math.inf},
                each.key,
                CODES,
                temperature=each.temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=each.min_p,
            )
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


def test_cuts_leave_the_likeliest_tokens() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.4, 0.1)]

    def possible(top_p: float, top_k: int | None, min_p: float = 0.0) -> set[int]:
        draws = (Draw(key, 1.0, top_p, top_k, min_p) for key in range(300))
        return {draw.draw_one(logits, CODES[:4], each) for each in draws}

    assert possible(1.0, None) == {0, 1, 2, 3}
    assert possible(0.39, None) == {1}
    assert possible(0.5, None) == {1, 2}
    assert possible(1.0, 1) == {1, 2}  # equally likely tokens stay
    assert possible(1.0, 3) == {0, 1, 2, 3}
    assert possible(0.01, 3) == {1}
    assert possible(1.0, None, 0.2) == {0, 1, 2, 3}  # a quarter of the highest probability
    assert possible(1.0, None, 0.3) == {1, 2}
    assert possible(0.39, None, 0.2) == {1}


def test_mix_gives_the_published_outputs_of_splitmix64() -> None:
    seeds = [0x9E3779B97F4A7C15 * step % 2**64 for step in range(3)]
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert draw.mix(draw.signed(seeds)).tolist() == draw.signed(expected).tolist()


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_the_noise_is_always_finite(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "mix", lambda _: draw.signed([bits]))
    assert math.isfinite(draw.noise(torch.zeros(1)))


def test_ties_go_to_the_lower_token_id() -> None:
    random = torch.randint(0, 40, (200, 37), generator=torch.Generator().manual_seed(0)).float()
    values, found = draw.likeliest(random, 5)
    for row, tokens, logits in zip(random.tolist(), found.tolist(), values.tolist(), strict=True):
        assert tokens == sorted(range(37), key=lambda i: (-row[i], i))[:5]
        assert logits == [row[token] for token in tokens]
