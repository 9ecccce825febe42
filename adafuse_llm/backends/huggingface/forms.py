"""Two ways to evaluate the nodes of a tree with a transformers model.

`TreeForm` keeps the key/value rows of the whole tree in one buffer and evaluates any nodes in one
pass, each seeing its ancestors only (tree attention: a 4-D mask and explicit position ids).
`PathForm` is for models that cannot: it runs token by token from saved copies of the model's own
cache. Both give the numbers of a plain forward pass over the node's sequence.

Shapes: n new tokens, r rows in the buffer, v vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from adafuse_llm.backends.huggingface.kv import RowCache
from adafuse_llm.tree import Node, TokenTree

PREFILL_TOKENS = 2048
"""Most tokens of a prompt in one forward pass, which bounds the memory of its activations."""


class Form(Protocol):
    """State of one request at one model.

    Attributes:
        passes, tokens: forward passes run, and tokens that went through them, so far.
    """

    passes: int
    tokens: int

    def extend(self, nodes: Sequence[Node]) -> torch.Tensor:
        """Logits after each node, [len(nodes), v].

        Args:
            nodes: not evaluated before, parents before children; parents that are not among them
                have been evaluated, but for the root's.
        """
        ...

    def reroot(self) -> None:
        """The tree's root has moved: forget what is not below it."""
        ...


