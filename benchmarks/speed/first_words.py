"""Measure the time and the memory until the first words of a response.

The yardstick is the members' own prefill: one forward pass of each model over the prompt. The first
span of an ensemble needs more passes, because members propose words and score those of others. So
a third system runs the prefill and then passes of the same sizes as the engine's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any, Final

import torch

from benchmarks.speed import memory
from benchmarks.speed.measure import Outcome, Report, Row, System, Target, take_turns
from benchmarks.speed.members import Member, Members, chosen_members, make_engine, prompt_of
from benchmarks.speed.peers import outcome_of

LIMIT: Final = 1.05
FIRST_SEED: Final = 1000
"""Seed of the first prompt. Other comparisons use other prompts."""


@dataclass(frozen=True)
class Point:
    """A point at which the first span is compared with the members' prefill.

    Attributes:
        members: ``embedded``, or the shape of random-weight members.
        prompt: tokens of the prompts.
        repeats: timed runs of each system.
        branches: values of B.
        warm: whether each system runs once before it is timed.
    """

    members: str
    prompt: int
    repeats: int
    branches: tuple[int, ...] = (1, 3)
    warm: bool = True


def compare(report: Report, points: Sequence[Point], peaks: Sequence[tuple[str, int]]) -> None:
    """Compare the first span with the members' prefill.

    Args:
        report: receives the results.
        points: the points at which times are compared.
        peaks: members and tokens of the prompt of each measurement of memory.
    """
    for point in points:
        _times(report, point)
    for members, prompt in peaks:
        _peaks(report, members, prompt)


def first_span(engine: Any, prompt: str) -> Outcome:
    """Run the engine until the first span. The part ``cpu`` is the CPU time until then."""
    cancel = Event()
    start = time.process_time()
    spent: list[float] = []
    events = engine.stream(prompt, cancel=cancel, on_round=lambda *_: cancel.set())
    for event in events:
        spent.append(time.process_time() - start)
        generation = event.generation
    assert generation is not None
    return replace(outcome_of(generation), parts={"cpu": spent[0]})


@torch.inference_mode()
def prefill(
    members: Members, ids: Mapping[str, Sequence[int]], sizes: Mapping[str, Sequence[int]]
) -> Outcome:
    """Run a pass of each model over the prompt, and then passes over the same cache.

    Args:
        members: the members.
        ids: tokens of the prompt, by member.
        sizes: numbers of tokens in the passes after the prompt's, by member.
    """
    start = time.process_time()
    first = [_prefill_alone(member, ids[member.name], sizes[member.name]) for member in members]
    spent = time.process_time() - start
    prompt = {name: len(tokens) for name, tokens in ids.items()}
    return Outcome(
        members[0].tokenizer.decode(first[:1]),
        dict.fromkeys(ids, 1),
        {name: 1 + len(sizes[name]) for name in ids},
        {name: prompt[name] + sum(sizes[name]) for name in ids},
        prompt,
        {"cpu": spent},
    )


def _prefill_alone(member: Member, ids: Sequence[int], sizes: Sequence[int]) -> int:
    """Run the passes of one model, and return the likeliest token after the prompt."""
    tokens = torch.tensor([list(ids)], device=member.model.device)
    output = member.model(input_ids=tokens, use_cache=True, logits_to_keep=1)
    first = int(output.logits[0, -1].argmax())
    for size in sizes:
        cache = output.past_key_values
        output = member.model(input_ids=tokens[:, :size], past_key_values=cache, use_cache=True)
    return first


class Turns:
    """The systems of one point. Every run of a system has a new prompt, the same for all systems.

    Args:
        members: the members.
        point: the point.

    Attributes:
        sizes: numbers of tokens in the engine's passes after the prompt, by B, run and member.
    """

    def __init__(self, members: Members, point: Point) -> None:
        self.members = members
        self.sizes: dict[int, list[dict[str, list[int]]]] = {b: [] for b in point.branches}
        runs = range(point.repeats + point.warm)
        self._prompts = [prompt_of(point.prompt, FIRST_SEED + run) for run in runs]
        self._ids = [{m.name: m.encode(text) for m in members} for text in self._prompts]

    def systems(self) -> dict[str, System]:
        """Return the systems by name, in the order in which they must run."""
        none: dict[str, list[int]] = {member.name: [] for member in self.members}
        systems: dict[str, System] = {
            "members' prefill": _in_order(
                [partial(prefill, self.members, i, none) for i in self._ids]
            )
        }
        for branches in self.sizes:
            engine = make_engine(self.members, branching_factor=branches)
            systems[f"engine, B = {branches}"] = _in_order(
                [
                    partial(self._span, engine, branches, text, ids)
                    for text, ids in zip(self._prompts, self._ids, strict=True)
                ]
            )
            systems[f"prefill and passes as B = {branches}"] = _in_order(
                [partial(self._replay, branches, run, ids) for run, ids in enumerate(self._ids)]
            )
        return systems

    def _span(
        self, engine: Any, branches: int, prompt: str, ids: Mapping[str, Sequence[int]]
    ) -> Outcome:
        with _recording(self.members) as passes:
            outcome = first_span(engine, prompt)
        self.sizes[branches].append(
            {name: _after(passes[name], len(tokens)) for name, tokens in ids.items()}
        )
        return outcome

    def _replay(self, branches: int, run: int, ids: Mapping[str, Sequence[int]]) -> Outcome:
        return prefill(self.members, ids, self.sizes[branches][run])


def _times(report: Report, point: Point) -> None:
    turns = Turns(chosen_members(point.members), point)
    systems, where = turns.systems(), f"{point.members} members, prompt {point.prompt}"
    warm = () if point.warm else systems
    rows = take_turns("first_words", f"{where}, first span", systems, point.repeats, warm=warm)
    report.rows += rows.values()
    alone = rows["members' prefill"]
    for branches in point.branches:
        engine = rows[f"engine, B = {branches}"]
        same = rows[f"prefill and passes as B = {branches}"]
        report.targets.append(
            Target(
                f"CPU time to the first span / members' prefill and the same passes, {where}, "
                f"B = {branches}",
                _ratio(engine, same),
                LIMIT,
            )
        )
        timed = turns.sizes[branches][-point.repeats :]
        sizes = [each for run in timed for each in run.values()]
        passes, tokens = statistics.mean(map(len, sizes)), statistics.mean(map(sum, sizes))
        report.figures.append(
            (
                f"CPU time to the first span / members' prefill, {where}, B = {branches}",
                f"{_ratio(engine, alone):.2f} x; after the prompt, a member needs {passes:.1f} "
                f"passes over {tokens:.1f} tokens",
            )
        )


def _peaks(report: Report, name: str, prompt: int) -> None:
    rows = sum(memory.row_bytes(member.model.config) for member in chosen_members(name))
    engine = memory.in_process("first_span", name, prompt)
    alone = memory.in_process("prefill", name, prompt)
    report.figures.append(
        (
            f"peak memory until the first span, {name} members, prompt {prompt}, bytes per "
            "prompt token",
            f"{engine / prompt:,.0f}; members' prefill, one after the other: "
            f"{alone / prompt:,.0f}; key/value rows: {rows:,}",
        )
    )


def _ratio(one: Row, other: Row) -> float:
    """Return the median ratio of CPU times. Each is of two runs with the same prompt."""
    pairs = zip(one.parts["cpu"], other.parts["cpu"], strict=True)
    return statistics.median(mine / others for mine, others in pairs)


def _after(passes: Sequence[int], prompt: int) -> list[int]:
    """Return the sizes of the passes that begin after the prompt's last token."""
    done = 0
    for number, size in enumerate(passes):
        if done >= prompt:
            return list(passes[number:])
        done += size
    return []


def _in_order(runs: Sequence[System]) -> System:
    """Return a system that runs the next one of `runs` whenever it is called."""
    rest = iter(runs)

    def system() -> Outcome:
        return next(rest)()

    return system


@contextmanager
def _recording(members: Members) -> Iterator[dict[str, list[int]]]:
    """Record the number of tokens in each pass of each model."""
    passes: dict[str, list[int]] = {member.name: [] for member in members}

    def recorder(name: str) -> Callable[..., None]:
        return lambda _, __, inputs: passes[name].append(inputs["input_ids"].numel())

    hooks = [
        member.model.register_forward_pre_hook(recorder(member.name), with_kwargs=True)
        for member in members
    ]
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()
