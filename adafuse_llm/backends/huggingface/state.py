"""The state that a member keeps for a running request.

Shapes: n nodes, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from adafuse_llm.backends.base import NodeQuery
from adafuse_llm.backends.huggingface.kv import to_device
from adafuse_llm.backends.huggingface.path_form import PathForm
from adafuse_llm.backends.huggingface.tree_form import TreeForm
from adafuse_llm.tree import Node, TokenTree


class Logits:
    """Logits of a pass, [n, v], and the logarithm of their summed exponentials, [n, 1]."""

    def __init__(self, values: torch.Tensor, total: torch.Tensor | None = None) -> None:
        self.values = values
        self.total = values.logsumexp(-1, keepdim=True) if total is None else total


class RequestState:
    """The state of one request at a member: that of its form, and the logits of live nodes.

    Logits are kept for nodes of the tree only, as a later pass may need their children. A
    row keeps all logits of its pass, other requests' too: rows that outlive a commit are copied
    once most of what they keep is not theirs.

    Args:
        tree: the request's tree.
        form: fresh state.
        edge: length at which all must be computed anew, if there is one.
        reused: tokens of the prompt that the state already holds.

    Attributes:
        rows: node to the logits of a pass and the node's row in them.
        passes, tokens: forward passes so far, and tokens that went through them.
    """

    def __init__(
        self, tree: TokenTree, form: TreeForm | PathForm, edge: int | None, reused: int = 0
    ) -> None:
        self.tree = tree
        self.form = form
        self.edge = edge
        self.reused = reused
        self.rows: dict[Node, tuple[Logits, int]] = {}
        self.passes = 0
        self.tokens = 0
        self._cuts = tree.cuts
        self._reported = (0, 0, 0)

    def restart(self, form: TreeForm | PathForm) -> None:
        """Forget everything computed so far, because the rotary frequencies change."""
        self.form, self.rows, self.edge = form, {}, None

    def follow(self) -> None:
        """Forget the nodes that were dropped."""
        if self._cuts == self.tree.cuts:
            return
        self._cuts = self.tree.cuts
        self.form.reroot()
        self.rows = {node: self.rows[node] for node in self.tree.nodes() if node in self.rows}
        passes = {logits: len(logits.values) for logits, _ in self.rows.values()}
        if 2 * len(self.rows) < sum(passes.values()):
            own = Logits(*gather(list(self.rows.values())))
            self.rows = {node: (own, row) for row, node in enumerate(self.rows)}

    def missing(self, query: NodeQuery) -> list[Node]:
        """Return the nodes to evaluate for a query, parents before children: those it evaluates,
        the parents of those it scores, and their ancestors.
        """
        missing: dict[Node, None] = {}
        for wanted in (*query.evaluate, *(node.parent for node in query.score)):
            line: list[Node] = []
            above = wanted
            while above is not None and above not in self.rows and above not in missing:
                line.append(above)
                above = above.parent
            missing.update(dict.fromkeys(reversed(line)))
        return list(missing)

    def learn(self, nodes: Iterable[Node], logits: Logits, start: int) -> None:
        """Record the logits of `nodes`: the rows of `logits` from `start` on."""
        self.rows.update((node, (logits, row)) for row, node in enumerate(nodes, start))

    def costs(self) -> tuple[int, int, int]:
        """Passes, tokens and reused tokens since the last call."""
        now = (self.passes, self.tokens, self.reused)
        before, self._reported = self._reported, now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]


def gather(rows: Sequence[tuple[Logits, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and their totals, [n, v] and [n, 1]."""
    first = rows[0][0]
    if all(logits is first for logits, _ in rows):
        indices = [row for _, row in rows]
        if indices == list(range(len(first.values))):
            return first.values, first.total
        chosen = to_device(torch.tensor(indices), first.values.device)
        return first.values.index_select(0, chosen), first.total.index_select(0, chosen)
    values = torch.stack([logits.values[row] for logits, row in rows])
    return values, torch.stack([logits.total[row] for logits, row in rows])
