"""The limit on the key/value cache that running requests hold on each device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.member import Member
from adafuse_llm.errors import CacheMemoryError

Needs = Mapping[str, int]
"""Bytes of key/value cache by device, or by member for members with a cache of fixed size."""


class CacheBudget:
    """Budget for the key/value cache, which checks whether requests fit at the same time.

    The budget is thread-safe. It does not
    record which requests run; callers pass the requests.

    Args:
        limit: maximum bytes on each device. If it is None, the limit is half of the free memory,
            measured for each request. While others run, it is not known how much of their
            reservations they hold, so the limit stays as it is if that can be half.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._limits: dict[str, int] = {}

    def needs(
        self,
        members: Sequence[Member],
        config: AdaFuseConfig,
        spare: int,
        running: Iterable[Needs] = (),
    ) -> Needs:
        """Return the maximum number of cache bytes that a request needs on each device.

        Args:
            members: the members that decode.
            config: the request's options.
            spare: maximum number of tokens that a tree holds in addition to the committed ones.
            running: the needs of the requests that run.

        Raises:
            CacheMemoryError: the request needs more than the limit of a device.
        """
        needs: Counter[str] = Counter()
        reserved = _sum(running)
        for member in members:
            backend = member.backend
            longest = member.prompt_tokens + config.max_new_tokens
            if member.window is not None:
                longest = min(longest, member.window)
            needed = backend.cache_bytes(longest + spare)
            if (limit := backend.cache_limit) is not None:
                _check_cache(member.name, backend.cache_bytes(longest), limit, config)
                cache = f"member {member.name}"
                needs[cache], self._limits[cache] = min(needed, limit), limit
                continue
            device = backend.device
            if self._limit is not None:
                self._limits[device] = self._limit
            elif device not in needs:
                free = backend.free_bytes()
                least, most = free // 2, (free + reserved[device]) // 2
                self._limits[device] = min(max(self._limits.get(device, 0), least), most)
            needs[device] += needed
        for device, needed in needs.items():
            if needed > self._limits[device]:
                raise CacheMemoryError(
                    f"the request needs {needed:,} bytes of key/value cache on {device!r}; "
                    f"{self._limits[device]:,} are allowed. Shorten the prompt, lower "
                    f"max_new_tokens ({config.max_new_tokens}), or raise the limit with "
                    "RuntimeConfig(cache_bytes=...)."
                )
        return needs

    def fits(self, requests: Iterable[Needs]) -> bool:
        """Return whether these requests can run at the same time."""
        return all(used <= limit for used, limit in self.use(requests).values())

    def use(self, requests: Iterable[Needs]) -> dict[str, tuple[int, int]]:
        """Return the bytes that requests reserve on each device, and the device's limit."""
        total = _sum(requests)
        return {device: (total[device], limit) for device, limit in self._limits.copy().items()}


def _sum(requests: Iterable[Needs]) -> Counter[str]:
    total: Counter[str] = Counter()
    for needs in requests:
        total.update(needs)
    return total


def _check_cache(name: str, needed: int, limit: int, config: AdaFuseConfig) -> None:
    """Raise an error if a request needs more bytes than the cache of a member has."""
    if needed > limit:
        raise CacheMemoryError(
            f"the request needs {needed:,} bytes of the cache of member {name!r}, which has "
            f"{limit:,}. Shorten the prompt, lower max_new_tokens ({config.max_new_tokens}), or "
            "load the member with a larger cache: GGUFMember(context=...)."
        )