class Decoder:
    """A model reduced to one call. Shared by all requests; holds no state of theirs."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.rope_edge = _rope_edge(model)
        self.device = torch.device(model.get_input_embeddings().weight.device)
        if self.device.type == "meta":  # offloaded: accelerate moves inputs where they belong
            self.device = torch.device("cpu")
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
        parameters = inspect.signature(inner.forward).parameters
        self._takes_keep = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self.cache_name = next(
            (name for name in ("past_key_values", "cache_params") if name in parameters), None
        )

    def check(self, tokens: Sequence[int]) -> None:
        """Refuse ids that a GPU would only notice by failing for good."""
        if (highest := max(tokens)) >= self.vocabulary:
            raise ValueError(
                f"token {highest} is outside the model's {self.vocabulary} embeddings: the "
                "tokenizer does not belong to the model"
            )

    def takes_chunks(self, length: int) -> bool:
        """Whether a prompt of `length` tokens gives the same numbers in several passes."""
        return self.rope_edge is None or length <= self.rope_edge

    def run(
        self,
        tokens: Sequence[int],
        cache: Any,
        *,
        keep: int,
        positions: Sequence[int] | None = None,
        mask: Any = None,
    ) -> tuple[torch.Tensor, Any]:
        """One forward pass over [1, n] tokens; returns logits of the last `keep`, [keep, v], in
        at least float32, and the model's output.
        """
        self.check(tokens)
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([list(tokens)], device=self.device),
            "use_cache": True,
        }
        if cache is not None:
            inputs[self.cache_name or "past_key_values"] = cache
        if positions is not None and self._takes_positions:
            inputs["position_ids"] = torch.tensor([list(positions)], device=self.device)
        if mask is not None:
            inputs["attention_mask"] = mask
        if self._takes_keep:
            inputs["logits_to_keep"] = keep
        output = self.model(**inputs, return_dict=True)
        logits = output.logits[0, -keep:]
        return (logits if logits.dtype == torch.float64 else logits.float()), output


@dataclass(frozen=True)
class Attention:
    """How a model's attention layers take a tree mask.

    Args:
        layer_types: which of ``full_attention`` and ``sliding_attention`` the layers have.
        window: tokens that sliding layers see; None without such layers.
        additive: whether masks are added to attention scores (eager attention) or boolean.
        dtype: of additive masks.
        device: where the model takes masks.
    """

    layer_types: frozenset[str]
    window: int | None
    additive: bool
    dtype: torch.dtype
    device: torch.device

    def mask(
        self, visible: NDArray[np.bool_], queries: NDArray[np.int64], keys: NDArray[np.int64]
    ) -> Any:
        """The attention mask for the model.

        Args:
            visible: [n, r] which rows each new token sees under full attention.
            queries: [n] positions of the new tokens.
            keys: [r] positions of the rows.

        Returns:
            [1, 1, n, r], or one such mask by layer type for models that mix them.
        """
        masks = {}
        for kind in self.layer_types:
            seen = visible
            if kind == "sliding_attention" and self.window is not None:
                seen = visible & (keys[None, :] > queries[:, None] - self.window)
            allowed = torch.from_numpy(seen)[None, None].to(self.device)
            masks[kind] = self._additive(allowed) if self.additive else allowed
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, allowed: torch.Tensor) -> torch.Tensor:
        lowest = torch.finfo(self.dtype).min
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~allowed, lowest)


class TreeForm:
    """Tree attention over one growing buffer of key/value rows.

    Rows of the committed tokens (the trunk) are visible to every new token, rows of a node to
    those below it. Rows of dropped nodes are masked, and compacted away once they are more than a
    quarter of the buffer.
    """

    def __init__(self, decoder: Decoder, attention: Attention, tree: TokenTree) -> None:
        self.passes = 0
        self.tokens = 0
        self._decoder = decoder
        self._attention = attention
        self._tree = tree
        self._cache = RowCache()
        self._committed = 0  # tokens of tree.ids that have a row
        self._trunk = np.zeros(0, dtype=np.bool_)  # [r] rows of those tokens
        self._positions = np.zeros(0, dtype=np.int64)  # [r]
        self._lines: dict[Node, list[int]] = {}  # rows from below the root to the node

    def extend(self, nodes: Sequence[Node]) -> torch.Tensor:
        pending = self._tree.ids[self._committed :]  # committed, but not in the buffer yet
        if not self._committed:
            root = self._prefill(pending)
            below = nodes[1:]
            return torch.cat([root, self._pass([], below)]) if below else root
        return self._pass(pending, [node for node in nodes if node is not self._tree.root])

    def reroot(self) -> None:
        line = self._lines.get(self._tree.root)
        if line is None:  # the root is not in the buffer: nothing below it is
            self._lines = {}
        else:
            self._trunk[line] = True
            self._committed += len(line)
            self._lines = {
                node: self._lines[node][len(line) :]
                for node in self._tree.nodes()
                if node in self._lines and node is not self._tree.root
            }
        self._compact()

    def _prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        """The prompt into the empty buffer; logits after its last token, [1, v]."""
        size = PREFILL_TOKENS if self._decoder.takes_chunks(len(prompt)) else len(prompt)
        for start in range(0, len(prompt), size):
            chunk = prompt[start : start + size]
            positions = range(start, start + len(chunk))
            logits = self._run(chunk, positions, None, keep=1)
        self._committed = len(prompt)
        self._trunk = np.ones(len(prompt), dtype=np.bool_)
        self._positions = np.arange(len(prompt), dtype=np.int64)
        return logits

    def _pass(self, pending: Sequence[int], below: Sequence[Node]) -> torch.Tensor:
        """One pass over tokens that continue the trunk and nodes below the root.

        Returns logits after the root, if any token was pending, and after each node.
        """
        rows = len(self._trunk)
        joined = rows + len(pending)  # pending tokens see each other, nodes see all of them
        size = joined + len(below)
        visible = np.zeros((size - rows, size), dtype=np.bool_)
        visible[:, :rows] = self._trunk
        visible[:, rows:joined] = np.tri(size - rows, len(pending), dtype=np.bool_)
        for row, node in enumerate(below, start=joined):
            assert node.parent is not None
            self._lines[node] = [*self._lines.get(node.parent, ()), row]
            visible[row - rows, self._lines[node]] = True
        tokens = [*pending, *(node.token for node in below)]
        positions = np.array(
            [*range(self._committed, self._committed + len(pending))]
            + [node.length - 1 for node in below],
            dtype=np.int64,
        )
        self._positions = np.concatenate([self._positions, positions])
        if np.array_equal(visible, np.tri(len(tokens), size, rows, dtype=np.bool_)):
            mask = None  # one line without gaps: plain causal attention
        else:
            mask = self._attention.mask(visible, positions, self._positions)
        logits = self._run(tokens, positions.tolist(), mask, keep=bool(pending) + len(below))
        self._trunk = np.concatenate([self._trunk, np.arange(rows, size) < joined])
        self._committed += len(pending)
        return logits

    def _run(
        self, tokens: Sequence[int], positions: Sequence[int], mask: Any, keep: int
    ) -> torch.Tensor:
        self.passes += 1
        self.tokens += len(tokens)
        return self._decoder.run(tokens, self._cache, keep=keep, positions=positions, mask=mask)[0]

    def _compact(self) -> None:
        alive = self._trunk.copy()
        for line in self._lines.values():
            alive[line] = True
        if 4 * int(np.count_nonzero(~alive)) <= len(alive):
            return
        first = int(np.argmin(alive))  # rows before the first dead one stay where they are
        rows = np.flatnonzero(alive)
        self._cache.keep(first, torch.from_numpy(rows[rows >= first]))
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
        self._trunk: Any = None  # state after the first `_committed` tokens of tree.ids
        self._committed = 0
        self._tips: dict[Node, Any] = {}  # state after a node

    def extend(self, nodes: Sequence[Node]) -> torch.Tensor:
        logits = []
        for number, node in enumerate(nodes):
            if node is self._tree.root:
                logits.append(self._advance_trunk())
            else:
                assert node.parent is not None
                shared = any(later.parent is node.parent for later in nodes[number + 1 :])
                state = self._state_after(node.parent, shared=shared)
                row, self._tips[node] = self._run([node.token], state)
                logits.append(row)
        return torch.cat(logits)

    def reroot(self) -> None:
        if self._tree.root in self._tips:
            self._trunk = self._tips[self._tree.root]
            self._committed = len(self._tree.ids)
        alive = set(self._tree.nodes()) - {self._tree.root}
        self._tips = {node: state for node, state in self._tips.items() if node in alive}

    def _advance_trunk(self) -> torch.Tensor:
        """Read the committed tokens not read yet; logits after the root, [1, v]."""
        pending = self._tree.ids[self._committed :]
        if not self._committed:
            logits, self._trunk = self._run(pending, None)
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
        assert node.parent is not None
        state = self._state_after(node.parent, shared=True)
        return self._run([node.token], state)[1]

    def _run(self, tokens: Sequence[int], state: Any) -> tuple[torch.Tensor, Any]:
        self.passes += 1
        self.tokens += len(tokens)
        logits, output = self._decoder.run(tokens, state, keep=1)
        return logits, getattr(output, self._decoder.cache_name or "past_key_values")


def _rope_edge(model: Any) -> int | None:
    """Length at which a model with "longrope" positions (Phi-3) changes over to another set of
    frequencies, for all of its tokens: what was cached before is worth nothing after.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
