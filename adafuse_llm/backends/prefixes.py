"""What members keep of finished requests, so that later requests that begin alike read less.

When a request ends, its backend keeps what it computed for the committed tokens: the Hugging Face
backend a copy of their key/value rows, llama.cpp the cells of their sequence. A new request starts
with the kept or running sequence that shares the most first tokens with its prompt, if these are at
least `MIN_SHARED` (``QueryResult.reused``). It waits while another request reads tokens that it can
reuse (`late`).

The option `prefix_cache_bytes` limits what is kept. The least recently used sequence goes first.
That leaves some ten to some hundred sequences, so a look-up compares with each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
T = TypeVar("T")

MIN_SHARED = 16
"""Minimum number of shared first tokens. With fewer, a request reuses nothing."""

CachedTokens = tuple[Sequence[int], int, T]
"""Tokens of a running request, how many of them are cached, and a value."""


class KeptPrefixes(Generic[T]):
    """Sequences of tokens with a value each, such as cached rows. The least recently used is first.

    No sequence begins with all tokens of another one.
    """

    def __init__(self) -> None:
        self._ids: dict[T, Ids] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[T]:
        return iter(self._ids)

    def items(self) -> Iterable[tuple[T, Ids]]:
        """Return the values and their tokens."""
        return self._ids.items()

    def shared(self, ids: Ids) -> int:
        """Return the largest number of first tokens that a kept sequence shares with `ids`."""
        return _most_alike(ids, self.items())[1]

    def use(self, value: T) -> None:
        """Record that a value was used. Nothing happens if it is not kept."""
        if value in self._ids:
            self._ids[value] = self._ids.pop(value)

    def add(self, ids: Ids, value: T) -> T | None:
        """Keep a value for a sequence, with which no kept sequence may begin.

        Returns:
            The value that is no longer kept, because its sequence is the beginning of the new one.
        """
        replaced, shared = _most_alike(ids, self.items())
        if replaced is not None and shared < len(self._ids[replaced]):
            replaced = None
        if replaced is not None:
            del self._ids[replaced]
        self._ids[value] = ids
        return replaced

    def pop_oldest(self) -> T:
        """Remove the least recently used value, and return it."""
        oldest = next(iter(self._ids))
        del self._ids[oldest]
        return oldest


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
    ids = np.array(prompt[:-1], dtype=np.int64)
    value, length = _most_alike(ids, [*kept.items(), *_cached(running)])
    if value is None or length < MIN_SHARED:
        return None
    kept.use(value)
    return value, length


def late(
    prompts: Mapping[int, Sequence[int]],
    kept: KeptPrefixes[T],
    running: Iterable[CachedTokens[T]],
) -> set[int]:
    """Return the prompts that should wait until the pass of another prompt is complete.

    Such a prompt shares at least `MIN_SHARED` more first tokens with an earlier prompt than with
    any sequence that the backend has cached.

    Args:
        prompts: token ids of each new prompt, by index.
        kept: the cached sequences of finished requests.
        running: the running requests.

    Returns:
        The indices of the prompts that should wait.
    """
    cached = [*kept.items(), *_cached(running)]
    waiting: set[int] = set()
    first: dict[int, Ids] = {}
    for index, prompt in prompts.items():
        ids = np.array(prompt, dtype=np.int64)
        if _most_alike(ids, first.items())[1] - MIN_SHARED >= _most_alike(ids, cached)[1]:
            waiting.add(index)
        else:
            first[index] = ids
    return waiting


def _cached(running: Iterable[CachedTokens[T]]) -> Iterator[tuple[T, Ids]]:
    for tokens, count, value in running:
        yield value, np.array(tokens[:count], dtype=np.int64)


def _most_alike(ids: Ids, sequences: Iterable[tuple[T, Ids]]) -> tuple[T | None, int]:
    """Return the value of a sequence that shares the most first tokens, and their number."""
    best, length = None, 0
    for value, each in sequences:
        if length < min(len(ids), len(each)) and ids[length] == each[length]:  # else no more
            shared = _shared(ids, each)
            if shared > length:
                best, length = value, shared
    return best, length


def _shared(left: Ids, right: Ids) -> int:
    """Return the length of the common prefix of two sequences."""
    size = min(len(left), len(right))
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if len(differ) else size
