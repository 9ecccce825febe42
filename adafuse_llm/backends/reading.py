"""Read the prompts of several requests in pieces (`Backend.read_piece`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from adafuse_llm.backends.base import Query, QueryResult
from adafuse_llm.backends.prefixes import MIN_SHARED
from adafuse_llm.tree import TokenTree


class Reader(Protocol):
    """The state of a request that can read the committed tokens of its tree in pieces."""

    @property
    def tree(self) -> TokenTree:
        """The request's tree."""
        ...

    @property
    def unread(self) -> int:
        """Number of committed tokens that the member can read in pieces, and has not read."""
        ...


S = TypeVar("S", bound=Reader)


def read_piece(
    trees: Sequence[TokenTree],
    others: Iterable[S],
    sizes: tuple[int, int],
    *,
    find_late: Callable[[Mapping[int, Sequence[int]]], set[int]],
    state_of: Callable[[TokenTree], S],
    read: Callable[[Sequence[tuple[S, int]]], None],
) -> list[bool]:
    """Read a piece of the prompts of requests (`Backend.read_piece`).

    The long prompts share the piece evenly. A new request waits while another one reads tokens that
    it can reuse.

    Args:
        trees: the trees. Those without a state belong to new requests.
        others: the states of other requests for which new ones may wait.
        sizes: number of tokens of a piece for one prompt, while a request writes its response and
            while none does. The second number also limits the piece for several prompts.
        find_late: returns the indices of the requests that should wait, as `prefixes.late` does.
        state_of: returns the state of a request, and creates it for a new one.
        read: reads that many tokens of each request.

    Returns:
        Whether the rest of each prompt is so short that it can be read with the request's nodes.
    """
    new = {i: tree.ids for i, tree in enumerate(trees) if tree.state is None}
    known = {*others, *(state_of(tree) for tree in trees if tree.state is not None)}
    half_read = [state.tree.ids for state in known if state.unread > MIN_SHARED]
    waits = find_late({**{-1 - i: ids for i, ids in enumerate(half_read)}, **new}) if new else set()
    for i in new.keys() - waits:
        state_of(trees[i])  # this may drop the states of other requests
    states = {i: state_of(tree) for i, tree in enumerate(trees) if tree.state is not None}
    unread = {i: state.unread for i, state in states.items()}
    long = [i for i, count in unread.items() if count > MIN_SHARED]
    someone_writes = any(state.unread <= MIN_SHARED for state in known)
    size = sizes[0] if someone_writes else sizes[1]
    share = max(1, min(size, sizes[1] // max(1, len(long))))
    if pieces := [(states[i], share) for i in long if unread[i] > share]:
        read(pieces)
    return [i in states and unread[i] <= max(share, MIN_SHARED) for i in range(len(trees))]


def in_turn(
    queries: Sequence[Query],
    read: Callable[[Sequence[TokenTree]], Sequence[bool]],
    evaluate: Callable[[Sequence[Query]], Sequence[QueryResult]],
) -> list[QueryResult]:
    """Read the prompts of queries to their ends, and evaluate each query once its prompt is read.

    Args:
        queries: the queries.
        read: reads a piece, as `Backend.read_piece`.
        evaluate: evaluates queries whose prompts are read.
    """
    results: dict[int, QueryResult] = {}
    while waiting := {i: query for i, query in enumerate(queries) if i not in results}:
        is_read = read([query.tree for query in waiting.values()])
        ready = {i: q for (i, q), done in zip(waiting.items(), is_read, strict=True) if done}
        if ready:
            results.update(zip(ready, evaluate(list(ready.values())), strict=True))
    return [results[i] for i in range(len(queries))]
