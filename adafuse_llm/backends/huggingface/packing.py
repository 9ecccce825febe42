"""Pack the tokens of many requests into one forward pass.

The pass runs over one sequence with the tokens of all requests, so all layers but attention compute
them at once. Its cache is a `PackedCache`, which adds a row (a key and a value) for every token to
the rows of its request. Its attention is `_attend` (see transformers' ``AttentionInterface``):
tokens see only rows of their own request. Outside such a pass, `_attend` changes nothing.

Shapes: T tokens of the pass; n tokens and r rows of one request; h query heads, k key/value heads
of size d, g = h / k.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adafuse_llm.backends.huggingface.tree_cache import Piece
from adafuse_llm.backends.logits.state import to_device
from adafuse_llm.errors import UnsupportedModelError

PACKED = {"sdpa": "adafuse_llm_sdpa", "eager": "adafuse_llm_eager"}
"""Names of `_attend` in transformers, by the attention that it computes outside packed passes."""

Attention = Callable[..., tuple[torch.Tensor, Any]]

FOLD_ROWS = 256
"""Maximum number of queries, g * n, in one product for all query heads that share a key head. For
few tokens, one product is faster than g: with 14 query heads and 2 key heads, attention of four
tokens to 300 rows took 71 instead of 106 µs, and to 2,000 rows 404 instead of 702 µs."""


class Scores(NamedTuple):
    """How a layer computes its attention."""

    # factor of the scores; None for the default
    scale: float | None
    # the attention function in the model's code, if the layer uses it; None for PyTorch's
    eager: Attention | None


class PackedCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The cache of one pass over pieces of several requests, and the attention of the pass.

    `windows` maps the index of a sliding layer to the number of tokens that a token sees there.
    """

    def __init__(self, pieces: Sequence[Piece], windows: Mapping[int, int]) -> None:
        super().__init__(layers=[])
        self._windows = windows
        self._groups = [_GroupAttention(group) for group in grouped(pieces)]
        self._sizes = [sum(len(p.tokens) for p in group.pieces) for group in self._groups]
        # pairs of a slab and the indices of its new rows
        by_slab = itertools.groupby(pieces, key=lambda piece: piece.request.kv.slab)
        self._slabs = [(slab, _places(list(group))) for slab, group in by_slab if slab]
        # by device: copies of these indices, one tensor per slab
        self._devices: dict[torch.device, list[torch.Tensor]] = {}
        # new keys and values of the layer that attends next, and its index
        self._layer: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, [1, k, T, d], in the slabs of their requests. Return them."""
        device = key_states.device
        if device not in self._devices:
            self._devices[device] = [to_device(places, device) for _, places in self._slabs]
        # tokens with rows in one slab are neighbors in the pass
        sizes = [len(places) for _, places in self._slabs]
        parts = (rows[0].split_with_sizes(sizes, 1) for rows in (key_states, value_states))
        slabs = zip(self._slabs, self._devices[device], *parts, strict=True)
        for (slab, _), places, keys, values in slabs:
            buffers = slab.layer(layer_idx, key_states, value_states)
            all_keys, all_values = (buffer.flatten(1, 2) for buffer in buffers)
            all_keys.index_copy_(1, places, keys)
            all_values.index_copy_(1, places, values)
        self._layer = key_states, value_states, layer_idx
        return key_states, value_states

    def attend(self, query: torch.Tensor, key: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Return the outputs of a layer, [1, T, h, d], from its queries, [1, h, T, d].

        Raises:
            UnsupportedModelError: the layer has changed the keys that `update` returned.
        """
        if self._layer is None or key is not self._layer[0]:
            raise UnsupportedModelError("the attention layers use other keys than they cache")
        index, self._layer = self._layer[2], None
        window = self._windows.get(index)
        parts = zip(self._groups, query.split_with_sizes(self._sizes, dim=2), strict=True)
        outputs = [group(part, index, window, scores).transpose(1, 2) for group, part in parts]
        return outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs, dim=1)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the models that run in this thread attend with this cache."""
        _running.cache = self
        try:
            yield
        finally:
            _running.cache = None


class _Running(threading.local):
    # the cache of the packed pass that runs in this thread
    cache: PackedCache | None = None


_running = _Running()


def grouped(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Split pieces, sorted by `in_slots`, into groups. A group attends in one product."""
    for _, group in itertools.groupby(pieces, key=lambda piece: in_slots(piece)[:2]):
        same = list(group)
        yield from ([piece] for piece in same) if same[0].is_long else [same]


