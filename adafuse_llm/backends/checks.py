"""Check how many tokens a backend can list, and the results that it returns."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from itertools import islice

from adafuse_llm.backends.base import Backend, Query, QueryResult
from adafuse_llm.errors import InvalidOptionError, MemberError
from adafuse_llm.tree.tokens import Next, Node

ROUNDING = 0.01
"""Amount by which rounding errors may raise a log-probability above 0."""


def check_listed(members: Sequence[Backend], top: int) -> None:
    """Raise an InvalidOptionError if a member cannot list the `top` likeliest tokens."""
    for member in members:
        if member.listed_limit is not None and member.listed_limit < top:
            raise InvalidOptionError(
                f"the request needs the {top} likeliest tokens, but member {member.name!r} lists "
                f"{member.listed_limit} at most. Raise the limit of its server (vLLM: "
                f"--max-logprobs {top}), lower branching_factor or top_logprobs, or leave the "
                "member out with use=[...]."
            )


def check_results(
    name: str, queries: Sequence[Query], results: Sequence[QueryResult]
) -> Sequence[QueryResult]:
    """Return a member's results if they have the form that `Backend.evaluate` promises.

    Raises:
        MemberError: a result is invalid. The message says what the backend did wrong.
    """
    try:
        fault = next(_faults(queries, results), None)
    except (AttributeError, TypeError) as error:
        fault = f"it is not a list of QueryResult objects with Next objects ({error})"
    if fault is not None:
        raise MemberError(name, f"its backend returned an invalid result: {fault}")
    return results


def _faults(queries: Sequence[Query], results: Sequence[QueryResult]) -> Iterator[str]:
    # each check relies on the ones before it, so only the first fault counts
    if len(results) != len(queries):
        yield f"{len(results)} results for {len(queries)} queries"
    for query, result in zip(queries, results, strict=True):
        if len(result.next) != len(query.evaluate):
            yield f"{len(result.next)} distributions for {len(query.evaluate)} nodes"
        if len(result.logprobs) != len(query.score):
            yield f"{len(result.logprobs)} log-probabilities for {len(query.score)} nodes"
        values = [*result.logprobs]
        for node, summary in zip(query.evaluate, result.next, strict=True):
            yield from _faults_of(query, node, summary)
            values += summary.values
        if any(map(math.isnan, values)):
            yield "a log-probability is NaN, so its logits are NaN or infinite"
        if max(values, default=0.0) > ROUNDING:
            yield (
                f"a log-probability is {max(values):.6g}, but the highest possible value is 0. "
                "Return natural logarithms of probabilities, not logits"
            )


def _faults_of(query: Query, node: Node, summary: Next) -> Iterator[str]:
    tokens, logprobs = summary.tokens, summary.logprobs
    if not tokens or len(tokens) != len(logprobs):
        yield (
            f"a distribution has {len(tokens)} tokens and {len(logprobs)} log-probabilities; it "
            "must have at least one token, and a log-probability for each"
        )
    if len(set(tokens)) < len(tokens):
        yield f"a distribution has a token more than once: {tokens}"
    if any(map(operator.lt, logprobs, islice(logprobs, 1, None))):
        yield "a distribution's tokens are not in descending order of probability"
    if {*map(type, tokens)} != {int} or (node.draw is not None and type(summary.drawn) is not int):
        yield f"all tokens, also drawn ones, must be int; got {tokens} and {summary.drawn}"
    if query.word_ends and summary.word_end_logprob is None:
        yield (
            "a distribution has no word_end_logprob, which the query asks for. Set it, or choose a "
            "strategy that does not need it, such as 'adafuse'"
        )
