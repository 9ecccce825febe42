"""Evaluate the nodes of a tree token by token, from saved copies of the model's own cache.

Shapes: v vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from adafuse_llm.backends.huggingface.model import Decoder
from adafuse_llm.tree.tokens import Node, TokenTree


class PathForm:
    """The evaluation of one request by a model whose layers may have no rows (Mamba).

    It keeps one cache for the trunk (the committed tokens) and one for every tip of the tree. The
    prompt takes one pass, and every later token takes another one.
    """

    unread = 0  # it reads no prompt in pieces

    def __init__(self, decoder: Decoder, tree: TokenTree) -> None:
        self._decoder = decoder
        self._tree = tree
        self._root = tree.root
        self._trunk: Any = None  # state after the first `_committed` tokens of tree.ids
        self._committed = 0
        self._tips: dict[Node, Any] = {}  # state after a node
        self._passes: list[int] = []

    def extend(self, nodes: Sequence[Node]) -> tuple[torch.Tensor, list[int]]:
        """Evaluate nodes, parents before children, as `TreeForm.plan`.

        Returns:
            The logits after each node, [len(nodes), v], and the number of tokens of each pass.
        """
        self._passes = []
        logits = []
        for number, node in enumerate(nodes):
            if node is self._tree.root:
                logits.append(self._advance_trunk())
            else:
                shared = any(later.parent is node.parent for later in nodes[number + 1 :])
                row, self._tips[node] = self._step(node, shared=shared)
                logits.append(row)
        return torch.cat(logits), self._passes

    def reroot(self) -> None:
        """Drop the states of nodes that the tree has dropped, and advance the trunk to the root."""
        for node in self._tree.since(self._root):
            if node in self._tips:
                self._trunk, self._committed = self._tips[node], node.length
        self._root = self._tree.root
        alive = set(self._tree.nodes()) - {self._tree.root}
        self._tips = {node: state for node, state in self._tips.items() if node in alive}

    def tensors(self) -> list[torch.Tensor]:
        """Return the keys and values of the trunk. A state of fixed size has none."""
        tensors = (
            getattr(layer, name, None)
            for layer in getattr(self._trunk, "layers", None) or ()
            for name in ("keys", "values")
        )
        return [rows for rows in tensors if isinstance(rows, torch.Tensor) and rows.ndim == 4]

    def _advance_trunk(self) -> torch.Tensor:
        """Run the remaining committed tokens, and return the logits after the root, [1, v]."""
        pending = self._tree.ids[self._committed :]
        for tokens in [[token] for token in pending] if self._committed else [pending]:
            logits, self._trunk = self._run(tokens, self._trunk)
        self._committed = len(self._tree.ids)
        return logits

    def _state_after(self, node: Node, *, shared: bool) -> Any:
        """Return the state after `node`, of which another child of it needs a copy if `shared`."""
        if node in self._tips:
            return copy.deepcopy(self._tips[node]) if shared else self._tips.pop(node)
        if node is self._tree.root:
            if self._committed < len(self._tree.ids):
                self._advance_trunk()
            return copy.deepcopy(self._trunk)
        return self._step(node, shared=True)[1]

    def _step(self, node: Node, *, shared: bool) -> tuple[torch.Tensor, Any]:
        assert node.parent is not None
        return self._run([node.token], self._state_after(node.parent, shared=shared))

    def _run(self, tokens: Sequence[int], state: Any) -> tuple[torch.Tensor, Any]:
        self._passes.append(len(tokens))
        return self._decoder.run(tokens, state, keep=[len(tokens) - 1])
