"""Generated questions with long answers: what they state is in the passages, and sums are right."""

from __future__ import annotations

import random
import re

import pytest

from benchmarks.paper.metrics import sentences
from training.world import (
    ENDINGS,
    LONG_TASKS,
    SKILLS,
    Case,
    LongTask,
    Names,
    Split,
    ask_parts,
    ask_summary,
    draw_long_case,
    draw_long_problem,
    draw_scene,
    made_up_words,
)
from training.world.scenes import Scene

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
STEP = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")


def cases(task: LongTask, split: Split = "heldout", seed: int = 3, n: int = 100) -> list[Case]:
    names = Names(random.Random(seed), split)
    return [draw_long_case(names, task) for _ in range(n)]


@pytest.mark.quick
@pytest.mark.parametrize("task", LONG_TASKS)
def test_the_same_seed_draws_the_same_cases(task: LongTask) -> None:
    assert cases(task, n=5) == cases(task, n=5)
    assert cases(task, n=5) != cases(task, n=5, seed=4)


@pytest.mark.parametrize("task", ["parts", "summary"])
def test_every_number_and_name_of_an_answer_is_in_one_passage(task: LongTask) -> None:
    for case in cases(task):
        stated = [each for each in sentences(case.answer) if "=" not in each]
        assert stated
        for sentence in stated:
            found = re.findall(r"\d[\d.:]*\d|\d|(?<!^)\b[A-Z][a-z]+", sentence)
            assert any(all(each in p.text for each in found) for p in case.passages), sentence


def test_a_question_of_several_parts_has_a_sentence_for_each() -> None:
    numbers = set()
    for case in cases("parts"):
        n_parts = len(re.split(r", and |, | and ", case.question))
        assert len(sentences(case.answer)) == n_parts
        numbers.add(n_parts)
    assert numbers == {2, 3, 4}


def test_a_summary_states_its_facts_in_the_order_of_the_passage() -> None:
    for case in cases("summary"):
        facts, asked = sentences(case.answer), case.question.lower()
        assert len(facts) >= 3
        values = [re.findall(r"\d[\d.:]*\d|\d", fact) for fact in facts]
        named = (p for p in case.passages if p.source[:-3].replace("-", " ") in asked)
        (text,) = (p.text for p in named)
        if all(values):
            places = [re.search(rf"\b{re.escape(each[-1])}\b", text) for each in values]
            starts = [found.start() for found in places if found]
            assert starts == sorted(starts)


@pytest.mark.quick
def test_long_problems_are_right_and_stay_below_one_hundred() -> None:
    names = Names(random.Random(11), "train")
    for case in [draw_long_problem(names) for _ in range(300)]:
        steps = STEP.findall(case.answer)
        assert 3 <= len(steps) <= 5
        assert case.answer.endswith(f"The answer is {steps[-1][3]}.")
        for (a, op, b, result), after in zip(steps, [*steps[1:], None], strict=True):
            assert OPERATIONS[op](int(a), int(b)) == int(result)
            assert max(int(a), int(b), int(result)) < 100
            assert after is None or after[0] == result


def test_calculations_within_an_answer_are_right() -> None:
    steps = [step for case in cases("parts", n=300) for step in STEP.findall(case.answer)]
    assert len(steps) > 30
    assert all(OPERATIONS[op](int(a), int(b)) == int(result) for a, op, b, result in steps)


def test_calculations_and_problems_of_the_two_splits_are_disjoint() -> None:
    drawn: dict[Split, set[tuple[str, ...]]] = {}
    for split in ("train", "heldout"):
        split_cases = [*cases("parts", split, n=1500), *cases("reasoning", split, n=1500)]
        drawn[split] = {
            (case.skill, *map("".join, STEP.findall(case.answer)))
            for case in split_cases
            if "=" in case.answer
        }
    assert len(drawn["train"]) > 1000
    assert not drawn["train"] & drawn["heldout"]


def test_heldout_names_and_values_never_occur_in_training_text() -> None:
    made_up = {word for c in ENDINGS for s in ("train", "heldout") for word in made_up_words(c, s)}
    value = re.compile(r"\d+(?:\.\d+)? (?:crowns|grams|metres|kilometres)|\d+:\d+")

    def found(split: Split) -> set[str]:
        drawn = [case for task in ("parts", "summary") for case in cases(task, split, n=300)]
        text = "\n".join(p.text for case in drawn for p in case.passages)
        return (made_up & set(re.findall(r"[A-Z][a-z]+", text))) | set(value.findall(text))

    train, heldout = found("train"), found("heldout")
    assert len(heldout) > 1000
    assert sorted(train & heldout) == []


def test_a_scene_without_enough_facts_has_no_such_question() -> None:
    names = Names(random.Random(1), "train")
    scene: Scene = draw_scene(names, 2, (1, 1), same_kind=1.0)
    assert ask_summary(names.rng, scene) is None
    one = Scene(scene.entities[:1], scene.passages[:1], ())
    assert ask_parts(names, one, dict.fromkeys(SKILLS, 1.0), 0.0) is None
