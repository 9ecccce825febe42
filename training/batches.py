"""Batches: rows of packs as tensors.

The functions that draw a batch return the same batch whenever their arguments are the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from training.dialogues import AGENT_SYSTEMS, FORMS, SHORT_SYSTEMS, draw_tools, turns_of
from training.packing import LearnedSkill, Pack, Packer
from training.schedule import SHORT_SHARE, Stage, long_stage, stage_at
from training.world.agent_cases import NEEDS, draw_agent_case
from training.world.names import Names

AGENT_LENGTH: Final = 640  # tokens in a row of a batch of agents' turns
IGNORED: Final = -100


@dataclass(frozen=True)
class Batch:
    """Tokens of one training step. Shapes are ``[rows, length]`` unless stated otherwise.

    Attributes:
        ids: token ids.
        positions: position of each token in its text, which starts with the prompt.
        mask: which tokens each token may attend to, ``[rows, 1, length, n + length]``.
        labels: the token to predict at the *next* position.
        weights: weight of that prediction in the loss.
        spans: (row, first, last + 1, skill) of each predicted answer, for measuring.
        prompt: tokens ``[n]`` that all rows continue; empty except in batches of agents' turns.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    labels: Tensor
    weights: Tensor
    spans: tuple[tuple[int, int, int, LearnedSkill], ...]
    prompt: Tensor


class Rows:
    """Rows of packs, each of at most ``length`` tokens.

    Attributes:
        packs: the packs of each row.
        room: tokens that are left in each row.
    """

    def __init__(self, number: int, length: int) -> None:
        self.packs: list[list[Pack]] = [[] for _ in range(number)]
        self.room = [length] * number

    def add(self, pack: Pack, *, whole: bool = False) -> Pack | None:
        """Add a pack to the row with the most room; return what was added of it, or None.

        Unless it has to be ``whole``, a pack loses its last branches if they do not fit.
        """
        row = max(range(len(self.room)), key=lambda index: self.room[index])
        while not whole and len(pack) > self.room[row] and len(pack.branches) > 1:
            pack = Pack(pack.prefix, pack.branches[:-1])
        if len(pack) > self.room[row]:
            return None
        self.packs[row].append(pack)
        self.room[row] -= len(pack)
        return pack


def draw_packs(packer: Packer, names: Names, stage: Stage, n_rows: int) -> list[list[Pack]]:
    """Draw rows of packs.

    ``packer.emphasis`` determines the share of problems, ``stage`` the share of drills.
    """
    rows = Rows(n_rows, stage.length)
    total = of_problems = of_drills = 0
    for _ in range(40 * n_rows):
        only_drills = stage.drills == 1.0
        is_problem = not only_drills and of_problems < packer.emphasis.arithmetic * total
        is_drill = only_drills or (not is_problem and of_drills < stage.drills * total)
        if is_problem:
            pack = packer.draw_problem(names)
        else:
            pack = packer.draw_drill(names) if is_drill else packer.draw_reading(names, stage)
        added = rows.add(pack)
        if added is None:
            if is_problem or is_drill or max(rows.room) < 96:
                break
            continue
        total += len(added)
        of_problems += len(added) * is_problem
        of_drills += len(added) * is_drill
    return rows.packs


