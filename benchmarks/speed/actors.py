"""What Ray costs: members in this program, in processes and in Ray actors, in one run.

    python -m tests.support.loopback python -m benchmarks.speed.actors
    python -m tests.support.loopback python -m benchmarks.speed.actors --quick --output actors.json

The benchmark starts a Ray cluster on this machine: a head node that runs nothing, and two nodes for
the members. It refuses to start one in a network that others can reach, so run it with
``tests.support.loopback``. Actors get the priority of this program. Ray itself gives them a lower
one, which would add the waiting for other programs on the same cores.

The three ways take turns. The first table is about one member alone: a forward pass over one token
after a prompt of 256 tokens, with the message around it. The second one is about responses of the
embedded pair and trio, with and without drafts. Every figure is the median of several runs, and the
spread is that of the runs. Counts are exact.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import transformers

from adafuse_llm import AdaFuseEngine, Generation, MemberSpec, RuntimeConfig
from adafuse_llm.backends.remote.processes import ProcessChannel
from adafuse_llm.embedded import member_paths
from benchmarks.speed.kinds import passes, spec
from benchmarks.speed.measure import machine
from benchmarks.speed.members import prompt_of
from tests.support.loopback import enable_loopback, is_loopback_only
from tests.support.ray_cluster import Nodes

HERE, PROCESS, ACTOR = "this program", "processes", "Ray actors"
WAYS: Final = (HERE, PROCESS, ACTOR)
NODES: Final = ("north", "south")
PRIORITY: Final = {"RAY_worker_niceness": "0"}
"""The setting of Ray that gives actors the priority of this program."""

TRAFFIC: Final = Path("/proc/self/net/dev")


@dataclass(frozen=True)
class Size:
    """Sizes of the measurements. Lengths of prompts and responses are in tokens.

    Attributes:
        repeats: runs of each measurement.
        passes: forward passes in each run of the first table.
        prompts: number of different prompts in each run of the second table.
        prompt: length of a prompt.
        response: length of a response.
    """

    repeats: int = 9
    passes: int = 200
    prompts: int = 3
    prompt: int = 256
    response: int = 64


QUICK: Final = Size(2, 20, 1, 64, 16)


@dataclass(frozen=True)
class Spread:
    """The median of several runs, with the extremes."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def line(self, digits: int = 2) -> str:
        """Return the figures as a cell of a table."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True)
class Pass:
    """A forward pass over one token of one member.

    Attributes:
        way: where the member runs.
        milliseconds: duration with the message to the member and back.
        overhead: the same, less the duration in this program in the same run.
        message: bytes of the message to the member, and of the reply.
        network: bytes on the network per pass, in both directions, with everything that Ray sends.
            None without a network.
    """

    way: str
    milliseconds: Spread
    overhead: Spread
    message: tuple[float, float] | None
    network: float | None


@dataclass(frozen=True)
class Response:
    """Responses of an ensemble.

    Attributes:
        members: number of members.
        drafting: whether drafts are on.
        way: where the members run.
        round: milliseconds of a round, the time for the prompts included.
        ratio: the same, divided by the duration in this program in the same run.
        over: the same, less the duration in processes in the same run.
        rounds: number of rounds of all prompts.
        passes: forward passes per round and member.
        calls: messages per round and member. None in this program.
        message: bytes per round of all messages and replies. None in this program.
        equal: whether all texts are those of this program.
    """

    members: int
    drafting: bool
    way: str
    round: Spread
    ratio: Spread
    over: Spread
    rounds: int
    passes: float
    calls: float | None
    message: float | None
    equal: bool


class Meter:
    """Counts messages and their bytes while it is open, in all channels of this program."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @contextmanager
    def open(self) -> Iterator[Counter[str]]:
        """Count from here to the end of the block."""
        from adafuse_llm.ray.actors import ActorChannel, pack

        self.counts.clear()
        with ExitStack() as stack:
            kinds: list[tuple[type, Callable[[Any], bytes]]] = [
                (ActorChannel, pack),
                (ProcessChannel, pickle.dumps),
            ]
            for kind, encode in kinds:
                stack.enter_context(patch.object(kind, "send", self._sending(kind, encode)))
                stack.enter_context(patch.object(kind, "receive", self._receiving(kind, encode)))
            yield self.counts

    def _sending(self, kind: Any, encode: Callable[[Any], bytes]) -> Callable[..., None]:
        send = kind.send

        def counted(channel: Any, message: Any) -> None:
            self.counts.update(calls=1, out=len(encode(message)))
            send(channel, message)

        return counted

    def _receiving(self, kind: Any, encode: Callable[[Any], bytes]) -> Callable[..., Any]:
        receive = kind.receive

        def counted(channel: Any) -> Any:
            reply = receive(channel)
            self.counts.update(back=len(encode(reply)))
            return reply

        return counted


