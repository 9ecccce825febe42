"""Evaluate the nodes of a tree token by token, from saved copies of the model's own cache.

Shapes: v vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from adafuse_llm.backends.huggingface.decoder import Decoder
from adafuse_llm.backends.huggingface.tree_form import walked
from adafuse_llm.tree import Node, TokenTree


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
