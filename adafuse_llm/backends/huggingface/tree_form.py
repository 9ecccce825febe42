"""Two ways to evaluate the nodes of a tree with a transformers model.

`TreeForm` keeps the key/value rows of the whole tree in one buffer and evaluates any nodes in one
pass, each seeing its ancestors only (tree attention). It plans the pass; `PackedPasses` runs the
plans of many requests at once, `SinglePasses` runs them one by one with a mask for the model.
`PathForm` is for models that take neither: it runs token by token from saved copies of the model's
own cache. All give the numbers of a plain forward pass over the node's sequence.

Shapes: n new tokens, r rows in the buffer, v vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adafuse_llm.backends.huggingface.kv import KeyValues, RowCache, to_device
from adafuse_llm.backends.huggingface.packing import PackedCache, Piece
from adafuse_llm.tree import Node, TokenTree

PREFILL_TOKENS = 2048
"""Most tokens in one forward pass, which bounds the memory of its activations."""

CAUSAL_TOKENS = 64
"""More tokens of a prompt than these get a pass without nodes, where attention needs no mask."""


COMPILED_SIZES = 64
"""Sizes of inputs for which a model is compiled; others run as they are."""


class Decoder:
    """A model reduced to one call. Shared by all requests; holds no state of theirs."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.rope_types, self.rope_edge = _rope(model)
        self.device = torch.device(model.get_input_embeddings().weight.device)
        if self.device.type == "meta":  # offloaded: accelerate moves inputs where they belong
            self.device = torch.device("cpu")
        self._spread = len({parameter.device for parameter in model.parameters()}) > 1
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
        parameters = inspect.signature(inner.forward).parameters
        self._takes_keep = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self.cache_name = next(
            (name for name in ("past_key_values", "cache_params") if name in parameters), None
        )

    def check(self, tokens: Sequence[int]) -> None:
        """Refuse ids that a GPU would only notice by failing for good."""
        if (highest := max(tokens, default=0)) >= self.vocabulary:
            raise ValueError(
                f"token {highest} is outside the model's {self.vocabulary} embeddings: the "
                "tokenizer does not belong to the model"
            )

    @property
    def on_one_gpu(self) -> bool:
        """Whether all weights are on one CUDA device."""
        devices = {parameter.device for parameter in self.model.parameters()}
        return devices == {self.device} and self.device.type == "cuda"

    @property
    def packs(self) -> bool:
        """Whether the rotary frequencies of a token do not depend on what else is in the pass."""
        return self.rope_types.isdisjoint(("dynamic", "longrope"))

    def shares_prefixes(self, length: int) -> bool:
        """Whether the rows of a prompt of `length` tokens depend on nothing but its tokens."""
        return "dynamic" not in self.rope_types and self.takes_chunks(length)

    def takes_chunks(self, length: int) -> bool:
        """Whether a prompt of `length` tokens gives the same numbers in several passes."""
        return self.rope_edge is None or length <= self.rope_edge

    def run(
        self,
        tokens: Sequence[int],
        cache: Any,
        *,
        keep: Sequence[int],
        positions: Sequence[int] | None = None,
        mask: Any = None,
    ) -> tuple[torch.Tensor, Any]:
        """One forward pass over [1, n] tokens; `keep` is ascending.

        Returns:
            Logits after the tokens with the indices `keep`, [len(keep), v], in at least float32;
            and the model's output.
        """
        self.check(tokens)
        inputs: dict[str, Any] = {
            "input_ids": to_device(torch.tensor([list(tokens)]), self.device),
            "use_cache": True,
        }
        if cache is not None:
            inputs[self.cache_name or "past_key_values"] = cache
        if positions is not None and self._takes_positions:
            inputs["position_ids"] = to_device(torch.tensor([list(positions)]), self.device)
        if mask is not None:
            inputs["attention_mask"] = mask
        last = max(1, len(keep))
        if list(keep[:1]) in ([], [len(tokens) - last]):  # the last ones: keep is ascending
            kept: Any = last
        elif self._spread:  # a list serves whichever device the last layer is on
            kept = list(keep)
        else:
            kept = to_device(torch.tensor(keep), self.device)
        if self._takes_keep:
            inputs["logits_to_keep"] = kept
        output = self.model(**inputs, return_dict=True)
        logits = output.logits[0]  # [n, v], or those to keep
        if not self._takes_keep:
            logits = logits[-kept:] if isinstance(kept, int) else logits[kept]
        logits = logits[: len(keep)]
        return precise(logits), output

    def call(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any
    ) -> torch.Tensor:
        """One forward pass over [S, n] tokens, all on the device: logits [S, n, v]."""
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            self.cache_name or "past_key_values": cache,
            "use_cache": True,
        }
        if self._takes_positions:
            inputs["position_ids"] = positions
        logits: torch.Tensor = self.model(**inputs, return_dict=True).logits
        return logits

    def compiled(self) -> Decoder:
        """The same, the model compiled for every size of its inputs, up to `COMPILED_SIZES`.

        A torch whose ``compile`` takes no limit (2.13's does) compiles no more sizes than the
        process allows, ``torch._dynamo.config.recompile_limit``; those beyond run as they are. No
        configuration of the process is touched.
        """
        options = {"recompile_limit": COMPILED_SIZES, "isolate_recompiles": True}
        known = inspect.signature(torch.compile).parameters
        taken: Any = {name: value for name, value in options.items() if name in known}
        made = copy.copy(self)
        made.model = torch.compile(self.model, dynamic=False, **taken)
        return made


