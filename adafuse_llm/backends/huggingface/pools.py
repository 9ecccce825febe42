"""Assign the slots of key/value buffers to requests."""

from __future__ import annotations

from collections.abc import Mapping

from adafuse_llm.backends.huggingface.kv import RowCache
from adafuse_llm.backends.huggingface.slots import SlotBuffers, SlotRows

LEAST_ROWS, SPARE_ROWS = 64, 64
"""Minimum number of rows in a slot, and the number of rows that a new request gets in addition to
its prompt."""


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
        slot = SlotRows(self._buffers_for(length + SPARE_ROWS))
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
                buffers.resize(rounded_up(used, 4))

    def _buffers_for(self, rows: int) -> SlotBuffers:
        """Return the buffers for requests with `rows` rows, with at least one free slot."""
        capacity = rounded_up(max(rows, LEAST_ROWS), 2)
        buffers = self._classes.setdefault(capacity, SlotBuffers(capacity))
        used = len(buffers.live())
        if used == buffers.slots:
            buffers.resize(rounded_up(used + 1, 4))
        return buffers

    def _move(self, slot: SlotRows, rows: int) -> None:
        """Move a request to the buffers for requests with `rows` rows."""
        old, index = slot.slots, slot.index
        target = self._buffers_for(rows)
        target.add(slot)
        for number, pair in enumerate(old.layers):
            for new, buffer in zip(target.layer(number, *pair), pair, strict=True):
                new[slot.index, :, : slot.rows] = buffer[index, :, : slot.rows]
        old.vacate(index)


def rounded_up(number: int, steps: int) -> int:
    """Round a positive number up to one of `steps` equally spaced numbers per power of two."""
    step = max(1, (1 << (number.bit_length() - 1)) // steps)
    return -(-number // step) * step
