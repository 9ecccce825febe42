"""Computations that run in lockstep, with batched queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from adafuse_llm.decoding.member import Member, MemberQuery, Query, Steps

T = TypeVar("T")


def in_lockstep(steps: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Run computations in lockstep, and batch the queries of each step.

    Returns:
        The results of the computations, in order.
    """
    results: dict[int, T] = {}
    running = dict(enumerate(steps))
    while running:
        queries: list[Query] = []
        for index, step in list(running.items()):
            try:
                queries += next(step)
            except StopIteration as done:
                results[index] = done.value
                del running[index]
        if queries:
            yield tuple(queries)
    return [results[index] for index in range(len(steps))]


def merge_queries(member: Member, steps: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Run computations of one member in lockstep, and merge the queries of each step into one.

    Each merged query costs one pass and has no drafts.

    Returns:
        The results of the computations, in order.
    """
    running = in_lockstep(steps)
    while True:
        try:
            queries = next(running)
        except StopIteration as done:
            return list(done.value)
        asked = [each for each in queries if isinstance(each, MemberQuery)]
        assert len(asked) == len(queries), "a member has only queries"
        wanted = dict.fromkeys(node for each in asked for node in each.query.evaluate)
        scored = tuple(dict.fromkeys(node for each in asked for node in each.scored))
        yield (MemberQuery(member, member.query(tuple(wanted), scored), 0, scored),)
