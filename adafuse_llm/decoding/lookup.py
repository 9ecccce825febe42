"""Drafts copied from earlier text, because answers often quote it."""

from __future__ import annotations

from collections.abc import Sequence

from adafuse_llm.decoding.member import Member
from adafuse_llm.decoding.odds import DRAFT_ODDS, PRIOR_ODDS, Odds
from adafuse_llm.tree import Node

GRAM_SIZES = (4, 3, 2)
"""Numbers of last tokens to look up, in this order. The first match is used."""


class Lookup:
    """Index of a member's committed tokens that finds earlier occurrences of the last few tokens.

    The first use builds the index, which takes about a microsecond per token of the prompt.
    """

    def __init__(self) -> None:
        self._read = 0
        self._found: list[dict[tuple[int, ...], int]] = [{} for _ in GRAM_SIZES]
        self._odds = [Odds(PRIOR_ODDS) for _ in GRAM_SIZES]

    def after(
        self, member: Member, node: Node, odds: float, threshold: float = DRAFT_ODDS
    ) -> list[Node]:
        """Return nodes that may follow `node`.

        Args:
            member: the member whose tokens are indexed.
            node: the node to continue.
            odds: odds that the response reaches `node`.
            threshold: lowest odds at which a token is drafted.
        """
        ids = member.tree.ids
        self._read_on(ids)
        last = [*ids[-GRAM_SIZES[0] :], *member.tree.tokens(node)][-GRAM_SIZES[0] :]
        for size, found, right in zip(GRAM_SIZES, self._found, self._odds, strict=True):
            start = found.get(tuple(last[-size:]))
            if start is not None:
                return self._copy(member, node, ids[start : start + right.length(odds, threshold)])
        return []

    def _copy(self, member: Member, node: Node, tokens: Sequence[int]) -> list[Node]:
        copied = []
        for token in tokens:
            if member.is_full(node) or token in member.end_ids:
                break
            node = member.tree.child(node, token)
            copied.append(node)
        return copied

    def _read_on(self, ids: Sequence[int]) -> None:
        """Index the committed tokens that are not in the index yet, and update the odds."""
        if self._read:
            for end in range(self._read, len(ids)):
                self._learn(ids, end)
        else:
            for size, found in zip(GRAM_SIZES, self._found, strict=True):
                grams = zip(*(ids[shift:] for shift in range(size)), strict=False)
                found.update(zip(grams, range(size, len(ids)), strict=False))
        self._read = len(ids)

    def _learn(self, ids: Sequence[int], end: int) -> None:
        known = False
        for size, found, odds in zip(GRAM_SIZES, self._found, self._odds, strict=True):
            gram = tuple(ids[end - size : end])
            start = found.get(gram)
            if start is not None and not known:
                odds.learn(ids[start] == ids[end])
                known = True
            found[gram] = end
