"""Metrics compared with manual cases and with other implementations, if installed."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from pathlib import Path

import pytest

from adafuse_llm import InvalidInputError, MissingDependencyError
from benchmarks.paper.metrics import (
    METRICS,
    contains,
    exact_match,
    f1,
    final_number,
    lenient_match,
    lenient_number,
    load_metric,
    normalize,
    number,
    sentence_f1,
    sentence_recall,
    sentences,
    verbatim,
)
from tests.support.paths import BENCHMARKS


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles.", "beatles"),
        ("an apple, a day", "apple day"),
        ("Theatre of the absurd", "theatre of absurd"),
        ("U.S.A.", "usa"),
        ("don't", "dont"),
        ("a", ""),
        ("Ärzte – ‘quoted’", "ärzte – ‘quoted’"),
        ("$1,000", "1000"),
    ],
)
def test_normalization_is_that_of_squad(text, normal):
    assert normalize(text) == normal


@pytest.mark.parametrize(
    ("prediction", "accepted", "exact", "overlap"),
    [
        ("The Beatles", ["beatles!"], True, 1.0),
        ("World War", ["World War I"], False, 2 * 2 / 5),
        ("in World War I", ["World War II", "World War I"], False, 2 * 3 / 7),
        ("war war", ["war"], False, 2 / 3),
        ("", ["x"], False, 0.0),
        ("A", ["a"], True, 1.0),  # normalization leaves nothing, so the text itself counts
        ("---", ["---"], True, 1.0),
        ("the", ["a"], False, 0.0),
        ("", ["A"], False, 0.0),
        (".", ["A"], False, 0.0),
        ("Paris", ["London", "Rome"], False, 0.0),
        ("3", ["13"], False, 0.0),
    ],
)
def test_exact_match_and_f1(prediction, accepted, exact, overlap):
    assert exact_match(prediction, accepted) is exact
    assert f1(prediction, accepted) == pytest.approx(overlap)


@pytest.mark.parametrize(
    ("prediction", "accepted", "right"),
    [
        ("The mill was founded by Ada Brook.", ["Tom Reed", "ada brook"], True),
        ("It is the Ada, Brook", ["The Ada Brook"], True),
        ("Ada Brook", ["Ada Brook"], True),
        ("Ada Brooks founded it", ["Ada Brook"], False),  # whole words
        ("Brook Ada founded it", ["Ada Brook"], False),
        ("Ada M. Brook founded it", ["Ada Brook"], False),
        ("Ada", ["Ada Brook"], False),
        ("14 pears", ["4 pears"], False),
        ("Ada Brook or Tom Reed", ["Ada Brook"], False),
        ("Tom, Ada Brook, Or maybe Jane", ["Ada Brook"], False),
        ("Either way, it is sink or swim.", ["sink or swim"], True),
        ("Grade A, of course", ["A"], False),  # an article in the answer, but not as a whole
        ("A", ["A"], True),
        ("", ["Ada Brook"], False),
        ("It was not Ada Brook", ["Ada Brook"], True),  # not understood
    ],
)
def test_an_answer_contains_an_accepted_one(prediction, accepted, right):
    assert contains(prediction, accepted) is right


def test_verbatim_compares_characters():
    assert verbatim("19.88 crowns", ["x", "19.88 crowns"])
    assert not verbatim("19.88 Crowns", ["19.88 crowns"])


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


def test_the_lenient_match_is_never_stricter_than_exact_match():
    rng = random.Random(1)
    words = ["the", "war", "of", "World", "I", "1874", "a", "mill"]
    for _ in range(500):
        left, right = (" ".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(2))
        if exact_match(left, [right]) and normalize(left):
            assert lenient_match(left, [right])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is 18", "18"),
        ("The answer is 18.", "18"),
        ("so the ANSWER IS: $1,234.50.", "1234.50"),
        ("9 * 2 = 18 dollars", "18"),
        ("16-3=13", "13"),
        ("5-3", "3"),
        ("it is -5", "-5"),
        ("it is -$5", "-5"),
        ("it is $-5", "-5"),
        ("x = \u22127", "-7"),
        (r"The answer is \boxed{4}", "4"),
        (r"\boxed{\$1{,}000} is it, of 3", "1000"),
        ("The answer is 5 + 3 = 8.", "8"),
        ("The answer is 18 eggs, of 20", "18"),
        ("The answer is 3. No: the answer is 4", "4"),
        ("The answer is\n\n**72**", "72"),
        ("work\n#### 72", "72"),
        ("3 eggs. The answer is unclear", "3"),
        ("1,234,567.89", "1234567.89"),
        (".5", "0.5"),
        ("50%", "50"),
        ("7,8", "8"),
    ],
)
def test_the_final_number(text, found):
    assert final_number(text) == Decimal(found)


@pytest.mark.parametrize("text", ["", "none at all", "The answer is unknown", "-", "$"])
def test_no_number(text):
    assert final_number(text) is None
    assert not number(text, ["3"])
    assert not lenient_number(text, ["3"])


def test_numbers_are_equal_as_numbers():
    assert number("18.00 dollars", ["Therefore, the answer is 18"])
    assert number("$1,000", ["5", "1000"])
    assert not number("3", ["13"])
    assert not number("-3", ["3"])
    assert lenient_number("3", ["13"])
    assert lenient_number("13", ["3"])
    assert not lenient_number("4", ["13"])


def test_scores_are_means_in_percent():
    metric = load_metric("f1")
    kept = [metric.statistics("World War", ["World War I"]), metric.statistics("x", ["x"])]
    assert metric.score([sum(column) for column in zip(*kept, strict=True)]) == pytest.approx(90)
    assert not metric.binary
    assert load_metric("exact_match").binary


def test_the_error_for_an_unknown_metric_names_the_nearest():
    with pytest.raises(InvalidInputError, match="Did you mean 'exact_match'"):
        load_metric("exact-match")


# Translation ----------------------------------------------------------------------------------

PREDICTIONS = ["The mill was built in 1874.", "Bread is sold here", "", "a b c d e f g"]
REFERENCES = ["The mill was founded in 1874.", "Bread is sold at this place.", "Nothing", "a b c d"]


def corpus(metric):
    kept = [
        metric.statistics(prediction, [known])
        for prediction, known in zip(PREDICTIONS, REFERENCES, strict=True)
    ]
    return metric.score([sum(column) for column in zip(*kept, strict=True)])


def test_chrf_of_sums_equals_the_corpus_score_of_sacrebleu():
    chrf = pytest.importorskip("sacrebleu").CHRF()
    metric = load_metric("chrf")
    assert corpus(metric) == pytest.approx(chrf.corpus_score(PREDICTIONS, [REFERENCES]).score)
    one = metric.score(metric.statistics(PREDICTIONS[0], REFERENCES[:2]))
    assert one == pytest.approx(chrf.sentence_score(PREDICTIONS[0], REFERENCES[:2]).score)


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Return the folder of sacrebleu's SentencePiece files."""
    spm = pytest.importorskip("sacrebleu.tokenizers.tokenizer_spm")
    monkeypatch.setattr(spm, "SACREBLEU_DIR", str(tmp_path))
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.mark.quick
def test_spbleu_of_sums_equals_the_corpus_score_of_sacrebleu(models):
    import sentencepiece
    from sacrebleu.metrics import BLEU

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*PREDICTIONS, *REFERENCES] * 5),
        model_prefix=str(models / "sacrebleu_tokenizer_spm"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    bleu = BLEU(tokenize="flores101")
    assert corpus(load_metric("spbleu")) == pytest.approx(
        bleu.corpus_score(PREDICTIONS, [REFERENCES]).score
    )


@pytest.mark.parametrize("failure", [OSError("no network"), SystemExit(1)])
def test_without_its_file_spbleu_raises_an_error_with_a_remedy(models, monkeypatch, failure):
    def download(*arguments):
        raise failure

    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_spm.download_file", download)
    with pytest.raises(MissingDependencyError) as caught:
        load_metric("spbleu")
    assert "--metric chrf" in str(caught.value)
    assert "sacrebleu_tokenizer_spm.model" in str(caught.value)


def test_without_sacrebleu_an_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[eval\]"):
        load_metric("chrf")


# Other implementations ------------------------------------------------------------------------


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
        if not all(map(normalize, accepted)):
            continue  # torchmetrics treats "A" as an empty answer
        known = {"answers": {"answer_start": [0] * len(accepted), "text": accepted}, "id": "1"}
        theirs = text.squad([{"prediction_text": prediction, "id": "1"}], [known])
        assert exact_match(prediction, accepted) == (theirs["exact_match"] == 100)
        assert 100 * f1(prediction, accepted) == pytest.approx(float(theirs["f1"]), abs=1e-3)
        seen.add(exact_match(prediction, accepted))
    assert seen == {True, False}


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the paper's test sets are not there")
def test_the_final_numbers_of_gsm8k_equal_those_of_the_filter_of_lm_eval():
    pattern = re.compile(
        r"(-?[$0-9.,]{2,})|(-?[0-9]+)"
    )  # lm-eval's flexible-extract takes the last match
    lines = (BENCHMARKS / "gsm8k.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        label = json.loads(line)["answer"]
        last = "".join(pattern.findall(label)[-1]).strip("$.,").replace(",", "").replace("$", "")
        assert final_number(label) == Decimal(last)


def test_this_module_tests_every_metric_without_a_download():
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(name in source for name in METRICS)


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
