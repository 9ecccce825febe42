"""Typed questions to real members: no answer changes with the order of its options."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adafuse_llm import AdaFuseEngine, Choice, Predicate, Score
from adafuse_llm.decisions import Question
from tests.support.deciding import assert_reads_a_state_once
from tests.support.models import TEXT

pytestmark = [pytest.mark.real, pytest.mark.gguf]

TEAMS = {"billing": "invoices", "sales": "prices", "technical": "bugs", "legal": "", "other": ""}
LEVELS = ["calm", "concerned", "angry", "furious"]
ANGRY, URGENT = "How angry is the writer?", Predicate("Does this need an answer today?")
STATES = ["Stripe fails whenever I connect my account.", {"text": TEXT[:300]}, "A refund, please!"]


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(STATES),
    st.permutations([*TEAMS]),
    st.integers(2, len(TEAMS)),
    st.integers(0, len(LEVELS) - 1),
)
def test_no_answer_changes_with_the_order_of_its_options(
    real_gguf: dict[str, Any], state: Any, teams: list[str], size: int, turn: int
) -> None:
    known = {name: TEAMS[name] for name in teams[:size]}
    turned = LEVELS[turn:] + LEVELS[:turn]  # members read the same cyclic orders of it
    first: dict[str, Question] = {
        "team": Choice("Which team?", known),
        "mood": Score(ANGRY, LEVELS),
        "urgent": URGENT,
    }
    second: dict[str, Question] = {
        "urgent": URGENT,
        "mood": Score(ANGRY, turned),
        "team": Choice("Which team?", dict(sorted(known.items(), reverse=True))),
    }
    with AdaFuseEngine([real_gguf["smollm"], real_gguf["qwen"]]) as engine:
        one, other = (engine.decide(state, each, weights=[1, 2]) for each in (first, second))
    for name in first:
        assert one[name].probabilities == pytest.approx(other[name].probabilities, abs=1e-4)
        for member, own in one[name].members.items():
            assert own == pytest.approx(other[name].members[member], abs=1e-4)


def test_members_read_a_long_state_once_for_eight_questions(
    real_gguf: dict[str, Any], real_backends: dict[str, Any]
) -> None:
    state = " ".join(8 * TEXT.split())
    for members in ([real_gguf["smollm"], real_gguf["qwen"]], [real_backends["smollm"]]):
        with AdaFuseEngine(members) as engine:
            assert min(map(len, engine.encode_text(state).values())) >= 900
            assert_reads_a_state_once(engine, state, 8)
