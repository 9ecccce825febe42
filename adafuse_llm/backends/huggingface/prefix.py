"""Cache key/value rows of requests, for later requests that begin with the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from adafuse_llm.backends.huggingface.kv import KeyValues, RowCache
from adafuse_llm.backends.huggingface.tree_form import TreeForm
from adafuse_llm.backends.prefixes import MIN_SHARED, Ids, late, longest, shared


@dataclass(frozen=True, eq=False)
class Kept:
    """A sequence of tokens with its rows.

    Attributes:
        ids: token ids.
        cache: cache that contains the rows.
        rows: row index of each token.
    """

    ids: Ids
    cache: KeyValues
    rows: torch.Tensor

    @property
    def size(self) -> int:
        """Size of the cache's buffers, in bytes."""
        return self.cache.row_bytes * self.cache.capacity


Running = Sequence[tuple[Sequence[int], TreeForm]]
"""Committed tokens and form of each running request."""


class PrefixCache:
    """A cache of rows of finished requests. It drops the least recently used rows first.

    Args:
        limit: maximum size in bytes; with 0, the cache keeps nothing.

    Attributes:
        size: current size in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._kept: list[Kept] = []  # least recently used first

    def clear(self) -> None:
        """Drop all rows."""
        self._kept, self.size = [], 0

    def add(self, ids: Sequence[int], form: TreeForm) -> None:
        """Keep the rows of a finished request.

        The cache takes over the buffers of the request without copying them. If the buffers exceed
        the limit, or also hold rows of other requests, the cache copies the first rows instead, up
        to the limit.
        """
        new = Kept(np.array(ids[: form.committed], dtype=np.int64), form.cache, form.trunk)
        copied = form.cache.pooled or new.size > self.limit
        if copied:
            fitting = self.limit // max(1, form.cache.row_bytes)
            new = Kept(new.ids[:fitting], new.cache, new.rows[:fitting])
        if len(new.ids) < MIN_SHARED:
            return
        if any(shared(old.ids, new.ids) == len(new.ids) for old in self._kept):
            return
        if copied:
            new = Kept(new.ids, new.cache.copy(new.rows), torch.arange(len(new.rows)))
        self._kept = [old for old in self._kept if shared(old.ids, new.ids) < len(old.ids)]
        self._kept.append(new)
        self.size = sum(kept.size for kept in self._kept)
        while self.size > self.limit:
            self.size -= self._kept.pop(0).size

    def late(self, prompts: Mapping[int, Sequence[int]], running: Running) -> set[int]:
        """Return the prompts that should wait (`adafuse_llm.backends.prefixes.late`).

        Args:
            prompts: token ids of each new prompt, by index.
            running: committed tokens and form of each running request.

        Returns:
            The indices of the prompts that should wait.
        """
        if not self.limit:
            return set()
        return late(prompts, [kept.ids for kept in self._with(running)])

    def longest(self, prompt: Sequence[int], running: Running) -> RowCache | None:
        """Return a copy of the rows of the longest cached prefix of `prompt`.

        The prefix does not include the last token of the prompt.

        Args:
            prompt: token ids.
            running: committed tokens and form of each running request.

        Returns:
            The rows; None if the prefix is shorter than `MIN_SHARED`.
        """
        if not self.limit:
            return None
        sources = self._with(running)
        found = longest(prompt, [kept.ids for kept in sources])
        if found is None:
            return None
        best, length = sources[found[0]], found[1]
        if best in self._kept:
            self._kept.remove(best)
            self._kept.append(best)
        return best.cache.copy(best.rows[:length])

    def _with(self, running: Running) -> list[Kept]:
        """Return the cached rows and the rows of running requests."""
        return [
            *self._kept,
            *(
                Kept(np.array(ids[: form.committed], dtype=np.int64), form.cache, form.trunk)
                for ids, form in running
            ),
        ]
