"""Metrics of the paper's tables, compared with manual cases and with other implementations."""

from __future__ import annotations

import json
import random
import re

import pytest

from adafuse_llm.evaluation.metrics import exact_match
from benchmarks.paper.metrics import (
    f1,
    lenient_match,
    lenient_number,
    load_metric,
    sentence_f1,
    sentence_recall,
    sentences,
)
from tests.support.paths import BENCHMARKS


@pytest.mark.parametrize(
    ("prediction", "accepted", "overlap"),
    [
        ("The Beatles", ["beatles!"], 1),
        ("World War", ["World War I"], 2 * 2 / 5),
        ("in World War I", ["World War II", "World War I"], 2 * 3 / 7),
        ("war war", ["war"], 2 / 3),
        ("", ["x"], 0),
        ("Paris", ["London", "Rome"], 0),
    ],
)
def test_by_hand(prediction, accepted, overlap):
    assert f1(prediction, accepted) == pytest.approx(overlap)


@pytest.mark.parametrize(
    ("prediction", "accepted", "matches"),
    [
        ("war", ["World War I"], True),
        ("the war of the worlds", ["World War I"], False),
        ("World War I and more", ["World War I"], True),  # one word longer
        ("World War I and much more", ["World War I"], False),  # two
        ("Stone, in the year 1874", ["1874"], True),  # fewer than three words: any length
        ("of the", ["World War I"], False),
        ("of the", ["in a"], False),
        ("the who", ["The Who"], True),  # only function words, so all words count
        ("", ["The Who"], False),
        ("", ["x"], False),
        ("Paris", ["London", "in Paris"], True),
    ],
)
def test_the_lenient_match_accepts_some_of_the_words(prediction, accepted, matches):
    assert lenient_match(prediction, accepted) is matches


def test_lenient_numbers_have_some_of_the_digits():
    assert lenient_number("3", ["13"])
    assert lenient_number("13", ["3"])
    assert not lenient_number("4", ["13"])
    assert not lenient_number("none", ["none"])


PREDICTIONS = ["The mill was built in 1874.", "Bread is sold here", "", "a b c d e f g"]
REFERENCES = ["The mill was founded in 1874.", "Bread is sold at this place.", "Nothing", "a b c d"]


def test_chrf_of_sums_equals_the_corpus_score_of_sacrebleu():
    theirs = pytest.importorskip("sacrebleu").CHRF().corpus_score(PREDICTIONS, [REFERENCES])
    metric = load_metric("chrf")
    kept = [
        metric.statistics(prediction, [known])
        for prediction, known in zip(PREDICTIONS, REFERENCES, strict=True)
    ]
    sums = [sum(column) for column in zip(*kept, strict=True)]
    assert metric.score(sums) == pytest.approx(theirs.score)


def answers(name, count=300):
    """Return accepted answers of a benchmark, and predictions made from them."""
    rng = random.Random(name)
    lines = (BENCHMARKS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    for line in lines:
        accepted = json.loads(line)["answer"]
        other = json.loads(rng.choice(lines))["answer"][0]
        words = accepted[0].split()
        yield (
            rng.choice([accepted[-1], other, " ".join(words[:2]), f"the {accepted[0]}.", ""]),
            accepted,
        )


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the paper's test sets are not there")
@pytest.mark.parametrize("name", ["nq", "squad", "triviaqa"])
def test_exact_match_and_f1_equal_those_of_torchmetrics(name):
    text = pytest.importorskip("torchmetrics.functional.text")
    seen = set()
    for prediction, accepted in answers(name):
        bare = (re.sub(r"\b(a|an|the)\b|[^\w\s]", "", each.lower()).strip() for each in accepted)
        if not all(bare):
            continue  # torchmetrics treats "A" as an empty answer
        known = {"answers": {"answer_start": [0] * len(accepted), "text": accepted}, "id": "1"}
        theirs = text.squad([{"prediction_text": prediction, "id": "1"}], [known])
        assert exact_match(prediction, accepted) == (theirs["exact_match"] == 100)
        assert 100 * f1(prediction, accepted) == pytest.approx(float(theirs["f1"]), abs=1e-3)
        seen.add(exact_match(prediction, accepted))
    assert seen == {True, False}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "It opened in 1870. It charges 4.35 crowns.",
            ["It opened in 1870", "It charges 4.35 crowns"],
        ),
        ("12 + 7 = 19. The answer is 19", ["12 + 7 = 19", "The answer is 19"]),
        ("- one\n- two\n\n", ["- one", "- two"]),
        ("Who? Me!", ["Who?", "Me!"]),
        (" . ", []),
        ("", []),
    ],
)
def test_sentences_end_before_whitespace(text, expected):
    assert sentences(text) == expected


@pytest.mark.quick
@pytest.mark.parametrize(
    ("answer", "recall", "f1"),
    [
        ("A is B. It has C.", 1, 1),
        ("It has C. A is B", 1, 1),
        ("A is B.", 1 / 2, 2 / 3),
        ("A is B. A is B. It has D.", 1 / 2, 2 / 5),
        ("A is B. It has C. It has D.", 1, 4 / 5),
        ("a is b.", 0, 0),
        ("", 0, 0),
    ],
)
def test_sentences_are_compared_in_any_order(answer, recall, f1):
    accepted = ("Something else.", "A is B. It has C.")
    assert sentence_recall(answer, accepted) == pytest.approx(recall)
    assert sentence_f1(answer, accepted) == pytest.approx(f1)
