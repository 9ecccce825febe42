"""Evaluate the nodes of a tree token by token, from saved copies of the model's own cache.

Shapes: v vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from adafuse_llm.backends.huggingface.decoder import Decoder
from adafuse_llm.tree import Node, TokenTree


class PathForm:
    """An evaluation of one request, token by token, from saved copies of the model's own cache.

    The path form is for models without tree attention, such as those whose layers have a state
    instead of rows (Mamba, linear attention). It keeps one cache for the trunk (the committed
    tokens) and one for each tip of the tree. Each token costs one pass.
    """

    def __init__(self, decoder: Decoder, tree: TokenTree) -> None:
        self.passes = 0
        self.tokens = 0
        self.unread = 0  # a state that a prompt has begun goes on token by token only
        self._decoder = decoder
        self._tree = tree
        self._root = tree.root
        self._trunk: Any = None  # state after the first `_committed` tokens of tree.ids
        self._committed = 0
        self._tips: dict[Node, Any] = {}  # state after a node
        self._edge = decoder.rope_edge or 0

    def extend(self, nodes: Sequence[Node]) -> torch.Tensor:
        """Evaluate nodes, and return the logits after each of them, [len(nodes), v].

        Args:
            nodes: nodes to evaluate, parents before children. The parent of each node is also in
                `nodes`, or is evaluated already.
        """
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
        """Drop the states of nodes that the tree has dropped, and advance the trunk to the root."""
        for node in self._tree.since(self._root):
            if node in self._tips:
                self._trunk, self._committed = self._tips[node], node.length
        self._root = self._tree.root
        alive = set(self._tree.nodes()) - {self._tree.root}
        self._tips = {node: state for node, state in self._tips.items() if node in alive}

    @property
    def row_bytes(self) -> int:
        """Size of a token in one state, in bytes. Layers with a state of fixed size count as 0."""
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
        """Run the remaining committed tokens, and return the logits after the root, [1, v]."""
        pending = self._tree.ids[self._committed :]
        if not self._committed or self._committed <= self._edge < len(self._tree.ids):
            logits, self._trunk = self._run(self._tree.ids, None)
        else:
            for token in pending:
                logits, self._trunk = self._run([token], self._trunk)
        self._committed = len(self._tree.ids)
        return logits

    def _state_after(self, node: Node, *, shared: bool) -> Any:
        """Return the state after `node`, as an object that the caller may change.

        Args:
            node: the node.
            shared: whether another child of the node needs the state later.
        """
        if node in self._tips:
            return copy.deepcopy(self._tips[node]) if shared else self._tips.pop(node)
        if node is self._tree.root:
            if self._committed < len(self._tree.ids):
                self._advance_trunk()
            return copy.deepcopy(self._trunk)
        return self._step(node, shared=True)[1]

    def _step(self, node: Node, *, shared: bool) -> tuple[torch.Tensor, Any]:
        """Return the logits and the state after `node`.

        The pass continues from the state of the parent. If the rotary frequencies of all tokens
        change at this node, the pass runs over the whole sequence instead.

        Args:
            node: the node.
            shared: whether another child of the parent needs the parent's state later.
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
