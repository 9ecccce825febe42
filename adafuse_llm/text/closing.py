"""The search for a short text that completes a text of a grammar."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

from adafuse_llm.text.matchers import next_bytes

MAX_CLOSING = 10_000
"""Maximum number of bytes of the text that completes a response."""

MAX_FORCED = 1_000
"""Maximum number of bytes to which there is no alternative that are looked at."""

MAX_RANKED = 32
"""Maximum number of bytes that a step of the search compares."""

MAX_REPEATS = 16
"""Number of steps for which the same byte is chosen if the same bytes may follow."""

MAX_LOOKS = 8
"""Maximum number of steps that try hints, because the same bytes may follow as before."""

MAX_VISITED = 1_000
"""Maximum number of states that the search among many texts visits."""

MAX_SECONDS = 1.0
"""Maximum CPU time of the search for a first complete text, when a grammar is compiled."""

RESPONSE_STATES, RESPONSE_SECONDS = 10_000, 0.3
"""What the searches for texts that complete a response may cost together: states and CPU time. All
requests wait meanwhile. The states of ordinary grammars take half of the time, so only other
grammars depend on time."""

CLOSING_STATES, CLOSING_SECONDS = 500, 0.01
"""What each of these searches may cost at least."""

NO_TEXT = (
    f"no text of at most {MAX_CLOSING:,} bytes that fits the grammar was found in {MAX_SECONDS:g} "
    "s of computing. Every repetition and recursion must be able to end. Require fewer or shorter "
    "parts."
)
"""Error for a grammar without a short text."""

_SAMPLE = b'}]" !$%()*+,-./01:;<=>?@AB[^_`ab|~\n'
"""Bytes of all kinds, which stand for others if many may follow."""

_ORDER = b'}]" {['
"""Bytes that end and begin a value, with a space for all others."""

_VALUE_ENDS = b'"}],'
_LAST = frozenset([ord("\\"), *range(0x80, 0x100)])
"""Bytes that do not shorten a text: the start of an escape, and parts of longer characters."""


class Effort:
    """What a search may still cost.

    Args:
        states: number of states that it may read. Some 75,000 take a second.
        seconds: CPU time of this thread.
    """

    def __init__(self, states: float = math.inf, seconds: float = math.inf) -> None:
        self.states = states
        self._expires = time.thread_time() + seconds

    @property
    def seconds(self) -> float:
        """The CPU time that is left."""
        return self._expires - time.thread_time()

    @property
    def is_over(self) -> bool:
        """Whether the search must end."""
        return self.states < 0 or self.seconds < 0


def found_closing(state: Any, effort: Effort, hints: Sequence[bytes] = ()) -> bytes | None:
    """Complete a text. Return None if no text of at most `MAX_CLOSING` bytes was found.

    Args:
        state: a matcher over bytes, after the text. The search may change it.
        effort: what the search may cost. What it has cost is subtracted.
        hints: texts that may lead on where no single byte seems to.

    Raises:
        GrammarError: the grammar exceeds a limit of llguidance.
    """
    half = Effort(effort.states / 2, effort.seconds / 2)
    best: bytes | None = None
    for texts in [hints, ()] if hints else [()]:
        limit = MAX_CLOSING if best is None else len(best)
        shorter = _greedy_closing(state.deep_copy(), half, texts, limit)
        best = best if shorter is None else shorter
    effort.states = effort.states / 2 + half.states
    return _searched_closing(state, effort) if best is None else best


def _greedy_closing(state: Any, effort: Effort, hints: Sequence[bytes], limit: int) -> bytes | None:
    """Complete a text in fewer than `limit` bytes with the best next byte or hint at every step."""
    found = bytearray()
    before, best, repeats, looks = b"", 0, 0, MAX_LOOKS if hints else 0
    while len(found) < limit and not effort.is_over:
        if state.is_accepting():
            return bytes(found)
        following = next_bytes(state)
        if not following:
            return None
        effort.states -= 1
        repeats = repeats + 1 if following == before else 0
        before = following
        if repeats == 1 and looks:
            looks -= 1
            effort.states -= len(hints)
            hint = next((each for each in hints if _leads_on(state, each, following)), b"")
            found += hint
            state.consume_tokens(list(hint))
            if hint:
                continue
        if repeats % MAX_REPEATS == 0:
            best = _ranked(state, _sample(following), effort)[0]
        found.append(best)
        state.consume_token(best)
    return None


def _leads_on(state: Any, hint: bytes, following: bytes) -> bool:
    """Return whether other bytes may follow a hint than before it."""
    copy = state.deep_copy()
    is_read = copy.try_consume_tokens(list(hint)) == len(hint)
    return is_read and (copy.is_accepting() or next_bytes(copy) != following)


def _sample(following: bytes) -> bytes:
    """Return some of the bytes that may follow, of as many kinds as possible."""
    if len(following) <= MAX_RANKED:
        return following
    return bytes(byte for byte in _SAMPLE if byte in following) or following


def _searched_closing(state: Any, effort: Effort) -> bytes | None:
    """Complete a text with a best-first search over all bytes.

    The cost of a text is the number of steps with several possible bytes, plus the ranks of the
    chosen bytes.
    """
    order = itertools.count()
    queue: list[tuple[int, int, bytes, Any]] = [(0, next(order), b"", state)]
    for _ in range(MAX_VISITED):
        if not queue or effort.is_over:
            break
        cost, _, found, before = heapq.heappop(queue)
        reached = before.deep_copy()  # only states that are visited, which saves memory
        reached.consume_tokens(list(found[-1:]))
        following = next_bytes(reached)
        while len(following) == 1 and not reached.is_accepting() and len(found) < MAX_CLOSING:
            found += following
            reached.consume_token(following[0])
            following = next_bytes(reached)
        if reached.is_accepting():
            return found
        if len(found) < MAX_CLOSING:
            for rank, byte in enumerate(_ranked(reached, following, effort)):
                entry = (cost + 1 + rank, next(order), found + bytes([byte]), reached)
                heapq.heappush(queue, entry)
    return None


def _ranked(state: Any, candidates: bytes, effort: Effort) -> list[int]:
    """Order bytes that may follow: the byte that probably leads to the shortest text first.

    First come the bytes that close an object, an array or a string. Then come those after which the
    text may end, those after which other bytes may follow than before, those after which the fewest
    bytes must follow, and those after which the fewest may follow. Escapes, characters of several
    bytes, and bytes that open an object or an array come last.
    """
    if len(candidates) == 1:
        return [*candidates]
    following = next_bytes(state)
    ranks: list[tuple[int, ...]] = []
    for byte in candidates:
        if ranks and effort.is_over:
            break
        child = state.deep_copy()
        child.consume_token(byte)
        options, ends = next_bytes(child), child.is_accepting()
        # inside a string, a bracket is a character like others, and many may follow
        is_bracket = len(options) <= MAX_RANKED
        place = _ORDER.find(byte) if is_bracket and byte in _ORDER else _ORDER.index(b" ")
        run = _forced_bytes(child) if len(options) == 1 and not ends else 0
        effort.states -= 1 + run
        rank = (place, byte in _LAST, not ends, options == following, run, len(options), byte)
        ranks.append(rank)
    return [rank[-1] for rank in sorted(ranks)]


def _forced_bytes(state: Any) -> int:
    """Return the number of bytes to which there is no alternative, at most `MAX_FORCED`.

    Count them up to the end of the value.
    """
    for count in range(MAX_FORCED):
        following = next_bytes(state)
        if len(following) != 1 or following in _VALUE_ENDS or state.is_accepting():
            return count
        state.consume_token(following[0])
    return MAX_FORCED
