"""Evaluate the nodes of a tree one by one, from saved copies of the model's own cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from adafuse_llm.backends.huggingface.model import Decoder
from adafuse_llm.backends.logits.state import RequestLogits, learn
from adafuse_llm.tree.tokens import Node, TokenTree


class PathForm(RequestLogits):
    """A request to a model for which the tree form fails, such as Mamba.

    Some layers of such models keep one state instead of a row for each token.
    The request has one cache for the trunk (the committed tokens), and one for every tip (a node
    without evaluated children). The prompt takes one pass, and every later token at least one.
    """

    unread = 0  # this form reads a prompt as a whole

    def __init__(self, tree: TokenTree, decoder: Decoder) -> None:
        super().__init__(tree)
        self._decoder = decoder
        # the model's cache after the first `_committed` tokens of `tree.ids`
        self._trunk: Any = None
        self._committed = 0
        # the model's caches after the tips of the tree
        self._tips: dict[Node, Any] = {}

    def extend(self, nodes: Sequence[Node]) -> None:
        """Evaluate nodes, which are ordered parents before children."""
        for number, node in enumerate(nodes):
            if node is self.tree.root:
                logits = self._advance_trunk()
            else:
                shared = any(later.parent is node.parent for later in nodes[number + 1 :])
                logits, self._tips[node] = self._step(node, shared=shared)
            learn(logits, [(self, [node])])

    def reroot(self, before: Node, below: set[Node]) -> None:
        for node in self.tree.since(before):
            if node in self._tips:
                self._trunk, self._committed = self._tips[node], node.length
        self._tips = {node: state for node, state in self._tips.items() if node in below}

    def tensors(self) -> list[torch.Tensor]:
        """Return the keys and values of the trunk. A cache of fixed size has none."""
        tensors = (
            getattr(layer, name, None)
            for layer in getattr(self._trunk, "layers", None) or ()
            for name in ("keys", "values")
        )
        return [rows for rows in tensors if isinstance(rows, torch.Tensor) and rows.ndim == 4]

    def _advance_trunk(self) -> torch.Tensor:
        """Run the committed tokens that have not run. Return the logits after the root, [1, v]."""
        pending = self.tree.ids[self._committed :]
        for tokens in [[token] for token in pending] if self._committed else [pending]:
            logits, self._trunk = self._run(tokens, self._trunk)
        self._committed = len(self.tree.ids)
        return logits

    def _step(self, node: Node, *, shared: bool) -> tuple[torch.Tensor, Any]:
        """Run a node; return logits and its cache. `shared`: whether to keep the parent's cache."""
        parent = node.parent
        assert parent is not None
        if parent in self._tips:
            state = copy.deepcopy(self._tips[parent]) if shared else self._tips.pop(parent)
        elif parent is self.tree.root:
            if self._committed < len(self.tree.ids):
                self._advance_trunk()
            state = copy.deepcopy(self._trunk)
        else:
            # a child has taken over the parent's cache, so run the parent again
            state = self._step(parent, shared=True)[1]
        return self._run([node.token], state)

    def _run(self, tokens: Sequence[int], state: Any) -> tuple[torch.Tensor, Any]:
        self.passes += 1
        self.tokens += len(tokens)
        return self._decoder.run(tokens, state, keep=[len(tokens) - 1])
