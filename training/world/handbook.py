"""The handbook: Markdown documents about one town, and questions about them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from training.world.cases import NOT_STATED, Skill
from training.world.entities import draw_entity, phrase_question, render_passage
from training.world.names import Names
from training.world.relations import RELATIONS, Kind

HANDBOOK_SEED: Final = "handbook 40"

_CHAPTERS: Final[tuple[tuple[Kind, int], ...]] = (
    ("place", 2),
    ("institution", 4),
    ("person", 2),
    ("product", 2),
    ("event", 2),
)


@dataclass(frozen=True)
class Handbook:
    """Documents by file name, and questions as (question, answer, source or None, skill)."""

    documents: Mapping[str, str]
    questions: tuple[tuple[str, str, str | None, Skill], ...]


def write_handbook(folder: Path) -> None:
    """Write the handbook that ships with the package: its documents and ``questions.jsonl``."""
    handbook = draw_handbook(Names(random.Random(HANDBOOK_SEED), "heldout"))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in handbook.documents.items():
        (folder / name).write_text(text, encoding="utf-8")
    keys = ("question", "answer", "source", "skill")
    lines = [json.dumps(dict(zip(keys, line, strict=True))) for line in handbook.questions]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw_handbook(names: Names, n_missing: int = 10) -> Handbook:
    """Draw a document per entity, a question per fact, and some unanswerable questions."""
    names.forget()
    rng = names.rng
    people = [names.person() for _ in range(dict(_CHAPTERS)["person"])]
    documents: dict[str, str] = {}
    questions: list[tuple[str, str, str | None, Skill]] = []
    missing: list[tuple[str, str, str | None, Skill]] = []
    unnamed = list(people)
    for kind, n_entities in _CHAPTERS:
        for _ in range(n_entities):
            name = unnamed.pop(0) if kind == "person" else None
            n_facts = len(RELATIONS[kind]) - 2 if kind == "institution" else 5
            entity = draw_entity(names, kind, n_facts, people, name)
            source = entity.name.lower().replace(" ", "-") + ".md"
            documents[source] = render_passage(rng, entity, rng.uniform(0.2, 0.5)) + "\n"
            documents[source] = documents[source].replace("## ", "# ", 1)
            for fact in entity.facts:
                question = phrase_question(rng, kind, entity.name, fact.relation)
                questions.append((question, fact.answer, source, fact.relation.skill))
            stated = {fact.relation.name for fact in entity.facts}
            for relation in RELATIONS[kind]:
                if relation.name not in stated:
                    question = phrase_question(rng, kind, entity.name, relation)
                    missing.append((question, NOT_STATED, None, "not_stated"))
    questions += rng.sample(missing, n_missing)
    return Handbook(documents, tuple(questions))