@dataclass(frozen=True)
class Attention:
    """How a model's attention layers take a tree mask.

    Args:
        layer_types: which of ``full_attention`` and ``sliding_attention`` the layers have.
        windows: tokens that a sliding layer sees, by its index; the same for all of them.
        additive: whether masks are added to attention scores (eager attention) or boolean.
        dtype: of additive masks.
        device: where the model takes masks.
    """

    layer_types: frozenset[str]
    windows: Mapping[int, int]
    additive: bool
    dtype: torch.dtype
    device: torch.device

    def mask(self, piece: Piece) -> Any:
        """The attention mask for the model: [1, 1, n, r], or one such mask by layer type for
        models that mix them.
        """
        masks = {}
        for kind in self.layer_types:
            window = next(iter(self.windows.values())) if kind == "sliding_attention" else None
            seen = piece.sight(window)
            allowed = to_device(torch.from_numpy(seen), self.device)[None, None]
            masks[kind] = self._additive(allowed) if self.additive else allowed
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, allowed: torch.Tensor) -> torch.Tensor:
        lowest = torch.finfo(self.dtype).min
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~allowed, lowest)


class PackedPasses:
    """Runs pieces of many requests in one pass.

    Args:
        decoder: the model.
        attention: its layers.
    """

    def __init__(self, decoder: Decoder, attention: Attention) -> None:
        self._decoder = decoder
        self._windows = attention.windows
        blank = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=attention.device)
        masks = dict.fromkeys(attention.layer_types, blank)  # spares the model to make one
        self._mask = masks if len(masks) > 1 else blank

    def run(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Logits after the kept tokens of each piece in turn, [sum of their numbers, v]."""
        tokens = [token for piece in pieces for token in piece.tokens]
        positions = np.concatenate([piece.queries for piece in pieces]).tolist()
        starts = np.cumsum([0, *(len(piece.tokens) for piece in pieces)]).tolist()
        keep = [start + i for start, piece in zip(starts, pieces, strict=False) for i in piece.keep]
        cache = PackedCache(pieces, self._windows)
        return self._decoder.run(tokens, cache, keep=keep, positions=positions, mask=self._mask)[0]


class SinglePasses:
    """Runs one piece in a pass, with a mask for the model.

    Args:
        decoder: the model.
        attention: its layers.
    """

    def __init__(self, decoder: Decoder, attention: Attention) -> None:
        self._decoder = decoder
        self._attention = attention

    def run(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Logits after the kept tokens of the piece, [their number, v]."""
        (piece,) = pieces
        mask = None if piece.visible is None else self._attention.mask(piece)
        return self._decoder.run(
            piece.tokens, piece.cache, keep=piece.keep, positions=piece.queries.tolist(), mask=mask
        )[0]


class TreeForm:
    """Tree attention over one growing buffer of key/value rows.

    Rows of the committed tokens (the trunk) are visible to every new token, rows of a node to
    those below it. Rows of dropped nodes are masked, and compacted away once they are more than a
    quarter of the buffer.

    Args:
        tree: the request's tree.
        chunked: whether a long prompt gives the same numbers in several passes.
        cache: rows of the first tokens of the prompt, but not of its last one.

    Attributes:
        cache: the rows.
        committed: tokens of ``tree.ids`` that have a row.
    """

    def __init__(self, tree: TokenTree, *, chunked: bool, cache: KeyValues | None = None) -> None:
        self.cache: KeyValues = RowCache() if cache is None else cache
        self.committed = self.cache.rows
        self._tree = tree
        self._root = tree.root
        self._chunked = chunked
        self._trunk = np.ones(self.committed, dtype=np.bool_)  # [r] rows of those tokens
        self._positions = np.arange(self.committed, dtype=np.int64)  # [r]
        self._lines: dict[Node, list[int]] = {}  # rows from below the root to the node

    @property
    def row_bytes(self) -> int:
        """Bytes that a token takes."""
        return self.cache.row_bytes

    @property
    def layers(self) -> Sequence[Any]:
        """The cache's layers, with their keys and values."""
        return getattr(self.cache, "layers", ())

    @property
    def trunk(self) -> torch.Tensor:
        """Rows of the first `committed` tokens, in order."""
        return torch.from_numpy(np.flatnonzero(self._trunk))

    def plan(self, nodes: Sequence[Node]) -> list[Piece]:
        """Pieces to be run in order, after which `nodes` are evaluated.

        Args:
            nodes: not evaluated before, parents before children; parents that are not among them
                have been evaluated, but for the root's.
        """
        pending = self._tree.ids[self.committed :]  # committed, but not in the buffer yet
        below = [node for node in nodes if node is not self._tree.root]
        pieces = []
        while self._chunked and len(pending) > PREFILL_TOKENS:
            pieces.append(self._piece(pending[:PREFILL_TOKENS], []))
            pending = pending[PREFILL_TOKENS:]
        if self._chunked and below and len(pending) > CAUSAL_TOKENS:
            pieces.append(self._piece(pending, []))
            pending = []
        return [*pieces, self._piece(pending, below)]

    def reroot(self) -> None:
        """The tree has lost nodes, or its root has moved: forget what is gone."""
        line: list[int] = []
        for node in walked(self._root, self._tree):
            line = self._lines.get(node, line)  # the new root may have been scored only
        self._root = self._tree.root
        self._trunk[line] = True
        self.committed += len(line)
        self._lines = {
            node: self._lines[node][len(line) :]
            for node in self._tree.nodes()
            if node in self._lines and node is not self._root
        }
        self._compact()

    def _piece(self, pending: Sequence[int], below: Sequence[Node]) -> Piece:
        """Tokens that continue the trunk, then nodes below the root."""
        rows = len(self._trunk)
        joined = rows + len(pending)  # pending tokens see each other, nodes see all of them
        size = joined + len(below)
        tokens = [*pending, *(node.token for node in below)]
        for row, node in enumerate(below, start=joined):
            assert node.parent is not None
            self._lines[node] = [*self._lines.get(node.parent, ()), row]
        positions = np.array(
            [*range(self.committed, self.committed + len(pending))]
            + [node.length - 1 for node in below],
            dtype=np.int64,
        )
        visible = None
        if below or not self._trunk.all():
            visible = np.zeros((size - rows, size), dtype=np.bool_)
            visible[:, :rows] = self._trunk
            visible[:, rows:joined] = np.tri(size - rows, len(pending), dtype=np.bool_)
            for row, node in enumerate(below, start=joined):
                visible[row - rows, self._lines[node]] = True
            if np.array_equal(visible, np.tri(len(tokens), size, rows, dtype=np.bool_)):
                visible = None  # one line without gaps: plain causal attention
        self._positions = np.concatenate([self._positions, positions])
        self._trunk = np.concatenate([self._trunk, np.arange(rows, size) < joined])
        self.committed += len(pending)
        ends = [len(pending) - 1] if self.committed == len(self._tree.ids) and pending else []
        return Piece(
            self.cache,
            tokens,
            self._positions,
            visible,
            keep=[*ends, *range(len(pending), len(tokens))],
            nodes=[*([self._tree.root] if ends else []), *below],
        )

    def _compact(self) -> None:
        alive = self._trunk.copy()
        for line in self._lines.values():
            alive[line] = True
        if 4 * int(np.count_nonzero(~alive)) <= len(alive):
            return
        first = int(np.argmin(alive))  # rows before the first dead one stay where they are
        rows = np.flatnonzero(alive)
        self.cache.keep(first, torch.from_numpy(rows[rows >= first]))
        moved = np.cumsum(alive) - 1
        self._trunk, self._positions = self._trunk[rows], self._positions[rows]
        self._lines = {node: moved[line].tolist() for node, line in self._lines.items()}


class PathForm:
    """Token by token from saved copies of the model's own cache.

    For layers that keep a state instead of rows (Mamba, linear attention) and whatever else has no
    tree attention. One cache holds the trunk, one more each tip of the tree; a token costs one
    pass.
    """

    def __init__(self, decoder: Decoder, tree: TokenTree) -> None:
        self.passes = 0
        self.tokens = 0
        self._decoder = decoder
        self._tree = tree
        self._root = tree.root
        self._trunk: Any = None  # state after the first `_committed` tokens of tree.ids
        self._committed = 0
        self._tips: dict[Node, Any] = {}  # state after a node
        self._edge = decoder.rope_edge or 0

    def extend(self, nodes: Sequence[Node]) -> torch.Tensor:
        """Logits after each node, [len(nodes), v]; nodes as for `TreeForm.plan`."""
        logits = []
        for number, node in enumerate(nodes):
            if node is self._tree.root:
                logits.append(self._advance_trunk())
            else:
                shared = any(later.parent is node.parent for later in nodes[number + 1 :])
                row, self._tips[node] = self._step(node, shared=shared)
                logits.append(row)
        return torch.cat(logits)

    def reroot(self) -> None:
        """The tree has lost nodes, or its root has moved: forget what is gone."""
        for node in walked(self._root, self._tree):
            if node in self._tips:
                self._trunk, self._committed = self._tips[node], node.length
        self._root = self._tree.root
        alive = set(self._tree.nodes()) - {self._tree.root}
        self._tips = {node: state for node, state in self._tips.items() if node in alive}

    @property
    def row_bytes(self) -> int:
        """Bytes that a token takes in one state; states of fixed size count nothing."""
        tensors = [
            tensor
            for layer in self.layers
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 4
        ]
        return sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in tensors)

    @property
    def layers(self) -> Sequence[Any]:
        """The layers of the trunk's state."""
        return getattr(self._trunk, "layers", None) or ()

    def _advance_trunk(self) -> torch.Tensor:
        """Read the committed tokens not read yet; logits after the root, [1, v]."""
        pending = self._tree.ids[self._committed :]
        if not self._committed or self._committed <= self._edge < len(self._tree.ids):
            logits, self._trunk = self._run(self._tree.ids, None)
        else:
            for token in pending:
                logits, self._trunk = self._run([token], self._trunk)
        self._committed = len(self._tree.ids)
        return logits

    def _state_after(self, node: Node, *, shared: bool) -> Any:
        """A state after `node` that may be changed; `shared` if another child will need it."""
        if node in self._tips:
            return copy.deepcopy(self._tips[node]) if shared else self._tips.pop(node)
        if node is self._tree.root:
            if self._committed < len(self._tree.ids):
                self._advance_trunk()
            return copy.deepcopy(self._trunk)
        return self._step(node, shared=True)[1]

    def _step(self, node: Node, *, shared: bool) -> tuple[torch.Tensor, Any]:
        """Logits and state after `node`, from the state of its parent; from nothing where the
        frequencies of all its tokens change over. `shared` as for `_state_after`.
        """
        if node.length == self._edge + 1:
            return self._run([*self._tree.ids, *self._tree.tokens(node)], None)
        assert node.parent is not None
        return self._run([node.token], self._state_after(node.parent, shared=shared))

    def _run(self, tokens: Sequence[int], state: Any) -> tuple[torch.Tensor, Any]:
        self.passes += 1
        self.tokens += len(tokens)
        logits, output = self._decoder.run(tokens, state, keep=[len(tokens) - 1])
        return logits, getattr(output, self._decoder.cache_name or "past_key_values")


def walked(node: Node, tree: TokenTree) -> Iterator[Node]:
    """The nodes from below `node`, a former root of the tree, to its root, as far as they exist."""
    for token in tree.ids[node.length :]:
        if (child := node.children.get(token)) is None:
            return
        node = child
        yield node


def precise(logits: torch.Tensor) -> torch.Tensor:
    """`logits` in at least float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _rope(model: Any) -> tuple[frozenset[str], int | None]:
    """The kinds of rotary positions, which may differ by layer type (Gemma 3), and the length at
    which a model with "longrope" positions (Phi-3) changes over to another set of frequencies, for
    all of its tokens: what was cached before is worth nothing after.

    Those of "dynamic" ones change beyond the context window, where no sequence gets.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    layers = [each for each in rope.values() if isinstance(each, Mapping)] or [rope]
    kinds = [str(each.get("rope_type", each.get("type"))) for each in layers]
    edges = [
        each.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        for each, kind in zip(layers, kinds, strict=True)
        if kind == "longrope"
    ]
    return frozenset(kinds), min(filter(None, edges), default=None)
