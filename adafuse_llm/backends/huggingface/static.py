"""Decoding passes of a few fixed sizes over key/value buffers that stay where they are.

A GPU is kept waiting by launches when a pass is small. Passes whose tensors have the same sizes
and addresses every time can be recorded once and repeated as a whole (CUDA graphs), or compiled.
So the rows of all requests stand side by side in one buffer per layer, each request in a slot of
its own; a pass is padded to S slots of n tokens that see up to c rows, all of them powers of two,
and its inputs are copied to where they were the time before. Long pieces (prompts), requests that
no slot fits and passes that would be padding for the most part go through `PackedPasses`, beside
the others.

Attention is PyTorch's with a mask: flex attention would need a block mask made anew for every
pass, and the compiler at hand.

Shapes: S slots, n tokens of each, c rows seen; h query heads, k key/value heads of size d; v
vocabulary.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache

from adafuse_llm.backends.huggingface.forms import Attention, Decoder, PackedPasses
from adafuse_llm.backends.huggingface.kv import RowCache, RowLayer, to_device
from adafuse_llm.backends.huggingface.packing import Piece, Rows

logger = logging.getLogger(__name__)

MAX_TOKENS = 64
"""Pieces with more tokens are not padded."""

FREE_TOKENS, PADDING = 128, 4
"""A pass is padded up to so many tokens, which a GPU computes on while it reads the weights, or up
to so many times the tokens it has."""

FIRST_ROWS, HEADROOM = 512, 256
"""Fewest rows of a slot, and how many a request is expected to need beyond its prompt."""

FIRST_SEEN = 256
"""Fewest rows that the tokens of a pass may see."""

MAX_RECORDED = 64
"""Sizes that are kept recorded, the latest used."""

EMPTY = 4
"""The pool has at most so many times the rows that its requests were ever expected to need."""

PATIENCE = 8
"""Requests that must leave the pool before it gives up slots for a longer one, once it is empty."""


class SlotRows:
    """Key/value rows of one request in a pool's buffers: what `RowCache` is on its own.

    Args:
        pool: where the rows are.
        room: rows that the request is expected to need.

    Attributes:
        index: its slot; None once it has left the pool for buffers of its own.
        rows: rows in use.
    """

    pooled = True

    def __init__(self, pool: StaticPool, room: int) -> None:
        self.index: int | None = None
        self.room = room
        self.rows = 0
        self._pool = pool
        self._own: RowCache | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all layers."""
        return self._pool.row_bytes

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return self._pool.capacity if self._own is None else self._own.capacity

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write rows [1, k, n, d] behind those in use; returns these and the new ones. The pass
        counts them when it is through.
        """
        if self._own is not None:
            own: tuple[torch.Tensor, torch.Tensor] = self._own.update(
                key_states, value_states, layer_idx
            )
            return own
        end = self.rows + key_states.shape[2]
        keys, values = (
            buffer[self.index, None, :, :end]
            for buffer in self._pool.layer(layer_idx, key_states, value_states)
        )
        keys[:, :, self.rows :] = key_states
        values[:, :, self.rows :] = value_states
        return keys, values

    def keep(self, first: int, rows: torch.Tensor) -> None:
        """Of the rows from `first` on, keep only `rows`, in that order, in every layer."""
        end = first + len(rows)
        if self._own is not None:
            self._own.keep(first, rows)
        else:
            for buffer in self._pool.buffers():
                rows = to_device(rows, buffer.device)  # once for all buffers of a device
                slot = buffer[self.index]  # [k, capacity, d]
                slot[:, first:end] = slot.index_select(1, rows)
        self.rows = end

    def copy(self, rows: torch.Tensor) -> RowCache:
        """A cache of its own that holds `rows` only, in that order."""
        if self._own is not None:
            return self._own.copy(rows)
        layers = []
        for pair in self._pool.layers:
            rows = to_device(rows, pair[0].device)  # once for all layers of a device
            keys, values = (buffer[self.index, None].index_select(2, rows) for buffer in pair)
            layers.append(RowLayer.of(keys, values))
        return RowCache.of(layers)

    def fill(self, cache: RowCache) -> None:
        """Begin with the rows of `cache`."""
        for index, layer in enumerate(cache.layers):
            rows = layer.get_seq_length()
            self.update(layer.keys[:, :, :rows], layer.values[:, :, :rows], index)
        self.rows = cache.rows

    def leave(self) -> None:
        """Move to buffers of its own."""
        self._own = self.copy(torch.arange(self.rows)) if self.rows else RowCache()
        self.index = None


class StaticPool:
    """The rows of a member's requests, side by side: per layer one buffer of keys and one of
    values, [slots, k, capacity, d].

    Used slots are always the first ones: when a request is gone, the last one moves into its slot.
    A request is gone when nobody holds its `SlotRows` any more. The last row of every slot is
    nobody's: padding is written there. Rows that were never written are zero, so that masked they
    stay without effect.

    What was recorded is lost when the buffers are replaced, so that happens seldom, in whatever
    order short and long requests come. Slots and capacity grow by doubling. A request leaves the
    pool if most of it were empty with as many slots as there are and as long as that request
    needs; capacity that no request in the pool needs is given up for more slots.

    Attributes:
        slots: requests that there is room for.
        capacity: rows of a slot, nobody's included.
        layers: the buffers, made when a layer is first run.
        moves: how often the buffers have been replaced.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.capacity = 0
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.moves = 0
        self._used: list[weakref.ref[SlotRows]] = []
        self._needed = 0  # most rows so far
        self._left = 0  # requests since the last move

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all layers."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in self.buffers())

    def buffers(self) -> Iterator[torch.Tensor]:
        """All buffers, of keys and of values."""
        return (buffer for pair in self.layers for buffer in pair)

    def layer(
        self, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of a layer, for rows like these, [*, k, *, d]."""
        if index == len(self.layers):
            self.layers.append((self._buffer(keys), self._buffer(values)))
        return self.layers[index]

    def take(self, length: int, rows: RowCache | None = None) -> SlotRows:
        """Rows for a request with a prompt of `length` tokens, the first of them given."""
        slot = SlotRows(self, max(length + HEADROOM, FIRST_ROWS - 1))
        self._fit(slot)
        if rows is not None:
            slot.fill(rows)
        return slot

    def reserve(self, needed: Mapping[SlotRows, int]) -> None:
        """Make room for so many rows of each request; those it does not fit leave the pool."""
        for slot, rows in needed.items():
            slot.room = max(slot.room, rows)
        self._fit()

    def _live(self) -> list[SlotRows]:
        """The requests in the pool by slot, after slots of those that are gone are given away."""
        while True:
            live = [ref() for ref in self._used]
            here = [slot for slot in live if slot is not None]
            if len(here) == len(live):
                return here
            self._vacate(max(index for index, slot in enumerate(live) if slot is None))

    def _vacate(self, index: int) -> None:
        """Move the last used slot to `index`."""
        last = len(self._used) - 1
        for buffer in self.buffers():
            buffer[index] = buffer[last]
            buffer[last] = 0
        moved = self._used.pop()
        if index < last:
            self._used[index] = moved
            if (slot := moved()) is not None:
                slot.index = index

    def _fit(self, joining: SlotRows | None = None) -> None:
        """Grow to what the requests are expected to need; give the one that joins a slot."""
        while True:
            requests = [*self._live(), *([joining] if joining else [])]
            if (size := self._size(requests)) is not None:
                break
            longest = max(requests, key=lambda slot: slot.room)
            index = longest.index
            longest.leave()
            self._left += 1
            if index is None:
                joining = None
            else:
                self._vacate(index)
        self._needed = max(self._needed, sum(slot.room + 1 for slot in requests))
        if size != (self.slots, self.capacity):
            self._resize(*size)
        if joining is not None:
            joining.index = len(self._used)
            self._used.append(weakref.ref(joining))

    def _size(self, requests: Sequence[SlotRows]) -> tuple[int, int] | None:
        """Slots and capacity for these requests; None if most rows would be empty."""
        if not requests:
            return self.slots, self.capacity
        rooms = [slot.room + 1 for slot in requests]
        least, longest = power_of_two(len(rooms)), power_of_two(max(rooms))
        limit = EMPTY * max(self._needed, sum(rooms))
        patient = self._left < PATIENCE or len(rooms) > 1
        for slots in (max(self.slots, least), *([] if patient else [least])):
            capacity = max(self.capacity, longest)
            while slots * capacity > limit and capacity > longest:
                capacity //= 2
            if slots * capacity <= limit:
                return slots, capacity
        return None

    def _resize(self, slots: int, capacity: int) -> None:
        kept = min(self.capacity, capacity)
        self.slots, self.capacity = slots, capacity
        self.moves += 1
        self._left = 0
        for index, pair in enumerate(self.layers):
            grown = self._buffer(pair[0]), self._buffer(pair[1])
            for new, old in zip(grown, pair, strict=True):
                used = min(len(self._used), len(old))
                new[:used, :, :kept] = old[:used, :, :kept]
            self.layers[index] = grown

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        _, heads, _, width = like.shape
        return like.new_zeros((self.slots, heads, self.capacity, width))


def power_of_two(number: int) -> int:
    """The smallest one that is not below `number`."""
    return 1 << (number - 1).bit_length() if number > 1 else 1


@dataclass(frozen=True)
class Size:
    """Sizes of a pass.

    Attributes:
        slots: S, the slots from the first one on.
        tokens: n, of each slot.
        rows: c, that every token may see.
    """

    slots: int
    tokens: int
    rows: int


class Inputs:
    """What passes of one size are given, at the same addresses every time.

    Args:
        size: of the passes.
        windows: for every kind of mask, the tokens that are within sight; None for all.
        device: where the model takes its inputs.

    Attributes:
        ids, positions, rows: [S, n] token ids, their positions, and the rows they are written to.
        keep: [S * n] which of the tokens are wanted, first those that are.
        masks: for every kind, [S, 1, n, c] whether a token sees a row.
    """

    def __init__(self, size: Size, windows: Mapping[str, int | None], device: torch.device) -> None:
        self.size = size
        self._windows = windows
        grid = (size.slots, size.tokens)
        numbers = torch.zeros((4, *grid), dtype=torch.int64, device=device)
        masks = torch.zeros(
            (len(windows), size.slots, 1, size.tokens, size.rows), dtype=torch.bool, device=device
        )
        self.ids, self.positions, self.rows = numbers[0], numbers[1], numbers[2]
        self.keep = numbers[3].view(-1)
        self.masks = dict(zip(windows, masks, strict=True))
        self._there = self._here = [numbers, masks]
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._here = [torch.zeros_like(t, device="cpu").pin_memory() for t in self._there]
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's

    def fill(self, pieces: Sequence[Piece], slots: Sequence[int], spare: int) -> None:
        """Send what the pieces say, those in slot `slots`; padding is written to the row `spare`
        and sees the first row of its slot.
        """
        if self._arrived is not None:
            self._arrived.synchronize()  # long ago, unless passes follow each other unread
        (ids, positions, rows, keep), masks = (t.numpy() for t in self._here)
        for numbers in (ids, positions, keep):
            numbers.fill(0)
        rows.fill(spare)
        masks.fill(False)
        masks[..., 0] = True
        kept: list[int] = []
        for slot, piece in zip(slots, pieces, strict=True):
            new, old = len(piece.tokens), len(piece.positions) - len(piece.tokens)
            ids[slot, :new] = piece.tokens
            positions[slot, :new] = piece.queries
            rows[slot, :new] = range(old, old + new)
            kept.extend(slot * self.size.tokens + index for index in piece.keep)
            for mask, window in zip(masks, self._windows.values(), strict=True):
                mask[slot, 0, :new, : old + new] = piece.sight(window)
        keep.reshape(-1)[: len(kept)] = kept
        if self._arrived is not None:
            for here, there in zip(self._here, self._there, strict=True):
                there.copy_(here, non_blocking=True)
            self._arrived.record(torch.cuda.current_stream(self.ids.device))


class SlotCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The cache of one static pass, as the model sees it.

    Args:
        pool: where the rows are.
        inputs: of the pass.
        kinds: the kind of mask of every layer that has not the kind ``full_attention``.
        plain: let the model attend by itself, to all rows with the mask it is given; else `Rows`
            stand for the keys, and heads that share keys are folded instead of repeating these.
    """

    def __init__(
        self, pool: StaticPool, inputs: Inputs, kinds: Mapping[int, str], *, plain: bool
    ) -> None:
        super().__init__(layers=[])
        self._pool = pool
        self._inputs = inputs
        self._kinds = kinds
        self._plain = plain
        self._places: dict[tuple[int, torch.device], tuple[torch.Tensor, ...]] = {}
        self._masks: dict[tuple[Any, ...], torch.Tensor] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new rows, [S, k, n, d], where the inputs say."""
        size = self._inputs.size
        keys, values = self._pool.layer(layer_idx, key_states, value_states)
        for buffer, new in ((keys, key_states), (values, value_states)):
            buffer.index_put_(self._place(new), new)
        keys, values = (t[: size.slots, :, : size.rows] for t in (keys, values))
        if self._plain:
            return keys, values
        kind = self._kinds.get(layer_idx, "full_attention")

        def attend(query: torch.Tensor, scale: float | None) -> torch.Tensor:
            """Query and result [S, h, n, d]; heads of single tokens may be folded already."""
            groups = query.shape[1] // keys.shape[1]
            folded = query.reshape(
                size.slots, keys.shape[1], groups * query.shape[2], query.shape[3]
            )
            mask = self._mask(kind, groups, query)
            output = scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
            return output.reshape(query.shape[:-1] + output.shape[-1:])

        return Rows.of(key_states, attend), value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing counts rows here: positions and masks are given."""
        return 0

    def _place(self, new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Slots, heads and rows of new rows, [S, 1, 1], [k, 1] and [S, 1, n]."""
        known = (new.shape[1], new.device)
        if known not in self._places:
            slots, heads = (torch.arange(size, device=new.device) for size in new.shape[:2])
            rows = self._inputs.rows.to(new.device)
            self._places[known] = slots[:, None, None], heads[:, None], rows[:, None]
        return self._places[known]

    def _mask(self, kind: str, groups: int, query: torch.Tensor) -> torch.Tensor:
        """What is added to the scores of folded heads, [S, 1, groups * n, c]."""
        known = (kind, groups, query.dtype, query.device)
        if known not in self._masks:
            seen = self._inputs.masks[kind].to(query.device)
            mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
            self._masks[known] = mask.masked_fill_(~seen, -math.inf).repeat(1, 1, groups, 1)
        return self._masks[known]


Call = Callable[[], torch.Tensor]
"""A computation whose inputs and buffers are the same tensors every time."""

Record = Callable[[Call], Call]
"""Makes of a computation one that repeats it; its result is overwritten by the next call of any."""


def direct(call: Call) -> Call:
    """Nothing is recorded: operations are called one by one."""
    return call


class CudaGraphs:
    """Records what a computation launches on a GPU, to launch all of it at once.

    Graphs share one pool of memory for what they compute: a result must be read before any of
    them is repeated.

    Args:
        device: the GPU that all of it runs on.
    """

    _recording = threading.Lock()  # one at a time in a process

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._state_of = torch.cuda.graph_pool_handle()

    def __call__(self, call: Call) -> Call:
        """Run once, so that libraries set themselves up, then record."""
        with self._recording, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                call()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.stream(current),  # a recording that fails leaves its own stream set
                torch.cuda.graph(
                    graph, self._state_of, self._stream, capture_error_mode="thread_local"
                ),
            ):
                result = call()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class StaticPasses:
    """Runs pieces of many requests at once, those that are short in a pass of a fixed size.

    Args:
        decoder: the model.
        attention: its layers.
        compiled: whether fixed sizes are compiled.
        record: how they are recorded; None for CUDA graphs if the model is on one GPU.

    Attributes:
        pool: the rows of the requests.
        compiled: as given.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        *,
        compiled: bool = False,
        record: Record | None = None,
    ) -> None:
        self.pool = StaticPool()
        self.compiled = compiled
        self._packed = PackedPasses(decoder, attention)
        self._decoder = decoder.compiled() if compiled else decoder
        blank = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=attention.device)
        self._blank = dict.fromkeys(attention.layer_types, blank)  # spares the model to make one
        self._kinds = dict.fromkeys(attention.windows, "sliding_attention")
        self._windows = {
            kind: next(iter(attention.windows.values())) if kind == "sliding_attention" else None
            for kind in sorted(attention.layer_types)
        }
        self._record = record or (CudaGraphs(decoder.device) if decoder.on_one_gpu else direct)
        self._recorded: dict[Size, tuple[Inputs, Call]] = {}  # the latest used last
        self._moves = 0
        self._logits: torch.Tensor | None = None  # [most S * n so far, v], of the latest pass

    def run(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Logits after the kept tokens of each piece in turn, [sum of their numbers, v]."""
        caches = [piece.cache for piece in pieces if isinstance(piece.cache, SlotRows)]
        assert len(caches) == len(pieces)
        rows = [len(piece.positions) for piece in pieces]
        self.pool.reserve(dict(zip(caches, rows, strict=True)))
        slots = {
            number: cache.index
            for number, (cache, piece) in enumerate(zip(caches, pieces, strict=True))
            if cache.index is not None and len(piece.tokens) <= MAX_TOKENS
        }
        short = [pieces[number] for number in slots]
        size = self._size(short, list(slots.values()))
        if size is None:
            logits = self._packed.run(pieces)
        else:
            logits = self._padded(size, short, list(slots.values()))
            if others := [number for number in range(len(pieces)) if number not in slots]:
                rest = self._packed.run([pieces[number] for number in others])
                parts = [
                    *torch.split(logits, [len(piece.keep) for piece in short]),
                    *torch.split(rest, [len(pieces[number].keep) for number in others]),
                ]
                found = dict(zip([*slots, *others], parts, strict=True))
                logits = torch.cat([found[number] for number in range(len(pieces))])
        for cache, used in zip(caches, rows, strict=True):
            cache.rows = used
        return logits

    def _padded(self, size: Size, pieces: Sequence[Piece], slots: Sequence[int]) -> torch.Tensor:
        """What `run` returns, by a pass of a fixed size."""
        logits = self._prepared(size, pieces, slots)()[: sum(len(piece.keep) for piece in pieces)]
        return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)

    def _size(self, pieces: Sequence[Piece], slots: Sequence[int]) -> Size | None:
        """The size that fits; None if most of the pass would be padding, or all of it."""
        if not pieces:
            return None
        longest = max(len(piece.tokens) for piece in pieces)
        total = sum(len(piece.tokens) for piece in pieces)
        rows = max(len(piece.positions) for piece in pieces)
        size = Size(
            power_of_two(max(slots) + 1),
            power_of_two(longest),
            min(self.pool.capacity, max(FIRST_SEEN, power_of_two(rows))),
        )
        padded = size.slots * size.tokens > max(FREE_TOKENS, PADDING * total)
        return None if padded else size

    def _prepared(self, size: Size, pieces: Sequence[Piece], slots: Sequence[int]) -> Call:
        """The computation for a size, its inputs filled."""
        if self._moves != self.pool.moves:
            self._moves = self.pool.moves
            self._recorded = {}  # they use the buffers that were
        for piece in pieces:
            self._decoder.check(piece.tokens)
        known = self._recorded.pop(size, None)
        inputs = known[0] if known else Inputs(size, self._windows, self._decoder.device)
        inputs.fill(pieces, slots, self.pool.capacity - 1)
        call = known[1] if known else self._recording(inputs)
        self._recorded[size] = inputs, call
        if len(self._recorded) > MAX_RECORDED:
            del self._recorded[next(iter(self._recorded))]
        return call

    def _recording(self, inputs: Inputs) -> Call:
        """The pass over `inputs`, recorded: logits [S * n, v], first those that are wanted."""

        def call() -> torch.Tensor:
            cache = SlotCache(self.pool, inputs, self._kinds, plain=self.compiled)
            masks = inputs.masks if self.compiled else self._blank
            mask = masks if len(masks) > 1 else next(iter(masks.values()))
            logits = self._decoder.call(inputs.ids, inputs.positions, mask, cache).flatten(0, 1)
            if self._logits is None or len(self._logits) < len(logits):
                self._logits = torch.empty_like(logits)
            kept = inputs.keep.to(logits.device)
            return torch.index_select(logits, 0, kept, out=self._logits[: len(logits)])

        try:
            return self._record(call)
        except Exception as error:  # whatever it is, the plain call works or says why not
            logger.warning(
                "passes are not recorded: %s: %s", type(error).__name__, error, exc_info=True
            )
            self._record = direct
            return call
