"""The generated world: repeatable from a seed, with splits that share no name and no number."""

import random
import re
from collections.abc import Callable, Iterator

import pytest

from adafuse_llm.documents import read_documents
from adafuse_llm.embedded import handbook_path, heldout_questions
from adafuse_llm.embedded.tools import calculate
from benchmarks.heldout import KINDS, long_questions
from training.world.agent_cases import NEEDS, AgentCase, draw_agent_case
from training.world.cases import NOT_STATED, SKILLS, Case
from training.world.long_cases import ask_parts, ask_summary, draw_long_problem, draw_long_scene
from training.world.names import Names
from training.world.problems import draw_problem, draw_sum
from training.world.words import ENDINGS, Split, made_up_words

WORDS = {
    split: {w for c in ENDINGS for w in made_up_words(c, split)} for split in ("train", "heldout")
}
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
VALUE = re.compile(
    r"\d+(?:\.\d+)? (?:crowns|grams|metres|kilometres)"
    rf"|\d+ (?:{MONTHS})|\d+ [A-Z][a-z]+ (?:Street|Lane|Road|Square)|\d+:\d+"
)
STEP = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def cases(split: Split, seed: int, scenes: int) -> Iterator[Case]:
    names = Names(random.Random(seed), split)
    mix = dict.fromkeys(SKILLS, 1.0)
    for _ in range(scenes):
        scene = draw_long_scene(names, 3)
        drawn = [scene.ask(names.rng, skill) for skill in SKILLS if skill != "arithmetic"]
        drawn += [ask_parts(names, scene, mix, 0.5), ask_summary(names.rng, scene)]
        yield from filter(None, drawn)


def agent_cases(split: Split, seed: int, per_need: int) -> list[AgentCase]:
    names = Names(random.Random(seed), split)
    return [draw_agent_case(names, need) for need in NEEDS for _ in range(per_need)]


def made_up(text: str) -> set[str]:
    return set(re.findall(r"[A-Z][a-z]+", text)) & (WORDS["train"] | WORDS["heldout"])


@pytest.mark.quick
def test_the_same_seed_draws_the_same_cases() -> None:
    assert [*cases("heldout", 3, 2)] == [*cases("heldout", 3, 2)] != [*cases("heldout", 4, 2)]
    assert agent_cases("heldout", 3, 5) == agent_cases("heldout", 3, 5)


def test_heldout_names_and_values_never_occur_in_training_text() -> None:
    found: dict[str, set[str]] = {}
    for split in ("train", "heldout"):
        text = "\n".join(p.text for case in cases(split, 1, 250) for p in case.passages)
        found[split] = made_up(text) | set(VALUE.findall(text))
        assert len(found[split]) > 2000
    assert sorted(found["train"] & found["heldout"]) == []
    assert not WORDS["train"] & WORDS["heldout"]


def test_calculations_of_the_two_splits_are_disjoint() -> None:
    found = {}
    for split in ("train", "heldout"):
        names = Names(random.Random(9), split)
        draws: tuple[Callable[[Names], Case], ...] = (draw_problem, draw_sum, draw_long_problem)
        problems = {draw(names).answer for draw in draws for _ in range(1000)}
        expressions = {
            u.argument for c in agent_cases(split, 7, 100) for u in c.uses if "+" in u.argument
        }
        found[split] = problems | expressions
    assert not found["train"] & found["heldout"]


def test_the_handbook_and_the_questions_are_heldout() -> None:
    texts = [passage.text for passage in read_documents([handbook_path()])]
    for questions in (heldout_questions(), *map(long_questions, KINDS)):
        assert len(set(questions)) >= 300
        for each in questions:
            texts += [each.question, each.answer, *(passage.text for passage in each.passages)]
    words = made_up("\n".join(texts))
    assert len(words) > 1000
    assert not words & WORDS["train"]


@pytest.mark.quick
@pytest.mark.parametrize("draw", [draw_problem, draw_sum, draw_long_problem])
def test_arithmetic_is_right_and_stays_below_one_hundred(draw: Callable[[Names], Case]) -> None:
    names = Names(random.Random(11), "train")
    for case in [draw(names) for _ in range(300)]:
        steps = STEP.findall(case.answer)
        assert all(OPERATIONS[op](int(a), int(b)) == int(result) for a, op, b, result in steps)
        assert all(max(int(a), int(b), int(result)) < 100 for a, _, b, result in steps)
        assert case.answer.endswith(f"The answer is {steps[-1][3]}.")


def test_answers_state_what_their_passages_state() -> None:
    for case in cases("heldout", 6, 60):
        text = "\n".join(passage.text for passage in case.passages)
        if case.skill == "not_stated":
            assert case.answer == NOT_STATED
        elif case.skill in ("parts", "summary"):
            stated = [each for each in case.answer.split(". ") if "=" not in each]
            assert all(value in text for value in re.findall(r"\d[\d.:]*\d|\d", " ".join(stated)))
        else:
            assert case.answer in text


def test_an_agents_case_uses_the_tools_it_needs_and_its_answer_follows() -> None:
    tools = {"look_up": ["look_up"], "calculate": ["calculate"], "none": []}
    tools["both"] = ["look_up", "calculate"]
    for case in agent_cases("train", 1, 100):
        assert [use.tool for use in case.uses] == tools[case.need]
        for use in case.uses:
            if use.tool == "calculate":
                assert use.result == calculate(use.argument)
            else:
                assert use.argument in case.question
        if case.need != "none" and case.answer != NOT_STATED:
            assert case.answer.split()[0] in case.uses[-1].result
        elif case.need == "none" and case.question.startswith(("What is my", "Where do I")):
            assert any(case.answer in each.question for each in case.earlier)
