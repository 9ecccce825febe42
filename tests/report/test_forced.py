"""Rounds whose text a grammar forced, and rounds that chose among given texts."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from adafuse_llm import Generation, Round
from adafuse_llm.report.page import page
from adafuse_llm.report.styles import owner
from adafuse_llm.summary import Summary, choice_probabilities, is_unanimous, record
from tests.report.test_report import printed

pytestmark = pytest.mark.quick

MEMBERS = ("wren", "heron")


def candidate(text: str, *proposers: str, score: float = 0.5, ends: bool = False) -> Any:
    nll = dict.fromkeys(MEMBERS, score) if score else {}
    return {"text": text, "ends": ends, "proposers": proposers, "nll": nll, "score": score}


def round_(index: int, *candidates: Any, winner: int = 0, **told: Any) -> Round:
    told = {"margins": {}, "text": candidates[winner]["text"], **told}
    return Round(index=index, candidates=candidates, winner=winner, elapsed=0.25, **told)


def forced(index: int, text: str, *, ends: bool = False) -> Round:
    return round_(index, candidate(text, score=0.0, ends=ends), forced=True)


def grown(index: int, *candidates: Any) -> Round:
    return round_(index, *candidates, margins=dict.fromkeys(MEMBERS, (0.9,)))


def chosen(scores: dict[str, float], winner: int) -> Round:
    texts = [candidate(text, score=score, ends=True) for text, score in scores.items()]
    return round_(0, *texts, winner=winner)


def generation(*rounds: Round, finish_reason: str = "stop") -> Generation:
    counts = ("prompt_tokens", "completion_tokens", "forward_passes", "tokens_processed")
    usage = dict.fromkeys((*counts, "cached_tokens"), dict.fromkeys(MEMBERS, 7))
    text = "".join(decided.text for decided in rounds)
    told = {"text": text, "rounds": rounds, "finish_reason": finish_reason, "usage": usage}
    return Generation.model_validate(told)


JSON = generation(
    forced(0, '{"name":'),
    grown(1, candidate(' "Ada', "wren"), candidate(' "Bea', "heron", score=0.75)),
    grown(2, candidate('",', *MEMBERS)),
    forced(3, ' "year": 1}', ends=True),
    finish_reason="length",
)
SCORES = {"red <b>": 3.0, "blue": 1.0, "green": 2.0}


def test_forced_rounds_count_as_no_decisions():
    summary = Summary.of(JSON.rounds)
    assert (summary.rounds, summary.forced, summary.seconds) == (4, 2, 1.0)
    assert summary.backed == {"wren": 2, "heron": 1}
    assert summary.decided == {"wren": 1, "heron": 0}
    assert (summary.words_per_round, summary.agreement) == ({1: 2}, 0.5)
    alone = Summary.of([forced(0, "{}", ends=True)])
    assert (alone.agreement, alone.backed, alone.words_per_round) == (None, {}, {})


def test_a_forced_round_has_no_owner_and_is_not_unanimous():
    for decided in (forced(0, "{"), forced(0, "}", ends=True)):
        assert is_unanimous(decided) is None
        assert choice_probabilities(decided) is None
        assert owner(decided, MEMBERS) is None
        assert (record(decided)["forced"], record(decided)["proposers"]) == (True, [])


def test_the_probabilities_of_given_texts_are_the_softmax_of_their_scores():
    decided = chosen(SCORES, 1)
    total = sum(math.exp(-score) for score in SCORES.values())
    expected = [math.exp(-score) / total for score in SCORES.values()]
    assert choice_probabilities(decided) == pytest.approx(expected)
    assert record(decided)["probability"] == pytest.approx(expected[1])
    assert choice_probabilities(chosen({"a": 2000.0, "b": 900.0}, 1)) == (0.0, 1.0)
    assert all(choice_probabilities(other) is None for other in JSON.rounds)


def test_forced_text_is_shown_as_such():
    shown, made = printed(JSON), page(JSON)
    assert shown.count("– forced by the grammar") == 3  # legend and two rounds
    for part in ("= all agree", JSON.text, "4 rounds, 2 forced", "all agreed in 1 of 2"):
        assert part in shown
    assert made.count("No member proposed or scored it") == 2
    for part in ("4 rounds · 2 forced · 5 words", "ended at a length limit"):
        assert part in made
    assert "ended by the grammar" in page(generation(*JSON.rounds))
    free = generation(*JSON.rounds[1:3])
    assert "forced" not in printed(free)
    assert "forced" not in page(free).split("</style>", 2)[-1]


def test_a_page_shows_the_probability_of_every_option():
    made = page(generation(chosen(SCORES, 1)))
    labels = re.findall(r"<dt>(.*?)</dt>.*?<dd>([\d.]+ %)</dd>", made, re.DOTALL)
    assert labels == [("blue", "66.5 %"), ("green", "24.5 %"), ("red &lt;b&gt;", "9.0 %")]
    for part, there in (("» chosen by score", 1), ("= all agree", 0), ("proposed by</th>", 0)):
        assert (part in made) == bool(there)
    many = page(generation(chosen({f"t{number}": float(number) for number in range(25)}, 0)))
    assert "5 less likely options" in many