def network_bytes() -> int:
    """Return the bytes that this network has carried so far."""
    (line,) = (each for each in TRAFFIC.read_text().splitlines() if each.strip().startswith("lo:"))
    return int(line.split()[9])  # what was sent; a loopback interface receives the same


@contextmanager
def ensembles(cluster: Nodes) -> Iterator[dict[str, AdaFuseEngine]]:
    """Load the three embedded members in each way. They keep nothing between requests."""
    paths = member_paths()
    specs: dict[str, list[MemberSpec]] = {
        HERE: [spec(path) for path in paths],
        PROCESS: [spec(path, process=True, threads=1) for path in paths],
        ACTOR: [
            spec(path, ray={"address": cluster.address, "resources": {NODES[number % 2]: 1}})
            for number, path in enumerate(paths)
        ],
    }
    with ExitStack() as stack:
        yield {
            way: stack.enter_context(AdaFuseEngine.from_pretrained(members))
            for way, members in specs.items()
        }


def compare_passes(loaded: Mapping[str, AdaFuseEngine], size: Size) -> list[Pass]:
    """Measure a pass of the first member in each way."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(1 + size.repeats):
        for way in WAYS:
            seconds = passes(loaded[way], 1, size.passes)
            if number:  # the first run warms up
                times[way].append(1000 * statistics.median(seconds))
    rows = []
    for way in WAYS:
        over = [there - here for there, here in zip(times[way], times[HERE], strict=True)]
        message, network = None, None
        if way != HERE:
            with Meter().open() as counts:
                passes(loaded[way], 1, size.passes)
            message = counts["out"] / counts["calls"], counts["back"] / counts["calls"]
        if way == ACTOR:
            network = statistics.median(
                network_per_pass(loaded[way], size.passes) for _ in range(size.repeats)
            )
        rows.append(Pass(way, Spread.of(times[way]), Spread.of(over), message, network))
    return rows


def network_per_pass(engine: AdaFuseEngine, count: int) -> float:
    """Return the bytes on the network per pass, less what the idle cluster sends."""
    begin, start = network_bytes(), time.perf_counter()
    passes(engine, 1, count)
    sent, seconds = network_bytes() - begin, time.perf_counter() - start
    begin = network_bytes()
    time.sleep(seconds)
    return (sent - (network_bytes() - begin)) / count


def compare_responses(loaded: Mapping[str, AdaFuseEngine], size: Size) -> list[Response]:
    """Measure the responses of pair and trio in each way, with and without drafts."""
    prompts = [prompt_of(size.prompt, seed) for seed in range(size.prompts)]
    rows: list[Response] = []
    for drafting in (False, True):
        for members in (2, 3):
            engines = {
                way: AdaFuseEngine(
                    engine.backends[:members], runtime=RuntimeConfig(drafting=drafting)
                )
                for way, engine in loaded.items()
            }
            rows += _compared(engines, prompts, size, drafting=drafting)
    return rows


def _compared(
    engines: Mapping[str, AdaFuseEngine], prompts: Sequence[str], size: Size, *, drafting: bool
) -> Iterator[Response]:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(1 + size.repeats):
        for way in WAYS:
            start = time.perf_counter()
            found = answers(engines[way], prompts, size.response)
            rounds = sum(len(each.rounds) for each in found)
            if number:  # the first run warms up
                times[way].append(1000 * (time.perf_counter() - start) / rounds)
    want = [each.text for each in answers(engines[HERE], prompts, size.response)]
    for way in WAYS:
        with Meter().open() as counts:
            found = answers(engines[way], prompts, size.response)
        members = len(engines[way].backends)
        rounds = sum(len(each.rounds) for each in found)
        made = sum(sum(each.usage.forward_passes.values()) for each in found)
        is_apart = counts["calls"] > 0
        yield Response(
            members=members,
            drafting=drafting,
            way=way,
            round=Spread.of(times[way]),
            ratio=Spread.of([a / b for a, b in zip(times[way], times[HERE], strict=True)]),
            over=Spread.of([a - b for a, b in zip(times[way], times[PROCESS], strict=True)]),
            rounds=rounds,
            passes=made / rounds / members,
            calls=counts["calls"] / rounds / members if is_apart else None,
            message=(counts["out"] + counts["back"]) / rounds if is_apart else None,
            equal=[each.text for each in found] == want,
        )


def answers(engine: AdaFuseEngine, prompts: Sequence[str], new: int) -> list[Generation]:
    """Return the responses to the prompts, one after the other."""
    return [engine.generate(prompt, max_new_tokens=new) for prompt in prompts]


def as_markdown(header: Mapping[str, str], alone: Sequence[Pass], rows: Sequence[Response]) -> str:
    """Format the figures as Markdown."""
    lines = [*(f"- {name}: {value}" for name, value in header.items()), ""]
    lines += [
        "| a pass over one token, member in | ms | more than in this program, ms "
        "| bytes to the member and back | bytes on the network |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {each.way} | {each.milliseconds.line()} | {each.overhead.line()} "
        f"| {'{:.0f}, {:.0f}'.format(*each.message) if each.message else ''} "
        f"| {f'{each.network:.0f}' if each.network is not None else ''} |"
        for each in alone
    ]
    lines += [
        "",
        "| members | drafts | in | ms per round | ratio | more than in processes, ms | rounds "
        "| passes per round and member | messages per round and member | bytes per round | texts |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {each.members} | {'on' if each.drafting else 'off'} | {each.way} | {each.round.line(1)}"
        f" | {each.ratio.line()} | {each.over.line(1) if each.way == ACTOR else ''} "
        f"| {each.rounds} | {each.passes:.2f} "
        f"| {'' if each.calls is None else f'{each.calls:.2f}'} "
        f"| {'' if each.message is None else f'{each.message:.0f}'} "
        f"| {'equal' if each.equal else '**differ**'} |"
        for each in rows
    ]
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed.actors", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="use toy sizes")
    parser.add_argument("--output", type=Path, help="write all figures to this file, as JSON")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    args = parser.parse_args(argv)
    if not is_loopback_only():
        parser.error(
            "Ray would listen at the address of this machine. Run the benchmark in a network of "
            "its own: python -m tests.support.loopback python -m benchmarks.speed.actors"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Start the cluster, print the tables and write the files."""
    args = _arguments(argv)
    enable_loopback()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    size = QUICK if args.quick else Size()
    os.environ.update(PRIORITY)
    header = {**machine(), "size": str(size)}
    start = time.perf_counter()
    cluster = Nodes(*NODES, cores=2)
    try:
        with ensembles(cluster) as loaded:
            alone, rows = compare_passes(loaded, size), compare_responses(loaded, size)
    finally:
        cluster.close()
    header["took"] = f"{time.perf_counter() - start:.0f} s"
    table = as_markdown(header, alone, rows)
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n", encoding="utf-8")
    if args.output:
        measured = {
            "header": header,
            "passes": list(map(asdict, alone)),
            "responses": list(map(asdict, rows)),
        }
        args.output.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
