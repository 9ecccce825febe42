"""The logits that a backend keeps for the nodes of a running request.

Shapes: n nodes, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from adafuse_llm.backends.base import Query
from adafuse_llm.tree import Node, TokenTree

SHARED_BYTES = 4 * 2**20
"""Maximum size, in bytes, of logits that a request keeps although most of them belong to others."""


class Logits:
    """The logits of a pass, [n, v], and the logarithm of their summed exponentials, [n, 1]."""

    def __init__(self, values: torch.Tensor, total: torch.Tensor | None = None) -> None:
        self.values = values
        self.total = values.logsumexp(-1, keepdim=True) if total is None else total

    @property
    def size(self) -> int:
        """Size of the logits in bytes."""
        return self.values.numel() * self.values.element_size()


class RequestLogits:
    """The logits of the nodes of one request, and the costs of the request.

    The object keeps the logits of all nodes in the tree, because later queries may score children
    of these nodes. Each row of logits belongs to the logits of its whole pass, so it keeps the
    logits of other requests in memory. `separate` limits this memory.

    Args:
        tree: the request's tree.
        reused: number of prompt tokens that the backend does not process for this request.

    Attributes:
        rows: for each evaluated node, the logits of its pass and the index of its row.
        passes: number of forward passes so far.
        tokens: number of tokens in these passes.
    """

    def __init__(self, tree: TokenTree, reused: int = 0) -> None:
        self.tree = tree
        self.reused = reused
        self.rows: dict[Node, tuple[Logits, int]] = {}
        self.passes = 0
        self.tokens = 0
        self._cuts = tree.cuts
        self._reported = (0, 0, 0)

    def follow(self) -> bool:
        """Drop the logits of nodes that the tree has dropped. Return whether it dropped nodes."""
        if self._cuts == self.tree.cuts:
            return False
        self._cuts = self.tree.cuts
        self.rows = {node: self.rows[node] for node in self.tree.nodes() if node in self.rows}
        return True

    def is_mostly_foreign(self) -> bool:
        """Return whether the object keeps many logits, most of which belong to other requests."""
        passes = {logits for logits, _ in self.rows.values()}
        return 2 * len(self.rows) < sum(len(logits.values) for logits in passes) and any(
            logits.size > SHARED_BYTES for logits in passes
        )

    def missing(self, query: Query) -> list[Node]:
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

    def logits(self, node: Node) -> torch.Tensor:
        """Return the logits after an evaluated node, [v]."""
        values, row = self.rows[node]
        return values.values[row]


def separate(states: Iterable[RequestLogits]) -> None:
    """Copy the logits of requests that keep too many logits of others.

    Requests share the copies up to `SHARED_BYTES`, so the number of operations depends on the size
    of the logits, not on the number of requests.
    """
    places: list[tuple[RequestLogits, Node]] = []
    for state in states:
        if state.is_mostly_foreign():
            places += ((state, node) for node in state.rows)
    if not places:
        return
    values = next(iter(places[0][0].rows.values()))[0].values
    count = max(1, SHARED_BYTES // (values.shape[1] * values.element_size()))
    for start in range(0, len(places), count):
        part = places[start : start + count]
        copied = Logits(*gather([state.rows[node] for state, node in part]))
        for row, (state, node) in enumerate(part):
            state.rows[node] = copied, row


def gather(rows: Sequence[tuple[Logits, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collect rows into a tensor of logits, [n, v], and a tensor of their totals, [n, 1]."""
    first = rows[0][0]
    if all(logits is first for logits, _ in rows):
        indices = [row for _, row in rows]
        if indices == list(range(len(first.values))):
            return first.values, first.total
        chosen = to_device(torch.tensor(indices), first.values.device)
        return first.values.index_select(0, chosen), first.total.index_select(0, chosen)
    by_pass: dict[Logits, list[int]] = {}
    for number, (logits, _) in enumerate(rows):
        by_pass.setdefault(logits, []).append(number)
    order = [number for numbers in by_pass.values() for number in numbers]
    places = [0] * len(rows)
    for place, number in enumerate(order):
        places[number] = place
    chosen = to_device(
        torch.tensor([*(rows[number][1] for number in order), *places]), first.values.device
    )
    sizes = [*map(len, by_pass.values()), len(rows)]
    *parts, last = chosen.split_with_sizes(sizes)
    values, total = (
        torch.cat([t.index_select(0, part) for t, part in zip(tensors, parts, strict=True)])
        for tensors in ([each.values for each in by_pass], [each.total for each in by_pass])
    )
    return values.index_select(0, last), total.index_select(0, last)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `values` on `device`, without waiting for the pending work of a GPU."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def check_tokens(tokens: Sequence[int], size: int) -> None:
    """Check that all token ids are in the vocabulary. Other ids would corrupt a GPU's context.

    Args:
        tokens: token ids.
        size: number of tokens in the vocabulary.

    Raises:
        ValueError: an id is not in the vocabulary.
    """
    if (highest := max(tokens, default=0)) >= size:
        raise ValueError(
            f"token {highest} is outside the model's {size} tokens: the tokenizer does not match "
            "the model"
        )
