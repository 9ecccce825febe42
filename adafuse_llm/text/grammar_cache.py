"""Compiled grammars that are kept, within a number and within measured memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from adafuse_llm.forks import after_fork

MAX_GRAMMARS = 64
"""Maximum number of compiled grammars that are kept, for each member and for texts."""

MAX_BYTES = 64 * 2**20
"""Maximum memory of the grammars that are kept, for each member and for texts."""

MAX_GROWTH = 8 * 2**20
"""Bytes by which a compiled grammar that is kept may grow while texts are read. Then the next
request compiles it anew."""

T = TypeVar("T")


@dataclass
class _Entry(Generic[T]):
    value: T
    first_size: int
    size: int


class GrammarCache(Generic[T]):
    """Compiled grammars, of which those are dropped whose last use is the longest ago. Thread-safe.

    Args:
        size_of: function that measures the bytes that a compiled grammar takes now. It returns
            None if the grammar is of no more use.
    """

    def __init__(self, size_of: Callable[[T], int | None]) -> None:
        self._size_of = size_of
        self._entries: OrderedDict[Hashable, _Entry[T]] = OrderedDict()
        after_fork(self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all grammars, each as it was measured at its last use."""
        with self._lock:
            return sum(entry.size for entry in self._entries.values())

    def get(self, key: Hashable, compile_grammar: Callable[[], T]) -> T:
        """Return a compiled grammar. Compile it if it is not kept, or if it has grown too much."""
        with self._lock:
            entry = self._entries.get(key)
        size = None if entry is None else self._size_of(entry.value)
        if entry is None or size is None or size - entry.first_size > MAX_GROWTH:
            value = compile_grammar()
            size = self._size_of(value) or 0
            entry = _Entry(value, size, size)
        with self._lock:
            entry.size = size
            self._entries[key] = entry
            self._entries.move_to_end(key)
            self._forget_old()
        return entry.value

    def _forget_old(self) -> None:
        total = sum(entry.size for entry in self._entries.values())
        while len(self._entries) > 1 and (len(self._entries) > MAX_GRAMMARS or total > MAX_BYTES):
            _, entry = self._entries.popitem(last=False)
            total -= entry.size