def in_slots(piece: Piece) -> tuple[int, int, int]:
    """Return a piece's sort key: by slab, then short pieces before long ones, then by slot."""
    number = piece.request.kv.slab.number if piece.request.kv.slab else 0
    return number, piece.is_long, piece.request.kv.slot


def _places(pieces: Sequence[Piece]) -> torch.Tensor:
    """Return the indices of the new rows of pieces among all rows of their slab."""
    slab = pieces[0].request.kv.slab
    assert slab is not None
    starts = [piece.request.kv.slot * slab.capacity + piece.request.kv.count for piece in pieces]
    sizes = [len(piece.tokens) for piece in pieces]
    return torch.tensor([a + i for a, n in zip(starts, sizes, strict=True) for i in range(n)])


class _GroupAttention:
    """The attention of pieces in the slots of one slab, in all layers.

    A single piece reads the rows of its slot. Several pieces share one product over all slots from
    their first to their last, where masks hide the rows of other requests. If the slots are far
    apart, the product runs over copies of them.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self._masks: dict[tuple[object, ...], torch.Tensor | None] = {}
        self._slots = [piece.request.kv.slot for piece in pieces]
        self._rows = max(len(piece.positions) for piece in pieces)
        self._size = max(len(piece.tokens) for piece in pieces)
        self._first, last = self._slots[0], self._slots[-1]
        # read slots in place if they are close together; otherwise, copy them
        self._is_close = last - self._first < 2 * len(pieces)
        self._places = list(range(len(pieces)))
        if self._is_close:
            self._places = [slot - self._first for slot in self._slots]
        self._batch = self._places[-1] + 1
        # find each token's index in the padded batch, [batch * size], and the token at each index
        order = [
            place * self._size + number
            for place, piece in zip(self._places, pieces, strict=True)
            for number in range(len(piece.tokens))
        ]
        self._is_even = len(order) == self._batch * self._size
        if not self._is_even:
            self._back = torch.tensor(order)
            self._order = torch.zeros(self._batch * self._size, dtype=torch.long)
            self._order[self._back] = torch.arange(len(order))
        if not self._is_close:
            self._chosen = torch.tensor(self._slots)

    def __call__(
        self, query: torch.Tensor, layer: int, window: int | None, scores: Scores
    ) -> torch.Tensor:
        """Return the outputs of a layer for the queries of the group, both [1, h, tokens, d]."""
        slab = self.pieces[0].request.kv.slab
        assert slab is not None
        keys, values = slab.layers[layer]
        # take the rows of the slots, [batch, k, r, d]
        if self._is_close:
            keys, values = (x.narrow(1, self._first, self._batch) for x in (keys, values))
        else:
            self._chosen = to_device(self._chosen, query.device)
            keys, values = (x.index_select(1, self._chosen) for x in (keys, values))
        keys, values = (x[:, :, : self._rows].transpose(0, 1) for x in (keys, values))
        # pad the queries to [batch, h, size, d], slot by slot, and remove the padding at the end
        heads, size, batch = query.shape[1], self._size, self._batch
        flat = query[0]
        if not self._is_even:
            self._order, self._back = (
                to_device(x, query.device) for x in (self._order, self._back)
            )
            flat = flat.index_select(1, self._order)
        padded = flat.view(heads, batch, size, -1).transpose(0, 1)
        output = self._attend(padded, keys, values, window, scores)
        flat = output.transpose(0, 1).reshape(heads, batch * size, -1)
        if not self._is_even:
            flat = flat.index_select(1, self._back)
        return flat[None]

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int | None,
        scores: Scores,
    ) -> torch.Tensor:
        """Let queries, [batch, h, n, d], attend to rows, [batch, k, r, d]. Return the outputs."""
        batch, heads, size, width = query.shape
        groups = heads // keys.shape[1]
        if scores.eager is not None:
            mask = self._mask(window, 1, query)
            return scores.eager(query, keys, values, mask)[0].transpose(1, 2)
        # a prompt without earlier rows needs causal attention, but no mask
        causal = batch == 1 and 1 < size == self._rows and self.pieces[0].visible is None
        causal = causal and (window is None or size <= window)
        # make one product of the query heads that share a key head
        if groups > 1 and size * groups <= FOLD_ROWS and not causal:
            folded = query.reshape(batch, heads // groups, groups * size, width)
            mask = self._mask(window, groups, query)
            output = scaled_dot_product_attention(folded, keys, values, mask, scale=scores.scale)
            return output.view(batch, heads, size, -1)
        mask = None if causal else self._mask(window, 1, query)
        # kernels of GPUs support either a mask or shared key heads, so copy the key heads
        if mask is not None and query.device.type != "cpu":
            keys, values = (rows.repeat_interleave(groups, 1) for rows in (keys, values))
        return scaled_dot_product_attention(
            query,
            keys,
            values,
            mask,
            is_causal=causal,
            scale=scores.scale,
            enable_gqa=keys.shape[1] != heads,
        )

    def _mask(self, window: int | None, groups: int, query: torch.Tensor) -> torch.Tensor | None:
        """Return what to add to the scores, [batch, 1, groups * n, r]; None if no row is hidden."""
        key = (window, groups, query.dtype, query.device)
        if key not in self._masks:
            seen = np.zeros((self._batch, self._size, self._rows), dtype=np.bool_)
            for place, piece in zip(self._places, self.pieces, strict=True):
                seen[place, : len(piece.tokens), : len(piece.positions)] = piece.seen(window)
            # softmax over no rows gives NaN, so padding sees the first row
            seen[:, :, 0] |= ~seen.any(-1)
            mask = None
            if not seen.all():
                mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
                mask.masked_fill_(to_device(torch.from_numpy(~seen), query.device), -math.inf)
                mask = mask.repeat(1, groups, 1)[:, None]
            self._masks[key] = mask
        return self._masks[key]


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    usual: str,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Compute packed attention during a packed pass, otherwise the `usual` one."""
    attention: Attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if usual == "eager":
        attention = sys.modules[type(module).__module__].eager_attention_forward
    attention = partial(attention, module, **options)
    if _running.cache is None:
        return attention(query, key, value, attention_mask)
    scores = Scores(options.get("scaling"), attention if usual == "eager" else None)
    return _running.cache.attend(query, key, scores), None


