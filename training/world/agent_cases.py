"""Questions for an agent that has the tools ``look_up`` and ``calculate``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from adafuse_llm.documents import Passage
from adafuse_llm.embedded.tools import calculate, one_line
from training.world.cases import NOT_STATED
from training.world.entities import Entity, draw_entity, phrase_question, render_passage
from training.world.names import Names
from training.world.problems import FIRST, HOW_MANY, THEN, THINGS
from training.world.relations import KINDS, RELATIONS
from training.world.words import split_of_value

Need = Literal["look_up", "calculate", "both", "none"]
NEEDS: Final[tuple[Need, ...]] = get_args(Need)

# Relations with an amount, the operation that a question needs, and the question.
_AMOUNTS: Final = [
    line.strip().split(" ", 2)
    for line in """
    price * How much do {n} pieces of {s} cost?
    price * What is the price of {n} pieces of {s}?
    price + What does {s} cost with {m} for postage?
    ticket * How much do {n} tickets for {s} cost?
    ticket * How much do {n} visitors of {s} pay together?
    ticket + What does entry to {s} cost with {m} for a guide?
    fee * How much do {n} guests pay at {s}?
    fee * What do {n} places at {s} cost?
    fee + What is the fee for {s} with {m} for a guide?
    weight * How much do {n} pieces of {s} weigh?
    weight * What is the weight of {n} pieces of {s}?
    staff + How many people work at {s} when {c} more join?
    staff - How large is the staff of {s} when {c} leave?
    letters + How many letters by {s} are there when {c} more are found?
    letters - How many letters by {s} are there when {c} are lost?
    population + How many people live in {s} when {c} more arrive?
    population - How many people live in {s} when {c} leave?
    visitors + How many visitors come to {s} when {c} more come?
    visitors - How many visitors come to {s} when {c} stay at home?
    """.strip().splitlines()
]
_GREETINGS: Final = ("Hello.", "Hello!", "Good morning.", "Hi!")
_SMALL_TALK: Final = (
    *((each, "Hello. What would you like to know?") for each in _GREETINGS),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye.", "Goodbye."),
)
# Statements that users make about themselves, and the questions that they ask about them later.
_STATEMENTS: Final[tuple[tuple[str, str, Callable[[Names], str]], ...]] = (
    ("My name is {A}.", "What is my name?", Names.person),
    ("I live in {A}.", "Where do I live?", Names.place),
    ("I work at the {A}.", "Where do I work?", Names.institution),
    ("I have bought the {A}.", "What have I bought?", Names.product),
    ("My friend is called {A}.", "What is my friend called?", Names.person),
    ("I have {A} in my purse.", "How much do I have in my purse?", Names.price),
)
_ACKNOWLEDGMENT: Final = "I will remember that."
_REPEAT_REQUESTS: Final = ("Please repeat your answer.", "What was that again?")


@dataclass(frozen=True)
class ToolUse:
    """One call of a tool: its name, its only argument, and its result."""

    tool: str
    argument: str
    result: str


@dataclass(frozen=True)
class AgentCase:
    """A question with its exact answer, the tool calls that it needs, and the turns before it."""

    question: str
    answer: str
    need: Need
    uses: tuple[ToolUse, ...] = ()
    earlier: tuple[AgentCase, ...] = ()


def draw_agent_case(names: Names, need: Need) -> AgentCase:
    """Draw a case that needs the given tools. Some cases have earlier turns."""
    rng = names.rng
    names.forget()
    case = _draw_agent_case(names, need)
    if case.earlier:
        return case
    before = rng.choices((0, 1, 2), (6, 3, 1))[0]
    among: tuple[Need, ...] = ("none", "calculate", "look_up")
    needs = rng.choices(among, (6, 3, 2), k=before)
    return replace(case, earlier=tuple(_draw_without_reference(names, each) for each in needs))


def _draw_without_reference(names: Names, need: Need) -> AgentCase:
    """Draw a case that refers to no earlier turn."""
    while True:
        case = _draw_agent_case(names, need)
        if not case.earlier:
            return case


def _draw_agent_case(names: Names, need: Need) -> AgentCase:
    draws: dict[Need, Callable[[Names], AgentCase]] = {
        "look_up": _draw_lookup,
        "calculate": _draw_calculation,
        "both": _draw_lookup_and_calculation,
        "none": _draw_conversation,
    }
    return draws[need](names)


def _draw_lookup_result(names: Names, entity: Entity, n_others: int) -> ToolUse:
    """Draw the result of a lookup: the entity's passage, usually first, and other passages."""
    rng = names.rng
    others = [draw_entity(names, rng.choice(KINDS), rng.randint(2, 5)) for _ in range(n_others)]
    found = [entity, *others] if entity.facts else others
    if rng.random() < 0.2:
        rng.shuffle(found)
    passages = [Passage(each.name, render_passage(rng, each)) for each in found]
    return ToolUse("look_up", entity.name, one_line(passages))


