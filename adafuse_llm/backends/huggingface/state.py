"""What a member keeps of running requests, and how answers are read off it.

Shapes: n nodes, v vocabulary, t likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from adafuse_llm.backends.base import NodeQuery, NodeResult
from adafuse_llm.backends.huggingface.forms import Decoder, PathForm, TreeForm
from adafuse_llm.backends.huggingface.kv import to_device
from adafuse_llm.tree import Next, Node, TokenTree


class Logits:
    """Logits of a pass, [n, v], and the logarithm of their summed exponentials, [n, 1]."""

    def __init__(self, values: torch.Tensor, total: torch.Tensor | None = None) -> None:
        self.values = values
        self.total = values.logsumexp(-1, keepdim=True) if total is None else total


class RequestState:
    """What a member keeps of one request: a form's state, and the logits of live nodes.

    Logits are kept for nodes of the tree only, as children may be asked for in a later pass. A
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
        self._told = (0, 0, 0)

    def restart(self, form: TreeForm | PathForm) -> None:
        """Forget all that was computed, as positions change over."""
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
            own = Logits(*_gather(list(self.rows.values())))
            self.rows = {node: (own, row) for row, node in enumerate(self.rows)}

    def missing(self, query: NodeQuery) -> list[Node]:
        """Nodes to evaluate, parents before children: those asked for, the parents of those to
        be scored, and what lies above them.
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
        """Take in the rows of `logits` from `start` on."""
        self.rows.update((node, (logits, row)) for row, node in enumerate(nodes, start))

    def costs(self) -> tuple[int, int, int]:
        """Passes, tokens and reused tokens since this was last asked."""
        now = (self.passes, self.tokens, self.reused)
        before, self._told = self._told, now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]


def read(
    queries: Sequence[NodeQuery],
    states: Sequence[RequestState],
    decoder: Decoder,
    end_ids: torch.Tensor,
) -> list[NodeResult]:
    """Answers to asks whose nodes have been evaluated, with one transfer from the device."""
    pairs = list(zip(queries, states, strict=True))
    top = max(query.top for query in queries)
    wanted = [state.rows[node] for query, state in pairs for node in query.evaluate]
    scored = [node.token for query in queries for node in query.score]
    decoder.check(scored)
    parents = [
        state.rows[node.parent] for query, state in pairs for node in query.score if node.parent
    ]
    summaries, logprobs = _numbers(wanted, parents, scored, top, end_ids)
    next_summary, next_logprob = iter(summaries), iter(logprobs)
    results = []
    for query, state in pairs:
        nexts = tuple(_cut(next(next_summary), query.top) for _ in query.evaluate)
        own = tuple(next(next_logprob) for _ in query.score)
        passes, tokens, reused = state.costs()
        results.append(NodeResult(nexts, own, passes, tokens, reused))
    return results


def _cut(summary: Next, top: int) -> Next:
    """The summary with `top` tokens."""
    if len(summary.tokens) <= top:
        return summary
    return Next(summary.tokens[:top], summary.logprobs[:top], summary.end_logprob)


def _numbers(
    wanted: Sequence[tuple[Logits, int]],
    parents: Sequence[tuple[Logits, int]],
    tokens: Sequence[int],
    top: int,
    end_ids: torch.Tensor,
    *,
    by_sorting: bool = False,
) -> tuple[list[Next], list[float]]:
    """Summaries of the wanted rows, and log-probabilities of `tokens` after the parents' rows."""
    parts = []
    width = 0
    if wanted:
        logits, total = _gather(wanted)
        values, likely, tied = likeliest(logits, top, by_sorting=by_sorting)
        ends = logits.index_select(-1, end_ids.to(logits.device))  # [n, end ids]
        ends = ends.logsumexp(-1, keepdim=True)  # -inf without such ids
        table = torch.cat(
            [values - total, ends - total, likely.to(logits.dtype), tied.to(logits.dtype)], -1
        )  # [n, 2t + 2]; ids fit: float32 counts to 2^24
        width = table.shape[1]
        parts.append(table.flatten())
    if parents:
        logits, total = _gather(parents)
        chosen = logits.gather(-1, to_device(torch.tensor(tokens), logits.device)[:, None])
        parts.append((chosen - total).flatten())
    if not parts:
        return [], []
    numbers = torch.cat(parts).tolist()
    rows = [numbers[i * width : (i + 1) * width] for i in range(len(wanted))]
    count = (width - 2) // 2
    if any(row[-1] for row in rows):
        return _numbers(wanted, parents, tokens, top, end_ids, by_sorting=True)
    summaries = [
        Next(tuple(map(int, row[count + 1 : -1])), tuple(row[:count]), row[count]) for row in rows
    ]
    return summaries, numbers[len(rows) * width :]


def _gather(rows: Sequence[tuple[Logits, int]]) -> tuple[torch.Tensor, torch.Tensor]:
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


def likeliest(
    logits: torch.Tensor, top: int, *, by_sorting: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `top` highest logits and their ids, [n, t] each, equal ones by lower id; and whether a
    lower id may have been left out, [n, 1].

    ``topk`` leaves the order of equal values open. One more value is asked for: only where it
    equals the last wanted one could a lower id have been left out. Sorting leaves out none.
    """
    top = min(top, logits.shape[-1])
    if by_sorting:
        tokens = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        return logits.gather(-1, tokens), tokens, torch.zeros_like(tokens[:, :1], dtype=torch.bool)
    values, tokens = logits.topk(min(top + 1, logits.shape[-1]))
    tied = (values[:, top:] == values[:, top - 1 : top]).any(-1, keepdim=True)
    tokens, order = tokens[:, :top].sort(dim=-1)
    values, by_value = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(-1, by_value), tied
