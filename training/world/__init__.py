"""A generated small-town world: names, facts, passages, questions, word problems.

The generator is pure Python and seeded: the same seed gives the same text on every machine.
Each text belongs to one of two splits, ``train`` and ``heldout``. Both splits use the same
syllables and sentence patterns. No made-up word, number, year, price, date, time, address or
arithmetic problem occurs in both, so a model can answer a held-out question only by reading.

    words        made-up words, and the split of a word or number
    names        draws names and values for one split
    cases        questions with their passages and exact answers, and the check of an answer
    relations    patterns that state a fact, ask for it and list it
    entities     institutions, persons, products, places and events, with passages and questions
    scenes       several passages, and the cases about them
    problems     arithmetic word problems and sums
    long_cases   questions with long answers: several parts, summaries, problems of several steps
    agent_cases  questions with the tool calls that lead to their answers
    handbook     the shipped documents about one town, and their questions
"""

from training.world.agent_cases import NEEDS, AgentCase, Need, ToolUse, draw_agent_case
from training.world.cases import LONG_TASKS, NOT_STATED, SKILLS, Case, LongTask, Skill, is_correct
from training.world.entities import Entity, Fact, draw_entity, phrase_question, render_passage
from training.world.handbook import HANDBOOK_SEED, Handbook, draw_handbook, write_handbook
from training.world.long_cases import (
    ask_parts,
    ask_summary,
    draw_long_case,
    draw_long_problem,
    draw_long_scene,
)
from training.world.names import Names
from training.world.problems import draw_problem, draw_sum, draw_sum_list
from training.world.relations import KINDS, RELATIONS, Kind, Relation
from training.world.scenes import Scene, draw_case, draw_scene
from training.world.words import (
    ENDINGS,
    STARTS,
    Split,
    made_up_words,
    mark_syllables,
    split_of_value,
)

__all__ = [
    "ENDINGS",
    "HANDBOOK_SEED",
    "KINDS",
    "LONG_TASKS",
    "NEEDS",
    "NOT_STATED",
    "RELATIONS",
    "SKILLS",
    "STARTS",
    "AgentCase",
    "Case",
    "Entity",
    "Fact",
    "Handbook",
    "Kind",
    "LongTask",
    "Names",
    "Need",
    "Relation",
    "Scene",
    "Skill",
    "Split",
    "ToolUse",
    "ask_parts",
    "ask_summary",
    "draw_agent_case",
    "draw_case",
    "draw_entity",
    "draw_handbook",
    "draw_long_case",
    "draw_long_problem",
    "draw_long_scene",
    "draw_problem",
    "draw_scene",
    "draw_sum",
    "draw_sum_list",
    "is_correct",
    "made_up_words",
    "mark_syllables",
    "phrase_question",
    "render_passage",
    "split_of_value",
    "write_handbook",
]
