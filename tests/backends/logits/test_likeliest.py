"""Results read off logits."""

from __future__ import annotations

import pytest
import torch

from adafuse_llm.backends.logits.likeliest import likeliest


@pytest.mark.quick
def test_ties_go_to_the_lower_token_id():
    logits = torch.tensor(
        [[0.0, 3.0, 1.0, 3.0, 3.0, 2.0], [5.0, 4.0, 4.0, 4.0, 4.0, 4.0], [1.0, 1.0, 2.0, 0, 0, 0]]
    )
    values, tokens, tied = likeliest(logits, 3)
    assert tied[:, 0].tolist() == [False, True, False]
    values, tokens, _ = likeliest(logits, 3, by_sorting=True)
    assert tokens.tolist() == [[1, 3, 4], [0, 1, 2], [2, 0, 1]]
    assert values.tolist() == [[3.0, 3.0, 3.0], [5.0, 4.0, 4.0], [2.0, 1.0, 1.0]]
    random = torch.randint(0, 40, (200, 37)).float()
    _, found, tied = likeliest(random, 5)
    _, resolved, _ = likeliest(random, 5, by_sorting=True)
    assert 0 < int(tied.sum()) < 200
    rows = zip(random.tolist(), found.tolist(), resolved.tolist(), tied[:, 0].tolist(), strict=True)
    for row, fast, sure, unsure in rows:
        expected = sorted(range(37), key=lambda i: (-row[i], i))[:5]
        assert sure == expected
        assert unsure or fast == expected
