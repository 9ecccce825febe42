"""Compiled grammars that are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MAX_GRAMMARS = 16
"""Maximum number of compiled grammars that are kept, for each member and for texts. A grammar grows
while texts are read, up to `adafuse_llm.text.matchers.MAX_LEXER_STATES`."""

T = TypeVar("T")


class GrammarCache(Generic[T]):
    """Compiled grammars, of which those are dropped whose last use is the longest ago. Thread-safe.

    Args:
        is_usable: function that returns whether a kept grammar can still be used.
    """

    def __init__(self, is_usable: Callable[[T], bool]) -> None:
        self._is_usable = is_usable
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, compile_grammar: Callable[[], T]) -> T:
        """Return a compiled grammar. Compile it if it is not kept, or of no more use."""
        with self._lock:
            value = self._kept.get(key)
        if value is None or not self._is_usable(value):
            value = compile_grammar()
        with self._lock:
            self._kept[key] = value
            self._kept.move_to_end(key)
            if len(self._kept) > MAX_GRAMMARS:
                self._kept.popitem(last=False)
        return value
