"""Key/value rows of earlier requests, for requests that begin with the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from adafuse_llm.backends.huggingface.kv import KeyValues, RowCache
from adafuse_llm.backends.huggingface.tree_form import TreeForm

MIN_SHARED = 16
"""Fewer shared tokens than these are not worth a copy."""


@dataclass(frozen=True, eq=False)
class Kept:
    """Tokens, and which rows of a cache are theirs."""

    ids: NDArray[np.int64]
    cache: KeyValues
    rows: torch.Tensor

    @property
    def size(self) -> int:
        """Bytes of the buffers."""
        return self.cache.row_bytes * self.cache.capacity


Running = Sequence[tuple[Sequence[int], TreeForm]]
"""Committed tokens and state of requests that are being decoded."""


class PrefixCache:
    """Rows of finished requests, the least recently used dropped first.

    Args:
        limit: most bytes kept; 0 keeps nothing.

    Attributes:
        size: bytes kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._kept: list[Kept] = []  # the most recently used last

    def clear(self) -> None:
        """Forget everything."""
        self._kept, self.size = [], 0

    def add(self, ids: Sequence[int], form: TreeForm) -> None:
        """Keep the rows of a request that is over. Its buffers are taken over, or, if they are too
        large or not its own, as many of its first rows as fit are copied.
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
        """Which of several new prompts better wait until another of them has been read, as they
        begin like it. Arguments as for `longest`.
        """
        late: set[int] = set()
        if not self.limit or len(prompts) < 2:
            return late
        first: list[NDArray[np.int64]] = []
        sources = self._with(running)
        for index, prompt in prompts.items():
            ids = np.array(prompt, dtype=np.int64)
            known = max((shared(kept.ids, ids) for kept in sources), default=0)
            if any(shared(other, ids) >= known + MIN_SHARED for other in first):
                late.add(index)
            else:
                first.append(ids)
        return late

    def longest(self, prompt: Sequence[int], running: Running) -> RowCache | None:
        """A copy of the rows of the longest beginning of `prompt` that is known, its last token
        excepted; None if that is too short.

        Args:
            prompt: token ids.
            running: committed tokens and state of requests that are being decoded.
        """
        if not self.limit:
            return None
        ids = np.array(prompt[:-1], dtype=np.int64)
        best, length = None, MIN_SHARED - 1
        for kept in self._with(running):
            if (same := shared(kept.ids, ids)) > length:
                best, length = kept, same
        if best is None:
            return None
        if best in self._kept:
            self._kept.remove(best)
            self._kept.append(best)
        return best.cache.copy(best.rows[:length])

    def _with(self, running: Running) -> list[Kept]:
        """What is kept, and the rows of running requests."""
        return [
            *self._kept,
            *(
                Kept(np.array(ids[: form.committed], dtype=np.int64), form.cache, form.trunk)
                for ids, form in running
            ),
        ]


def shared(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    size = min(len(left), len(right))
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if len(differ) else size
