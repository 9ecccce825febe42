"""Keep the rows of finished requests, for later requests that begin with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from adafuse_llm.backends.huggingface.rows import Rows, TreeForm
from adafuse_llm.backends.prefixes import MIN_SHARED, KeptPrefixes, late, longest

Running = Sequence[tuple[Sequence[int], TreeForm]]
"""Committed tokens and form of each running request."""


@dataclass(frozen=True, eq=False)
class _Kept:
    """Rows, and which of them are those of a sequence's tokens, in order."""

    rows: Rows
    indices: torch.Tensor

    @property
    def size(self) -> int:
        """Size of the rows, in bytes."""
        return self.rows.row_bytes * self.rows.count


class FinishedRows:
    """The rows of finished requests. The least recently used ones are dropped first.

    Args:
        limit: maximum size in bytes; with 0, nothing is kept.

    Attributes:
        size: current size in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self._kept: KeptPrefixes[_Kept] = KeptPrefixes()
        self.size = 0

    def add(self, ids: Sequence[int], form: TreeForm) -> None:
        """Keep a copy of the first rows of a finished request, up to the limit."""
        tokens = np.array(ids[: form.committed], dtype=np.int64)
        tokens = tokens[: self.limit // max(1, form.rows.row_bytes)]
        if len(tokens) < MIN_SHARED or self._kept.shared(tokens) == len(tokens):
            return
        rows = form.rows.copy(form.trunk[: len(tokens)])
        new = _Kept(rows, torch.arange(rows.count))
        replaced = self._kept.add(tokens, new)
        self.size += new.size - (0 if replaced is None else replaced.size)
        while self.size > self.limit:
            self.size -= self._kept.pop_oldest().size

    def late(self, prompts: Mapping[int, Sequence[int]], running: Running) -> set[int]:
        """Return the prompts that should wait (`adafuse_llm.backends.prefixes.late`)."""
        return late(prompts, self._kept, list(_rows(running))) if self.limit else set()

    def longest(self, prompt: Sequence[int], running: Running) -> Rows | None:
        """Return a copy of the rows of the longest prefix of `prompt` that has rows.

        The prefix does not include the last token of the prompt. The result is None if the prefix
        is shorter than `MIN_SHARED`.
        """
        found = longest(prompt, self._kept, _rows(running)) if self.limit else None
        if found is None:
            return None
        best, length = found
        return best.rows.copy(best.indices[:length])


def _rows(running: Running) -> Iterator[tuple[Sequence[int], int, _Kept]]:
    """Yield the tokens of running requests, how many of them have rows, and the rows."""
    for ids, form in running:
        yield ids, form.committed, _Kept(form.rows, form.trunk)
