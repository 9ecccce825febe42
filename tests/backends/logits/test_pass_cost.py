"""What each further token adds to a pass, measured on a member with a clock of its own."""

from types import SimpleNamespace
from typing import Any

import pytest

from adafuse_llm.backends.logits import pass_cost


@pytest.mark.parametrize(
    ("seconds", "cost", "passes"),
    [
        ({1: 0.01, 2: 0.01, 4: 0.01, 8: 0.01}, 0.0, 36),  # waits for weights, as on a GPU
        ({1: 0.001, 2: 0.002, 4: 0.004, 8: 0.008}, 1.0, 36),
        ({1: 0.01, 2: 0.015, 4: 0.016, 8: 0.017}, 0.27, 36),
        ({1: 2.0, 2: 3.0, 4: 9.0, 8: 9.0}, 0.5, 2),  # so slow that few passes are enough
    ],
)
def test_the_cost_of_a_token_is_the_mean_over_short_passes(seconds, cost, passes, monkeypatch):
    now, sizes = [0.0], []

    def evaluate(queries: Any) -> None:
        (query,) = queries
        if query.evaluate != (query.tree.root,):
            sizes.append(len(query.evaluate))
            now[0] += seconds[sizes[-1]]

    clock = SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: now[0])
    monkeypatch.setattr(pass_cost, "time", clock)
    member: Any = SimpleNamespace(
        evaluate=evaluate, device="cpu", context_window=None, vocabulary_size=5
    )
    assert pass_cost.measured_token_cost(member, lambda tree: None) == cost
    assert len(sizes) == passes
