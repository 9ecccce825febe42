"""Scenes: passages and the questions they allow."""

from __future__ import annotations

import random
from dataclasses import dataclass

from adafuse_llm.documents import Passage
from training.world.cases import NOT_STATED, Case, Skill
from training.world.entities import Entity, draw_entity, phrase_question, render_passage
from training.world.names import Names
from training.world.relations import KINDS, RELATIONS, Kind


@dataclass(frozen=True)
class Scene:
    """Entities, their passages in the same order, and names that no passage mentions."""

    entities: tuple[Entity, ...]
    passages: tuple[Passage, ...]
    absent: tuple[tuple[Kind, str], ...]

    def ask(self, rng: random.Random, skill: Skill) -> Case | None:
        """Draw a question for one skill; return None if the scene has no such question."""
        if skill == "not_stated":
            return self._ask_missing(rng)
        facts = [f for e in self.entities for f in e.facts if f.relation.skill == skill]
        if not facts:
            return None
        fact = rng.choice(facts)
        question = phrase_question(rng, fact.kind, fact.subject, fact.relation)
        return Case(question, fact.answer, skill, self.passages)

    def _ask_missing(self, rng: random.Random) -> Case:
        """Ask for a fact that the passages leave out, or about a subject they do not mention."""
        if rng.random() < 0.6:
            entity = rng.choice(self.entities)
            stated = {fact.relation.name for fact in entity.facts}
            missing = [r for r in RELATIONS[entity.kind] if r.name not in stated]
            if missing:
                question = phrase_question(rng, entity.kind, entity.name, rng.choice(missing))
                return Case(question, NOT_STATED, "not_stated", self.passages)
        kind, name = rng.choice(self.absent)
        stated_here = [f.relation for e in self.entities if e.kind == kind for f in e.facts]
        relation = rng.choice(stated_here or list(RELATIONS[kind]))
        question = phrase_question(rng, kind, name, relation)
        return Case(question, NOT_STATED, "not_stated", self.passages)


def draw_scene(
    names: Names,
    n_passages: int,
    facts: tuple[int, int] = (2, 6),
    same_kind: float = 0.5,
    small_amounts: float = 0.0,
) -> Scene:
    """Draw ``n_passages`` passages, each about one entity.

    ``facts`` is the lowest and the highest number of facts of an entity. ``same_kind`` is the
    probability that all entities are of the same kind, and ``small_amounts`` the probability that a
    price or a number is small enough for a calculation below 100.
    """
    names.forget()
    rng = names.rng
    same: Kind | None = rng.choice(KINDS) if rng.random() < same_kind else None
    kinds: list[Kind] = [rng.choice(KINDS) if same is None else same for _ in range(n_passages)]
    people: list[str] = []
    entities: list[Entity] = []
    for kind in kinds:
        n_facts = rng.randint(*facts)
        entity = draw_entity(names, kind, n_facts, people, small_amounts=small_amounts)
        entities.append(entity)
        if kind == "person":
            people.append(entity.name)
        people += [fact.answer for fact in entity.facts if fact.relation.skill == "people"]
    absent_kinds = [rng.choice(kinds), rng.choice(kinds)]
    absent = tuple((kind, draw_entity(names, kind, 0).name) for kind in absent_kinds)
    passages = tuple(
        Passage(entity.name.lower().replace(" ", "-") + ".md", render_passage(rng, entity))
        for entity in entities
    )
    return Scene(tuple(entities), passages, absent)
