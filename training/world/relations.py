"""Relations of each kind of entity, with patterns that state a fact, ask for it and list it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast, get_args

from training.world.cases import Skill

Kind = Literal["institution", "person", "product", "place", "event"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True)
class Relation:
    """A relation between an entity and a value. ``relations.txt`` explains its patterns.

    ``label`` names the relation in lists. ``draw`` is a method of `Names`, with its arguments.
    """

    name: str
    skill: Skill
    label: str
    draw: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


def _read() -> dict[Kind, tuple[Relation, ...]]:
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    found: dict[Kind, tuple[Relation, ...]] = {}
    for number, line in enumerate(lines):
        if line.startswith("["):
            kind = cast("Kind", line.strip("[]"))
        elif line.startswith("?"):
            name, skill, label, draw = lines[number - 2].split(" | ")
            stated, asked = (
                tuple(each[2:].split(" | ")) for each in lines[number - 1 : number + 1]
            )
            relation = Relation(name, cast("Skill", skill), label, draw, stated, asked)
            found[kind] = (*found.get(kind, ()), relation)
    return found


RELATIONS: Final[Mapping[Kind, tuple[Relation, ...]]] = _read()
