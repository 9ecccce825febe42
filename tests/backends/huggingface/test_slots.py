"""The buffers that hold the rows of many requests."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from adafuse_llm.backends.huggingface.kv import RowCache
from adafuse_llm.backends.huggingface.pools import SPARE_ROWS, SizeClasses
from adafuse_llm.backends.huggingface.slots import SlotBuffers, SlotRows


def rows(count: int, value: float) -> RowCache:
    made = RowCache()
    for layer in range(2):
        made.update(
            torch.full((1, 2, count, 4), value), torch.full((1, 2, count, 4), -value), layer
        )
    return made


def values_of(slot: SlotRows) -> list[float]:
    return slot.copy(torch.arange(slot.rows)).layers[1].keys[0, 1, :, 3].tolist()


def buffers_of(pool: SizeClasses) -> list[SlotBuffers]:
    return list(pool._classes.values())


def test_used_slots_are_the_first_ones_and_empty_rows_are_zero() -> None:
    pool = SizeClasses()
    first, second, third, extra = (pool.take(8, rows(8, value)) for value in (1.0, 2.0, 3.0, 5.0))
    (buffers,) = buffers_of(pool)
    assert [s.index for s in (first, second, third, extra)] == [0, 1, 2, 3]
    del first, extra
    gc.collect()
    fourth = pool.take(8, rows(5, 4.0))
    assert buffers.slots == 4
    assert {s.index for s in (third, second, fourth)} == {0, 1, 2}
    assert values_of(third) == [3.0] * 8
    assert values_of(second) == [2.0] * 8
    assert values_of(fourth) == [4.0] * 5
    for buffer in buffers.buffers():
        assert not buffer[fourth.index, :, 5:].any(), "nothing is left of the request before"
        assert not buffer[3].any()
    del second, third, fourth
    gc.collect()
    assert not buffers.live()
    assert not any(buffer.any() for buffer in buffers.buffers())


@pytest.mark.quick
def test_rows_survive_growth_and_reordering() -> None:
    pool = SizeClasses()
    slot = pool.take(4, rows(4, 1.0))
    for value in (2.0, 3.0):
        more = rows(1, value)
        for layer in range(2):
            new = more.layers[layer]
            slot.write(new.keys[:, :, :1], new.values[:, :, :1], layer, slot.rows)
        slot.rows += 1
    slot.keep(2, torch.tensor([5, 3]))
    assert values_of(slot) == [1.0, 1.0, 3.0, 1.0]
    others = [pool.take(4) for _ in range(7)]
    assert {s.index for s in (slot, *others)} == set(range(8))
    assert values_of(slot) == [1.0, 1.0, 3.0, 1.0]
    pool.reserve({slot: 5000})
    assert slot.capacity == 6144
    assert values_of(slot) == [1.0, 1.0, 3.0, 1.0]


def test_requests_of_a_size_share_buffers_and_move_on_when_they_outgrow_them() -> None:
    pool = SizeClasses()
    small = [pool.take(20, rows(20, value)) for value in (1.0, 2.0, 3.0)]
    large = pool.take(5000, rows(4000, 4.0))
    assert [buffers.capacity for buffers in buffers_of(pool)] == [96, 6144]
    pool.reserve({small[0]: 97, large: 6144})
    assert [buffers.capacity for buffers in buffers_of(pool)] == [96, 6144, 128]
    assert [slot.index for slot in (*small, large)] == [0, 1, 0, 0]
    for slot, value in zip(small, (1.0, 2.0, 3.0), strict=True):
        assert values_of(slot) == [value] * 20
    del slot, large
    pool.sweep()
    assert [buffers.capacity for buffers in buffers_of(pool)] == [96, 128]
    small.clear()
    pool.sweep()
    assert not buffers_of(pool), "no memory is left when no request runs"


def test_size_classes_hold_at_most_twice_the_rows_of_their_requests() -> None:
    rng = random.Random(0)
    pool = SizeClasses()
    live: dict[SlotRows, int] = {}
    for _ in range(300):
        if rng.random() < 0.5:
            length = rng.choice((1, 90, 400, 3000))
            live[pool.take(length)] = length + SPARE_ROWS
        if live and rng.random() < 0.4:
            chosen = rng.choice(list(live))
            live[chosen] += rng.randint(1, 300)
            pool.reserve({chosen: live[chosen]})
            assert chosen.capacity >= live[chosen]
            del chosen
        if live and rng.random() < 0.4:
            del live[rng.choice(list(live))]
        pool.sweep()
        for buffers in buffers_of(pool):
            indices = [slot.index for slot in buffers.live()]
            assert indices == list(range(len(indices)))
            assert len(indices) <= buffers.slots
        held = sum(buffers.slots * buffers.capacity for buffers in buffers_of(pool))
        assert held <= 2 * sum(live.values())
