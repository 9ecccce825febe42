"""Check what a backend returns."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from adafuse_llm.backends.base import Query, QueryResult
from adafuse_llm.errors import MemberError
from adafuse_llm.tree import Next, Node

ROUNDING = 0.01
"""Amount by which rounding errors may raise a log-probability above 0."""


def check_results(
    name: str, queries: Sequence[Query], results: Sequence[QueryResult]
) -> Sequence[QueryResult]:
    """Return `results` if they have the form that `Backend.evaluate` promises.

    Args:
        name: the member's name.
        queries: the queries that the member's backend evaluated.
        results: what the backend returned.

    Raises:
        MemberError: a result is invalid. The message says what the backend did wrong.
    """
    for fault in _faults(queries, results):
        raise MemberError(name, f"its backend returned an invalid result: {fault}")
    return results


def _faults(queries: Sequence[Query], results: Any) -> Iterator[str]:
    """Yield faults of results. Only the first counts: later lines rely on its absence."""
    if not isinstance(results, Sequence):
        yield f"it must return a list; it returned {_kind(results)}"
    if len(results) != len(queries):
        yield f"it returned {len(results)} results for {len(queries)} queries"
    for query, result in zip(queries, results, strict=True):
        if not isinstance(result, QueryResult):
            yield f"each result must be a QueryResult; one is {_kind(result)}"
        for what, got, wanted in (
            ("distributions", result.next, query.evaluate),
            ("log-probabilities", result.logprobs, query.score),
        ):
            if len(got) != len(wanted):
                yield f"it returned {len(got)} {what} for {len(wanted)} nodes"
        for node, summary in zip(query.evaluate, result.next, strict=True):
            yield from _faults_of(query, node, summary)
        yield from _faults_of_logprobs(result.logprobs)


def _faults_of(query: Query, node: Node, summary: Any) -> Iterator[str]:
    if not isinstance(summary, Next):
        yield f"each distribution must be a Next; one is {_kind(summary)}"
    tokens, logprobs = summary.tokens, summary.logprobs
    if not tokens or len(tokens) != len(logprobs):
        yield (
            f"a distribution has {len(tokens)} tokens and {len(logprobs)} log-probabilities; it "
            "must have at least one token, and a log-probability for each"
        )
    if others := {*map(type, tokens)} - {int}:
        yield f"token ids must be int; one is {others.pop().__name__}"
    if len(set(tokens)) < len(tokens):
        yield f"a distribution has a token more than once: {tokens}"
    yield from _faults_of_logprobs(summary.values)
    if any(map(operator.lt, logprobs, islice(logprobs, 1, None))):
        yield "a distribution's tokens are not in descending order of probability"
    if query.word_ends and summary.word_end_logprob is None:
        yield (
            "a distribution has no word_end_logprob, which the query asks for. Set it, or choose a "
            "strategy that does not need it, such as 'adafuse'"
        )
    if node.draw is not None and type(summary.drawn) is not int:
        yield f"the drawn token must be an int; it is {_kind(summary.drawn)}"


def _faults_of_logprobs(values: Iterable[float]) -> Iterator[str]:
    for value in values:
        if math.isnan(value):
            yield "a log-probability is NaN, so its logits are NaN or infinite"
        if value > ROUNDING:
            yield (
                f"a log-probability is {value:.6g}, but the highest possible value is 0. Return "
                "natural logarithms of probabilities, not logits"
            )


def _kind(value: object) -> str:
    return type(value).__name__
