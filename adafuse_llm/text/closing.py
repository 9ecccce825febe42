"""The search for a short text that completes a text of a grammar."""

from __future__ import annotations

import enum
import heapq
import itertools
import math
import time
import unicodedata
from dataclasses import dataclass, replace
from typing import Any

from adafuse_llm.text.matchers import next_bytes

MAX_FORCED = 1_000
"""Maximum number of bytes of forced text that is committed at once."""

MAX_CLOSING = 10_000
"""Maximum number of bytes of the text that completes a response."""

MAX_RANKED = 32
"""Maximum number of bytes that a step of the search compares."""

MAX_REPEATS = 16
"""Number of steps for which the same byte is chosen if the same bytes may follow."""

FEW_CHOICES = 300
"""Number of choices after which the search for the text starts again and compares many texts."""

MAX_STATES = 1_000
"""Maximum number of states that this comparison visits."""

MAX_CHOICES = 2_000
"""Maximum number of choices if it finds nothing."""

SHORT = 64
"""Number of bytes of a text for which no shorter one is searched."""

SHORTER_STATES = 1_000
"""Number of states that the search for a shorter text may read."""

MAX_SECONDS = 1.0
"""Maximum CPU time of the search for a first complete text, when a grammar is compiled."""

RESPONSE_STATES = 10_000
"""Number of states that the searches for texts that complete a response may read together, in
addition to `CLOSING_STATES` for each of them."""

CLOSING_STATES = 500
"""Number of states that each of these searches may read."""

RESPONSE_SECONDS = 0.3
"""Maximum CPU time of these searches together, in addition to `CLOSING_SECONDS` for each of them.
All requests wait meanwhile. The states of ordinary grammars take half of it, so only other grammars
depend on time."""

CLOSING_SECONDS = 0.01
"""Maximum CPU time of each of these searches."""

_CLOSERS = b'}]"'
_OPENERS = b"{["
_VALUE_ENDS = b'"}],'
_LAST = frozenset([ord("\\"), *range(0x80, 0x100)])
"""Bytes that do not shorten a text: the start of an escape, and parts of longer characters."""


class Failure(enum.Enum):
    """Why no complete text was found, as a sentence for errors."""

    NONE = "no text fits the grammar. Every repetition and recursion must be able to end."
    LONG = (
        f"no text of at most {MAX_CLOSING:,} bytes that fits the grammar was found. Every "
        "repetition and recursion must be able to end. Require fewer or shorter parts."
    )
    COMPLEX = (
        f"no text that fits the grammar was found in {MAX_SECONDS:g} s of computing or "
        f"{MAX_STATES:,} steps. The grammar is too complex, or it requires too long a text. "
        "Require fewer or shorter parts."
    )


@dataclass
class Effort:
    """What a search may still cost.

    Attributes:
        states: number of states that it may read. Some 75,000 take a second.
        expires: the CPU time of this thread, in seconds, at which it is given up.
    """

    states: float = math.inf
    expires: float = math.inf

    @property
    def is_over(self) -> bool:
        """Whether the search must end."""
        return self.states < 0 or (self.expires < math.inf and time.thread_time() > self.expires)


def found_closing(state: Any, effort: Effort | None = None) -> bytes | Failure:
    """Complete a text.

    Args:
        state: a matcher over bytes, after the text. The search may change it.
        effort: what the search may cost. What it has cost is subtracted.
    """
    effort = effort or Effort()
    greedy = _greedy_closing(state.deep_copy(), FEW_CHOICES, effort)
    if isinstance(greedy, bytes):
        if len(greedy) <= SHORT:
            return greedy
        found = _searched_closing(state.deep_copy(), replace(effort, states=SHORTER_STATES))
        return min(greedy, found, key=len) if isinstance(found, bytes) else greedy
    now = time.thread_time()
    half = replace(effort, expires=now + (effort.expires - now) / 2)  # the rest is for the last try
    found = _searched_closing(state.deep_copy(), half)
    effort.states = half.states
    if found is not Failure.COMPLEX:
        return found
    if greedy is Failure.COMPLEX:
        greedy = _greedy_closing(state.deep_copy(), MAX_CHOICES, effort)
    return found if greedy is Failure.NONE else greedy


