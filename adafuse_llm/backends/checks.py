"""Check what a backend returns."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from adafuse_llm.backends.base import Query, QueryResult
from adafuse_llm.errors import MemberError
from adafuse_llm.tree import Next

ROUNDING = 0.01
"""Amount by which rounding errors may raise a log-probability above 0."""


def check_results(
    name: str, queries: Sequence[Query], results: Sequence[QueryResult]
) -> Sequence[QueryResult]:
    """Return `results` if they have the form that `Backend.evaluate` promises.

    This function runs for every evaluated node, so it looks for the fault only after a check fails.

    Args:
        name: the member's name.
        queries: the queries that the member's backend evaluated.
        results: what the backend returned.

    Raises:
        MemberError: a result is invalid. The message says what the backend did wrong.
    """
    if not isinstance(results, Sequence):
        raise _error(name, f"it must return a list; it returned {_kind(results)}")
    if len(results) != len(queries):
        raise _error(name, f"it returned {len(results)} results for {len(queries)} queries")
    for query, result in zip(queries, results, strict=True):
        if not isinstance(result, QueryResult):
            raise _error(name, f"each result must be a QueryResult; one is {_kind(result)}")
        for what, got, wanted in (
            ("distributions", result.next, query.evaluate),
            ("log-probabilities", result.logprobs, query.score),
        ):
            if len(got) != len(wanted):
                raise _error(name, f"it returned {len(got)} {what} for {len(wanted)} nodes")
        for summary in result.next:
            if not _is_valid(summary):
                raise _error(name, _fault(summary))
        _check_asked(name, query, result)
        if not _are_logprobs(result.logprobs):
            raise _error(name, _fault_of_logprobs(result.logprobs))
    return results


def _check_asked(name: str, query: Query, result: QueryResult) -> None:
    """Check that the summaries have what only some queries ask for."""
    if query.word_ends and any(each.word_end_logprob is None for each in result.next):
        raise _error(
            name,
            "a distribution has no word_end_logprob, which the query asks for. Set it, or choose a "
            "strategy that does not need it, such as 'adafuse'",
        )
    for node, summary in zip(query.evaluate, result.next, strict=True):
        if node.draw is not None and type(summary.drawn) is not int:
            raise _error(name, f"the drawn token must be an int; it is {_kind(summary.drawn)}")


def _is_valid(summary: Any) -> bool:
    """Return whether a summary is valid. A comparison with NaN is false."""
    if not isinstance(summary, Next):
        return False
    tokens, logprobs = summary.tokens, summary.logprobs
    return (
        0 < len(tokens) == len(logprobs) == len(set(tokens))
        and set(map(type, tokens)) == {int}
        and logprobs[0] <= ROUNDING
        and all(map(operator.ge, logprobs, islice(logprobs, 1, None)))
        and summary.end_logprob <= ROUNDING
        and (summary.word_end_logprob is None or summary.word_end_logprob <= ROUNDING)
    )


def _are_logprobs(values: Iterable[float]) -> bool:
    return all(value <= ROUNDING for value in values)


def _fault(summary: Any) -> str:
    """Return what is wrong with an invalid summary."""
    if not isinstance(summary, Next):
        return f"each distribution must be a Next; one is {_kind(summary)}"
    tokens, logprobs = summary.tokens, summary.logprobs
    if not tokens or len(tokens) != len(logprobs):
        return (
            f"a distribution has {len(tokens)} tokens and {len(logprobs)} log-probabilities; it "
            "must have at least one token, and a log-probability for each"
        )
    if others := [token for token in tokens if type(token) is not int]:
        return f"token ids must be int; {others[0]!r} is {_kind(others[0])}"
    if len(set(tokens)) < len(tokens):
        return f"a distribution has token {Counter(tokens).most_common(1)[0][0]} more than once"
    if not _are_logprobs(summary.values):
        return _fault_of_logprobs(summary.values)
    return "a distribution's tokens are not in descending order of probability"


def _fault_of_logprobs(values: Iterable[float]) -> str:
    worst = next(value for value in values if not value <= ROUNDING)
    if math.isnan(worst):
        return "a log-probability is NaN, so its logits are NaN or infinite"
    return (
        f"a log-probability is {worst:.6g}, but the highest possible value is 0. Return natural "
        "logarithms of probabilities, not logits"
    )


def _error(name: str, fault: str) -> MemberError:
    return MemberError(name, f"its backend returned an invalid result: {fault}")


def _kind(value: object) -> str:
    return type(value).__name__
