"""Entities with their facts, passages that state them, and questions about them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from training.world.names import Names
from training.world.relations import RELATIONS, Kind, Relation

_SMALL_AMOUNTS: Final[Mapping[str, Callable[[Names], str]]] = {
    "ticket": Names.whole_price,
    "price": Names.whole_price,
    "fee": Names.whole_price,
    "staff": Names.small_count,
    "letters": Names.small_count,
}


def _draw_answer(
    names: Names, relation: Relation, people: Sequence[str], small_amounts: float
) -> str:
    """Draw the value of a relation. One person in four already occurs in the scene."""
    small = _SMALL_AMOUNTS.get(relation.name)
    if small_amounts and small and names.rng.random() < small_amounts:
        return small(names)
    method, *arguments = relation.draw.split()
    if method == "measure":
        unit, low, high = arguments
        return names.measure(unit, int(low), int(high))
    if method != "person_of_scene":
        return cast("str", getattr(names, method)())
    if people and names.rng.random() < 0.25:
        return names.rng.choice(people)
    return names.person()


@dataclass(frozen=True)
class Fact:
    """One fact about a subject, which is given by its name without an article."""

    kind: Kind
    subject: str
    relation: Relation
    answer: str


@dataclass(frozen=True)
class Entity:
    """An institution, person, product, place or event, with its facts."""

    kind: Kind
    name: str
    facts: tuple[Fact, ...]
    pronoun: str

    @property
    def full(self) -> str:
        """The name as it stands inside a sentence, with its article if it has one."""
        return with_article(self.kind, self.name)


def with_article(kind: Kind, name: str) -> str:
    """Return a name as it stands inside a sentence, with its article if it has one."""
    return name if kind in ("person", "place") else f"the {name}"


def _upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def draw_entity(
    names: Names,
    kind: Kind,
    n_facts: int,
    people: Sequence[str] = (),
    small_amounts: float = 0.0,
) -> Entity:
    """Draw an entity with ``n_facts`` facts, or all facts of its kind if there are fewer.

    ``small_amounts`` is the probability that a price or a number is a whole number below 49.
    """
    rng = names.rng
    name = cast("str", getattr(names, kind)())
    relations = rng.sample(RELATIONS[kind], min(n_facts, len(RELATIONS[kind])))
    others = [person for person in people if person != name]
    facts = tuple(
        Fact(kind, name, relation, _draw_answer(names, relation, others, small_amounts))
        for relation in relations
    )
    pronoun = rng.choice(("She", "He")) if kind == "person" else "It"
    return Entity(kind, name, facts, pronoun)


def _sentence(rng: random.Random, entity: Entity, fact: Fact, first: bool) -> str:
    pattern = rng.choice(fact.relation.statements)
    full = entity.full
    start = _upper_first(full)
    if not first and "{S}" in pattern:
        chance = rng.random()
        if chance < 0.2:
            start = entity.pronoun
        elif chance < 0.35 and entity.kind in ("institution", "event", "product"):
            start = f"The {entity.name.split()[-1].lower()}"
        elif chance < 0.35 and entity.kind == "person":
            start = entity.name.split()[-1]
    return _upper_first(pattern.format(S=start, s=full, A=fact.answer))


def render_passage(rng: random.Random, entity: Entity) -> str:
    """Write the entity's facts in random order, as a list, as prose or as both."""
    facts = list(entity.facts)
    rng.shuffle(facts)
    style = rng.random()
    if style < 0.2:
        mark = rng.choice(("- ", "* ", "- ", ""))
        head = rng.choice(("# {}\n", "## {}\n", "{}:\n", "# {}\n\n", "**{}**\n"))
        return head.format(entity.name) + _bullets(facts, mark)
    n_prose = len(facts) if style < 0.42 or style > 0.5 else (len(facts) + 1) // 2
    sentences = [
        _sentence(rng, entity, fact, index == 0) for index, fact in enumerate(facts[:n_prose])
    ]
    gap = rng.choice((" ", " ", " ", "\n", "\n\n"))
    middle = rng.randint(0, n_prose)
    prose = gap.join(filter(None, (" ".join(sentences[:middle]), " ".join(sentences[middle:]))))
    if style < 0.5:
        prose = rng.choice(("# {}\n\n", "## {}\n\n", "## {}\n")).format(entity.name) + prose
    return f"{prose}\n\n{_bullets(facts[n_prose:], '- ')}" if facts[n_prose:] else prose


def _bullets(facts: Sequence[Fact], mark: str) -> str:
    return "\n".join(f"{mark}{fact.relation.label}: {fact.answer}" for fact in facts)


def phrase_question(rng: random.Random, kind: Kind, name: str, relation: Relation) -> str:
    """Write a question about one relation of a subject; one in ten omits the article."""
    subject = name if rng.random() < 0.1 else with_article(kind, name)
    return rng.choice(relation.questions).format(s=subject)
