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
"""Bytes by which a compiled grammar that is kept may grow while texts are read. It is then
forgotten, and the next request compiles it anew."""

MEASURED = 3
"""Number of other kept grammars that each look-up measures anew. A grammar grows while responses
are written, and nobody may ever ask for it again."""

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
        self._turn = 0
        after_fork(self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all grammars, each as it was last measured."""
        with self._lock:
            return sum(entry.size for entry in self._entries.values())

    def get(self, key: Hashable, compile_grammar: Callable[[], T]) -> T:
        """Return a compiled grammar. Compile it if it is not kept, or if it has grown too much."""
        for due in self._due(key):
            self._measure(due)
        with self._lock:
            entry = self._entries.get(key)
        if entry is None:
            value = compile_grammar()
            size = self._size_of(value) or 0
            entry = _Entry(value, size, size)
        with self._lock:
            self._entries[key] = entry
            self._entries.move_to_end(key)
            self._forget_old()
        return entry.value

    def _due(self, key: Hashable) -> set[Hashable]:
        """Return the key, and those of the grammars whose turn it is to be measured."""
        with self._lock:
            keys = list(self._entries)
            turns = range(self._turn, self._turn + min(MEASURED, len(keys)))
            self._turn = turns.stop
        return {key, *(keys[turn % len(keys)] for turn in turns)}

    def _measure(self, key: Hashable) -> None:
        """Measure a grammar, and forget it if it has grown too much or is of no more use."""
        with self._lock:
            entry = self._entries.get(key)
        if entry is None:
            return
        size = self._size_of(entry.value)
        with self._lock:
            if size is not None and size - entry.first_size <= MAX_GROWTH:
                entry.size = size
            elif self._entries.get(key) is entry:
                del self._entries[key]

    def _forget_old(self) -> None:
        total = sum(entry.size for entry in self._entries.values())
        while len(self._entries) > 1 and (len(self._entries) > MAX_GRAMMARS or total > MAX_BYTES):
            _, entry = self._entries.popitem(last=False)
            total -= entry.size
