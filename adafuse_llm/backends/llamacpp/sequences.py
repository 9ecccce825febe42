"""The sequences of llama.cpp's cache that hold the tree of a request.

A request has one sequence for its committed tokens (the trunk), and one for each tip, which is a
cached node without cached children. A node belongs to the sequences of all tips below it, so all
of them share its cell.

Cached nodes can be dropped at any time, because `TreeSequences.plan` evaluates them again if a new
node needs them. So a request can lose its tips when the cache has no room.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from adafuse_llm.backends.llamacpp.context import Context, Entry
from adafuse_llm.tree import Node, TokenTree


class FreeSequences:
    """The sequences of a context that no request uses.

    Args:
        count: number of sequences.
        context: the context.
    """

    def __init__(self, context: Context, count: int) -> None:
        self._context = context
        self._free = list(range(count))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Return an empty sequence. There must be one."""
        return self._free.pop()

    def give_back(self, sequences: Iterable[int]) -> None:
        """Empty sequences, so that they can be taken again."""
        for sequence in sequences:
            self._context.cut(sequence)
            self._free.append(sequence)


class TreeSequences:
    """The sequences of one request.

    Args:
        tree: the request's tree.
        context: the context.
        free: the free sequences of the context. The constructor takes one of them.

    Attributes:
        trunk: the sequence of the committed tokens.
        committed: number of tokens of ``tree.ids`` that are in the trunk or planned.
        ready: number of tokens of ``tree.ids`` in the trunk.
    """

    def __init__(self, tree: TokenTree, context: Context, free: FreeSequences) -> None:
        self.trunk = free.take()
        self.committed = self.ready = 0
        self._tree = tree
        self._root = tree.root
        self._context = context
        self._free = free
        self._tips: dict[Node, int] = {}

    @property
    def tips(self) -> int:
        """Number of tips."""
        return len(self._tips)

    def begin_with(self, source: int, length: int) -> None:
        """Let the trunk begin with the first `length` tokens of another sequence."""
        self._context.copy(source, self.trunk, 0, length)
        self.committed = self.ready = length

    def missing(self, nodes: Collection[Node]) -> list[Node]:
        """Return the nodes below the root that must run so that `nodes` can be evaluated.

        These are `nodes` and those of their ancestors that are not cached, parents before children.
        """
        cached = {node for tip in self._tips for node in _upwards(tip)} - {self._root}
        needed: dict[Node, None] = {}
        for node in nodes:
            line: list[Node] = []
            step: Node | None = node
            while step is not None and step is not self._tree.root and step not in needed:
                if step in cached and step is not node:
                    break
                line.append(step)
                step = step.parent
            needed.update(dict.fromkeys(reversed(line)))
        return list(needed)

    def plan(self, nodes: Sequence[Node], keep: Collection[Node]) -> list[Entry]:
        """Return the tokens that must run to evaluate `nodes`, in order, and reserve sequences.

        There must be as many free sequences as `nodes` has elements.

        Args:
            nodes: nodes below the root, which `missing` returned.
            keep: the nodes whose logits are needed; among them the root, if its logits are needed.
        """
        children: dict[Node, list[Node]] = defaultdict(list)
        for node in nodes:
            assert node.parent is not None, "the root is not below itself"
            children[node.parent].append(node)
        through: dict[Node, list[int]] = {}
        for node in nodes:
            if node.parent not in through:
                self._reserve(node, children, through)
        pending = self._tree.ids[self.committed :]
        root = [self.trunk, *dict.fromkeys(s for n in children[self._root] for s in through[n])]
        entries = [
            Entry(
                token,
                position,
                root,
                keep=self._root in keep and position == len(self._tree.ids) - 1,
            )
            for position, token in enumerate(pending, start=self.committed)
        ]
        entries += [
            Entry(node.token, node.length - 1, through[node], keep=node in keep) for node in nodes
        ]
        self.committed = len(self._tree.ids)
        return entries

    def read(self, count: int) -> list[Entry]:
        """Return the next `count` committed tokens, which extend the trunk."""
        start, self.committed = self.committed, self.committed + count
        tokens = self._tree.ids[start : self.committed]
        return [Entry(t, at, [self.trunk], keep=False) for at, t in enumerate(tokens, start)]

    def settle(self) -> None:
        """Record that all planned tokens have run."""
        self.ready = self.committed

    def _reserve(
        self, node: Node, children: dict[Node, list[Node]], through: dict[Node, list[int]]
    ) -> None:
        """Choose the sequences of `node`, whose parent is cached, and of all nodes below it."""
        order = [node]
        for each in order:
            order += children.get(each, ())
        parent = node.parent
        assert parent is not None
        source = self._source(parent)
        for tip in (each for each in order if each not in children):
            if parent in self._tips:  # the first new tip takes over the parent's sequence
                sequence = self._tips.pop(parent)
            else:
                sequence = self._free.take()
                length = self.committed if parent is self._root else parent.length
                self._context.copy(source, sequence, 0, length)
            self._tips[tip] = sequence
            step = tip
            while step is not parent:
                through.setdefault(step, []).append(sequence)
                assert step.parent is not None
                step = step.parent

    def _source(self, node: Node) -> int:
        """Return a sequence that contains a cached node."""
        if node is self._root:
            return self.trunk
        return next(s for tip, s in self._tips.items() if node in _upwards(tip))

    def follow(self) -> None:
        """Drop the nodes that the tree has dropped, and extend the trunk to the root."""
        sources = {node: s for tip, s in self._tips.items() for node in _upwards(tip)}
        for node in reversed(list(self._tree.since(self._root))):
            if node in sources:
                self._context.copy(sources[node], self.trunk, self.committed, node.length)
                self.committed = self.ready = node.length
                break
        self._root = self._tree.root
        alive = set(self._tree.nodes()) - {self._root}
        kept = {node for tip in self._tips for node in _upwards(tip) if tip in alive}
        for tip, sequence in list(self._tips.items()):
            if tip in alive:
                continue
            del self._tips[tip]
            end = next((node for node in _upwards(tip) if node in alive), None)
            if end is None or end in kept:
                self._free.give_back([sequence])
            else:  # the last cached node of a path whose end was dropped
                self._context.cut(sequence, end.length)
                self._tips[end] = sequence
                kept.update(_upwards(end))

    def drop_tips(self) -> None:
        """Drop all nodes below the root."""
        self._free.give_back(self._tips.values())
        self._tips = {}

    def drop(self) -> None:
        """Give all sequences back. The request has no cached tokens any more."""
        self.drop_tips()
        self._free.give_back([self.trunk])


def _upwards(node: Node | None) -> Iterator[Node]:
    """Yield a node and its ancestors, up to a root or a former root."""
    while node is not None:
        yield node
        node = node.parent
