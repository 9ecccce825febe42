"""Measure what each further token adds to a pass, which decides how much the engine drafts."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from adafuse_llm.backends.base import Query
from adafuse_llm.tree.tokens import TokenTree

if TYPE_CHECKING:
    from adafuse_llm.backends.logits.backend import LogitsBackend

SIZES = (1, 2, 4, 8)
"""Numbers of tokens in the passes that are measured."""

REPEATS, MAX_SECONDS = 9, 1.0
"""Each size is measured `REPEATS` times, but all of this ends after about `MAX_SECONDS`."""


def measured_token_cost(member: LogitsBackend[Any], forget: Callable[[TokenTree], None]) -> float:
    """Return the `token_cost` of a member that is ready to evaluate. `forget` drops a tree.

    On a CPU, it is measured in CPU time of this thread, which other programs and engines hardly
    change. So the member must use only this thread meanwhile; torch is set to do so.
    """
    if (member.context_window or sys.maxsize) <= max(SIZES):
        return member.token_cost
    clock, threads = time.perf_counter, torch.get_num_threads()
    if member.device == "cpu":
        clock = time.thread_time
        torch.set_num_threads(1)
    end = time.perf_counter() + MAX_SECONDS
    shortest: dict[int, float] = {}
    try:
        for repeat, size in itertools.product(range(REPEATS), SIZES):
            # read one token, then time a chain of nodes after it
            tree = TokenTree([0])
            member.evaluate([Query(tree, (tree.root,), (), top=2)])
            tokens = [token % member.vocabulary_size for token in range(size)]
            chain = tree.path(tree.grow(tokens))
            start = clock()
            member.evaluate([Query(tree, chain, (), top=2)])
            seconds = clock() - start
            forget(tree)
            shortest[size] = min(shortest.get(size, seconds), seconds)
            if time.perf_counter() > end and (repeat or size > 1):
                break
    finally:
        torch.set_num_threads(threads)
    # most passes have about two tokens, so the cost at two counts as much as that at eight
    one = max(shortest.pop(1), 1e-9)
    shares = [(spent / one - 1) / (size - 1) for size, spent in shortest.items()]
    return round(min(max(fmean(shares), 0.0), 1.0), 2)
