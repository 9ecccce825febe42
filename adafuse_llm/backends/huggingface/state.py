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
    """The logits of a pass, [n, v], and the logarithm of their summed exponentials, [n, 1]."""

    def __init__(self, values: torch.Tensor, total: torch.Tensor | None = None) -> None:
        self.values = values
        self.total = values.logsumexp(-1, keepdim=True) if total is None else total


class RequestState:
    """The state of one request at a member: its form, and the logits of its nodes.

    The state keeps the logits of all nodes in the tree, because later queries may score children of
    these nodes. Each row of logits is a view of the logits of its whole pass, so it keeps the
    logits of other requests in memory. Once less than half of that memory belongs to rows of this
    request, `follow` copies these rows.

    Args:
        tree: the request's tree.
        form: form of the request, which has not evaluated any nodes yet.
        edge: length beyond which all rows must be computed again; None if no length requires this.
        reused: number of prompt tokens whose rows the form already has.

    Attributes:
        rows: for each evaluated node, the logits of its pass and the index of its row.
        passes: number of forward passes so far.
        tokens: number of tokens in these passes.
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
        """Start again with `form` and without logits, because the rotary frequencies change."""
        self.form, self.rows, self.edge = form, {}, None

    def follow(self) -> None:
        """Drop the rows and logits of nodes that the tree has dropped."""
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
        """Return the nodes that must be evaluated for a query, parents before children.

        These are the nodes of ``query.evaluate``, the parents of the nodes of ``query.score``, and
        the ancestors of both, except for nodes that are evaluated already.
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
        """Store the logits of `nodes`, which are the rows of `logits` from index `start` on."""
        self.rows.update((node, (logits, row)) for row, node in enumerate(nodes, start))

    def costs(self) -> tuple[int, int, int]:
        """Return the numbers of passes, tokens and reused tokens since the last call."""
        now = (self.passes, self.tokens, self.reused)
        before, self._reported = self._reported, now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]


def gather(rows: Sequence[tuple[Logits, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collect rows into a tensor of logits, [n, v], and a tensor of their totals, [n, 1]."""
    first = rows[0][0]
    if all(logits is first for logits, _ in rows):
        indices = [row for _, row in rows]
        if indices == list(range(len(first.values))):
            return first.values, first.total
        chosen = to_device(torch.tensor(indices), first.values.device)
        return first.values.index_select(0, chosen), first.total.index_select(0, chosen)
    values = torch.stack([logits.values[row] for logits, row in rows])
    return values, torch.stack([logits.total[row] for logits, row in rows])
