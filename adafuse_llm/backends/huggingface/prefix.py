"""Cache key/value rows of requests, for later requests that begin with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from adafuse_llm.backends.huggingface.kv import RowCache
from adafuse_llm.backends.huggingface.tree_form import TreeForm
from adafuse_llm.backends.prefixes import MIN_SHARED, KeptPrefixes, late, longest


@dataclass(frozen=True, eq=False)
class Kept:
    """The rows of a sequence of tokens.

    Attributes:
        cache: cache that contains the rows.
        rows: row index of each token.
    """

    cache: RowCache
    rows: torch.Tensor

    @property
    def size(self) -> int:
        """Size of the rows, in bytes."""
        return self.cache.row_bytes * self.cache.rows


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
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self._kept: KeptPrefixes[Kept] = KeptPrefixes()
        self.size = 0

    def add(self, ids: Sequence[int], form: TreeForm) -> None:
        """Keep a copy of the first rows of a finished request, up to the limit."""
        tokens = np.array(ids[: form.committed], dtype=np.int64)
        tokens = tokens[: self.limit // max(1, form.cache.row_bytes)]
        if len(tokens) < MIN_SHARED or self._kept.shared(tokens) == len(tokens):
            return
        rows = form.trunk[: len(tokens)]
        new = Kept(form.cache.copy(rows), torch.arange(len(rows)))
        replaced = self._kept.add(tokens, new)
        self.size += new.size - (0 if replaced is None else replaced.size)
        while self.size > self.limit:
            self.size -= self._kept.pop_oldest().size

    def late(self, prompts: Mapping[int, Sequence[int]], running: Running) -> set[int]:
        """Return the prompts that should wait (`adafuse_llm.backends.prefixes.late`).

        Args:
            prompts: token ids of each new prompt, by index.
            running: committed tokens and form of each running request.

        Returns:
            The indices of the prompts that should wait.
        """
        return late(prompts, self._kept, list(_rows(running))) if self.limit else set()

    def longest(self, prompt: Sequence[int], running: Running) -> RowCache | None:
        """Return a copy of the rows of the longest cached prefix of `prompt`.

        The prefix does not include the last token of the prompt.

        Args:
            prompt: token ids.
            running: committed tokens and form of each running request.

        Returns:
            The rows; None if the prefix is shorter than `MIN_SHARED`.
        """
        found = longest(prompt, self._kept, _rows(running)) if self.limit else None
        if found is None:
            return None
        best, length = found
        return best.cache.copy(best.rows[:length])


def _rows(running: Running) -> Iterator[tuple[Sequence[int], int, Kept]]:
    """Yield the tokens of running requests, how many of them have rows, and the rows."""
    for ids, form in running:
        yield ids, form.committed, Kept(form.cache, form.trunk)
