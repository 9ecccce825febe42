"""Drafts copied from earlier text, because answers often quote their passages."""

from __future__ import annotations

from collections.abc import Sequence

from adafuse_llm.decoding.member import Member
from adafuse_llm.tree import Node

MAX_COMPARED = 16
"""Maximum number of last tokens that are compared with earlier text."""


class Lookup:
    """Finds the last tokens of a member in earlier text, and copies what followed.

    Earlier text is the prompt, the answer and what members proposed. The last place of the last two
    tokens counts, or else that of the last token. A longer match lets more tokens be copied, half
    as many as are equal, because a longer quotation goes on more often.
    """

    def __init__(self) -> None:
        self._read = 0
        self._places: dict[tuple[int, ...], tuple[Sequence[int], int]] = {}

    def after(self, member: Member, node: Node) -> list[Node]:
        """Return nodes that may follow `node`, parents before children."""
        ids = member.tree.ids
        self._index(ids, self._read)
        self._read = len(ids)
        last = (*ids[-MAX_COMPARED:], *member.tree.tokens(node))[-MAX_COMPARED:]
        text, place = self._places.get(last[-2:]) or self._places.get(last[-1:]) or ((), 0)
        most = min(len(last), place)
        equal = next((n for n in range(most) if text[place - 1 - n] != last[-1 - n]), most)
        copied: list[Node] = []
        for token in text[place : place + 1 + equal // 2]:
            if token in member.end_ids or member.is_full(node):
                break
            node = member.tree.child(node, token)
            copied.append(node)
        return copied

    def add(self, member: Member, node: Node) -> None:
        """Index the path to the end of a proposal, which may be proposed again if it loses."""
        before = member.tree.ids[-MAX_COMPARED:]
        self._index([*before, *member.tree.tokens(node)], len(before))

    def _index(self, text: Sequence[int], start: int) -> None:
        """Index the tokens of a text from `start` on, by the one and by the two before them."""
        for end in range(max(start, 1), len(text)):
            for size in (1, 2):
                self._places[tuple(text[max(0, end - size) : end])] = text, end
