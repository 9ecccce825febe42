"""Invalid results of custom backends are errors that say what the backend did wrong."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adafuse_llm import MemberError
from adafuse_llm.backends import Query, QueryResult
from adafuse_llm.backends.checks import check_results
from adafuse_llm.tree.sampling import Draw
from adafuse_llm.tree.tokens import Next, TokenTree

pytestmark = pytest.mark.quick

TREE = TokenTree([1])
QUERY = Query(TREE, (TREE.root,), (TREE.child(TREE.root, 2),), 3)
NEXT = Next((7, 8), (-0.5, -2.0), -3.0)
RESULT = QueryResult((NEXT,), (-1.0,), 1, 1)


def with_next(**changes: Any) -> list[QueryResult]:
    """Valid results but for some fields of the next-token distribution."""
    return [replace(RESULT, next=(replace(NEXT, **changes),))]


NO_NEXT: Any = {}
FAULTS: dict[str, tuple[Any, str]] = {
    "logits": (with_next(logprobs=(12.5, 1.0)), "a log-probability is 12.5, .* not logits"),
    "nan first": (with_next(logprobs=(math.nan, -1.0)), "is NaN"),
    "nan last": (with_next(logprobs=(-1.0, math.nan)), "is NaN"),
    "nan end": (with_next(end_logprob=math.nan), "is NaN"),
    "empty": (with_next(tokens=(), logprobs=()), "has 0 tokens"),
    "one too many": (with_next(tokens=(7, 8, 9)), "3 tokens and 2 log-probabilities"),
    "ascending": (with_next(logprobs=(-2.0, -0.5)), "not in descending order"),
    "duplicates": (with_next(tokens=(7, 7)), "a token more than once"),
    "ids of numpy": (with_next(tokens=(np.int64(7), 8)), "must be int"),
    "no results": ([], "0 results for 1 queries"),
    "None": (None, "not a list of QueryResult"),
    "no distribution": ([replace(RESULT, next=())], "0 distributions for 1 nodes"),
    "other distribution": ([replace(RESULT, next=(NO_NEXT,))], "not a list of QueryResult"),
    "no score": ([replace(RESULT, logprobs=())], "0 log-probabilities for 1 nodes"),
    "nan score": ([replace(RESULT, logprobs=(math.nan,))], "is NaN"),
    "high score": ([replace(RESULT, logprobs=(0.5,))], "is 0.5, but the highest"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_invalid_result_is_an_error_that_says_what_the_backend_did_wrong(fault: str) -> None:
    results, message = FAULTS[fault]
    with pytest.raises(MemberError, match=f"invalid result: .*{message}") as caught:
        check_results("x", [QUERY], results)
    assert caught.value.member == "x"
    assert message != "is NaN" or results[0].has_nan


def test_what_a_query_asks_for_must_be_there() -> None:
    with pytest.raises(MemberError, match="word_end_logprob"):
        check_results("x", [replace(QUERY, word_ends=True)], [RESULT])
    tree = TokenTree([1])
    tree.root.draw = Draw(1, 1.0, 1.0, None)
    with pytest.raises(MemberError, match="drawn ones, must be int"):
        check_results("x", [Query(tree, (tree.root,), (), 3)], [QueryResult((NEXT,), (), 1, 1)])


@pytest.mark.parametrize(
    "summary",
    [
        Next((7,), (-3.0,), -math.inf),  # a masked distribution may have one token
        Next((7, 8), (0.0, -math.inf), -math.inf),
        Next((8, 7), (-0.7, -0.7), -2.0),
        Next((8, 7), (1e-6, -14.0), 1e-6),  # rounding
        Next((8, 7), (0, -14), -20),
    ],
)
def test_valid_results_of_unusual_form_are_accepted(summary: Next) -> None:
    found = [QueryResult((summary,), (-math.inf,), 1, 1)]
    assert check_results("x", [QUERY], found) is found
    assert not found[0].has_nan
