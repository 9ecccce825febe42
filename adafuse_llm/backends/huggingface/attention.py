"""Compute the attention of one layer for the pieces of a pass, in as few calls as possible.

Short pieces of requests whose rows are in the same buffers share a call: the call computes a batch
of slots, and pads the pieces to the same number of tokens. If the pieces have very different
numbers of tokens, they get several calls. A long piece has a call of its own, because padding would
cost more than the call. A piece with many rows also has its own call, because a copy of these rows
would cost more. The number of other calls does not depend on the number of requests. One operation
per tensor writes the new rows of all pieces that share calls.

Shapes: T tokens of a pass; n tokens and r rows of a piece; S slots of a call, and c rows that the
call reads in each slot; h query heads, k key/value heads of size d, g = h / k.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from adafuse_llm.backends.huggingface.pieces import Piece, Placed
from adafuse_llm.backends.huggingface.slots import SlotBuffers, SlotRows
from adafuse_llm.backends.logits.rows import to_device

FOLD_ROWS = 256
"""Maximum number of query rows after folding the query heads that share one key head."""

BLOCK_TOKENS = 256
"""Number of tokens of a long piece that are computed at a time."""

SHORT_TOKENS = 64
"""Maximum number of tokens of a piece that shares a call."""

CALL_COST, SLOT_COST = 16, 4
"""Cost of a call and of each slot in a call, in tokens: reading the rows of a slot takes about as
long as computing `SLOT_COST` tokens."""

VIEW_SLOTS = 1.25
"""A call computes all slots between its first and its last one if there are at most this many times
as many as it needs. Otherwise it copies the rows of the slots that it needs."""

COPIED_BYTES, MAX_COPIED_BYTES = {"cpu": 96 * 2**10}, 8 * 2**20
"""Maximum size of the keys of a piece that shares a call, in bytes: by device type, and on other
devices. Copies of more rows take longer than calls, and need much memory."""


class AttentionCall(Protocol):
    """One call of PyTorch's attention for some pieces of a pass, in any layer.

    Attributes:
        shape: S and n, the numbers of slots and of tokens per slot, with padding.
        pieces: the pieces.
        slots: index of each piece's slot in the call.
    """

    shape: tuple[int, int]
    pieces: Sequence[Placed]
    slots: Sequence[int]

    def rows(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows that the pieces see, [S, k, c, d], given the new rows of the pass."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int | None,
        scale: float | None,
    ) -> torch.Tensor:
        """Return the results, [S, h, n, d], for the queries of the pass, [1, h, T, d].

        Args:
            query: the queries.
            keys: keys of the pieces, from `rows`.
            values: values of the pieces, from `rows`.
            window: number of tokens that the layer sees; None for all tokens.
            scale: factor of the attention scores; None for the default.
        """
        ...


class PieceCall:
    """The attention of one piece. Implements `AttentionCall`.

    Args:
        placed: the piece.
        whole: whether the piece is the whole pass.
    """

    def __init__(self, placed: Placed, *, whole: bool) -> None:
        self.shape = 1, placed.size
        self.pieces: Sequence[Placed] = (placed,)
        self.slots: Sequence[int] = (0,)
        self._piece = placed.piece
        self._tokens = slice(None) if whole else slice(placed.start, placed.start + placed.size)
        self._masks: dict[tuple[object, ...], torch.Tensor | None] = {}

    def rows(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new rows of the piece, and return all of its rows, [1, k, r, d]."""
        new_keys, new_values = keys[:, :, self._tokens], values[:, :, self._tokens]
        return self._piece.cache.write(new_keys, new_values, layer, self._piece.first)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int | None,
        scale: float | None,
    ) -> torch.Tensor:
        """Return the results of the piece. A model may have folded the heads of a single token."""
        query = query[:, :, self._tokens]
        piece = self._piece
        _, heads, size, width = query.shape
        groups = heads // keys.shape[1]
        if size > BLOCK_TOKENS and piece.first and piece.visible is None and window is None:
            return self._in_blocks(query, keys, values, scale)
        mask = self._mask(window, query)
        causal = mask is None and self._is_prompt
        if groups > 1 and size * groups <= FOLD_ROWS:
            if causal:
                mask = additive(piece.seen, query)
            folded = query.reshape(1, heads // groups, groups * size, width)
            if mask is not None:
                mask = mask.repeat(groups, 1)
            output = scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
            return output.reshape(query.shape[:-1] + output.shape[-1:])
        if mask is not None:
            keys, values = _repeated(keys, groups), _repeated(values, groups)
        return scaled_dot_product_attention(
            query,
            keys,
            values,
            mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=keys.shape[1] != heads,
        )

    def _in_blocks(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return the results of a part of a prompt whose first part has rows already.

        Each block of queries reads only the rows before its end. A mask for all queries would be
        much larger, and PyTorch would compute what it hides.
        """
        heads, size, rows = query.shape[1], query.shape[2], keys.shape[2]
        keys, values = (_repeated(t, heads // t.shape[1]) for t in (keys, values))
        key = ("blocks", query.dtype, query.device)
        if key not in self._masks:
            last = np.tri(BLOCK_TOKENS, rows, rows - BLOCK_TOKENS, dtype=np.bool_)
            self._masks[key] = additive(last, query)
        mask = self._masks[key]  # for the last block; earlier blocks see fewer rows
        assert mask is not None
        outputs = []
        # The first block is the short one, so that the parts of the mask are aligned in memory.
        for later in reversed(range(0, size, BLOCK_TOKENS)):
            block = query[:, :, max(0, size - later - BLOCK_TOKENS) : size - later]
            outputs.append(
                scaled_dot_product_attention(
                    block,
                    keys[:, :, : rows - later],
                    values[:, :, : rows - later],
                    mask[BLOCK_TOKENS - block.shape[2] :, later:],
                    scale=scale,
                    enable_gqa=keys.shape[1] != heads,
                )
            )
        return torch.cat(outputs, dim=2)

    @property
    def _is_prompt(self) -> bool:
        """Whether the piece has several tokens and no earlier rows."""
        return 1 < len(self._piece.tokens) == len(self._piece.positions)

    def _mask(self, window: int | None, query: torch.Tensor) -> torch.Tensor | None:
        """Return the mask, [n, r]; None for a prompt or one token that sees all rows."""
        key = (window, query.dtype, query.device)
        if key not in self._masks:
            piece = self._piece
            visible = piece.visible if window is None else piece.within(window)
            if visible is None and len(piece.tokens) > 1 and not self._is_prompt:
                visible = piece.seen
            self._masks[key] = None if visible is None else additive(visible, query)
        return self._masks[key]


class BatchCall:
    """The attention of short pieces in slots of the same buffers. Implements `AttentionCall`.

    Args:
        pieces: the pieces, in slot order. Each has a slot of its own.
    """

    def __init__(self, pieces: Sequence[Placed]) -> None:
        caches = [slot_rows(placed) for placed in pieces]
        self._buffers = caches[0].slots
        self._indices = np.array([cache.index for cache in caches])
        first, last = int(self._indices[0]), int(self._indices[-1])
        span = last - first + 1
        self._slots = slice(first, last + 1) if span <= VIEW_SLOTS * len(pieces) else None
        self._read = max(len(placed.piece.positions) for placed in pieces)
        size = max(placed.size for placed in pieces)
        self.shape = span if self._slots else len(pieces), size
        self.pieces = pieces
        self.slots: Sequence[int] = range(len(pieces))
        if self._slots:
            self.slots = (self._indices - first).tolist()
        self._cached: dict[tuple[object, ...], torch.Tensor] = {}

    def rows(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of the slots. `RowWrite` has written the new rows."""
        seen = [buffer[:, :, : self._read] for buffer in self._buffers.layers[layer]]
        if self._slots is not None:
            return seen[0][self._slots], seen[1][self._slots]
        indices = self._slot_indices(keys.device)
        return seen[0].index_select(0, indices), seen[1].index_select(0, indices)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int | None,
        scale: float | None,
    ) -> torch.Tensor:
        """Return the results of the pieces. The results of padding have no meaning."""
        _, heads, tokens, width = query.shape
        slots, size = self.shape
        groups = heads // keys.shape[1]
        taken = self._queries(heads, tokens, query.device)
        folded = query.reshape(heads * tokens, width).index_select(0, taken)
        output = scaled_dot_product_attention(
            folded.view(slots, keys.shape[1], groups * size, width),
            keys,
            values,
            self._mask(window, groups, query),
            scale=scale,
        )
        return output.reshape(slots, heads, size, -1)

    def _slot_indices(self, device: torch.device) -> torch.Tensor:
        """Return the slots of the pieces, [S]."""
        key = ("slots", device)
        if key not in self._cached:
            self._cached[key] = to_device(torch.from_numpy(self._indices), device)
        return self._cached[key]

    def _queries(self, heads: int, tokens: int, device: torch.device) -> torch.Tensor:
        """Return the index of each query among those of the pass, [S * h * n]. Padding is 0."""
        key = ("queries", heads, tokens, device)
        if key not in self._cached:
            indices = np.zeros((self.shape[0], heads, self.shape[1]), dtype=np.int64)
            first = tokens * np.arange(heads)[:, None]
            for slot, placed in zip(self.slots, self.pieces, strict=True):
                indices[slot, :, : placed.size] = first + placed.indices
            self._cached[key] = to_device(torch.from_numpy(indices.reshape(-1)), device)
        return self._cached[key]

    def _mask(self, window: int | None, groups: int, query: torch.Tensor) -> torch.Tensor:
        """Return the mask for folded heads, [S, 1, g * n, c]. Padding sees the first row."""
        key = (window, groups, query.dtype, query.device)
        if key not in self._cached:
            slots, size = self.shape
            seen = np.zeros((slots, 1, size, self._read), dtype=np.bool_)
            seen[..., 0] = True
            for slot, placed in zip(self.slots, self.pieces, strict=True):
                own = placed.piece.sight(window)
                seen[slot, 0, : own.shape[0], : own.shape[1]] = own
            self._cached[key] = additive(seen, query).repeat(1, 1, groups, 1)
        return self._cached[key]


class RowWrite:
    """A write of the new rows of short pieces into their buffers, with one operation per tensor.

    Args:
        buffers: buffers with the slots of the pieces.
        pieces: the pieces, in the order of their tokens.
    """

    def __init__(self, buffers: SlotBuffers, pieces: Sequence[Placed]) -> None:
        self._buffers = buffers
        self._tokens = np.concatenate([placed.indices for placed in pieces])
        indices = [slot_rows(placed).index for placed in pieces]
        self._slots = np.repeat(indices, [placed.size for placed in pieces])
        self._rows = np.concatenate(
            [np.arange(placed.piece.first, len(placed.piece.positions)) for placed in pieces]
        )
        self._indices: dict[tuple[int, int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        """Write the new rows of the pass, [1, k, T, d], that belong to the pieces."""
        buffers = self._buffers.layer(layer, keys, values)
        for buffer, new in zip(buffers, (keys, values), strict=True):
            _, heads, tokens, width = new.shape
            targets, sources = self._places(heads, tokens, new.device)
            rows = new.reshape(heads * tokens, width)
            if len(sources) < len(rows):
                rows = rows.index_select(0, sources)
            buffer.view(-1, width).index_copy_(0, targets, rows)

    def _places(
        self, heads: int, tokens: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of each token and head in the buffers, and in the tensors of the pass."""
        key = (heads, tokens, device)
        if key not in self._indices:
            each = np.arange(heads)[:, None]
            targets = (self._slots * heads + each) * self._buffers.capacity + self._rows
            sources = each * tokens + self._tokens
            self._indices[key] = (
                to_device(torch.from_numpy(targets.reshape(-1)), device),
                to_device(torch.from_numpy(sources.reshape(-1)), device),
            )
        return self._indices[key]


def plan_attention(
    pieces: Sequence[Piece], device: torch.device
) -> tuple[list[RowWrite], list[AttentionCall]]:
    """Plan the attention of a pass.

    Args:
        pieces: the pieces of the pass, in the order of their tokens.
        device: device of the rows.

    Returns:
        The writes of new rows that come before the calls, and the calls in the order in which
        their rows must be read.
    """
    in_pass = []
    start = 0
    for piece in pieces:
        in_pass.append(Placed(piece, start))
        start += len(piece.tokens)
    if len(in_pass) == 1:
        return [], [PieceCall(in_pass[0], whole=True)]
    together: dict[SlotBuffers, list[Placed]] = defaultdict(list)
    alone = []
    limit = COPIED_BYTES.get(device.type, MAX_COPIED_BYTES)
    last = {placed.piece.cache: placed for placed in in_pass}
    for placed in in_pass:
        cache = placed.piece.cache
        short = placed.size <= SHORT_TOKENS and placed is last[cache]
        buffers = cache.slots if isinstance(cache, SlotRows) else None
        if short and buffers and len(placed.piece.positions) * buffers.key_bytes <= limit:
            together[buffers].append(placed)
        else:
            alone.append(placed)
    writes = []
    batched: list[AttentionCall] = []
    for buffers, chosen in together.items():
        groups = _by_size(chosen)
        alone += [group[0] for group in groups if len(group) == 1]
        batches = [
            sorted(group, key=lambda placed: slot_rows(placed).index)
            for group in groups
            if len(group) > 1
        ]
        batched += map(BatchCall, batches)
        written = [placed for batch in batches for placed in batch]
        if written:
            writes.append(RowWrite(buffers, sorted(written, key=lambda placed: placed.start)))
    # A prompt may have its short piece in the same pass, which sees the rows of the prompt.
    return writes, [*(PieceCall(placed, whole=False) for placed in alone), *batched]


def _by_size(pieces: Sequence[Placed]) -> list[list[Placed]]:
    """Group pieces with similar numbers of tokens, so that calls and padding cost least."""
    of_size: dict[int, list[Placed]] = defaultdict(list)
    for placed in pieces:
        of_size[placed.size].append(placed)
    sizes = sorted(of_size)
    best: list[tuple[int, int]] = [(0, 0)]  # for the first sizes: least cost, start of last group
    for end, size in enumerate(sizes, 1):
        costs = []
        count = 0
        for start in reversed(range(end)):
            count += len(of_size[sizes[start]])
            costs.append((best[start][0] + CALL_COST + count * (SLOT_COST + size), start))
        best.append(min(costs))
    groups = []
    end = len(sizes)
    while end:
        start = best[end][1]
        groups.append([placed for size in sizes[start:end] for placed in of_size[size]])
        end = start
    return groups


def _repeated(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeat keys or values for grouped heads, where PyTorch's kernels do not support a mask."""
    return rows if rows.device.type == "cpu" or groups == 1 else rows.repeat_interleave(groups, 1)


def slot_rows(placed: Placed) -> SlotRows:
    """Return the rows of a piece that has a slot."""
    assert isinstance(placed.piece.cache, SlotRows)
    return placed.piece.cache


def additive(seen: NDArray[np.bool_], query: torch.Tensor) -> torch.Tensor:
    """Return a mask for adding to the scores of `query`, from the rows that are seen."""
    visible = to_device(torch.from_numpy(seen), query.device)
    mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
    return mask.masked_fill_(~visible, -math.inf)
