"""The state of a request at a GGUF member: the sequences of the cache that hold its tree.

A request has one sequence for its committed tokens (the trunk), and one for every tip, which is a
cached node without cached children. All tips below a node share its cell. The member can drop nodes
at any time, because `LlamaState.plan` plans them again when a query needs them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from adafuse_llm.backends.llamacpp.context import Context, Entry
from adafuse_llm.backends.logits.state import RequestLogits, unknown
from adafuse_llm.tree.tokens import Node, TokenTree


class LlamaState(RequestLogits):
    """The sequences of one request, and its nodes' logits. A new state takes a free sequence.

    Attributes:
        trunk: the sequence of the committed tokens.
        committed: number of tokens of ``tree.ids`` that are in the trunk or planned for it.
        ready: number of tokens of ``tree.ids`` that are in the trunk, because they have run.
        tips: the sequence of each tip.
    """

    def __init__(self, tree: TokenTree, context: Context) -> None:
        super().__init__(tree)
        self.trunk = context.free.pop()
        self.committed = self.ready = 0
        self.tips: dict[Node, int] = {}
        self._context = context

    @property
    def unread(self) -> int:
        return len(self.tree.ids) - self.committed

    def uncached(self, nodes: Collection[Node]) -> list[Node]:
        """Return `nodes` and their uncached ancestors, parents before children."""
        cached = {node for tip in self.tips for node in _upwards(tip)}
        return unknown(nodes, (cached | {self._root}).difference(nodes))

    def plan(
        self, nodes: Sequence[Node], keep: Collection[Node]
    ) -> list[tuple[Entry, Node | None]]:
        """Return the tokens that must run to evaluate `nodes`, which `uncached` has returned.

        A token comes with its node if the node is in `keep`, and otherwise with None. `keep` may
        contain the root. Every node may take a free sequence.
        """
        # find the children of every node
        children: dict[Node, list[Node]] = defaultdict(list)
        for node in nodes:
            assert node.parent is not None, "the root is not below itself"
            children[node.parent].append(node)
        # choose the sequences that run through every node
        through: dict[Node, list[int]] = {}
        for node in nodes:
            if node.parent not in through:
                self._reserve(node, children, through)
        root = [self.trunk, *dict.fromkeys(s for n in children[self._root] for s in through[n])]
        # first run the committed tokens that have not run, then the nodes
        planned = self.read(len(self.tree.ids) - self.committed, root)
        if planned and self._root in keep:
            planned[-1] = replace(planned[-1][0], keep=True), self._root
        for node in nodes:
            is_kept = node in keep
            entry = Entry(node.token, node.length - 1, through[node], is_kept)
            planned.append((entry, node if is_kept else None))
        return planned

    def read(
        self, count: int, sequences: Sequence[int] | None = None
    ) -> list[tuple[Entry, Node | None]]:
        """Plan the next `count` committed tokens, to extend `sequences` (default: the trunk)."""
        start, self.committed = self.committed, self.committed + count
        tokens = self.tree.ids[start : self.committed]
        sequences = sequences or [self.trunk]
        return [(Entry(t, at, sequences, keep=False), None) for at, t in enumerate(tokens, start)]

    def _reserve(
        self, node: Node, children: dict[Node, list[Node]], through: dict[Node, list[int]]
    ) -> None:
        """Add the sequences of `node` (its parent is cached) and of nodes below to `through`."""
        # list the node, and all nodes below it
        order = [node]
        for above in order:
            order += children.get(above, ())
        parent = node.parent
        assert parent is not None
        # find a sequence that holds the parent
        source = self.trunk
        if parent is not self._root:
            source = next(s for tip, s in self.tips.items() if parent in _upwards(tip))
        # give every new tip a sequence, which runs through all new nodes above it
        for tip in (below for below in order if below not in children):
            if parent in self.tips:  # the first new tip takes over the parent's sequence
                sequence = self.tips.pop(parent)
            else:
                sequence = self._context.free.pop()
                length = self.committed if parent is self._root else parent.length
                self._context.copy(source, sequence, 0, length)
            self.tips[tip] = sequence
            for step in itertools.takewhile(lambda node: node is not parent, _upwards(tip)):
                through.setdefault(step, []).append(sequence)

    def reroot(self, before: Node, below: set[Node]) -> None:
        # the trunk takes over the cells up to the new root
        sources = {node: s for tip, s in self.tips.items() for node in _upwards(tip)}
        for node in reversed(list(self.tree.since(before))):
            if node in sources:
                self._context.copy(sources[node], self.trunk, self.committed, node.length)
                self.committed = self.ready = node.length
                break
        # dropped tips give their sequences back
        self._context.give_back([self.tips.pop(tip) for tip in [*self.tips] if tip not in below])

    def drop_tips(self) -> None:
        """Drop all nodes below the root."""
        self._context.give_back(self.tips.values())
        self.tips = {}

    def drop(self) -> None:
        """Give all sequences back. The request has no cached tokens any more."""
        self.drop_tips()
        self._context.give_back([self.trunk])


def _upwards(node: Node | None) -> Iterator[Node]:
    """Yield a node and its ancestors, up to a root or a former root."""
    while node is not None:
        yield node
        node = node.parent