def _greedy_closing(state: Any, most: int, effort: Effort) -> bytes | Failure:
    """Complete a text with the best next byte at every step, and at most `most` choices."""
    found = bytearray()
    before, best, repeats, choices = b"", 0, 0, 0
    for _ in range(MAX_CLOSING):
        if state.is_accepting():
            return bytes(found)
        following = next_bytes(state)
        if not following:
            return Failure.NONE
        effort.states -= 1
        if choices > most or effort.is_over:
            return Failure.COMPLEX
        if following != before or repeats == MAX_REPEATS:
            best = (
                following[0]
                if len(following) == 1
                else _ranked(state, _sample(following), effort)[0]
            )
            repeats, choices = 0, choices + (len(following) > 1)
        before, repeats = following, repeats + 1
        found.append(best)
        state.consume_token(best)
    return Failure.LONG


def _sample(following: bytes) -> bytes:
    """Return at most `MAX_RANKED` of the bytes that may follow, of as many kinds as possible."""
    if len(following) <= MAX_RANKED:
        return following
    kinds: dict[str, list[int]] = {}
    for byte in following:
        kinds.setdefault(unicodedata.category(chr(byte)) if byte < 0x80 else "", []).append(byte)
    chosen = (byte for kind, found in kinds.items() if kind for byte in found[:2])
    return bytes({*chosen, *(byte for byte in _CLOSERS if byte in following)}) or following


def _searched_closing(state: Any, effort: Effort) -> bytes | Failure:
    """Complete a text with a best-first search over all bytes.

    The cost of a text is the number of steps with several possible bytes, plus the ranks of the
    chosen bytes. The search is given up after `MAX_STATES` states.
    """
    order = itertools.count()
    queue: list[tuple[int, int, bytes, Any]] = [(0, next(order), b"", state)]
    is_cut = False
    for _ in range(MAX_STATES):
        if not queue:
            return Failure.LONG if is_cut else Failure.NONE
        if effort.is_over:
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
        if len(found) >= MAX_CLOSING:
            is_cut = True
            continue
        for rank, byte in enumerate(_ranked(reached, following, effort)):
            heapq.heappush(queue, (cost + 1 + rank, next(order), found + bytes([byte]), reached))
    return Failure.COMPLEX


def _ranked(state: Any, candidates: bytes, effort: Effort) -> list[int]:
    """Order bytes that may follow: the byte that probably leads to the shortest text first.

    First come the bytes that close an object, an array or a string. Then come the bytes after which
    the text may end now or after one more byte, then the bytes after which other bytes may follow
    than before, then the bytes after which the fewest bytes must follow, and then the bytes after
    which the fewest bytes may follow. Escapes, characters of several bytes, and bytes that open an
    object or an array come last.
    """
    following = next_bytes(state)
    ranks: list[tuple[int, ...]] = []
    for byte in candidates:
        if ranks and effort.is_over:
            break
        child = state.deep_copy()
        child.consume_token(byte)
        options = next_bytes(child)
        # inside a string, a bracket is a character like others, and many may follow
        closer = _CLOSERS.find(byte) if len(options) <= MAX_RANKED else -1
        ends = bool(child.is_accepting())
        soon = not ends and len(options) <= 4 and any(_ends_after(child, each) for each in options)
        place = closer if closer >= 0 else len(_CLOSERS)
        opens = byte in _OPENERS and len(options) <= MAX_RANKED
        run = _forced_bytes(child) if len(options) == 1 and not ends else 0
        loops = options == following
        effort.states -= 1 + run
        rank = (place, opens, byte in _LAST, not ends, not soon, loops, run, len(options))
        ranks.append((*rank, byte))
    return [byte for *_, byte in sorted(ranks)]


def _forced_bytes(state: Any) -> int:
    """Return the number of bytes to which there is no alternative, at most `MAX_FORCED`.

    Count them up to the end of the value.
    """
    state = state.deep_copy()
    for count in range(MAX_FORCED):
        following = next_bytes(state)
        if len(following) != 1 or following in _VALUE_ENDS or state.is_accepting():
            return count
        state.consume_token(following[0])
    return MAX_FORCED


def _ends_after(state: Any, byte: int) -> bool:
    child = state.deep_copy()
    child.consume_token(byte)
    return bool(child.is_accepting())
