"""Statistics and descriptions of rounds, also of forced ones and of choices among texts."""

import math
from typing import Any

import pytest

from adafuse_llm import Generation, Round
from adafuse_llm.report.styles import owner
from adafuse_llm.summary import Summary, record
from tests.report.test_report import printed

pytestmark = pytest.mark.quick

MEMBERS = ("wren", "heron")


def candidate(text: str, *proposers: str, score: float = 0.5, ends: bool = False) -> Any:
    nll = dict.fromkeys(MEMBERS, score) if score else {}
    return {"text": text, "ends": ends, "proposers": proposers, "nll": nll, "score": score}


def decided(*candidates: Any, index: int = 0, winner: int = 0, **told: Any) -> Round:
    """A round of both members. By default, all margins are 0.9."""
    margins = dict.fromkeys(MEMBERS, (0.9,))
    told = {"text": candidates[winner]["text"], "margins": margins, "elapsed": 0.25, **told}
    return Round(index=index, candidates=candidates, winner=winner, **told)


def forced(text: str, *, index: int = 0, ends: bool = False) -> Round:
    written = candidate(text, score=0.0, ends=ends)
    return decided(written, index=index, forced=True, margins={})


def chosen(scores: dict[str, float], winner: int) -> Round:
    texts = [candidate(text, score=score, ends=True) for text, score in scores.items()]
    return decided(*texts, winner=winner, margins={})


def generation(*rounds: Round, finish_reason: str = "stop") -> Generation:
    counts = ("prompt_tokens", "completion_tokens", "forward_passes", "tokens_processed")
    usage = dict.fromkeys((*counts, "cached_tokens"), dict.fromkeys(MEMBERS, 7))
    text = "".join(each.text for each in rounds)
    told = {"text": text, "rounds": rounds, "finish_reason": finish_reason, "usage": usage}
    return Generation.model_validate(told)


JSON = generation(
    forced('{"name":'),
    decided(candidate(' "Ada', "wren"), candidate(' "Bea', "heron", score=0.75), index=1),
    decided(candidate('",', *MEMBERS), index=2),
    forced(' "year": 1}', index=3, ends=True),
    finish_reason="length",
)
SCORES = {"red <b>": 3.0, "blue": 1.0, "green": 2.0}


def test_a_summary_counts_what_was_backed_and_decided_and_leaves_forced_rounds_out() -> None:
    assert Summary.of(JSON.rounds).model_dump() == {
        "rounds": 4,
        "forced": 2,
        "asked": {"wren": 2, "heron": 2},
        "backed": {"wren": 2, "heron": 1},
        "decided": {"wren": 1, "heron": 0},
        "words_per_round": {1: 2},
        "agreement": 0.5,
        "seconds": 1.0,
    }
    for nothing in ([], [forced("{}", ends=True)]):
        summary = Summary.of(nothing)
        assert (summary.agreement, summary.backed, summary.words_per_round) == (None, {}, {})


@pytest.mark.parametrize(
    ("done", "unanimous"),
    [
        (decided(candidate(" a", *MEMBERS)), True),
        (decided(candidate(" a", *MEMBERS), candidate(" b", "heron")), False),  # it was unsure
        (decided(candidate(" a", "wren"), candidate(" b", "heron")), False),
        (decided(candidate(" a", "wren")), None),  # heron proposed nothing
        (decided(candidate(" a", "wren"), margins={"wren": (0.9,)}), None),  # it was alone
    ],
)
def test_a_round_is_unanimous_if_all_proposed_one_span_and_nothing_else(
    done: Round, unanimous: bool | None
) -> None:
    assert done.is_unanimous is unanimous
    assert record(done)["unanimous"] is unanimous
    assert Summary.of([done]).agreement == unanimous
    assert (owner(done, MEMBERS) is None) is bool(unanimous)


def test_the_probabilities_of_given_texts_are_the_softmax_of_their_scores() -> None:
    done = chosen(SCORES, 1)
    total = sum(math.exp(-score) for score in SCORES.values())
    expected = [math.exp(-score) / total for score in SCORES.values()]
    assert done.choice_probabilities == pytest.approx(expected)
    assert record(done)["probability"] == pytest.approx(expected[1])
    assert chosen({"a": 2000.0, "b": 900.0}, 1).choice_probabilities == (0.0, 1.0)
    assert all(other.choice_probabilities is None for other in JSON.rounds)


def test_forced_text_is_shown_as_such() -> None:
    shown = printed(JSON)
    assert shown.count("– forced by the grammar") == 3  # legend and two rounds
    for part in ("= all agree", JSON.text, "4 rounds, 2 forced", "all agreed in 1 of 2"):
        assert part in shown
    assert "ended at a length limit" in " ".join(shown.split())
    cut = JSON.model_copy(update={"cut_by": "the limit of 9 tokens"})
    assert "ended by the limit of 9 tokens" in " ".join(printed(cut).split())
    assert "forced" not in printed(generation(*JSON.rounds[1:3]))


def test_a_choice_shows_its_probability() -> None:
    shown = printed(generation(chosen(SCORES, 1)))
    assert "66.5 %" in shown and "» chosen by score" in shown
