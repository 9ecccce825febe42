"""The tools of the embedded members."""

import pytest

from adafuse_llm.embedded import handbook_questions
from adafuse_llm.embedded.tools import calculate, look_up
from adafuse_llm.errors import InvalidInputError


@pytest.mark.quick
def test_calculate_is_exact_and_takes_sums_only() -> None:
    sums = {
        "2 * (4.50 - 1.25) + 1": "7.50",
        "-3 + 5": "2",
        " 0.1 + 0.2 ": "0.3",
        "100 * 100": "10000",
    }
    assert {each: calculate(each) for each in sums} == sums
    for other in ("", "1 +", "2 ** 9", "abs(-1)", "__import__('os')", "True + 1"):
        with pytest.raises(InvalidInputError, match="decimal numbers"):
            calculate(other)


@pytest.mark.quick
def test_look_up_finds_the_document_of_every_name_in_the_handbook() -> None:
    for question in handbook_questions():
        if question.source:
            name = question.source.removesuffix(".md").replace("-", " ").title()
            assert look_up(name).startswith("[1] # " + name)
