"""Memory: key/value cache that running requests may hold per device; what is given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from adafuse_llm.backends.base import SupportsPlacement
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.member import Member
from adafuse_llm.errors import CacheMemoryError

Needs = Mapping[str, int]
"""Bytes by device."""


class CacheBudget:
    """What requests need, and whether several of them fit at the same time.

    Members that are not `SupportsPlacement` count nothing. Any thread may call it; nothing is
    booked here, as what is held follows from which requests run.

    Args:
        limit: most bytes on each device; None for half of what is free when a request first
            needs the device.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._limits: dict[str, int] = {}

    def needs(self, members: Sequence[Member], config: AdaFuseConfig, spare: int) -> Needs:
        """Most bytes that a request holds on each device.

        Args:
            members: who decodes.
            config: the request's options.
            spare: most tokens that a tree holds beside the committed ones.

        Raises:
            CacheMemoryError: it is more than the device may hold.
        """
        needs: Counter[str] = Counter()
        for member in members:
            backend = member.backend
            if isinstance(backend, SupportsPlacement):
                longest = member.prompt_tokens + config.max_new_tokens
                if member.window is not None:
                    longest = min(longest, member.window)
                needs[backend.device] += backend.cache_bytes(longest + spare)
                if backend.device not in self._limits:
                    limit = backend.free_bytes() // 2 if self._limit is None else self._limit
                    self._limits.setdefault(backend.device, limit)
        for device, needed in needs.items():
            if needed > self._limits[device]:
                raise CacheMemoryError(
                    f"the request needs {needed:,} bytes of key/value cache on {device!r}; "
                    f"{self._limits[device]:,} are allowed. Shorten the prompt, lower "
                    f"max_new_tokens ({config.max_new_tokens}), or allow more with "
                    "RuntimeConfig(cache_bytes=...)."
                )
        return needs

    def fits(self, requests: Iterable[Needs]) -> bool:
        """Whether these requests can run at the same time."""
        total: Counter[str] = Counter()
        for needs in requests:
            total.update(needs)
        return all(needed <= self._limits[device] for device, needed in total.items())
