"""Questions with long answers: several parts, summaries, and word problems of several steps.

An answer consists of sentences. Each sentence states one fact or one step of a calculation.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Final

from training.world.cases import Case, Skill
from training.world.entities import Entity, Fact, phrase_question, with_article
from training.world.names import Names
from training.world.problems import FIRST, HOW_MANY, THEN, THINGS, apply
from training.world.scenes import Scene, draw_scene
from training.world.words import split_of_value

_SUMMARY_REQUESTS: Final = (
    "Tell me what the passages say about {s}.",
    "What do the passages say about {s}?",
    "Tell me about {s}.",
    "What is said about {s}?",
)


# Questions that follow a question about an amount, and their answers. {n} is the other number, {a}
# the amount and {r} the result.
_CALCULATIONS: Final = {
    "ticket": ("how much do {n} tickets cost", "{n} tickets cost {n} * {a} = {r} crowns."),
    "price": ("how much do {n} pieces cost", "{n} pieces cost {n} * {a} = {r} crowns."),
    "fee": ("how much do {n} guests pay", "{n} guests pay {n} * {a} = {r} crowns."),
    **{
        name: (
            f"how many {n} is that with {{n}} more",
            f"With {{n}} more it is {{a}} + {{n}} = {{r}} {n}.",
        )
        for name, n in (("staff", "people"), ("letters", "letters"))
    },
}


def draw_long_scene(
    names: Names, n_passages: int, facts: tuple[int, int] = (2, 6), same_kind: float = 0.5
) -> Scene:
    """Draw a scene like `draw_scene`, with amounts that a calculation below 100 can use."""
    return draw_scene(names, n_passages, facts, same_kind, small_amounts=0.7)


def ask_parts(
    names: Names, scene: Scene, mix: Mapping[Skill, float], calculations: float
) -> Case | None:
    """Draw a question of two to four parts that need different skills.

    Args:
        names: source of numbers.
        scene: the passages.
        mix: relative weights of the skills.
        calculations: probability of a part that calculates with an amount, if the scene has one.

    Returns:
        The question, or None if the scene does not allow two parts.
    """
    rng = names.rng
    n_parts = rng.choice((2, 2, 3, 3, 4))
    subjects = rng.sample(scene.entities, min(len(scene.entities), rng.choice((1, 1, 1, 2))))
    facts = [fact for entity in subjects for fact in entity.facts]
    rng.shuffle(facts)
    chosen: list[Fact] = []
    sums: dict[Fact, tuple[str, str]] = {}
    if rng.random() < calculations:
        for fact in facts:
            if (calculation := _draw_calculation(names, fact)) is not None:
                chosen, sums = [fact], {fact: calculation}
                break
    while len(chosen) + len(sums) < n_parts:
        known = {fact.relation.skill for fact in chosen}
        left = [fact for fact in facts if fact.relation.skill not in known]
        if not left:
            break
        weights = [mix[fact.relation.skill] for fact in left]
        chosen += rng.choices(left, weights)
    if len(chosen) + len(sums) < 2:
        return None
    rng.shuffle(chosen)
    chosen.sort(key=lambda fact: [entity.name for entity in subjects].index(fact.subject))
    questions: list[str] = []
    answers: list[str] = []
    before = ""
    for fact in chosen:
        asked = _question(rng, fact)
        questions.append(asked if not questions else asked[0].lower() + asked[1:])
        answers.append(state(fact, fact.subject == before))
        before = fact.subject
        if fact in sums:
            question, answer = sums[fact]
            questions.append(question)
            answers.append(answer)
    comma = "," if len(questions) > 2 else ""
    question = f"{', '.join(questions[:-1])}{comma} and {questions[-1]}?"
    return Case(question, " ".join(answers), "parts", scene.passages)


def _question(rng: random.Random, fact: Fact) -> str:
    while True:
        question = phrase_question(rng, fact.kind, fact.subject, fact.relation)
        if question.endswith("?"):
            return question.removesuffix("?")


def _draw_calculation(names: Names, fact: Fact) -> tuple[str, str] | None:
    """Draw a question and answer that calculate with the amount of a fact, if it is small."""
    calculation = _CALCULATIONS.get(fact.relation.name)
    amount = fact.answer.split()[0]
    if calculation is None or not amount.isdigit() or int(amount) > 48:
        return None
    question, answer = calculation
    op, a = "*" if "*" in answer else "+", int(amount)
    possible = [
        n
        for n in range(2, 50)
        if apply(op, n, a) < 100 and split_of_value(f"part {op}", 100 * n + a) == names.split
    ]
    if not possible:
        return None
    n = names.rng.choice(possible)
    values = {"n": n, "a": a, "r": apply(op, n, a)}
    return question.format(**values), answer.format(**values)


def state(fact: Fact, follows: bool) -> str:
    """State a fact in a sentence, in the first wording of its relation.

    If the sentence ``follows`` another one about the same subject, a pronoun or a person's last
    name stands for the subject.
    """
    subject = with_article(fact.kind, fact.subject)
    if follows:
        subject = fact.subject.split()[-1] if fact.kind == "person" else "It"
    text = fact.relation.statements[0].format(S=subject[0].upper() + subject[1:], A=fact.answer)
    return text[0].upper() + text[1:]


def ask_summary(rng: random.Random, scene: Scene) -> Case | None:
    """Draw a request for everything that the passages say about a subject.

    The answer states the facts in the order of the passage. Return None if no passage has at least
    three facts.
    """
    rich = [place for place, entity in enumerate(scene.entities) if len(entity.facts) >= 3]
    if not rich:
        return None
    place = rng.choice(rich)
    entity, text = scene.entities[place], scene.passages[place].text
    facts = sorted(entity.facts, key=lambda fact: _position(text, entity, fact))
    question = rng.choice(_SUMMARY_REQUESTS).format(s=entity.full)
    answer = " ".join(state(fact, number > 0) for number, fact in enumerate(facts))
    return Case(question, answer, "summary", scene.passages)


def _position(text: str, entity: Entity, fact: Fact) -> int:
    """Return the place of a fact in its passage."""
    item = text.find(f"{fact.relation.label}: {fact.answer}")
    if item >= 0:
        return item
    found = [
        match.start()
        for pattern in fact.relation.statements
        if (match := re.search(_statement(pattern, fact), text))
    ]
    if not found:
        raise ValueError(f"the passage about {entity.name} does not state {fact}")
    return min(found)


def _statement(pattern: str, fact: Fact) -> str:
    """Return a regular expression for a statement with any subject."""
    subject = r"[^.\n]{2,40}?"
    parts = re.split(r"(\{[SsA]\})", pattern)
    values = {"{S}": subject, "{s}": subject, "{A}": re.escape(fact.answer)}
    return "".join(values.get(part, re.escape(part)) for part in parts).replace("In ", "[Ii]n ")


def draw_long_problem(names: Names) -> Case:
    """Draw a word problem of three to five steps; all its numbers and results are below 100."""
    names.forget()
    rng = names.rng
    while True:
        n_steps = rng.randint(3, 5)
        ops = [rng.choice(("+", "+", "-", "-", "*"))]
        ops += rng.choices(("+", "-"), k=n_steps - 1)
        a = rng.randint(2, 9 if ops[0] == "*" else 97)
        others = [rng.randint(2, 11 if op == "*" else 60) for op in ops]
        totals = [a]
        for op, other in zip(ops, others, strict=True):
            totals.append(apply(op, totals[-1], other))
        key = sum(number * 100**place for place, number in enumerate((a, *others))) % 999999937
        if all(0 < total < 100 for total in totals) and (
            split_of_value(f"problem {''.join(ops)}", key) == names.split
        ):
            break
    values = {"t": rng.choice(THINGS), "n": names.word("first"), "m": names.word("first")}
    patterns = [rng.choice(FIRST[ops[0]]).format(a=a, b=others[0], **values)]
    patterns += [
        rng.choice(THEN[op]).format(c=other, **values)
        for op, other in zip(ops[1:], others[1:], strict=True)
    ]
    question = " ".join([*patterns, rng.choice(HOW_MANY).format(**values)])
    worked_out = [
        f"{before} {op} {other} = {after}."
        for before, op, other, after in zip(totals, ops, others, totals[1:], strict=False)
    ]
    return Case(question, " ".join([*worked_out, f"The answer is {totals[-1]}."]), "reasoning")
