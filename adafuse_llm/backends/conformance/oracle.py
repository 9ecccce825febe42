"""What the results of a backend must be."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from adafuse_llm.backends.base import Backend, NodeQuery, NodeResult
from adafuse_llm.backends.conformance.subject import Logits
from adafuse_llm.backends.conformance.violations import expect, fail
from adafuse_llm.tree import Next, TokenTree

WHOLE = 2**20
"""Number of likeliest tokens to request for the distribution over a whole vocabulary."""

SLACK = 8
"""Number of further tokens to request, because noise can move tokens across the end of a list."""

COMPLETE = 0.999
"""Minimum total probability of the tokens of a distribution that lists the whole vocabulary."""


@dataclass(frozen=True)
class Expected:
    """The expected summary of a next-token distribution.

    Attributes:
        logprobs: the highest log-probabilities, in descending order.
        known: log-probabilities by token id.
        end_logprob: as in `Next`.
        fewest: minimum number of tokens that a summary lists.
    """

    logprobs: Sequence[float]
    known: Mapping[int, float]
    end_logprob: float
    fewest: int


class Oracle(Protocol):
    """A source of the numbers that a backend must return."""

    def summary(self, ids: Sequence[int], top: int) -> Expected:
        """Return the expected summary of the distribution after a sequence of token ids."""
        ...

    def logprob(self, ids: Sequence[int], token: int) -> float:
        """Return the log-probability of a token after a sequence of token ids."""
        ...

    def distribution(self, ids: Sequence[int]) -> Mapping[int, float]:
        """Return the log-probabilities of all tokens after a sequence of token ids, by token id.

        The mapping is incomplete if a backend does not list its whole vocabulary.
        """
        ...


class PlainOracle:
    """An oracle that runs plain forward passes.

    Args:
        logits: as in `Subject`.
        end_ids: the backend's end-of-sequence ids.
    """

    def __init__(self, logits: Logits, end_ids: Iterable[int]) -> None:
        self._logits = logits
        self._end_ids = end_ids
        self._rows: dict[tuple[int, ...], list[float]] = {}

    def summary(self, ids: Sequence[int], top: int) -> Expected:
        known = self.distribution(ids)
        end_logprob = log_total(known.get(token, -math.inf) for token in self._end_ids)
        return summarized(known, top, end_logprob)

    def logprob(self, ids: Sequence[int], token: int) -> float:
        row = self._row(tuple(ids))
        return row[token] if token < len(row) else -math.inf

    def distribution(self, ids: Sequence[int]) -> Mapping[int, float]:
        return dict(enumerate(self._row(tuple(ids))))

    def _row(self, ids: tuple[int, ...]) -> list[float]:
        if ids not in self._rows:
            logits = np.asarray(self._logits(ids), np.float64)
            self._rows[ids] = (logits - log_total(logits)).tolist()
        return self._rows[ids]


class FreshOracle:
    """An oracle that takes the results of the same backend for new requests.

    Args:
        backend: the backend.
        ask: function that evaluates a query and checks the form of its result.
    """

    def __init__(self, backend: Backend, ask: Callable[[NodeQuery], NodeResult]) -> None:
        self._backend = backend
        self._ask = ask
        self._summaries: dict[tuple[int, ...], tuple[int, Next]] = {}
        self._logprobs: dict[tuple[tuple[int, ...], int], float] = {}

    def summary(self, ids: Sequence[int], top: int) -> Expected:
        known = self._next(ids, top + SLACK)
        logprobs = dict(zip(known.tokens, known.logprobs, strict=True))
        fewest = min(top, len(logprobs))
        return Expected(known.logprobs, logprobs, known.end_logprob, fewest)

    def logprob(self, ids: Sequence[int], token: int) -> float:
        key = (tuple(ids), token)
        if key not in self._logprobs:
            tree = TokenTree(ids)
            query = NodeQuery(tree, (tree.root,), (tree.child(tree.root, token),), top=2)
            (self._logprobs[key],) = self._fresh(query).logprobs
        return self._logprobs[key]

    def distribution(self, ids: Sequence[int]) -> Mapping[int, float]:
        known = self._next(ids, WHOLE)
        return dict(zip(known.tokens, known.logprobs, strict=True))

    def _next(self, ids: Sequence[int], top: int) -> Next:
        """Return a summary with at least `top` tokens."""
        key = tuple(ids)
        if key not in self._summaries or self._summaries[key][0] < top:
            tree = TokenTree(ids)
            (known,) = self._fresh(NodeQuery(tree, (tree.root,), (), top)).next
            self._summaries[key] = (top, known)
        return self._summaries[key][1]

    def _fresh(self, query: NodeQuery) -> NodeResult:
        try:
            return self._ask(query)
        finally:
            self._backend.release(query.tree)


def log_total(logprobs: Iterable[float]) -> float:
    """Return the logarithm of the sum of probabilities."""
    values = np.fromiter(logprobs, np.float64)
    highest = float(values.max(initial=-math.inf))
    if highest == -math.inf:
        return highest
    return highest + math.log(np.exp(values - highest).sum())


def summarized(known: Mapping[int, float], top: int, end_logprob: float) -> Expected:
    """Return the summary of a distribution."""
    logprobs = heapq.nlargest(top, known.values())
    fewest = sum(value > -math.inf for value in logprobs)
    return Expected(logprobs, known, end_logprob, fewest)


def permitted(known: Mapping[int, float], mask: bytes | None) -> Mapping[int, float]:
    """Return the part of a distribution that a mask permits."""
    if mask is None:
        return known
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return {token: known[token] for token in bits.nonzero()[0].tolist() if token in known}


def is_complete(known: Mapping[int, float]) -> bool:
    """Return whether a distribution lists all tokens."""
    return math.exp(log_total(known.values())) >= COMPLETE


def is_close(one: float, other: float, tolerance: float) -> bool:
    """Return whether two log-probabilities are equal, apart from noise."""
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)


def compare(where: str, got: Next, want: Expected, top: int, tolerance: float) -> None:
    """Compare a summary with the expected one.

    Tokens with nearly the same probability may be in any order, and any of them may be the last.

    Raises:
        BrokenRuleError: they differ.
    """
    count = len(got.tokens)
    wanted = f"{top}" if want.fewest == top else f"{want.fewest} to {top}"
    expect(
        want.fewest <= count <= top,
        f"{where}, the summary lists {count} tokens; expected {wanted}.",
    )
    lowest = got.logprobs[-1]
    for place, (token, logprob) in enumerate(zip(got.tokens, got.logprobs, strict=True)):
        known = want.known.get(token)
        if known is None and not is_close(logprob, lowest, 2 * tolerance):
            fail(
                f"{where}, token {token} is number {place + 1}, but it is not among the likeliest."
            )
        compare_logprobs(where, f"the log-probability of token {token}", logprob, known, tolerance)
        highest = want.logprobs[place] if place < len(want.logprobs) else None
        what = f"the log-probability of the likeliest token number {place + 1}"
        compare_logprobs(where, what, logprob, highest, tolerance)
    _compare_ties(where, got, want)
    compare_logprobs(where, "end_logprob", got.end_logprob, want.end_logprob, tolerance)


def compare_logprobs(
    where: str, what: str, got: float, want: float | None, tolerance: float
) -> None:
    """Compare a log-probability with the expected one, if that is known.

    Raises:
        BrokenRuleError: they differ.
    """
    if want is not None and not is_close(got, want, tolerance):
        fail(f"{where}, {what} is {got:.6g}; expected {want:.6g}.")


def _compare_ties(where: str, got: Next, want: Expected) -> None:
    """Check the order of tokens that are equally likely."""
    for place in range(len(got.tokens) - 1):
        first, second = got.tokens[place : place + 2]
        is_tie = got.logprobs[place] == got.logprobs[place + 1]
        if is_tie and first in want.known and want.known[first] == want.known.get(second):
            expect(
                first < second,
                f"{where}, tokens {first} and {second} are equally likely; expected the lower id "
                "first.",
            )
