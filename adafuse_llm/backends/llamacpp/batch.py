"""The state of a request at a GGUF member, and the tokens of many requests that run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from adafuse_llm.backends.llamacpp.context import Entry
from adafuse_llm.backends.llamacpp.sequences import TreeSequences
from adafuse_llm.backends.logits.rows import RequestLogits
from adafuse_llm.tree import Node, TokenTree


class LlamaState(RequestLogits):
    """The state of one request: its sequences, and the logits of its nodes.

    Args:
        tree: the request's tree.
        sequences: the sequences of the request.
        reused: number of prompt tokens that the trunk begins with.
    """

    def __init__(self, tree: TokenTree, sequences: TreeSequences, reused: int) -> None:
        super().__init__(tree, reused)
        self.sequences = sequences

    @property
    def unread(self) -> int:
        """Number of committed tokens that have not run."""
        return len(self.tree.ids) - self.sequences.committed

    def follow(self) -> bool:
        """Drop the cells and logits of nodes that the tree has dropped."""
        is_cut = super().follow()
        if is_cut:
            self.sequences.follow()
        return is_cut


@dataclass(frozen=True)
class Piece:
    """Tokens that run in one call of llama.cpp.

    Attributes:
        entries: the tokens.
        parts: for each request, its state, its nodes whose logits the call returns, and its number
            of tokens. The parts are in the order of the tokens.
    """

    entries: Sequence[Entry]
    parts: Sequence[tuple[LlamaState, Sequence[Node], int]]


class Batch:
    """The tokens of requests that run together, in as few calls of llama.cpp as possible."""

    def __init__(self) -> None:
        self._added: list[tuple[LlamaState, Sequence[Entry], Sequence[Node]]] = []

    @property
    def states(self) -> list[LlamaState]:
        """The states of the requests."""
        return [state for state, _, _ in self._added]

    def add(self, state: LlamaState, entries: Sequence[Entry], nodes: Sequence[Node]) -> None:
        """Add the tokens of a request.

        Args:
            state: the request's state.
            entries: the tokens.
            nodes: the nodes of the tokens whose logits are kept, in order.
        """
        self._added.append((state, entries, nodes))

    def clear(self) -> None:
        """Remove all tokens."""
        self._added.clear()

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Yield the calls of llama.cpp, each with up to `limit` tokens."""
        entries: list[Entry] = []
        parts: list[tuple[LlamaState, Sequence[Node], int]] = []
        for state, own, nodes in self._added:
            left, kept = list(own), list(nodes)
            while left:
                room = limit - len(entries)
                now, left = left[:room], left[room:]
                count = sum(entry.keep for entry in now)
                entries += now
                parts.append((state, kept[:count], len(now)))
                kept = kept[count:]
                if len(entries) == limit:
                    yield Piece(entries, parts)
                    entries, parts = [], []
        if entries:
            yield Piece(entries, parts)
