"""Tokens that are drawn from logits, or listed as the likeliest, and logits that are kept."""

import math

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from adafuse_llm.backends.logits import draw
from adafuse_llm.backends.logits.state import RequestLogits, learn
from adafuse_llm.tree.sampling import Draw, text_hash
from adafuse_llm.tree.tokens import TokenTree
from tests import reference_sampling
from tests.reference_sampling import kept

pytestmark = pytest.mark.quick

CODES = [text_hash(str(token)) for token in range(700)]


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(1.0, None), (0.9, None), (0.3, 50), (1.0, 3), (0.999, 1000), (0.9, 1)]
)
def test_many_nodes_at_a_time_draw_what_the_reference_draws_alone(
    top_p: float, top_k: int | None
) -> None:
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
        fast = draw.drawn(logits, [*draws[:7], None], draw.signed(CODES), exact=False)
        is_done = fast != draw.REDO
        assert fast[is_done].tolist() == found[is_done].tolist()
        assert is_done.sum() > 4
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


@pytest.mark.parametrize("size", [1, 7, 300])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (None, 1.0, 0.0),
        (None, 1e-6, 0.0),
        (None, 0.5, 0.0),
        (1, 1.0, 0.0),
        (5, 0.9, 0.0),
        (1000, 0.999, 0.3),
        (None, 1.0, 0.2),
    ],
)
def test_cuts_keep_the_tokens_that_transformers_keeps(
    size: int, top_k: int | None, top_p: float, min_p: float
) -> None:
    """In the reference and in the engine, where no other token is ever drawn."""
    generator = torch.Generator().manual_seed(size)
    row = 3 * torch.randn(size, generator=generator, dtype=torch.float64)
    expected = row[None]
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(torch.empty(0), expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(torch.empty(0), expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(torch.empty(0), expected)
    allowed = expected[0].isfinite().nonzero()[:, 0].tolist()
    assert sorted(kept(dict(enumerate(row.tolist())), top_k, top_p, min_p)) == allowed
    draws = [Draw(text_hash(f"{key}"), 1.0, top_p, top_k, min_p) for key in range(100)]
    drawn = draw.drawn(row.expand(100, -1), draws, draw.signed(CODES[:size]))
    found = {*drawn.flatten().tolist()}
    assert found <= set(allowed)
    assert len(allowed) > 2 or found == set(allowed)


def test_mix_gives_the_published_outputs_of_splitmix64() -> None:
    seeds = [0x9E3779B97F4A7C15 * step % 2**64 for step in range(3)]
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert draw.mix(draw.signed(seeds)).tolist() == draw.signed(expected).tolist()


def test_the_noise_is_that_of_the_reference() -> None:
    place = text_hash("The ferry")
    found = draw.noise(draw.signed([place ^ code for code in CODES]))
    expected = [reference_sampling.noise(place, code) for code in CODES]
    assert found.tolist() == pytest.approx(expected)


def test_the_noise_is_finite_and_the_quick_noise_near_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = [value for n in range(64) for k in (1, 2, 3) for value in (k << n, -(k << n))]
    monkeypatch.setattr(draw, "mix", lambda _: draw.signed([0, *(b % 2**64 for b in bits)]))
    found, quick = draw.noise(torch.zeros(1)), draw._quick_noise(torch.zeros(1))
    assert found.isfinite().all()
    assert quick.isfinite().all()
    assert (found - quick).max() < draw.NOISE_ERROR / 2
    assert (quick - found).max() < 1  # too high is harmless


def test_an_error_of_the_quick_noise_changes_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(draw, "CANDIDATES", 2)
    monkeypatch.setattr(draw, "NOISE_ERROR", 0.5)

    def low(bits: torch.Tensor) -> torch.Tensor:
        exact = draw.noise(bits)
        return exact - draw.NOISE_ERROR * torch.rand(exact.shape, generator=generator)

    monkeypatch.setattr(draw, "_quick_noise", low)
    draws = [Draw(text_hash(f"{n}"), 1.0, 1.0, None) for n in range(500)]
    logits, codes = torch.zeros(500, 100), draw.signed(CODES[:100])
    fast, found = draw.drawn(logits, draws, codes, exact=False), draw.drawn(logits, draws, codes)
    is_done = fast != draw.REDO
    assert 100 < is_done.sum() < 500
    assert fast[is_done].tolist() == found[is_done].tolist()


def test_ties_go_to_the_lower_token_id() -> None:
    random = torch.randint(0, 40, (200, 37), generator=torch.Generator().manual_seed(0)).float()
    values, found, _ = draw.likeliest(random, 5)
    for row, tokens, logits in zip(random.tolist(), found.tolist(), values.tolist(), strict=True):
        assert tokens == sorted(range(37), key=lambda i: (-row[i], i))[:5]
        assert logits == [row[token] for token in tokens]


def test_a_request_keeps_no_logits_of_the_requests_it_shared_a_pass_with() -> None:
    states = [RequestLogits(TokenTree([number])) for number in range(8)]
    logits = torch.randn(8, 50)
    learn(logits, [(state, [state.tree.root]) for state in states])
    for state, row in zip(states, logits, strict=True):
        values, total = state.rows[state.tree.root]
        assert values.tolist() == row.tolist()
        assert total.item() == pytest.approx(row.logsumexp(-1).item())
        assert values.untyped_storage().nbytes() == 50 * 4
