"""Computations that run in lockstep, with batched queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from adafuse_llm.decoding.member import MemberQuery, Steps

T = TypeVar("T")


def in_lockstep(steps: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Run computations in lockstep, and batch the queries of each step.

    Returns:
        The results of the computations, in order.
    """
    results: dict[int, T] = {}
    running = dict(enumerate(steps))
    while running:
        queries: list[MemberQuery] = []
        for index, step in list(running.items()):
            try:
                queries += next(step)
            except StopIteration as done:
                results[index] = done.value
                del running[index]
        if queries:
            yield tuple(queries)
    return [results[index] for index in range(len(steps))]