def assemble(
    rows: Sequence[Sequence[Pack]],
    length: int,
    rng: random.Random,
    context_weight: float,
    prompt: Sequence[int] = (),
) -> Batch:
    """Assemble rows of packs, which all continue ``prompt``, as tensors.

    In the packs' own prompts, the model learns a random fifth of the tokens, each with the weight
    ``context_weight``.
    """
    shape = (len(rows), length)
    ids = np.zeros(shape, np.int64)
    positions = np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    weights = np.zeros(shape, np.float32)
    mask = np.ones((*shape, len(prompt) + length), bool)
    spans: list[tuple[int, int, int, LearnedSkill]] = []
    noise = np.random.default_rng(rng.getrandbits(32))
    causal = np.tril(np.ones((length, length), bool))
    for r, packs in enumerate(rows):
        # A part is a pack's prompt or a branch. Part 0 is padding.
        part = np.zeros(length, np.int64)  # the part that each token belongs to
        seen = [{0}]  # for each part, the parts that it sees: itself and those it continues
        ends = [0]  # for each part, the position after its last token
        at = 0
        for pack in packs:
            n = len(pack.prefix)
            root = len(seen)
            seen.append({root})
            ends.append(len(prompt) + n)
            ids[r, at : at + n] = pack.prefix
            positions[r, at : at + n] = len(prompt) + np.arange(n)
            part[at : at + n] = root
            chosen = np.flatnonzero(noise.random(max(n - 1, 0)) < 0.2)
            labels[r, at + chosen] = ids[r, at + chosen + 1]
            weights[r, at + chosen] = context_weight
            at += n
            for branch in pack.branches:
                m = len(branch.ids)
                start = ends[root + branch.parent]
                part[at : at + m] = len(seen)
                seen.append({len(seen)} | seen[root + branch.parent])
                ends.append(start + m)
                ids[r, at : at + m] = branch.ids
                positions[r, at : at + m] = start + np.arange(m)
                if branch.n_answer:
                    first, last = at + m - branch.n_answer - 1, at + m - 1
                    labels[r, first:last] = branch.ids[-branch.n_answer :]
                    weights[r, first:last] = 1.0
                    spans.append((r, first, last, branch.skill))
                at += m
        sees = np.zeros((len(seen), len(seen)), bool)
        for number, parts in enumerate(seen):
            sees[number, list(parts)] = True
        mask[r, :, len(prompt) :] = sees[part[:, None], part[None, :]] & causal
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(mask)[:, None],
        torch.from_numpy(labels),
        torch.from_numpy(weights),
        tuple(spans),
        torch.tensor(prompt, dtype=torch.int64),
    )


def draw_batch(packer: Packer, seed: int, step: int, progress: float, tokens: int) -> Batch:
    """Draw the batch of one step. Equal arguments give equal batches."""
    rng = random.Random(f"train {seed} {packer.recipe.name} {step}")
    stage = stage_at(progress, rng)
    if stage.drills == 1.0:
        tokens //= 2
    n_rows = max(1, tokens // stage.length)
    rows = draw_packs(packer, Names(rng, "train"), stage, n_rows)
    return assemble(rows, stage.length, rng, context_weight=0.1)


def draw_long_batch(packer: Packer, seed: int, step: int, tokens: int) -> Batch:
    """Draw questions with long answers. Equal arguments give equal batches."""
    rng = random.Random(f"train long {seed} {packer.recipe.name} {step}")
    names = Names(rng, "train")
    stage = long_stage(rng)
    rows = Rows(max(1, tokens // stage.length), stage.length)
    too_long = 0
    while too_long < 6:
        too_long += rows.add(packer.draw_long(names, stage)) is None
    return assemble(rows.packs, stage.length, rng, context_weight=0.1)


def draw_agent_batch(packer: Packer, seed: int, step: int, progress: float, tokens: int) -> Batch:
    """Draw turns of agents that all have the same tools. Equal arguments give equal batches.

    At first, prompts only name the tools, and most cases end with the first turn after their
    question. These many short prompts teach which tool to call and with which argument. Later,
    prompts describe the tools, and most cases continue to their answer, so that more of them
    include a tool's result.
    """
    rng = random.Random(f"train tools {seed} {packer.recipe.name} {step}")
    names = Names(rng, "train")
    form = rng.choice(FORMS)
    is_short = progress < SHORT_SHARE
    tools = [] if is_short else draw_tools(rng)
    system = rng.choice(AGENT_SYSTEMS) if rng.random() < 0.5 else ""
    if is_short:
        system = SHORT_SYSTEMS[form]
    prefix = packer.agent_prefix(form, tools, system)
    rows = Rows(max(1, tokens // AGENT_LENGTH), AGENT_LENGTH)
    too_long = 0
    while too_long < 4:
        (need,) = rng.choices(NEEDS, (5, 3, 4, 3) if is_short else (6, 2, 5, 2))
        case = draw_agent_case(names, need)
        turns = turns_of(case, form, tools, system, earlier=True)
        if rng.random() < (0.75 if is_short else 0.2):
            turns = turns[: len(turns) - len(case.uses)]
        too_long += rows.add(packer.dialogue(turns, prefix), whole=True) is None
    return assemble(rows.packs, AGENT_LENGTH, rng, context_weight=0.1, prompt=packer.encode(prefix))
