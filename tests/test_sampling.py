"""Random numbers that depend on text only."""

from __future__ import annotations

import pytest

from adafuse_llm.sampling import Sampling, derived_seeds, token_codes

pytestmark = pytest.mark.quick


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
