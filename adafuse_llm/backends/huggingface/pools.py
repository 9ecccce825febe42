"""Assign the slots of key/value buffers to requests.

`SizeClasses` serves passes of any size. `StaticPool` serves passes of fixed sizes, whose buffers
must stay in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from adafuse_llm.backends.huggingface.kv import RowCache
from adafuse_llm.backends.huggingface.slots import SlotBuffers, SlotRows

LEAST_ROWS, SPARE_ROWS = 64, 64
"""Size classes: minimum number of rows in a slot, and the number of rows that a new request gets in
addition to its prompt."""

FIRST_ROWS, HEADROOM = 512, 256
"""Static pool: minimum number of rows in a slot, and the estimated number of rows that a request
needs in addition to its prompt."""

MAX_OVERSIZE = 4
"""Maximum number of rows in a static pool, as a multiple of the largest number of rows that its
requests have needed at the same time."""

PATIENCE = 8
"""Number of requests that must leave a static pool before the pool may replace its slots with
fewer, longer slots. The pool does so only while it holds a single request."""


class SizeClasses:
    """The rows of a member's requests, in buffers for several sizes of requests.

    A request has a slot in the buffers for its size, so short and long requests do not share
    buffers. Capacities are powers of two and the numbers halfway between them. At most a quarter of
    the slots of a size are free. So the buffers have room for at most twice the rows that their
    requests have reserved. A request that outgrows its slot moves to a larger size.
    """

    def __init__(self) -> None:
        self._classes: dict[int, SlotBuffers] = {}

    def take(self, length: int, rows: RowCache | None = None) -> SlotRows:
        """Assign a slot to a new request.

        Args:
            length: number of tokens in the prompt.
            rows: cached rows of the first tokens of the prompt; None if no rows are cached.
        """
        slot = SlotRows(length + SPARE_ROWS)
        self._buffers_for(slot.room).add(slot)
        if rows is not None:
            slot.fill(rows)
        return slot

    def reserve(self, needed: Mapping[SlotRows, int]) -> None:
        """Make room for the rows of each request."""
        growing = [slot for slot, rows in needed.items() if rows > slot.capacity]
        # In this order, the requests that move leave few gaps for others to fill.
        for slot in sorted(growing, key=lambda slot: slot.index, reverse=True):
            self._move(slot, needed[slot])
        if growing:
            self.sweep()

    def sweep(self) -> None:
        """Free the slots of ended requests, and the memory of buffers that are mostly free."""
        for capacity, buffers in list(self._classes.items()):
            used = len(buffers.live())
            if not used:
                del self._classes[capacity]
            elif used < 0.75 * buffers.slots:
                buffers.resize(rounded_up(used, 4), capacity)

    def _buffers_for(self, rows: int) -> SlotBuffers:
        """Return the buffers for requests with `rows` rows, with at least one free slot."""
        capacity = rounded_up(max(rows, LEAST_ROWS), 2)
        buffers = self._classes.setdefault(capacity, SlotBuffers(capacity))
        used = len(buffers.live())
        if used == buffers.slots:
            buffers.resize(rounded_up(used + 1, 4), capacity)
        return buffers

    def _move(self, slot: SlotRows, rows: int) -> None:
        """Move a request to the buffers for requests with `rows` rows."""
        old, index = slot.slots, slot.index
        assert old is not None, "the request has a slot"
        target = self._buffers_for(rows)
        target.add(slot)
        for number, pair in enumerate(old.layers):
            for new, buffer in zip(target.layer(number, *pair), pair, strict=True):
                new[slot.index, :, : slot.rows] = buffer[index, :, : slot.rows]
        old.vacate(index)


class StaticPool(SlotBuffers):
    """The rows of a member's requests, in buffers that rarely change.

    The last row of each slot receives padding, so no request uses it.

    When the pool replaces its buffers, all recorded passes become invalid. So the pool rarely does
    this, regardless of the order of short and long requests. The number of slots and the capacity
    grow by doubling. If the longest request needs slots so long that most rows would be empty, this
    request leaves the pool. When the pool adds slots, it may reduce the capacity if all requests
    still fit.

    Attributes:
        capacity: number of rows in a slot, including the row for padding.
        moves: number of times that the pool has replaced the buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moves = 0
        self._needed = 0  # most rows that the requests have needed at the same time
        self._left = 0  # requests that have left since the buffers were last replaced

    def take(self, length: int, rows: RowCache | None = None) -> SlotRows:
        """Assign a slot to a new request.

        Args:
            length: number of tokens in the prompt.
            rows: cached rows of the first tokens of the prompt; None if no rows are cached.
        """
        slot = SlotRows(max(length + HEADROOM, FIRST_ROWS - 1))
        self._fit(slot)
        if rows is not None:
            slot.fill(rows)
        return slot

    def reserve(self, needed: Mapping[SlotRows, int]) -> None:
        """Make room for the rows of each request. Requests that do not fit leave the pool."""
        for slot, rows in needed.items():
            slot.room = max(slot.room, rows)
        self._fit()

    @override
    def resize(self, slots: int, capacity: int) -> None:
        super().resize(slots, capacity)
        self.moves += 1
        self._left = 0

    def _fit(self, joining: SlotRows | None = None) -> None:
        """Resize the buffers to the estimated needs, and assign a slot to the joining request."""
        while True:
            requests = [*self.live(), *([joining] if joining else [])]
            if (size := self._size(requests)) is not None:
                break
            longest = max(requests, key=lambda slot: slot.room)
            index = longest.index
            longest.leave()
            self._left += 1
            if longest is joining:
                joining = None
            else:
                self.vacate(index)
        self._needed = max(self._needed, sum(slot.room + 1 for slot in requests))
        if size != (self.slots, self.capacity):
            self.resize(*size)
        if joining is not None:
            self.add(joining)

    def _size(self, requests: Sequence[SlotRows]) -> tuple[int, int] | None:
        """Return the number of slots and the capacity that `requests` need.

        Return None if most rows would be empty.
        """
        if not requests:
            return self.slots, self.capacity
        rooms = [slot.room + 1 for slot in requests]
        least, longest = rounded_up(len(rooms)), rounded_up(max(rooms))
        limit = MAX_OVERSIZE * max(self._needed, sum(rooms))
        patient = self._left < PATIENCE or len(rooms) > 1
        for slots in (max(self.slots, least), *([] if patient else [least])):
            capacity = max(self.capacity, longest)
            while slots * capacity > limit and capacity > longest:
                capacity //= 2
            if slots * capacity <= limit:
                return slots, capacity
        return None


def rounded_up(number: int, steps: int = 1) -> int:
    """Round a positive number up to one of `steps` equally spaced numbers per power of two.

    With one step, the result is a power of two.
    """
    step = max(1, (1 << (number.bit_length() - 1)) // steps)
    return -(-number // step) * step
