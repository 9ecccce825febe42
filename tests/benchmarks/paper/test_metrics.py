"""Metrics of the paper's tables, compared with manual cases and with other implementations."""

import pytest

from benchmarks.paper.metrics import f1, load_metric, sentence_f1, sentence_recall, sentences


@pytest.mark.parametrize(
    ("prediction", "accepted", "overlap"),
    [
        ("The Beatles", ["beatles!"], 1),
        ("World War", ["World War I"], 2 * 2 / 5),
        ("Paris", ["London", "Rome"], 0),
    ],
)
def test_by_hand(prediction, accepted, overlap):
    assert f1(prediction, accepted) == pytest.approx(overlap)


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


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It opened in 1870. It charges 4.35.", ["It opened in 1870", "It charges 4.35"]),
        ("- one\n- two\n\n", ["- one", "- two"]),
        ("Who? Me!", ["Who?", "Me!"]),
    ],
)
def test_sentences_end_before_whitespace(text, expected):
    assert sentences(text) == expected


@pytest.mark.quick
@pytest.mark.parametrize(
    ("answer", "recall", "f1"),
    [
        ("A is B. It has C.", 1, 1),
        ("A is B.", 1 / 2, 2 / 3),
        ("A is B. A is B. It has D.", 1 / 2, 2 / 5),
        ("", 0, 0),
    ],
)
def test_sentences_are_compared_in_any_order(answer, recall, f1):
    accepted = ("Something else.", "A is B. It has C.")
    assert sentence_recall(answer, accepted) == pytest.approx(recall)
    assert sentence_f1(answer, accepted) == pytest.approx(f1)