def _mask(*args: Any, usual: str, **kwargs: Any) -> torch.Tensor | None:
    # a packed pass has masks of its own
    if _running.cache is not None:
        return None
    mask: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[usual](*args, **kwargs)
    return mask


for _usual, _name in PACKED.items():
    AttentionInterface.register(_name, partial(_attend, usual=_usual))
    AttentionMaskInterface.register(_name, partial(_mask, usual=_usual))


Attentions = Sequence[tuple[PreTrainedConfig, str | None]]
"""For each configuration of a model: the configuration, and the name of its attention or None."""


def attentions_of(model: torch.nn.Module) -> Attentions:
    """Return the configurations in which layers of a model look up the name of their attention."""
    parts = (getattr(module, "config", None) for module in model.modules())
    configs = {id(part): part for part in parts if isinstance(part, PreTrainedConfig)}
    return [(config, config._attn_implementation) for config in configs.values()]


def set_attentions(attentions: Attentions) -> None:
    """Set the attention of each configuration, as transformers does for a single one."""
    for config, name in attentions:
        config._attn_implementation_internal = name


def use_packed_attention(model: Any) -> dict[int, int]:
    """Give a model packed attention, and return the windows of sliding layers, by layer index."""
    config = model.config.get_text_config(decoder=True)
    kinds = {"full_attention", *(getattr(config, "layer_types", None) or ())}
    layers = DynamicCache(config=config).layers
    if kinds - {"full_attention", "sliding_attention"} or any(
        type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers
    ):
        raise UnsupportedModelError("some layers have no row for each token")
    for part, name in attentions_of(model):
        # use eager attention if sdpa cannot compute the model's, such as one with bounded scores
        is_eager = name in ("eager", PACKED["eager"]) or not type(model)._supports_sdpa
        usual = "eager" if is_eager else "sdpa"
        set_attentions([(part, PACKED[usual])])
    return {
        index: int(layer.sliding_window)
        for index, layer in enumerate(layers)
        if isinstance(layer, DynamicSlidingWindowLayer)
    }
