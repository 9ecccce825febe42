"""Random numbers that depend on text only."""

from __future__ import annotations

import math

import numpy as np
import pytest

from adafuse_llm.backends import gumbel
from adafuse_llm.backends.gumbel import GAMMA, drawn, mix, noise
from adafuse_llm.sampling import Draw, Sampling, derived_seeds, token_codes

pytestmark = pytest.mark.quick


def test_mix_gives_the_published_outputs_of_splitmix64() -> None:
    first = mix(np.uint64(GAMMA) * np.arange(1, 4, dtype=np.uint64))
    assert first.tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_the_noise_is_always_finite(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gumbel, "mix", lambda _: np.array([bits], np.uint64))
    assert math.isfinite(noise(0, [0])[0])


def test_tokens_with_the_same_text_share_a_code_among_vocabularies_but_not_within_one() -> None:
    one = token_codes(["a", " b", "", "\ufffd", "\ufffd"], [2], 7)
    other = token_codes([" b", "x", "a", "\ufffd"], [1], 4)
    assert (one[0], one[1], one[2], one[3]) == (other[2], other[0], other[1], other[3])
    assert len(set(one)) == 7
    assert len(set(token_codes(None, [0], 7))) == 7


def test_the_tokens_after_a_text_and_after_its_silent_tokens_differ() -> None:
    sampling = Sampling(seed=1, temperature=1.0)
    keys = {sampling.draw(text, silent).key for text in ("", "a", "1 ") for silent in range(3)}
    assert len(keys) == 9
    assert sampling.draw("a", 0).key != Sampling(seed=2, temperature=1.0).draw("a", 0).key


def test_derived_seeds_differ_and_begin_with_the_seed() -> None:
    seeds = derived_seeds(7, 50)
    assert seeds[0] == 7
    assert len(set(seeds)) == 50
    assert derived_seeds(7, 3) == seeds[:3]


def test_cuts_leave_the_likeliest_tokens() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.4, 0.1)]
    codes = [11, 22, 33, 44]

    def possible(top_p: float, top_k: int | None, min_p: float = 0.0) -> set[int]:
        return {drawn(logits, codes, Draw(key, 1.0, top_p, top_k, min_p)) for key in range(300)}

    assert possible(1.0, None) == {0, 1, 2, 3}
    assert possible(0.39, None) == {1}
    assert possible(0.5, None) == {1, 2}
    assert possible(1.0, 1) == {1, 2}  # equally likely tokens stay
    assert possible(1.0, 3) == {0, 1, 2, 3}
    assert possible(0.01, 3) == {1}
    assert possible(1.0, None, 0.2) == {0, 1, 2, 3}  # a quarter of the highest probability
    assert possible(1.0, None, 0.3) == {1, 2}
    assert possible(0.39, None, 0.2) == {1}
