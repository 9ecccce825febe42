"""Computations that run in lockstep, with batched queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from adafuse_llm.backends.base import Query
from adafuse_llm.decoding.member import Ask, Member, Steps

T = TypeVar("T")


def in_lockstep(steps: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Run computations in lockstep, and batch the queries of each step.

    Returns:
        The results of the computations, in order.
    """
    results: dict[int, T] = {}
    running = dict(enumerate(steps))
    while running:
        queries: list[tuple[Member, Query]] = []
        for index, step in list(running.items()):
            try:
                queries += next(step).queries
            except StopIteration as done:
                results[index] = done.value
                del running[index]
        if queries:
            yield Ask(tuple(queries))
    return [results[index] for index in range(len(steps))]
