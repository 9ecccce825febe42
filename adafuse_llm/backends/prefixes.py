"""Reuse what members have computed for another request that begins with the same tokens.

When a request ends, its backend keeps what it computed for the committed tokens: key/value rows of
transformers, or the cells of a sequence in llama.cpp. A new request reuses the longest beginning of
its prompt that a finished or running request has, if that has at least `MIN_SHARED` tokens
(``QueryResult.reused``). It waits while another request reads tokens that it can reuse. A look-up
compares the prompt with all sequences, of which there are tens to hundreds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
T = TypeVar("T")

MIN_SHARED = 16
"""Minimum number of shared first tokens. If there are fewer, a request reuses nothing."""

CachedTokens = tuple[Sequence[int], int, T]
"""Tokens of a running request, how many of them are cached, and the value that caches them."""


class PrefixCache(Generic[T]):
    """Keeps sequences of tokens, and for every sequence a value, such as the rows of its tokens.

    No sequence begins with another sequence. The least recently used one comes first.

    Args:
        limit: maximum number of tokens in all sequences together. With 0, the cache is off.
        count: maximum number of sequences.
    """

    def __init__(self, limit: int, count: int = sys.maxsize) -> None:
        self.limit = limit
        self.count = count
        self._ids: dict[T, Ids] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def fitting(self, tokens: Sequence[int]) -> Ids:
        """Return the tokens to keep: the first `limit`, or none if they are too few to be worth it
        or a kept sequence begins with them.
        """
        ids = np.array(tokens[: self.limit], dtype=np.int64)
        is_known = _most_alike(ids, self._ids.items())[1] == len(ids)
        return ids[:0] if is_known or len(ids) < MIN_SHARED else ids

    def add(self, ids: Ids, value: T) -> list[T]:
        """Keep the value of tokens that `fitting` returned, and return all dropped values."""
        dropped: list[T] = []
        # drop a sequence with which the new one begins
        before, shared = _most_alike(ids, self._ids.items())
        if before is not None and shared == len(self._ids[before]):
            dropped.append(before)
            del self._ids[before]
        self._ids[value] = ids
        # make room
        while sum(map(len, self._ids.values())) > self.limit or len(self) > self.count:
            dropped.append(self.pop_oldest())
        return dropped

    def pop_oldest(self) -> T:
        """Remove the least recently used value, and return it."""
        oldest = next(iter(self._ids))
        del self._ids[oldest]
        return oldest

    def clear(self) -> list[T]:
        """Remove all values, and return them."""
        dropped, self._ids = list(self._ids), {}
        return dropped

    def longest(
        self, prompt: Sequence[int], running: Iterable[CachedTokens[T]]
    ) -> tuple[T, int] | None:
        """Return the value and the length of the longest cached prefix, and mark it as used.

        Return None if it has fewer than `MIN_SHARED` tokens. A prompt's last token never counts.
        """
        ids = np.array(prompt[:-1], dtype=np.int64)
        value, length = _most_alike(ids, self._cached(running))
        if value is None or length < MIN_SHARED:
            return None
        if value in self._ids:
            self._ids[value] = self._ids.pop(value)
        return value, length

    def late(
        self, prompts: Mapping[int, Sequence[int]], running: Iterable[CachedTokens[T]]
    ) -> set[int]:
        """Return the indices of prompts that should wait until an earlier prompt is read.

        They share at least `MIN_SHARED` more first tokens with it than with any cached sequence.
        """
        if not self.limit:
            return set()
        cached = self._cached(running)
        first: dict[int, Ids] = {}
        for index, prompt in prompts.items():
            ids = np.array(prompt, dtype=np.int64)
            if _most_alike(ids, first.items())[1] - MIN_SHARED < _most_alike(ids, cached)[1]:
                first[index] = ids
        return prompts.keys() - first

    def _cached(self, running: Iterable[CachedTokens[T]]) -> list[tuple[T, Ids]]:
        if not self.limit:
            return []
        others = ((value, np.array(ids[:count], dtype=np.int64)) for ids, count, value in running)
        return [*self._ids.items(), *others]


def _most_alike(ids: Ids, sequences: Iterable[tuple[T, Ids]]) -> tuple[T | None, int]:
    """Return the value of a sequence with the longest prefix of `ids`, and that prefix's length."""
    best, length = None, 0
    for value, cached in sequences:
        size = min(len(ids), len(cached))
        # a sequence with another token at index `length` shares no more than the best one
        if length < size and ids[length] == cached[length]:
            differ = np.flatnonzero(ids[:size] != cached[:size])
            shared = int(differ[0]) if len(differ) else size
            if shared > length:
                best, length = value, shared
    return best, length
