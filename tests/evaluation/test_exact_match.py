"""Metrics compared with manual cases."""

from decimal import Decimal

import pytest

from adafuse_llm import InvalidInputError
from adafuse_llm.evaluation import exact_match


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles.", "beatles"),
        ("an apple, a day", "apple day"),
        ("Theatre of the absurd", "theatre of absurd"),
        ("U.S.A.", "usa"),
        ("A", "a"),  # otherwise nothing would be left
        ("---", "---"),
        ("Ärzte – ‘quoted’", "ärzte – ‘quoted’"),
        ("$1,000", "1000"),
    ],
)
def test_normalization_is_that_of_squad(text, normal):
    assert exact_match.normalize(text) == normal


@pytest.mark.parametrize(
    ("prediction", "accepted", "right"),
    [
        ("The mill was founded by Ada Brook.", ["Tom Reed", "ada brook"], True),
        ("It is the Ada, Brook", ["The Ada Brook"], True),
        ("Ada Brooks founded it", ["Ada Brook"], False),  # whole words
        ("Brook Ada founded it", ["Ada Brook"], False),
        ("14 pears", ["4 pears"], False),
        ("Ada Brook or Tom Reed", ["Ada Brook"], False),
        ("Either way, it is sink or swim.", ["sink or swim"], True),
        ("Grade A, of course", ["A"], False),  # an article in the answer, but not as a whole
        ("It was not Ada Brook", ["Ada Brook"], True),  # not understood
    ],
)
def test_an_answer_contains_an_accepted_one(prediction, accepted, right):
    assert exact_match.contains(prediction, accepted) is right


def test_answers_match_after_normalization_or_character_by_character():
    assert exact_match.exact_match("The Beatles", ["x", "beatles!"])
    assert not exact_match.exact_match("3", ["13"])
    assert exact_match.verbatim("19.88 crowns", ["x", "19.88 crowns"])
    assert not exact_match.verbatim("19.88 Crowns", ["19.88 crowns"])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is 18.", "18"),
        ("so the ANSWER IS: $1,234.50.", "1234.50"),
        ("9 * 2 = 18 dollars", "18"),
        ("5-3", "3"),
        ("it is -5", "-5"),
        ("it is -$5", "-5"),
        ("x = \u22127", "-7"),
        (r"The answer is \boxed{4}", "4"),
        (r"\boxed{\$1{,}000} is it, of 3", "1000"),
        ("The answer is 5 + 3 = 8.", "8"),
        ("The answer is 3. No: the answer is 4", "4"),
        ("The answer is\n\n**72**", "72"),
        ("work\n#### 72", "72"),
        ("3 eggs. The answer is unclear", "3"),
        (".5", "0.5"),
        ("50%", "50"),
        ("7,8", "8"),
    ],
)
def test_the_final_number(text, found):
    assert exact_match.final_number(text) == Decimal(found)


def test_numbers_are_equal_as_numbers():
    assert exact_match.number("18.00 dollars", ["Therefore, the answer is 18"])
    assert exact_match.number("$1,000", ["5", "1000"])
    assert not exact_match.number("3", ["13"])
    assert not exact_match.number("-3", ["3"])
    for text in ("", "none at all", "The answer is unknown", "$"):
        assert not exact_match.number(text, ["3", text])


def test_every_metric_reads_its_part_of_a_response():
    reply = "\n Ada Brook\nQuestion: The answer is 12."
    read = {name: metric.read(reply) for name, metric in exact_match.METRICS.items()}
    assert read["exact_match"] == read["contains"] == "Ada Brook"
    assert read["verbatim"] == "12"
    assert exact_match.final_number(read["number"]) == 12
    with pytest.raises(InvalidInputError, match="Did you mean 'exact_match'"):
        exact_match.load_metric("exact-match")
