"""Send hostile schemas, expressions and grammars to a server that an honest client uses, too.

    python -m benchmarks.fuzz_grammars --cases 10000

The benchmark runs ``adafuse serve`` with the embedded members. Some clients send random requests;
some of these clients leave early. Meanwhile an honest client asks a short question again and again,
every other time with a small schema: first alone, and then beside the hostile clients. The
benchmark prints the number of requests by outcome, the honest client's latencies, and the resident
memory of the server and its children. The members keep nothing of prompts, so that this memory
shows only what grammars leave behind. The benchmark exits with 1 if the server has died, if a
request had an unexpected outcome, or if an honest request failed.

``--first 5000 --cases 5000`` runs the second half of 10,000 cases.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from adafuse_llm.embedded import member_paths
from benchmarks.hostile import RULES, SCHEMAS, SWELLING, chain, lark_chain, lark_json
from tests.support.serving import server_process

LEAVING = 0.1
"""Share of the hostile requests whose clients leave early."""

PATIENCE = 60.0
"""Seconds after which a client that does not leave early gives up."""

EXPECTED = ("200", "400", "429", "504", "left")
"""Outcomes that a hostile request may have."""

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "open": {"type": "boolean"}},
    "required": ["name", "open"],
    "additionalProperties": False,
}
QUESTION = "Who founded the Silesse Mill?"

Latencies = tuple[list[float], list[float]]
"""Seconds from request to answer: of requests without a schema, and of those with one."""


@dataclass
class Report:
    """What a run has measured.

    Attributes:
        outcomes: number of hostile requests by outcome.
        faults: hostile requests with other outcomes than `EXPECTED`, and honest ones that failed.
        alone: latencies of the honest client without the others, in seconds.
        beside: its latencies beside hostile clients.
        memory: resident memory of the server and its children in MB, from time to time.
        has_died: whether the server died.
        seconds: duration in seconds.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    alone: Latencies = field(default_factory=lambda: ([], []))
    beside: Latencies = field(default_factory=lambda: ([], []))
    memory: list[float] = field(default_factory=list)
    has_died: bool = False
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether nothing unexpected happened."""
        return not self.has_died and not self.faults


def run(cases: Sequence[int], seed: int, clients: int, *, alone: int = 40) -> Report:
    """Send cases to a new server.

    Args:
        cases: numbers of the cases.
        seed: seed of the cases.
        clients: number of hostile clients.
        alone: number of honest requests before them.
    """
    report = Report()
    with _members_file() as members, server_process("--config", members) as (url, process):
        for number in range(alone):
            _ask(url, report, number, report.alone if number > 4 else ([], []))
        began = time.monotonic()
        with _asking(url, report), ThreadPoolExecutor(clients) as pool:
            sent = pool.map(lambda number: (number, _send(url, seed, number)), cases)
            for index, (number, outcome) in enumerate(sent):
                report.outcomes[outcome] += 1
                if outcome not in EXPECTED:
                    report.faults.append(f"case {number}: {outcome}")
                if index % max(len(cases) // 50, 1) == 0:
                    report.memory.append(_memory(process))
                    shown = f"{index + 1}/{len(cases)} cases, {len(report.faults)} faults"
                    print(f"{shown}, {report.memory[-1]:.0f} MB", file=sys.stderr, flush=True)
        time.sleep(1)
        report.memory.append(_memory(process))
        report.seconds = time.monotonic() - began
        report.has_died = not _is_alive(url, process)
    return report


def _ask(url: str, report: Report, number: int, latencies: Latencies) -> None:
    """Ask a short question, every other time with a schema, and note the seconds it takes."""
    form = {"name": "mill", "schema": SCHEMA, "strict": True}
    more = {"response_format": {"type": "json_schema", "json_schema": form}} if number % 2 else {}
    began = time.monotonic()
    try:
        response = _post(url, QUESTION, PATIENCE, max_tokens=32, **more)
    except httpx.HTTPError as error:
        report.faults.append(f"an honest request failed: {error!r}")
        return
    latencies[number % 2].append(time.monotonic() - began)
    if response.status_code != 200:
        report.faults.append(f"an honest request failed: {response.text:.200}")


@contextmanager
def _asking(url: str, report: Report) -> Iterator[None]:
    """Keep asking from a thread while the context is open."""
    done = threading.Event()

    def ask() -> None:
        number = 0
        while not done.wait(0.1):
            _ask(url, report, number, report.beside)
            number += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _members_file() -> Iterator[str]:
    """Yield the path of a configuration file of the embedded members without prefix caches."""
    members = [{"path": str(path), "prefix_cache_bytes": 0} for path in member_paths()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "members.yaml")
        path.write_text(json.dumps({"models": members}))  # JSON is YAML
        yield str(path)


def _send(url: str, seed: int, number: int) -> str:
    """Send a hostile request, and return its outcome."""
    options = request_of(seed, number)
    dice = random.Random(f"client {seed} {number}")
    leaves = dice.random() < LEAVING
    patience = dice.uniform(0.01, 1.0) if leaves else PATIENCE
    try:
        response = _post(url, "Repeat: abba cab 0110 " * 3, patience, adafuse=options)
    except httpx.TimeoutException:
        return "left" if leaves else f"no answer for {PATIENCE:g} seconds"
    except httpx.HTTPError as error:
        return f"{error!r:.200}"
    status = str(response.status_code)
    return status if status in EXPECTED else f"{status} {response.text:.200}"


def _post(url: str, question: str, timeout: float, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": question}]
    body = {"model": "adafuse", "messages": messages, "max_tokens": 100, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=timeout)


def _memory(process: psutil.Process) -> float:
    """Return the resident memory of a process and its children in MB."""
    total = 0
    with suppress(psutil.Error):
        for each in (process, *process.children()):
            with suppress(psutil.Error):
                total += each.memory_info().rss
    return total / 1e6


def _is_alive(url: str, process: psutil.Process) -> bool:
    try:
        return process.is_running() and httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and return 1 if something unexpected happened."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_grammars", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="number of cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases")
    parser.add_argument("--clients", type=int, default=4, help="number of hostile clients")
    args = parser.parse_args(argv)
    cases = range(args.first, args.first + args.cases)
    report = run(cases, args.seed, args.clients)
    for fault in report.faults[:40]:
        print(fault)
    outcomes = ", ".join(f"{name}: {count}" for name, count in report.outcomes.most_common())
    print(f"{len(cases)} cases in {report.seconds:.0f} s, seed {args.seed}; {outcomes}")
    print(f"the server {'died' if report.has_died else 'runs'}; {len(report.faults)} faults")
    for name, latencies in (("alone", report.alone), ("beside others", report.beside)):
        for form, seconds in zip(("without", "with"), latencies, strict=True):
            p95 = statistics.quantiles(seconds, n=20)[-1] if len(seconds) > 1 else float("nan")
            print(
                f"honest requests {name}, {form} a schema: {len(seconds)}, median "
                f"{statistics.median(seconds):.2f} s, p95 {p95:.2f} s"
            )
    shown = ", ".join(f"{each:.0f}" for each in report.memory[:: max(len(report.memory) // 10, 1)])
    print(f"resident memory in MB: {shown}; at the end {report.memory[-1]:.0f}")
    return 0 if report.is_good else 1


# Random requests ------------------------------------------------------------------------------

Options = dict[str, Any]

TERMINALS: dict[str, str] = {
    "terminals": 'A{0}: "x" A{1}\n',
    "both": "A{0}: /[a-z]*/ & A{1}\n",
    "not": "A{0}: ~A{1}\n",
}

EXPRESSIONS: dict[str, Callable[[int], str]] = {
    "groups": lambda size: "(" * size + "x" + ")" * size,
    "alternatives": lambda size: "(y|" * size + "x" + ")" * size,
    "stars": lambda size: "(" * size + "x" + ")*" * size,
    "repetitions": lambda size: "a" + "{1,2}" * size,
    "classes": lambda size: "[" * size + "a" + "]" * size,
}
"""Functions that return a regular expression of some depth, by name."""

SIZES = (3, 20, 90, 150, 400, 900, 1_500, 4_000, 12_000)
"""Sizes of chains and of other structures: some below the limits, some above."""

ATOMS = ("a", ".", "[a-z]", r"\w", r"\d", r"\p{L}", "[^b]", "(a|bc)", "(?:xy)?", "x|y", r"\s", "é")
QUANTIFIERS = ("", "", "*", "+", "?", "{2}", "{1,9}", "{20}", "{0,300}", "{1000}", "*?", "{1,2}{3}")
KEYWORDS = ("anyOf", "oneOf", "allOf", "not", "items", "properties", "prefixItems", "contains")


def request_of(seed: int, number: int) -> Options:
    """Return the options of a case: ``json_schema``, ``regex`` or ``grammar``."""
    dice = random.Random(f"{seed} {number}")
    return dice.choice(KINDS)(dice)


def _chain(dice: random.Random) -> Options:
    """References, rules or groups, one within another."""
    size = dice.choice(SIZES)
    schema = chain(dice.choice([*SCHEMAS.values()]), min(size, SIZES[-2]))
    forms: list[Options] = [
        {"json_schema": schema},
        {"grammar": lark_json(schema)},
        {"grammar": lark_chain(dice.choice([*RULES.values(), *TERMINALS.values()]), size)},
        {"regex": dice.choice([*EXPRESSIONS.values()])(size)},
    ]
    return dice.choice(forms)


def _swelling(dice: random.Random) -> Options:
    regex = dice.choice(SWELLING)
    for digit in "12":
        regex = regex.replace(digit, str(dice.randrange(1, 4)))
    if dice.random() < 0.3:
        return {"grammar": f'start: a+\na: /{regex}/ "!" | /{regex}c/ "?"\n'}
    return {"regex": regex}


def _expression(dice: random.Random) -> Options:
    """A random expression, now and then with many conjunctions or a broken end."""
    parts = [dice.choice(ATOMS) + dice.choice(QUANTIFIERS) for _ in range(dice.randrange(1, 30))]
    regex = "".join(parts)
    if dice.random() < 0.3:
        regex = f"({regex}){dice.choice(QUANTIFIERS)}"
    if dice.random() < 0.1:
        regex = regex[: dice.randrange(len(regex) + 1)]
    if dice.random() < 0.2:
        ors = " & ".join(f"/(.*{a}.{{{n}}}{a}.*|{regex})/" for n, a in enumerate("abcdefg", 3))
        return {"grammar": f"start: A\nA: {ors}\n"}
    return {"regex": regex or "x"}


def _schema(dice: random.Random) -> Options:
    """A random schema whose definitions refer to each other, also in circles."""
    names = [f"d{number}" for number in range(dice.choice((1, 3, 10, 60)))]
    leaves: list[Callable[[], Any]] = [
        lambda: {"$ref": f"#/$defs/{dice.choice(names)}"},
        lambda: {"type": "string", "pattern": _expression(dice).get("regex", "^a*$")[:60]},
        lambda: {"type": "string", "minLength": dice.choice((0, 5, 3_000))},
        lambda: {"enum": list(range(dice.choice((1, 50, 3_000))))},
        lambda: {"type": "number", "multipleOf": dice.choice((3, 7, 0.5))},
        lambda: True,
    ]

    def schema(depth: int) -> Any:
        if depth <= 0 or dice.random() < 0.2:
            return dice.choice(leaves)()
        keyword = dice.choice(KEYWORDS)
        inside = [schema(depth - 1) for _ in range(dice.choice((1, 2, 3, 12)))]
        if keyword == "properties":
            named = {f"p{number}": each for number, each in enumerate(inside)}
            return {"type": "object", "properties": named, "required": ["p0"]}
        if keyword in ("items", "not", "contains"):
            return {"type": "array", keyword: inside[0], "minItems": dice.choice((0, 2, 900))}
        return {keyword: inside}

    root = {"items": schema(4), "$defs": {name: schema(3) for name in names}}
    return {"grammar": lark_json(root)} if dice.random() < 0.3 else {"json_schema": root}


def _wide(dice: random.Random) -> Options:
    """Many alternatives, or several lists of them that multiply."""
    names = [f"x{number}" for number in range(dice.choice((300, 3_000, 30_000)))]
    parts = [
        {"anyOf": [{"type": "string", "minLength": 3 * one + other} for other in range(8)]}
        for one in range(dice.choice((3, 8, 16)))
    ]
    forms: list[Options] = [
        {"grammar": "start: " + " | ".join(f'"{name}"' for name in names) + "\n"},
        {"regex": "|".join(names)},
        {"json_schema": {"properties": {name: {"type": "string"} for name in names[::10]}}},
        {"json_schema": {"enum": names}},
        {"json_schema": {dice.choice(("allOf", "anyOf", "oneOf")): parts}},
    ]
    return dice.choice(forms)


def _ambiguous(dice: random.Random) -> Options:
    """Grammars with many derivations of the same text."""
    rules = [
        'start: e\ne: e e | e e e | "a" | ""\n',
        'start: a+\na: b* c*\nb: "x"* a?\nc: "x"+ | b b b\n',
        f"start: a{{0,{dice.choice((9, 200, 5_000))}}}\na: /[a-z]*/ b\nb: /[a-m]*/ | a?\n",
        'start: e\ne: "(" e ")" e | e e | "x"{1,50}\n',
        'start: e\ne: e "+" e | e "*" e | /[0-9]+/ | /[0-9a-f]+/ | /.+/\n',
    ]
    return {"grammar": dice.choice(rules)}


def _broken(dice: random.Random) -> Options:
    """A grammar in which some characters are replaced."""
    ((option, source),) = request_of(dice.randrange(1 << 30), 0).items()
    characters = [*(source if isinstance(source, str) else json.dumps(source))[:20_000]]
    for _ in range(dice.choice((1, 3, 30))):
        characters[dice.randrange(len(characters))] = dice.choice('(){}[]|"/\\%:&~*\n a1\x00é')
    return {"regex" if option == "regex" else "grammar": "".join(characters)}


KINDS = (_chain, _chain, _chain, _swelling, _expression, _schema, _wide, _ambiguous, _broken)
"""The functions that make the options of a case."""


if __name__ == "__main__":
    raise SystemExit(main())
