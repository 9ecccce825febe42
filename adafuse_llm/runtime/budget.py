"""The limit on the key/value cache that running requests hold on each device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from adafuse_llm.decoding.member import MemberState
from adafuse_llm.errors import CacheMemoryError

Needs = Mapping[str, int]
"""Bytes of key/value cache by device, or by member for members with a cache of fixed size."""


class CacheBudget:
    """Limits the key/value cache per device to `limit` bytes. None: to half of the free memory."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._limits: dict[str, int] = {}

    def needs(
        self,
        members: Sequence[MemberState],
        limit: int,
        spare: int,
        running: Sequence[Needs] = (),
        least: int | None = None,
    ) -> tuple[Needs, int]:
        """Return the maximum bytes that a request needs on each device, and its limit of tokens.

        Args:
            members: the members that decode.
            limit: maximum number of new tokens.
            spare: maximum number of uncommitted tokens that a tree holds.
            running: the needs of the requests that run.
            least: while memory is short, `limit` is halved, but not below this. None: it stays.
        """
        # add up each device's bytes for its members' longest sequences, and find its limit
        needs: Counter[str] = Counter()
        for member in members:
            backend = member.backend
            longest = member.prompt_tokens + limit
            if member.window is not None:
                longest = min(longest, member.window)
            place, needed = backend.device, backend.cache_bytes(longest + spare)
            if (most := backend.cache_limit) is not None:
                place = f"member {member.name}"  # it evaluates a tree in parts if room is short
                needed = max(backend.cache_bytes(longest), min(needed, most))
                self._limits[place] = most
            elif self._limit is not None:
                self._limits[place] = self._limit
            elif place not in needs:
                # The limit is half of the memory that is free without requests. Running requests
                # may hold nothing yet, or all that they reserve. So an earlier limit between these
                # two stays.
                free = backend.free_bytes()
                reserved = sum(each.get(place, 0) for each in running)
                lowest, most = free // 2, (free + reserved) // 2
                self._limits[place] = min(max(self._limits.get(place, 0), lowest), most)
            needs[place] += needed
        # if a device is too small, shorten the response or refuse the request
        for place, needed in needs.items():
            if needed > self._limits[place]:
                if least is not None and limit > least:
                    return self.needs(members, max(limit // 2, least), spare, running, least)
                raise CacheMemoryError(
                    f"the request needs {needed:,} bytes of key/value cache on {place!r}; "
                    f"{self._limits[place]:,} are allowed. Shorten the prompt, lower "
                    f"max_new_tokens ({limit}), or allow more: "
                    "RuntimeConfig(cache_bytes=...), or GGUFMember(context=...)."
                )
        return needs, limit

    def fits(self, requests: Sequence[Needs], elsewhere: Sequence[Needs] = ()) -> bool:
        """Return whether `requests` fit beside those of other engines (`elsewhere`)."""
        # other engines count only where the limit is a part of the free memory
        together = [*requests, *(elsewhere if self._limit is None else ())]
        return all(used <= limit for used, limit in self.use(together).values())

    def use(self, requests: Sequence[Needs]) -> dict[str, tuple[int, int]]:
        """Return, by device, the bytes that `requests` reserve there, and the device's limit."""
        return {
            place: (sum(each.get(place, 0) for each in requests), limit)
            for place, limit in self._limits.copy().items()
        }
