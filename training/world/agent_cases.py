"""Questions for an agent that has the tools ``look_up`` and ``calculate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from adafuse_llm.documents import Passage
from adafuse_llm.embedded.tools import calculate, one_line
from training.world.cases import NOT_STATED
from training.world.entities import Entity, draw_entity, phrase_question, render_passage
from training.world.names import Names
from training.world.problems import FIRST, HOW_MANY, THEN, THINGS
from training.world.relations import KINDS, RELATIONS
from training.world.words import split_of_value

Need = Literal["look_up", "calculate", "both", "none"]

NEEDS: Final[tuple[Need, ...]] = ("look_up", "calculate", "both", "none")

# What is asked about an amount that a passage tells: the question, and the operation on it.
_AMOUNTS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "price": (
        ("How much do {n} pieces of {s} cost?", "*"),
        ("What is the price of {n} pieces of {s}?", "*"),
        ("What does {s} cost with {m} for postage?", "+"),
    ),
    "ticket": (
        ("How much do {n} tickets for {s} cost?", "*"),
        ("How much do {n} visitors of {s} pay together?", "*"),
        ("What does entry to {s} cost with {m} for a guide?", "+"),
    ),
    "fee": (
        ("How much do {n} guests pay at {s}?", "*"),
        ("What do {n} places at {s} cost?", "*"),
        ("What is the fee for {s} with {m} for a guide?", "+"),
    ),
    "weight": (
        ("How much do {n} pieces of {s} weigh?", "*"),
        ("What is the weight of {n} pieces of {s}?", "*"),
    ),
    "staff": (
        ("How many people work at {s} when {c} more join?", "+"),
        ("How large is the staff of {s} when {c} leave?", "-"),
    ),
    "letters": (
        ("How many letters by {s} are there when {c} more are found?", "+"),
        ("How many letters by {s} are there when {c} are lost?", "-"),
    ),
    "population": (
        ("How many people live in {s} when {c} more arrive?", "+"),
        ("How many people live in {s} when {c} leave?", "-"),
    ),
    "visitors": (
        ("How many visitors come to {s} when {c} more come?", "+"),
        ("How many visitors come to {s} when {c} stay at home?", "-"),
    ),
}
_SMALL_TALK: Final = (
    ("Hello.", "Hello. What would you like to know?"),
    ("Hello!", "Hello. What would you like to know?"),
    ("Good morning.", "Hello. What would you like to know?"),
    ("Hi!", "Hello. What would you like to know?"),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye.", "Goodbye."),
)
# What a person says of herself or himself, and what is asked about it later.
_SAID: Final[tuple[tuple[str, str, Callable[[Names], str]], ...]] = (
    ("My name is {A}.", "What is my name?", Names.person),
    ("I live in {A}.", "Where do I live?", Names.place),
    ("I work at the {A}.", "Where do I work?", Names.institution),
    ("I have bought the {A}.", "What have I bought?", Names.product),
    ("My friend is called {A}.", "What is my friend called?", Names.person),
    ("I have {A} in my purse.", "How much do I have in my purse?", Names.price),
)
_NOTED: Final = "I will remember that."
_AGAIN: Final = ("Please repeat your answer.", "What was that again?")


@dataclass(frozen=True)
class ToolUse:
    """One call of a tool: its name, its only argument, and what it returned."""

    tool: str
    argument: str
    result: str


@dataclass(frozen=True)
class AgentCase:
    """A question, the uses of tools that answer it, its exact answer, and the turns before it."""

    question: str
    answer: str
    need: Need
    uses: tuple[ToolUse, ...] = ()
    earlier: tuple[AgentCase, ...] = ()


def draw_agent_case(names: Names, need: Need) -> AgentCase:
    """A question that needs the tools ``need`` says; at times with one or two turns before it."""
    rng = names.rng
    names.forget()
    case = _draw_agent_case(names, need)
    if case.earlier:
        return case
    before = rng.choices((0, 1, 2), (6, 3, 1))[0]
    among: tuple[Need, ...] = ("none", "calculate", "look_up")
    needs = rng.choices(among, (6, 3, 2), k=before)
    return replace(case, earlier=tuple(_draw_alone(names, each) for each in needs))


def _draw_alone(names: Names, need: Need) -> AgentCase:
    """A case that refers to no turn before it."""
    while True:
        case = _draw_agent_case(names, need)
        if not case.earlier:
            return case


def _draw_agent_case(names: Names, need: Need) -> AgentCase:
    match need:
        case "look_up":
            return _draw_reading(names)
        case "calculate":
            return _draw_reckoning(names)
        case "both":
            return _draw_reading_and_reckoning(names)
        case "none":
            return _draw_talk(names)


def _draw_found(names: Names, entity: Entity, n_others: int) -> ToolUse:
    """What looking up an entity returns: its passage, mostly first, and some of others."""
    rng = names.rng
    others = [draw_entity(names, rng.choice(KINDS), rng.randint(2, 5)) for _ in range(n_others)]
    found = [entity, *others] if entity.facts else others
    if rng.random() < 0.2:
        rng.shuffle(found)
    passages = [Passage(each.name, render_passage(rng, each)) for each in found]
    return ToolUse("look_up", entity.name, one_line(passages))


def _draw_reading(names: Names) -> AgentCase:
    """One fact of an entity; one in seven times it is not stated."""
    rng = names.rng
    kind = rng.choice(KINDS)
    n_others = rng.choice((0, 1, 1, 1, 2))
    if rng.random() < 0.05:
        nobody = draw_entity(names, kind, 0)
        asked = phrase_question(rng, kind, nobody.name, rng.choice(RELATIONS[kind]))
        use = _draw_found(names, nobody, max(1, n_others))
        return AgentCase(asked, NOT_STATED, "look_up", (use,))
    entity = draw_entity(names, kind, rng.randint(2, 5))
    use = _draw_found(names, entity, n_others)
    told = {fact.relation.name for fact in entity.facts}
    missing = [relation for relation in RELATIONS[kind] if relation.name not in told]
    if missing and rng.random() < 0.1:
        asked = phrase_question(rng, kind, entity.name, rng.choice(missing))
        return AgentCase(asked, NOT_STATED, "look_up", (use,))
    fact = rng.choice(entity.facts)
    asked = phrase_question(rng, kind, entity.name, fact.relation)
    return AgentCase(asked, fact.answer, "look_up", (use,))


def _draw_reading_and_reckoning(names: Names) -> AgentCase:
    """An amount that is looked up, then multiplied, added to or taken from."""
    rng = names.rng
    while True:
        entity = draw_entity(names, rng.choice(KINDS), rng.randint(2, 5))
        facts = [fact for fact in entity.facts if fact.relation.name in _AMOUNTS]
        if not facts:
            continue
        fact = rng.choice(facts)
        pattern, op = rng.choice(_AMOUNTS[fact.relation.name])
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
            _draw_found(names, entity, rng.choice((0, 1, 1, 1, 2))),
            ToolUse("calculate", expression, result),
        ),
    )


def _draw_reckoning(names: Names) -> AgentCase:
    """A bare sum or a word problem, with numbers that need a calculator."""
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
        asked = rng.choice(
            ("What is {}?", "{} = ?", "Work out {}.", "How much is {}?", "Calculate {}.")
        ).format(expression)
    else:
        values = {"a": a, "b": b, "c": c, "t": rng.choice(THINGS)}
        values |= {"n": names.word("first"), "m": names.word("first")}
        patterns = [rng.choice(FIRST[op]), *([rng.choice(THEN[then])] if then else [])]
        asked = " ".join([*patterns, rng.choice(HOW_MANY)]).format(**values)
    return AgentCase(asked, result, "calculate", (ToolUse("calculate", expression, result),))


def _draw_talk(names: Names) -> AgentCase:
    """Small talk, or something that was said before."""
    rng = names.rng
    chance = rng.random()
    if chance < 0.25:
        return AgentCase(*rng.choice(_SMALL_TALK), "none")
    if chance < 0.4:
        before = _draw_agent_case(names, rng.choice(("look_up", "calculate")))
        return AgentCase(rng.choice(_AGAIN), before.answer, "none", earlier=(before,))
    drawn = rng.sample(_SAID, rng.randint(1, 3))
    told = [(said, asked, draw(names)) for said, asked, draw in drawn]
    said, asked, answer = told[0]
    if chance < 0.55:
        return AgentCase(said.format(A=answer), _NOTED, "none")
    rng.shuffle(told)
    earlier = [AgentCase(said.format(A=value), _NOTED, "none") for said, _, value in told]
    return AgentCase(asked, answer, "none", earlier=tuple(earlier))
