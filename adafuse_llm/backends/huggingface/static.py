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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache

from adafuse_llm.backends.huggingface.architecture import Attention
from adafuse_llm.backends.huggingface.decoder import Decoder
from adafuse_llm.backends.huggingface.graphs import Call, CudaGraphs, Record, direct
from adafuse_llm.backends.huggingface.packing import Piece, Rows
from adafuse_llm.backends.huggingface.passes import PackedPasses
from adafuse_llm.backends.huggingface.slots import SlotRows, StaticPool, power_of_two

logger = logging.getLogger(__name__)

MAX_TOKENS = 64
"""Pieces with more tokens are not padded."""

FREE_TOKENS, PADDING = 128, 4
"""A pass is padded up to so many tokens, which a GPU computes on while it reads the weights, or up
to so many times the tokens it has."""

FIRST_SEEN = 256
"""Fewest rows that the tokens of a pass may see."""

MAX_RECORDED = 64
"""Sizes that are kept recorded, the latest used."""


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
