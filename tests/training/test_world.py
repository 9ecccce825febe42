"""The generated world: repeatable from a seed, with splits that share no name and no number."""

from __future__ import annotations

import json
import random
import re

import pytest

from adafuse_llm.documents import read_documents
from adafuse_llm.embedded import handbook_path, handbook_questions
from training.world import (
    ENDINGS,
    HANDBOOK_SEED,
    NOT_STATED,
    SKILLS,
    STARTS,
    Case,
    Names,
    Split,
    draw_case,
    draw_handbook,
    draw_problem,
    draw_scene,
    draw_sum,
    draw_sum_list,
    is_correct,
    made_up_words,
    mark_syllables,
)


def cases(split: Split, seed: int, per_skill: int) -> list[Case]:
    names = Names(random.Random(seed), split)
    return [draw_case(names, skill) for skill in SKILLS for _ in range(per_skill)]


MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
VALUE = re.compile(
    r"\d+(?:\.\d+)? (?:crowns|grams|metres|kilometres)"
    rf"|\d+ (?:{MONTHS})|\d+ [A-Z][a-z]+ (?:Street|Lane|Road|Square)|\d+:\d+"
)


def words_and_values(drawn: list[Case]) -> set[str]:
    """Return the made-up words, and the numbers with their units, in all texts."""
    made_up = {word for c in ENDINGS for s in ("train", "heldout") for word in made_up_words(c, s)}
    text = "\n".join(
        "\n".join([case.question, case.answer, *(passage.text for passage in case.passages)])
        for case in drawn
    )
    return (made_up & set(re.findall(r"[A-Z][a-z]+", text))) | set(VALUE.findall(text))


def test_the_same_seed_draws_the_same_cases() -> None:
    assert cases("heldout", 3, 5) == cases("heldout", 3, 5)
    assert cases("heldout", 3, 5) != cases("heldout", 4, 5)


@pytest.mark.parametrize("category", sorted(ENDINGS))
def test_heldout_words_are_new_pairs_of_syllables_known_from_training(category: str) -> None:
    train, heldout = (set(made_up_words(category, split)) for split in ("train", "heldout"))
    assert not train & heldout
    assert len(heldout) > 0.15 * len(train)
    for part in (*STARTS, *ENDINGS[category]):
        assert any(part in word for word in train)
        assert any(part in word for word in heldout)


def test_no_made_up_word_belongs_to_two_categories_or_splits() -> None:
    words = [word for c in ENDINGS for s in ("train", "heldout") for word in made_up_words(c, s)]
    assert len(words) == len(set(words)) == len(STARTS) * sum(map(len, ENDINGS.values()))


def test_heldout_names_and_values_never_occur_in_training_text() -> None:
    train = words_and_values(cases("train", 1, 300))
    heldout = words_and_values(cases("heldout", 2, 300))
    assert len(train) > 5000
    assert len(heldout) > 2000
    assert sorted(train & heldout) == []


@pytest.mark.parametrize("draw", ["year", "count", "thousands", "price", "time", "date", "address"])
def test_values_of_the_two_splits_are_disjoint(draw: str) -> None:
    drawn = {}
    for split in ("train", "heldout"):
        names = Names(random.Random(5), split)
        drawn[split] = {getattr(names, draw)() for _ in range(2000)}
    if draw == "address":
        drawn = {split: {a.split()[0] for a in found} for split, found in drawn.items()}
    assert drawn["train"]
    assert drawn["heldout"]
    assert not drawn["train"] & drawn["heldout"]


def test_arithmetic_problems_of_the_two_splits_are_disjoint() -> None:
    def steps(split: Split) -> set[str]:
        names = Names(random.Random(9), split)
        drawn = [draw(names) for draw in (draw_problem, draw_sum) for _ in range(3000)]
        return {case.answer for case in drawn}

    assert not steps("train") & steps("heldout")


def test_arithmetic_is_right_and_stays_below_one_hundred() -> None:
    names = Names(random.Random(11), "train")
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for case in [draw(names) for draw in (draw_problem, draw_sum) for _ in range(500)]:
        steps = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)\.", case.answer)
        assert len(steps) in (1, 2)
        for a, op, b, result in steps:
            assert operations[op](int(a), int(b)) == int(result)
            assert max(int(a), int(b), int(result)) < 100
        assert case.answer.endswith(f"The answer is {steps[-1][3]}.")


def test_a_list_of_sums_is_worked_out_in_order() -> None:
    case = draw_sum_list(Names(random.Random(3), "train"))
    sums = case.question.removeprefix("Work out: ").split("; ")
    worked_out = case.answer.split("; ")
    assert [line.split(" = ")[0] for line in worked_out] == sums
    assert 3 <= len(sums) <= 7


def test_a_stated_answer_stands_in_its_passages_and_not_stated_does_not() -> None:
    for case in cases("heldout", 6, 60):
        text = "\n".join(passage.text for passage in case.passages)
        if case.skill == "arithmetic":
            assert not case.passages
        elif case.skill == "not_stated":
            assert case.answer == NOT_STATED
        else:
            assert case.answer in text


def test_a_scene_has_questions_for_every_skill() -> None:
    names = Names(random.Random(2), "train")
    scene = draw_scene(names, 5, (6, 6))
    drawn = {skill: scene.ask(names.rng, skill) for skill in SKILLS if skill != "arithmetic"}
    assert all(case is None or case.skill == skill for skill, case in drawn.items())
    assert sum(case is not None for case in drawn.values()) >= 4


def test_mark_syllables_marks_capitalized_words_and_their_syllables() -> None:
    word = made_up_words("last", "train")[0]
    start = next(s for s in sorted(STARTS, key=len, reverse=True) if word.startswith(s))
    marked = f"|{start}|{word[len(start) :]}"
    assert mark_syllables(f"The {word}, of A Street.", "|") == f"|The {marked}, of |A |Street."


def test_is_correct_compares_the_whole_answer() -> None:
    case = Case("Who?", "Maren Tolvik", "people")
    assert is_correct(case, "Maren Tolvik.")
    assert not is_correct(case, "Maren")
    assert not is_correct(case, "Maren Tolvik and others")


def test_the_shipped_handbook_is_the_generated_one() -> None:
    handbook = draw_handbook(Names(random.Random(HANDBOOK_SEED), "heldout"))
    shipped = {path.name: path.read_text(encoding="utf-8") for path in handbook_path().glob("*.md")}
    assert shipped == dict(handbook.documents)
    lines = (handbook_path() / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [tuple(json.loads(line).values()) for line in lines] == list(handbook.questions)


def test_handbook_questions_are_answered_by_their_source() -> None:
    questions = handbook_questions()
    texts = {path.name: path.read_text(encoding="utf-8") for path in handbook_path().glob("*.md")}
    assert 8 <= len(texts) <= 15
    assert sum(question.source is not None for question in questions) >= 40
    for question in questions:
        if question.source is None:
            assert question.answer == NOT_STATED
        else:
            assert question.answer in texts[question.source]


def test_every_handbook_document_is_one_passage() -> None:
    passages = read_documents([handbook_path()])
    assert len(passages) == len(list(handbook_path().glob("*.md")))
