"""Rounds whose text a grammar forced, and rounds that chose among given texts."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
from rich.console import Console

from adafuse_llm import Generation, Round
from adafuse_llm.report.page import page
from adafuse_llm.report.styles import owner
from adafuse_llm.summary import Summary, choice_probabilities, is_unanimous, record

pytestmark = pytest.mark.quick

MEMBERS = ("wren", "heron")


def candidate(text: str, *proposers: str, score: float = 0.5, ends: bool = False) -> Any:
    nll = dict.fromkeys(MEMBERS, score)
    told = {"text": text, "ends": ends, "proposers": proposers}
    return {**told, "nll": nll, "score": score}


def forced(index: int, text: str, *, ends: bool = False) -> Round:
    only = {**candidate(text, score=0.0, ends=ends), "nll": {}}
    told = {"index": index, "candidates": [only], "winner": 0, "text": text}
    return Round.model_validate({**told, "margins": {}, "elapsed": 0.25, "forced": True})


def grown(index: int, *candidates: Any) -> Round:
    told = {"index": index, "candidates": candidates, "winner": 0, "text": candidates[0]["text"]}
    margins = dict.fromkeys(MEMBERS, (0.9,))
    return Round.model_validate({**told, "margins": margins, "elapsed": 0.25})


def chosen(scores: dict[str, float], winner: int) -> Round:
    candidates = [candidate(text, score=score, ends=True) for text, score in scores.items()]
    told = {"index": 0, "candidates": candidates, "winner": winner, "text": list(scores)[winner]}
    return Round.model_validate({**told, "margins": {}, "elapsed": 0.25})


def generation(*rounds: Round, finish_reason: str = "stop") -> Generation:
    numbers = dict.fromkeys(MEMBERS, 7)
    usage = dict.fromkeys(
        ("prompt_tokens", "completion_tokens", "forward_passes", "tokens_processed"), numbers
    )
    return Generation.model_validate(
        {
            "text": "".join(decided.text for decided in rounds),
            "rounds": rounds,
            "finish_reason": finish_reason,
            "usage": {**usage, "cached_tokens": numbers},
        }
    )


JSON = generation(
    forced(0, '{"name":'),
    grown(1, candidate(' "Ada', "wren"), candidate(' "Bea', "heron", score=0.75)),
    grown(2, candidate('",', *MEMBERS)),
    forced(3, ' "year": 1}', ends=True),
    finish_reason="length",
)
SCORES = {"red <b>": 3.0, "blue": 1.0, "green": 2.0}
COLOR = generation(chosen(SCORES, 1))


def printed(renderable: Any, **options: Any) -> str:
    console = Console(width=100, record=True, file=io.StringIO(), **options)
    console.print(renderable)
    return console.export_text()


def test_forced_rounds_count_as_no_decisions():
    summary = Summary.of(JSON.rounds)
    assert (summary.rounds, summary.forced, summary.seconds) == (4, 2, 1.0)
    assert summary.backed == {"wren": 2, "heron": 1}
    assert summary.decided == {"wren": 1, "heron": 0}
    assert summary.words_per_round == {1: 2}
    assert summary.agreement == 0.5
    assert Summary.of_records(record(each) for each in JSON.rounds).agreement == 0.5
    alone = Summary.of([forced(0, "{}", ends=True)])
    assert (alone.rounds, alone.forced, alone.agreement) == (1, 1, None)
    assert (alone.backed, alone.decided, alone.words_per_round) == ({}, {}, {})


def test_a_forced_round_has_no_owner_and_is_not_unanimous():
    for decided in (forced(0, "{"), forced(0, "}", ends=True)):
        assert is_unanimous(decided) is None
        assert choice_probabilities(decided) is None
        assert owner(decided, MEMBERS) is None
        assert record(decided)["forced"] is True
        assert record(decided)["proposers"] == []
    assert record(grown(0, candidate("a", "wren")))["forced"] is False


def test_the_probabilities_of_given_texts_are_the_softmax_of_their_scores():
    (decided,) = COLOR.rounds
    total = sum(math.exp(-score) for score in SCORES.values())
    expected = [math.exp(-score) / total for score in SCORES.values()]
    assert choice_probabilities(decided) == pytest.approx(expected)
    assert record(decided)["probability"] == pytest.approx(expected[1])
    far = choice_probabilities(chosen({"a": 2000.0, "b": 900.0}, 1))
    assert far == (0.0, 1.0)
    for other in JSON.rounds:
        assert choice_probabilities(other) is None
        assert "probability" not in record(other)


def test_a_terminal_shows_forced_text_as_such():
    shown = printed(JSON)
    legend, text = (line for line in shown.splitlines()[:3] if line.strip())
    assert "= all agree   – forced by the grammar" in legend
    assert text.strip() == JSON.text
    assert shown.count("– forced by the grammar") == 3  # legend and two rounds
    assert "4 rounds, 2 forced" in shown
    assert "all agreed in 1 of 2" in shown
    assert "1.0 words per round" in shown
    without = printed(generation(*JSON.rounds[1:3]))
    assert "forced" not in without


def test_a_page_shows_forced_text_as_such():
    made = page(JSON)
    assert "4 rounds · 2 forced · 5 words" in made
    assert made.count('<span class="key" style="border-bottom: 3px dotted var(--quiet)">') == 1
    assert made.count('class="span"') == 4
    assert made.count("border-bottom: 3px dotted var(--quiet); --member") == 2
    assert made.count("No member proposed or scored it") == 2
    assert made.count("← committed") == 2
    assert "ended at a length limit" in made
    assert "ended by the grammar" in page(generation(*JSON.rounds))
    free = page(generation(*JSON.rounds[1:3]))
    assert "forced" not in free.split("</style>", 2)[-1]


def test_a_page_shows_the_probability_of_every_option():
    made = page(COLOR)
    assert "Probability of each option" in made
    labels = re.findall(r"<dt>(.*?)</dt>.*?<dd>([\d.]+ %)</dd>", made, re.DOTALL)
    assert labels == [("blue", "66.5 %"), ("green", "24.5 %"), ("red &lt;b&gt;", "9.0 %")]
    assert made.count('data-label="probability"') == 3
    assert "proposed by</th>" not in made
    assert "» chosen by score" in made
    assert "= all agree" not in made
    assert "Probability of each option" not in page(JSON)
    many = page(generation(chosen({f"t{number}": float(number) for number in range(25)}, 0)))
    assert "Agreement" not in made
    assert "finished" in made
    assert "5 less likely options are not shown" in many
