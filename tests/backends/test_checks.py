"""Invalid results of custom backends are errors that say what the backend did wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adafuse_llm import AdaFuseEngine, MemberError, RuntimeConfig
from adafuse_llm.backends import FakeBackend, Query, QueryResult
from adafuse_llm.backends.checks import check_results
from adafuse_llm.tree import Next, TokenTree

pytestmark = pytest.mark.quick

WORDS = ("the", " light", " house", " is", " old")


def rule(text: str) -> dict[str, float]:
    """Continue with one of the words; the next word in turn is the likeliest."""
    turn = sum(text.count(word) for word in WORDS) % len(WORDS)
    return dict.fromkeys(WORDS, 0.05) | {WORDS[turn]: 0.7, "<end>": 0.05}


Results = list[QueryResult]


class Spoiled(FakeBackend):
    """A fake whose results a function changes once the member has evaluated `start` nodes."""

    def __init__(self, change: Callable[[Results], Any], start: int) -> None:
        super().__init__("spoiled", rule, WORDS)
        self.change = change
        self.start = start

    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        results = super().evaluate(queries)
        found: list[QueryResult] = self.change(results) if self.passes > self.start else results
        return found


def summaries(**changes: Callable[[Next], Any]) -> Callable[[Results], Results]:
    """Return a function that changes fields of all next-token distributions."""

    def change(results: Results) -> Results:
        return [
            replace(
                result,
                next=tuple(
                    replace(each, **{field: make(each) for field, make in changes.items()})
                    for each in result.next
                ),
            )
            for result in results
        ]

    return change


def logprobs(place: int, value: float) -> Callable[[Results], Results]:
    def put(summary: Next) -> tuple[float, ...]:
        values = list(summary.logprobs)
        values[place] = value
        return tuple(values)

    return summaries(logprobs=put)


def results(**changes: Callable[[QueryResult], Any]) -> Callable[[Results], Results]:
    """Return a function that changes fields of all results."""
    return lambda found: [
        replace(each, **{field: make(each) for field, make in changes.items()}) for each in found
    ]


FAULTS: dict[str, tuple[Callable[[Results], Any], str]] = {
    "infinite": (logprobs(0, math.inf), "a log-probability is inf, but the highest .* is 0"),
    "logits": (logprobs(0, 12.5), "a log-probability is 12.5, .* not logits"),
    "nan first": (logprobs(0, math.nan), "a log-probability is NaN"),
    "nan second": (logprobs(1, math.nan), "a log-probability is NaN"),
    "nan last": (logprobs(-1, math.nan), "a log-probability is NaN"),
    "nan end": (summaries(end_logprob=lambda _: math.nan), "a log-probability is NaN"),
    "infinite end": (summaries(end_logprob=lambda _: math.inf), "a log-probability is inf"),
    "empty": (summaries(tokens=lambda _: (), logprobs=lambda _: ()), "a distribution has 0 tokens"),
    "one token too many": (
        summaries(tokens=lambda each: (*each.tokens, 99)),
        r"a distribution has \d tokens and \d log-probabilities",
    ),
    "ascending": (
        summaries(logprobs=lambda each: each.logprobs[::-1]),
        "not in descending order of probability",
    ),
    "duplicates": (
        summaries(tokens=lambda each: each.tokens[:1] * len(each.tokens)),
        "a distribution has a token more than once",
    ),
    "ids of numpy": (
        summaries(tokens=lambda each: tuple(map(np.int64, each.tokens))),
        "token ids must be int; one is int64",
    ),
    "ids as text": (
        summaries(tokens=lambda each: tuple(map(str, each.tokens))),
        "token ids must be int; one is str",
    ),
    "no results": (lambda _: [], "it returned 0 results for 1 queries"),
    "too many results": (lambda found: found * 2, "it returned 2 results for 1 queries"),
    "None": (lambda _: None, "it must return a list; it returned NoneType"),
    "a generator": (lambda found: (each for each in found), "it returned generator"),
    "dicts": (lambda found: [{}] * len(found), "must be a QueryResult; one is dict"),
    "no distributions": (
        results(next=lambda _: ()),
        r"it returned 0 distributions for \d nodes",
    ),
    "one distribution too many": (
        results(next=lambda each: (*each.next, *each.next[:1])),
        r"it returned \d distributions for \d nodes",
    ),
    "another kind of distribution": (
        results(next=lambda each: tuple({} for _ in each.next)),
        "must be a Next; one is dict",
    ),
}


@pytest.mark.parametrize(
    ("fault", "start", "drafting"),
    [(fault, 4 * (n % 2), n % 4 < 2) for n, fault in enumerate(FAULTS)],
)
def test_e10_an_invalid_result_is_an_error_that_says_what_the_backend_did_wrong(
    fault: str, start: int, drafting: bool
) -> None:
    change, message = FAULTS[fault]
    spoiled = Spoiled(change, start)
    healthy = FakeBackend("healthy", rule, WORDS)
    with AdaFuseEngine([spoiled, healthy], runtime=RuntimeConfig(drafting=drafting)) as engine:
        with pytest.raises(MemberError, match=message) as caught:
            engine.generate("Go: ", max_new_tokens=12)
        assert caught.value.member == "spoiled"
        assert "its backend returned an invalid result" in str(caught.value)
        spoiled.change = lambda found: found
        assert engine.generate("Go: ", max_new_tokens=12).text


@pytest.mark.parametrize(
    ("value", "message"),
    [(math.nan, "NaN"), (math.inf, "is inf, but"), (0.5, "is 0.5, but the highest")],
)
def test_e10_an_invalid_score_of_a_node_is_an_error(value: float, message: str) -> None:
    change = results(logprobs=lambda each: tuple(value for _ in each.logprobs))
    with AdaFuseEngine([Spoiled(change, 0)]) as engine:
        with pytest.raises(MemberError, match=message) as caught:
            engine.score("Go: ", ["zebra crossing"])
        assert caught.value.member == "spoiled"


def test_e10_the_count_of_scores_is_checked() -> None:
    tree = TokenTree([1])
    query = Query(tree, (), (tree.child(tree.root, 2),), 2)
    with pytest.raises(MemberError, match="it returned 0 log-probabilities for 1 nodes"):
        check_results("x", [query], [QueryResult((), (), 1, 1)])


def test_valid_results_of_unusual_form_are_accepted() -> None:
    tree = TokenTree([1])
    query = Query(tree, (tree.root,), (tree.child(tree.root, 2),), 3)
    unusual = [
        Next((7,), (-3.0,), -math.inf),  # a masked distribution may have one token
        Next((7, 8), (0.0, -math.inf), -math.inf),
        Next((8, 7), (-0.7, -0.7), -2.0),
        Next((8, 7), (1e-6, -14.0), 1e-6),  # rounding
        Next((8, 7), (0, -14), -20),
    ]
    for summary in unusual:
        found = [QueryResult((summary,), (-math.inf,), 1, 1)]
        assert check_results("x", [query], found) is found
        assert not found[0].has_nan


@pytest.mark.parametrize(
    "result",
    [
        QueryResult((Next((1, 2), (-1.0, math.nan), -1.0),), (), 1, 1),
        QueryResult((Next((1, 2), (-1.0, -2.0), math.nan),), (), 1, 1),
        QueryResult((), (math.nan,), 1, 1),
    ],
)
def test_a_result_knows_that_it_has_nan(result: QueryResult) -> None:
    assert result.has_nan
