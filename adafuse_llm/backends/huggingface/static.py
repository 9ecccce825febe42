"""Run decoding passes of a few fixed sizes over key/value buffers that stay in place.

In a small pass, a GPU waits for kernel launches. If the tensors of a pass have the same sizes and
addresses every time, the pass can be recorded once and repeated as a whole (CUDA graphs), or
compiled. So each layer has shared buffers for the rows of all requests, and each request has a slot
in these buffers. A pass is padded to S slots of n tokens that see up to c rows. S, n and c are
powers of two. The inputs of a pass are copied to the same addresses every time. `PackedPasses` runs
long pieces (prompts), requests without a slot, and passes that would consist mostly of padding.

The passes use PyTorch's attention with a mask. Flex attention would need a compiler, and a new
block mask for every pass.

Shapes: S slots, n tokens per slot, c visible rows; h query heads, k key/value heads of size d; v
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
from adafuse_llm.backends.huggingface.packing import Rows
from adafuse_llm.backends.huggingface.passes import PackedPasses
from adafuse_llm.backends.huggingface.pieces import Piece
from adafuse_llm.backends.huggingface.pools import StaticPool, rounded_up
from adafuse_llm.backends.huggingface.slots import SlotRows
from adafuse_llm.backends.logits.rows import check_tokens

logger = logging.getLogger(__name__)

MAX_TOKENS = 64
"""Maximum number of tokens of a piece in a padded pass."""

FREE_TOKENS, PADDING = 128, 4
"""Limits of padding. With its padding, a pass has at most `FREE_TOKENS` tokens or at most `PADDING`
times its own tokens, whichever is more. A GPU computes `FREE_TOKENS` tokens while it reads the
weights."""

FIRST_SEEN = 256
"""Minimum of c, the number of rows that the tokens of a pass may see."""

MAX_RECORDED = 64
"""Maximum number of recorded sizes. `StaticPasses` drops the least recently used recording
first."""


@dataclass(frozen=True)
class Size:
    """The size of a pass.

    Attributes:
        slots: S, the number of slots, counted from the first slot.
        tokens: n, the number of tokens in each slot.
        rows: c, the number of rows that a token may see.
    """

    slots: int
    tokens: int
    rows: int


class Inputs:
    """The inputs of passes of one size, at the same addresses every time.

    Args:
        size: size of the passes.
        windows: for each layer type, the number of tokens that a token sees; None for no limit.
        device: device of the model's inputs.

    Attributes:
        ids: token ids, [S, n].
        positions: positions of the tokens, [S, n].
        rows: for each token, the row of its slot that stores the token's keys and values, [S, n].
        keep: indices of the tokens whose logits are needed, followed by zeros, [S * n].
        masks: for each layer type, whether a token sees a row, [S, 1, n, c].
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
        self._on_device = self._on_host = [numbers, masks]
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._on_host = [
                torch.zeros_like(t, device="cpu").pin_memory() for t in self._on_device
            ]
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's

    def fill(self, pieces: Sequence[Piece], slots: Sequence[int], spare: int) -> None:
        """Copy the inputs of a pass to the device.

        Args:
            pieces: the pieces of the pass.
            slots: slot of each piece.
            spare: row of each slot that receives padding. Padding sees only the first row of its
                slot.
        """
        if self._copied is not None:
            self._copied.synchronize()  # waits only if the caller has not read the last result
        (ids, positions, rows, keep), masks = (t.numpy() for t in self._on_host)
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
        if self._copied is not None:
            for host, target in zip(self._on_host, self._on_device, strict=True):
                target.copy_(host, non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self.ids.device))


class SlotCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The cache that the model gets in a pass of fixed size.

    Args:
        pool: pool that holds the rows.
        inputs: inputs of the pass.
        kinds: types of the layers that are not ``full_attention``, by layer index.
        plain: whether the model computes the attention over all rows, with the mask that it gets.
            Otherwise the cache returns `Rows` in place of keys. The attention function of `Rows`
            folds the heads that share keys, so it does not repeat the keys.
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
        """Write the new rows, [S, k, n, d], at the indices ``inputs.rows``."""
        size = self._inputs.size
        keys, values = self._pool.layer(layer_idx, key_states, value_states)
        for buffer, new in ((keys, key_states), (values, value_states)):
            buffer.index_put_(self._place(new), new)
        keys, values = (t[: size.slots, :, : size.rows] for t in (keys, values))
        if self._plain:
            return keys, values
        kind = self._kinds.get(layer_idx, "full_attention")

        def attend(query: torch.Tensor, scale: float | None) -> torch.Tensor:
            """Compute the attention of the pass.

            The query and the result are [S, h, n, d]. For single tokens, a model may have folded
            the heads already.
            """
            groups = query.shape[1] // keys.shape[1]
            folded = query.reshape(
                size.slots, keys.shape[1], groups * query.shape[2], query.shape[3]
            )
            mask = self._mask(kind, groups, query)
            output = scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
            return output.reshape(query.shape[:-1] + output.shape[-1:])

        return Rows.of(key_states, attend), value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0. The model does not need the length, because it gets positions and masks."""
        return 0

    def _place(self, new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the indices for `new`: slots [S, 1, 1], heads [k, 1] and rows [S, 1, n]."""
        key = (new.shape[1], new.device)
        if key not in self._places:
            slots, heads = (torch.arange(size, device=new.device) for size in new.shape[:2])
            rows = self._inputs.rows.to(new.device)
            self._places[key] = slots[:, None, None], heads[:, None], rows[:, None]
        return self._places[key]

    def _mask(self, kind: str, groups: int, query: torch.Tensor) -> torch.Tensor:
        """Return the additive mask for the scores of folded heads, [S, 1, groups * n, c]."""
        key = (kind, groups, query.dtype, query.device)
        if key not in self._masks:
            seen = self._inputs.masks[kind].to(query.device)
            mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
            self._masks[key] = mask.masked_fill_(~seen, -math.inf).repeat(1, 1, groups, 1)
        return self._masks[key]


