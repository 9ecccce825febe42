"""Drafts copied from earlier text: quotations, and the rest of words that occurred before."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice

from adafuse_llm.decoding.hit_rate import DRAFT_CHANCE, MAX_DRAFT_TOKENS, HitRate
from adafuse_llm.decoding.member import Member
from adafuse_llm.tree import Node

MAX_CONTEXT = 8
"""Maximum number of last tokens that are compared with earlier text."""

MAX_OCCURRENCES = 8
"""Number of earlier occurrences that are compared, from the most recent one."""

MAX_GUESSES = 3
"""Maximum number of different next tokens that are guessed."""

PRIORS_ONCE = (0.4, 0.5, 0.8, 0.8)
PRIORS_OFTEN = (0.8, 0.9, 0.9, 0.95)
PRIORS_DIFFERENT = (0.3, 0.6, 0.5, 0.3)
PRIOR_OTHER = 0.2
"""Initial hit rates by number of equal tokens: 1, 2 or 3, 4 to 7, and 8. They depend on whether one
token followed once, the same token followed more often, or different tokens followed. In the last
case, the most recent one has the hit rate of the list, and the others have `PRIOR_OTHER`. These
values were measured on prose of the embedded members."""

Occurrence = tuple[Sequence[int], int]
"""Tokens, and the index of the token that follows the indexed ones."""


class Lookup:
    """Index of tokens that finds earlier occurrences of a member's last few tokens.

    The index contains the prompt, the response and the candidates that did not win. Only the
    occurrences that have the most equal tokens before them count. The first use reads the prompt,
    which takes less than a microsecond per token.
    """

    def __init__(self) -> None:
        self._read = 0
        self._occurrences: defaultdict[tuple[int, ...], list[Occurrence]] = defaultdict(list)
        self._rates: dict[tuple[int, int, int], HitRate] = {}

    def after(
        self, member: Member, node: Node, chance: float, threshold: float = DRAFT_CHANCE
    ) -> list[Node]:
        """Return nodes that may follow `node`, parents before children.

        Args:
            member: the member whose tokens are indexed.
            node: the node to continue.
            chance: chance that the response reaches `node`.
            threshold: lowest chance at which a token is drafted.
        """
        self.read(member)
        found: list[Node] = []
        tips = [(chance, node, _last(member, node))]
        while tips and len(found) < MAX_DRAFT_TOKENS:
            tip = max(tips, key=lambda each: each[0])
            tips.remove(tip)
            chance, node, last = tip
            if member.is_full(node):
                continue
            for token, guess in self._guesses(last):
                if chance * guess.value >= threshold and token not in member.end_ids:
                    found.append(member.tree.child(node, token))
                    tips.append((chance * guess.value, found[-1], (*last, token)[-MAX_CONTEXT:]))
        return found

    def read(self, member: Member) -> None:
        """Index the committed tokens that are not in the index yet, and update the hit rates."""
        ids = member.tree.ids
        if not self._read:
            self._index(ids, 1)
            self._read = len(ids)
        for end in range(self._read, len(ids)):
            for token, rate in self._guesses(tuple(ids[max(0, end - MAX_CONTEXT) : end])):
                rate.learn(token == ids[end])
            self._index(ids, end, end + 1)
        self._read = len(ids)

    def add(self, member: Member, node: Node) -> None:
        """Index the path to a node that will not be committed."""
        self.read(member)
        before = member.tree.ids[-MAX_CONTEXT:]
        self._index([*before, *member.tree.tokens(node)], len(before))

    def _index(self, tokens: Sequence[int], start: int, stop: int | None = None) -> None:
        """Index the tokens from `start` to `stop`, which follow the tokens before them."""
        for end in range(start, len(tokens) if stop is None else stop):
            occurrence = (tokens, end)
            self._occurrences[(tokens[end - 1],)].append(occurrence)
            if end > 1:
                self._occurrences[tokens[end - 2], tokens[end - 1]].append(occurrence)

    def _guesses(self, last: tuple[int, ...]) -> list[tuple[int, HitRate]]:
        """Return guesses of the token after `last`, the most recent one first."""
        occurrences = self._occurrences.get(last[-2:]) or self._occurrences.get(last[-1:])
        if not occurrences:
            return []
        longest, following = 0, Counter[int]()
        for tokens, end in islice(reversed(occurrences), MAX_OCCURRENCES):
            equal = _equal(tokens, end, last)
            if equal > longest:
                longest, following = equal, Counter()
            if equal == longest:
                following[tokens[end]] += 1
        size = longest.bit_length() - 1
        if len(following) == 1:
            ((token, count),) = following.items()
            return [(token, self._measured(size, min(count, 2), 0))]
        tokens = list(following)[:MAX_GUESSES]
        return [(token, self._measured(size, 0, rank)) for rank, token in enumerate(tokens)]

    def _measured(self, size: int, count: int, rank: int) -> HitRate:
        """Return the hit rate of a guess.

        Args:
            size: binary logarithm of the number of equal tokens.
            count: 0 if different tokens followed; 1 or 2 if one token followed once or more often.
            rank: number of guesses before this one.
        """
        rate = self._rates.get((size, count, rank))
        if rate is None:
            priors = (PRIORS_DIFFERENT, PRIORS_ONCE, PRIORS_OFTEN)[count]
            prior = PRIOR_OTHER if rank else priors[size]
            rate = self._rates[size, count, rank] = HitRate(prior)
        return rate


def _last(member: Member, node: Node) -> tuple[int, ...]:
    """Return the last tokens up to a node."""
    return (*member.tree.ids[-MAX_CONTEXT:], *member.tree.tokens(node))[-MAX_CONTEXT:]


def _equal(tokens: Sequence[int], end: int, last: Sequence[int]) -> int:
    """Return how many of the last tokens stand before the index `end` of `tokens`."""
    most = min(end, len(last))
    for equal in range(most):
        if tokens[end - 1 - equal] != last[-1 - equal]:
            return equal
    return most
