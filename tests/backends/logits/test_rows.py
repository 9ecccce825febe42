"""Logits that a request keeps."""

from __future__ import annotations

import pytest
import torch

from adafuse_llm.backends.logits.rows import Logits, RequestLogits
from adafuse_llm.tree import TokenTree


@pytest.mark.quick
def test_a_request_keeps_no_logits_of_the_requests_it_shared_a_pass_with() -> None:
    trees = [TokenTree([number]) for number in range(8)]
    logits = Logits(torch.randn(8, 50))
    for row, tree in enumerate(trees):
        state = RequestLogits(tree)
        state.learn([tree.root], logits, row)
        values, total = state.rows[tree.root]
        assert values.tolist() == logits.values[row].tolist()
        assert total.tolist() == logits.total[row].tolist()
        assert values.untyped_storage().nbytes() == 50 * 4