class StaticPasses:
    """Run passes over pieces of many requests. Short pieces share a pass of fixed size.

    Args:
        decoder: the model.
        attention: format of the tree masks that the model accepts.
        compiled: whether passes of fixed size are compiled.
        record: function that records these passes. By default, they are recorded as CUDA graphs if
            the model is on one GPU. Otherwise they are not recorded.

    Attributes:
        pool: pool that holds the rows of the requests.
        compiled: the argument of the same name.
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
        # If the model gets no mask, it creates one.
        self._blank = dict.fromkeys(attention.layer_types, blank)
        self._kinds = dict.fromkeys(attention.windows, "sliding_attention")
        self._windows = {
            kind: next(iter(attention.windows.values())) if kind == "sliding_attention" else None
            for kind in sorted(attention.layer_types)
        }
        self._record = record or (CudaGraphs(decoder.device) if decoder.on_one_gpu else direct)
        self._recorded: dict[Size, tuple[Inputs, Call]] = {}  # least recently used first
        self._moves = 0
        self._logits: torch.Tensor | None = None  # reused by every pass: [largest S * n so far, v]

    def run(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the logits after the kept tokens of all pieces, in order, [kept tokens, v]."""
        caches = [piece.cache for piece in pieces if isinstance(piece.cache, SlotRows)]
        assert len(caches) == len(pieces)
        rows = [len(piece.positions) for piece in pieces]
        self.pool.reserve(dict(zip(caches, rows, strict=True)))
        slots = {
            number: cache.index
            for number, (cache, piece) in enumerate(zip(caches, pieces, strict=True))
            if cache.slots is not None and len(piece.tokens) <= MAX_TOKENS
        }
        short = [pieces[number] for number in slots]
        size = self._size(short, list(slots.values()))
        if size is None:
            logits = self._packed.run_in_place(pieces)
        else:
            logits = self._padded(size, short, list(slots.values()))
            if others := [number for number in range(len(pieces)) if number not in slots]:
                rest = self._packed.run_in_place([pieces[number] for number in others])
                parts = [
                    *torch.split(logits, [len(piece.keep) for piece in short]),
                    *torch.split(rest, [len(pieces[number].keep) for number in others]),
                ]
                by_piece = dict(zip([*slots, *others], parts, strict=True))
                logits = torch.cat([by_piece[number] for number in range(len(pieces))])
        for cache, used in zip(caches, rows, strict=True):
            cache.rows = used
        return logits

    def _padded(self, size: Size, pieces: Sequence[Piece], slots: Sequence[int]) -> torch.Tensor:
        """Run `pieces` in a pass of fixed size, and return the logits as `run` does."""
        logits = self._prepared(size, pieces, slots)()[: sum(len(piece.keep) for piece in pieces)]
        return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)

    def _size(self, pieces: Sequence[Piece], slots: Sequence[int]) -> Size | None:
        """Return the size of a pass over `pieces`; None without pieces or with too much padding."""
        if not pieces:
            return None
        longest = max(len(piece.tokens) for piece in pieces)
        total = sum(len(piece.tokens) for piece in pieces)
        rows = max(len(piece.positions) for piece in pieces)
        size = Size(
            rounded_up(max(slots) + 1),
            rounded_up(longest),
            min(self.pool.capacity, max(FIRST_SEEN, rounded_up(rows))),
        )
        padded = size.slots * size.tokens > max(FREE_TOKENS, PADDING * total)
        return None if padded else size

    def _prepared(self, size: Size, pieces: Sequence[Piece], slots: Sequence[int]) -> Call:
        """Fill the inputs of a pass of the given size, and return its computation."""
        if self._moves != self.pool.moves:
            self._moves = self.pool.moves
            self._recorded = {}  # the recordings use the old buffers
        for piece in pieces:
            check_tokens(piece.tokens, self._decoder.vocabulary)
        entry = self._recorded.pop(size, None)
        inputs = entry[0] if entry else Inputs(size, self._windows, self._decoder.device)
        inputs.fill(pieces, slots, self.pool.capacity - 1)
        call = entry[1] if entry else self._recording(inputs)
        self._recorded[size] = inputs, call
        if len(self._recorded) > MAX_RECORDED:
            del self._recorded[next(iter(self._recorded))]
        return call

    def _recording(self, inputs: Inputs) -> Call:
        """Record the pass over `inputs`.

        The result of the recording is [S * n, v], with the logits of the kept tokens first.
        """

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
        except Exception as error:  # the plain call works or raises a clearer error
            logger.warning(
                "passes are not recorded, because recording failed: %s: %s",
                type(error).__name__,
                error,
                exc_info=True,
            )
            self._record = direct
            return call
