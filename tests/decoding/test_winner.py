"""Which candidate wins a round."""

from __future__ import annotations

import pytest

from adafuse_llm import AdaFuseEngine, Candidate
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.decoding.score import best_candidate
from adafuse_llm.errors import DecodingError

pytestmark = pytest.mark.quick


def scored(*scores: float | None) -> list[Candidate]:
    return [Candidate(text="a", ends=False, proposers=(), nll={}, score=each) for each in scores]


@pytest.mark.parametrize(
    ("scores", "winner"),
    [((0.5, 0.2, 0.3), 1), ((0.2, 0.2), 0), ((0.3, 0.1, 0.1), 1), ((None, 0.4, 0.4), 1)],
)
def test_the_lowest_score_wins_and_the_first_of_equal_ones(
    scores: tuple[float | None, ...], winner: int
) -> None:
    assert best_candidate(scored(*scores)) == winner


def test_without_any_score_there_is_no_winner() -> None:
    with pytest.raises(DecodingError):
        best_candidate(scored(None, None))


def test_spaces_that_one_member_writes_before_a_reply_are_scored_by_the_others() -> None:
    def spaces(text: str) -> dict[str, float]:
        return {END: 1.0} if text.endswith("!") else {" ": 0.9, "Hi!": 0.1}

    def hi(text: str) -> dict[str, float]:
        return {END: 1.0} if text.endswith("!") else {"Hi!": 0.9, " ": 0.001}

    with AdaFuseEngine([FakeBackend("a", spaces), FakeBackend("b", hi)]) as engine:
        assert engine.generate(messages=[{"role": "user", "content": "Hi"}]).text == "Hi!"