def _draw_lookup(names: Names) -> AgentCase:
    """Draw a question about one fact; in one case of seven, no passage states the fact."""
    rng = names.rng
    kind = rng.choice(KINDS)
    n_others = rng.choice((0, 1, 1, 1, 2))
    if rng.random() < 0.05:
        nobody = draw_entity(names, kind, 0)
        question = phrase_question(rng, kind, nobody.name, rng.choice(RELATIONS[kind]))
        use = _draw_lookup_result(names, nobody, max(1, n_others))
        return AgentCase(question, NOT_STATED, "look_up", (use,))
    entity = draw_entity(names, kind, rng.randint(2, 5))
    use = _draw_lookup_result(names, entity, n_others)
    stated = {fact.relation.name for fact in entity.facts}
    missing = [relation for relation in RELATIONS[kind] if relation.name not in stated]
    if missing and rng.random() < 0.1:
        question = phrase_question(rng, kind, entity.name, rng.choice(missing))
        return AgentCase(question, NOT_STATED, "look_up", (use,))
    fact = rng.choice(entity.facts)
    question = phrase_question(rng, kind, entity.name, fact.relation)
    return AgentCase(question, fact.answer, "look_up", (use,))


def _draw_lookup_and_calculation(names: Names) -> AgentCase:
    """Draw a question that needs an amount from a passage and a calculation with it."""
    rng = names.rng
    while True:
        entity = draw_entity(names, rng.choice(KINDS), rng.randint(2, 5))
        asked = {relation for relation, _, _ in _AMOUNTS}
        facts = [fact for fact in entity.facts if fact.relation.name in asked]
        if not facts:
            continue
        fact = rng.choice(facts)
        patterns = [each for each in _AMOUNTS if each[0] == fact.relation.name]
        _, op, pattern = rng.choice(patterns)
        amount, _, unit = fact.answer.partition(" ")
        n, c, m = str(names.value("factor", 2, 30)), names.count(), names.price()
        if op != "-" or int(c) < int(amount):
            break
    other = n if "{n}" in pattern else c if "{c}" in pattern else m.split()[0]
    expression = f"{other} * {amount}" if op == "*" else f"{amount} {op} {other}"
    result = calculate(expression)
    subject = entity.name if rng.random() < 0.1 else entity.full
    return AgentCase(
        pattern.format(n=n, c=c, m=m, s=subject),
        f"{result} {unit}".strip(),
        "both",
        (
            _draw_lookup_result(names, entity, rng.choice((0, 1, 1, 1, 2))),
            ToolUse("calculate", expression, result),
        ),
    )


def _draw_calculation(names: Names) -> AgentCase:
    """Draw a sum or a word problem with numbers that need a calculator."""
    rng = names.rng
    bare = rng.random() < 0.5
    while True:
        op = rng.choice(("+", "-", "*"))
        then = rng.choice(("", "+", "-"))
        high = 999 if rng.random() < 0.6 else 99
        a, b, c = (rng.randint(2, high) for _ in range(3))
        if op == "*":
            a = rng.randint(2, 99)
        numbers = [str(a), str(b), str(c)]
        if bare and rng.random() < 0.3:
            numbers[rng.randrange(2)] = f"{rng.randint(105, 9999) / 100:.2f}"
        expression = f"{numbers[0]} {op} {numbers[1]}" + (f" {then} {numbers[2]}" if then else "")
        if bare and then and op != "*" and rng.random() < 0.25:
            expression = f"({numbers[0]} {op} {numbers[1]}) * {numbers[2]}"
        key = int("".join(filter(str.isdigit, expression)))
        result = calculate(expression)
        if split_of_value(f"sum {op}{then}", key) == names.split and not result.startswith("-"):
            break
    if bare:
        question = rng.choice(
            ("What is {}?", "{} = ?", "Work out {}.", "How much is {}?", "Calculate {}.")
        ).format(expression)
    else:
        values = {"a": a, "b": b, "c": c, "t": rng.choice(THINGS)}
        values |= {"n": names.word("first"), "m": names.word("first")}
        patterns = [rng.choice(FIRST[op]), *([rng.choice(THEN[then])] if then else [])]
        question = " ".join([*patterns, rng.choice(HOW_MANY)]).format(**values)
    return AgentCase(question, result, "calculate", (ToolUse("calculate", expression, result),))


def _draw_conversation(names: Names) -> AgentCase:
    """Draw small talk, or a question about something earlier in the conversation."""
    rng = names.rng
    chance = rng.random()
    if chance < 0.25:
        return AgentCase(*rng.choice(_SMALL_TALK), "none")
    if chance < 0.4:
        before = _draw_agent_case(names, rng.choice(("look_up", "calculate")))
        return AgentCase(rng.choice(_REPEAT_REQUESTS), before.answer, "none", earlier=(before,))
    drawn = rng.sample(_STATEMENTS, rng.randint(1, 3))
    facts = [(statement, question, draw(names)) for statement, question, draw in drawn]
    statement, question, answer = facts[0]
    if chance < 0.55:
        return AgentCase(statement.format(A=answer), _ACKNOWLEDGMENT, "none")
    rng.shuffle(facts)
    earlier = [
        AgentCase(statement.format(A=value), _ACKNOWLEDGMENT, "none")
        for statement, _, value in facts
    ]
    return AgentCase(question, answer, "none", earlier=tuple(earlier))
