"""Find requests that begin with the same tokens, so that a backend computes these tokens once."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from adafuse_llm.backends.base import Query, QueryResult
from adafuse_llm.tree import TokenTree

Ids = NDArray[np.int64]
T = TypeVar("T")

MIN_SHARED = 16
"""Minimum number of shared first tokens. With fewer, a request reuses nothing."""


class KeptPrefixes(Generic[T]):
    """Sequences of tokens with a value each, such as cached rows. The least recently used is first.

    The sequences are in a radix tree, whose branches hold the tokens that sequences share. So the
    cost of a look-up grows with the tokens that are looked up, and not with the number of
    sequences. No sequence begins with all tokens of another one, so only the leaves have values.
    """

    def __init__(self) -> None:
        self._root: _Branch[T] = _Branch(np.empty(0, dtype=np.int64))
        self._leaves: OrderedDict[T, _Branch[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[T]:
        return iter(self._leaves)

    def shared(self, ids: Ids) -> int:
        """Return the largest number of first tokens that a kept sequence shares with `ids`."""
        return self._match(ids)[2]

    def longest(self, ids: Ids) -> tuple[T | None, int]:
        """Return the value of a sequence that shares the most first tokens, and their number."""
        branch, _, length = self._match(ids)
        while length and branch.value is None:
            branch = next(iter(branch.children.values()))
        return branch.value, length

    def use(self, value: T) -> None:
        """Record that a value was used. Nothing happens if it is not kept."""
        if value in self._leaves:
            self._leaves.move_to_end(value)

    def add(self, ids: Ids, value: T) -> T | None:
        """Keep a value for a sequence, with which no kept sequence may begin.

        Returns:
            The value that is no longer kept, because its sequence is the beginning of the new one.
        """
        branch, inside, length = self._match(ids)
        assert length < len(ids), "a kept sequence begins with the new one"
        if inside < len(branch.tokens):
            branch = branch.split(inside)
        replaced, branch.value = branch.value, None
        if replaced is None:
            leaf: _Branch[T] = _Branch(ids[length:].copy())
            branch.append(leaf)
        else:
            leaf = branch
            leaf.tokens = np.concatenate([leaf.tokens, ids[length:]])
            del self._leaves[replaced]
        leaf.value = value
        self._leaves[value] = leaf
        return replaced

    def pop_oldest(self) -> T:
        """Remove the least recently used value, and return it."""
        value, leaf = self._leaves.popitem(last=False)
        parent = leaf.parent()
        del parent.children[int(leaf.tokens[0])]
        if parent is not self._root and len(parent.children) == 1:
            parent.absorb_child()
        return value

    def _match(self, ids: Ids) -> tuple[_Branch[T], int, int]:
        """Follow the branches of a sequence.

        Returns:
            The last branch, how many of its tokens the sequence shares, and how many the sequence
            shares in all.
        """
        branch, inside, length = self._root, 0, 0
        while length < len(ids) and inside == len(branch.tokens):
            child = branch.children.get(int(ids[length]))
            if child is None:
                break
            branch, inside = child, shared(child.tokens, ids[length:])
            length += inside
        return branch, inside, length


class _Branch(Generic[T]):
    """A part of a radix tree: tokens that several sequences share, or the rest of one.

    Args:
        tokens: its tokens. They follow those of the parent. Only the root has none.

    Attributes:
        tokens: as above.
        children: the branches that follow, by their first token.
        value: the value of the sequence that ends here; None if others follow.
    """

    __slots__ = ("__weakref__", "_parent", "children", "tokens", "value")

    def __init__(self, tokens: Ids) -> None:
        self.tokens = tokens
        self.children: dict[int, _Branch[T]] = {}
        self.value: T | None = None
        self._parent: weakref.ref[_Branch[T]] | None = None  # weak: values need no collector

    def parent(self) -> _Branch[T]:
        """Return the branch before this one. The root has none."""
        parent = None if self._parent is None else self._parent()
        assert parent is not None, "the root has no parent"
        return parent

    def append(self, child: _Branch[T]) -> None:
        """Add a branch after this one, or replace the one with the same first token."""
        self.children[int(child.tokens[0])] = child
        child._parent = weakref.ref(self)

    def split(self, length: int) -> _Branch[T]:
        """Move the first `length` tokens to a new branch before this one, and return it."""
        upper: _Branch[T] = _Branch(self.tokens[:length].copy())
        self.parent().append(upper)
        self.tokens = self.tokens[length:].copy()
        upper.append(self)
        return upper

    def absorb_child(self) -> None:
        """Move the tokens of this branch to its only child, which takes its place."""
        (child,) = self.children.values()
        child.tokens = np.concatenate([self.tokens, child.tokens])
        self.parent().append(child)


CachedTokens = tuple[Sequence[int], int, T]
"""Tokens of a running request, how many of them are cached, and a value."""


def shared(left: Ids, right: Ids) -> int:
    """Return the length of the common prefix of two sequences."""
    size = min(len(left), len(right))
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if len(differ) else size


def late(
    prompts: Mapping[int, Sequence[int]], kept: KeptPrefixes[T], running: Sequence[CachedTokens[T]]
) -> set[int]:
    """Return the prompts that should wait until the pass of another prompt is complete.

    Such a prompt shares at least `MIN_SHARED` more first tokens with the other prompt than with
    any sequence that the backend has cached.

    Args:
        prompts: token ids of each new prompt, by index.
        kept: the cached sequences of finished requests.
        running: the running requests.

    Returns:
        The indices of the prompts that should wait.
    """
    waiting: set[int] = set()
    first: KeptPrefixes[int] = KeptPrefixes()
    for index, prompt in prompts.items():
        ids = np.array(prompt, dtype=np.int64)
        more = first.shared(ids) - MIN_SHARED
        if more >= 0 and more >= _longest(ids, kept, running)[1]:
            waiting.add(index)
        elif first.shared(ids) < len(ids):
            first.add(ids, index)
    return waiting


def longest(
    prompt: Sequence[int], kept: KeptPrefixes[T], running: Iterable[CachedTokens[T]]
) -> tuple[T, int] | None:
    """Find the longest cached prefix of a prompt, without the prompt's last token.

    Args:
        prompt: token ids.
        kept: the cached sequences of finished requests. The one that is found counts as used.
        running: the running requests.

    Returns:
        The value of the cached sequence and the length of the prefix; None if the prefix is shorter
        than `MIN_SHARED`.
    """
    found = _longest(np.array(prompt[:-1], dtype=np.int64), kept, running)
    value, length = found
    if value is None or length < MIN_SHARED:
        return None
    kept.use(value)
    return value, length


def _longest(
    ids: Ids, kept: KeptPrefixes[T], running: Iterable[CachedTokens[T]]
) -> tuple[T | None, int]:
    value, length = kept.longest(ids)
    start = ids[:MIN_SHARED].tolist()
    for tokens, cached, each in running:
        if cached > length and tokens[:MIN_SHARED] == start:  # else it shares too few tokens
            same = shared(np.array(tokens[:cached], dtype=np.int64), ids)
            if same > length:
                value, length = each, same
    return value, length


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

    The requests share the piece evenly. A new request waits while another one reads tokens that it
    can reuse.

    Args:
        trees: the trees. Those without a state belong to new requests.
        others: the states of other requests for which new ones may wait.
        sizes: number of tokens of a piece, while a request writes its response and while none does.
        find_late: returns the indices of the requests that should wait, as `late` does.
        state_of: returns the state of a request, and creates it for a new one.
        read: reads that many tokens of each request.
    """
    new = {i: tree.ids for i, tree in enumerate(trees) if tree.state is None}
    known = {*others, *(state_of(tree) for tree in trees if tree.state is not None)}
    half_read = [state.tree.ids for state in known if state.unread > MIN_SHARED]
    waits = find_late({**{-1 - i: ids for i, ids in enumerate(half_read)}, **new}) if new else set()
    for i in new.keys() - waits:
        state_of(trees[i])  # this may drop the states of other requests
    states = {i: state_of(tree) for i, tree in enumerate(trees) if tree.state is not None}
    unread = {i: state.unread for i, state in states.items()}
    is_shared = any(state.unread <= MIN_SHARED for state in known)  # a request writes
    parts = _parts(unread, sizes[0] if is_shared else sizes[1], sizes[1])
    pieces = [(state, parts[i]) for i, state in states.items() if parts[i] < unread[i]]
    if not pieces and waits:  # these prompts fit into the piece, and others begin like them
        pieces = [(state, unread[i] - 1) for i, state in states.items() if unread[i] > MIN_SHARED]
        if pieces:
            read(pieces)
            more = partial(read_piece, find_late=find_late, state_of=state_of, read=read)
            return more(trees, others, sizes)
    if pieces:
        read(pieces)
    return [i in parts and parts[i] == unread[i] for i in range(len(trees))]


def _parts(unread: Mapping[int, int], size: int, most: int) -> dict[int, int]:
    """Divide a piece evenly among the unread tokens of prompts. A few tokens are read whole.

    Args:
        unread: number of unread tokens by prompt.
        size: number of tokens of the piece for one long prompt. For more prompts, it is larger.
        most: maximum number of tokens of the piece.
    """
    parts = {i: count for i, count in unread.items() if count <= MIN_SHARED}
    long = sorted(unread.keys() - parts.keys(), key=unread.__getitem__)
    room = min(most, size * len(long))
    for done, i in enumerate(long):
        parts[i] = min(unread[i], max(1, room // (len(long) - done)))
        room -= parts[i]
    return parts


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
    waiting = dict(enumerate(queries))
    while waiting:
        is_read = read([query.tree for query in waiting.values()])
        ready = {i: q for (i, q), done in zip(waiting.items(), is_read, strict=True) if done}
        if ready:
            results.update(zip(ready, evaluate(list(ready.values())), strict=True))
        waiting = {i: query for i, query in waiting.items() if i not in results}
    return [results[i] for i in range(len(queries))]
