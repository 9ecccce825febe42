"""Find requests that begin with the same tokens, so that a backend computes these tokens once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from adafuse_llm.backends.base import NodeQuery, NodeResult

Ids = NDArray[np.int64]

MIN_SHARED = 16
"""Minimum number of shared first tokens. With fewer, a request reuses nothing."""


def shared(left: Ids, right: Ids) -> int:
    """Return the length of the common prefix of two sequences."""
    size = min(len(left), len(right))
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if len(differ) else size


def late(prompts: Mapping[int, Sequence[int]], known: Sequence[Ids]) -> set[int]:
    """Return the prompts that should wait until the pass of another prompt is complete.

    Such a prompt shares at least `MIN_SHARED` more first tokens with the other prompt than with
    any sequence in `known`.

    Args:
        prompts: token ids of each new prompt, by index.
        known: token ids that the backend has cached, for running or finished requests.

    Returns:
        The indices of the prompts that should wait.
    """
    waiting: set[int] = set()
    first: list[Ids] = []
    for index, prompt in prompts.items():
        ids = np.array(prompt, dtype=np.int64)
        cached = max((shared(each, ids) for each in known), default=0)
        if any(shared(other, ids) >= cached + MIN_SHARED for other in first):
            waiting.add(index)
        else:
            first.append(ids)
    return waiting


def longest(prompt: Sequence[int], known: Sequence[Ids]) -> tuple[int, int] | None:
    """Find the longest cached prefix of a prompt, without the prompt's last token.

    Args:
        prompt: token ids.
        known: token ids that the backend has cached.

    Returns:
        The index of the sequence in `known` and the length of the prefix; None if the prefix is
        shorter than `MIN_SHARED`.
    """
    ids = np.array(prompt[:-1], dtype=np.int64)
    best, length = None, MIN_SHARED - 1
    for number, each in enumerate(known):
        if (same := shared(each, ids)) > length:
            best, length = number, same
    return None if best is None else (best, length)


def in_turn(
    queries: Sequence[NodeQuery],
    find_late: Callable[[Mapping[int, Sequence[int]]], set[int]],
    evaluate: Callable[[Sequence[NodeQuery]], Sequence[NodeResult]],
) -> list[NodeResult]:
    """Evaluate queries. A query waits while another one computes the tokens that it can reuse.

    Args:
        queries: the queries. Trees without a state belong to new requests.
        find_late: returns the indices of the new requests that should wait, as `late` does.
        evaluate: evaluates queries that belong together.
    """
    results: dict[int, NodeResult] = {}
    waiting = dict(enumerate(queries))
    while waiting:
        new = {i: query.tree.ids for i, query in waiting.items() if query.tree.state is None}
        waits = find_late(new) if len(new) > 1 else ()
        ready = {i: query for i, query in waiting.items() if i not in waits}
        results.update(zip(ready, evaluate(list(ready.values())), strict=True))
        waiting = {i: query for i, query in waiting.items() if i in waits}
    return [results[i] for i in range(len(queries))]
