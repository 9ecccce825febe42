"""The comparisons: each function adds rows, targets and figures to a report."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import transformers

from adafuse_llm import AdaFuseEngine, Generation
from adafuse_llm.documents import question_messages
from adafuse_llm.embedded import member_paths
from benchmarks.speed import branches as passes
from benchmarks.speed import first_words, memory, operations, servers, start_up
from benchmarks.speed.first_words import Point
from benchmarks.speed.measure import Outcome, Report, Row, System, Target, take_turns
from benchmarks.speed.members import (
    SHAPES,
    Member,
    Members,
    embedded,
    llama,
    make_engine,
    make_member,
    prompt_of,
    random_weights,
)
from benchmarks.speed.peers import (
    TOKEN_BY_TOKEN,
    PaperLoop,
    add_up,
    outcome_of,
    run_engine,
    run_generate,
)
from benchmarks.speed.script import make_scripted, write_script
from training.world import Case, Names, Skill, draw_case


@dataclass(frozen=True)
class Size:
    """Sizes of the comparisons. Lengths of prompts and responses are in tokens.

    Attributes:
        repeats: timed runs of each system.
        base: lengths of prompt and response at the base point.
        branches: values of B at the base point.
        prompts: other lengths of the prompt.
        responses: other lengths of the response.
        members: other numbers of members.
        paper_rounds: rounds of the paper's loop.
        questions: number of questions with quoted answers.
        quote: shape, prompt and response of the scripted quotation.
        random: shape, prompt, response and B of each comparison with random-weight members.
        long: shape, prompt, long prompt and response of the comparison with long prompts.
        at_once: numbers of concurrent requests.
        concurrent: shape, prompt and response of the concurrent requests, and the total number of
            requests.
        prefix: shared prefix and response of the comparison with and without prefix cache.
        memory: short and long prompt of the memory measurements.
        growth: first and last request of the measurement of memory growth.
        operations: shape, numbers of requests, and prompts of the count of operations.
        first_words: points at which the first span is compared with the members' prefill.
        first_memory: members and prompt of each memory measurement of the first span.
        starts: runs of each command of the measurement of start-up.
        servers: response and timed runs of the comparison with members on servers.
    """

    repeats: int = 5
    base: tuple[int, int] = (500, 64)
    branches: tuple[int, ...] = (1, 3, 5)
    prompts: tuple[int, ...] = (50, 2000)
    responses: tuple[int, ...] = (16, 256)
    members: tuple[int, ...] = (1, 2, 4)
    paper_rounds: int = 3
    questions: int = 8
    quote: tuple[str, int, int] = ("25M", 500, 64)
    random: tuple[tuple[str, int, int, tuple[int, ...]], ...] = (
        ("25M", 500, 32, (1, 3)),
        ("135M", 50, 16, (1,)),
    )
    long: tuple[str, int, int, int] = ("5M", 500, 8000, 32)
    at_once: tuple[int, ...] = (4, 16)
    concurrent: tuple[str, int, int, int] = ("25M", 20, 16, 48)
    prefix: tuple[int, int] = (2000, 16)
    memory: tuple[int, int] = (500, 3500)
    growth: tuple[int, int] = (1000, 3000)
    operations: tuple[str, tuple[int, ...], tuple[int, int]] = ("5M", (1, 4, 16, 64), (100, 8000))
    first_words: tuple[Point, ...] = (
        Point("embedded", 500, 9),
        Point("embedded", 2000, 5),
        Point("5M", 8000, 3, (1,)),
        Point("25M", 8000, 1, (1,), warm=False),
    )
    first_memory: tuple[tuple[str, int], ...] = (
        ("embedded", 500),
        ("embedded", 2000),
        ("5M", 8000),
        ("25M", 8000),
    )
    starts: int = 5
    servers: tuple[int, int] = (16, 3)


FULL: Final = Size()
QUICK: Final = Size(
    repeats=2,
    base=(100, 24),
    prompts=(20, 200),
    responses=(8, 48),
    paper_rounds=2,
    questions=2,
    quote=("tiny", 100, 24),
    random=(("tiny", 50, 16, (1, 3)),),
    long=("tiny", 100, 1000, 16),
    at_once=(2, 4),
    concurrent=("tiny", 20, 12, 6),
    prefix=(200, 8),
    memory=(100, 400),
    growth=(10, 40),
    operations=("tiny", (1, 4, 16), (100, 1000)),
    first_words=(Point("tiny", 100, 2), Point("tiny", 1000, 1, (1,), warm=False)),
    first_memory=(("tiny", 1000),),
    starts=1,
    servers=(4, 1),
)

QUOTED: Final[tuple[Skill, ...]] = ("people", "places_products", "numbers", "dates")
"""Skills whose answers are quotations from the passages."""

AGREEING: Final = (0.1, 0.1, 0.8)
"""Shares of rounds with one, two and three words, for members that quote the same passage."""


def base(report: Report, size: Size) -> None:
    """Compare all systems at the base point, for each B, with and without drafting."""
    members = embedded()
    prompt, response = size.base
    point = point_of(prompt, response)
    text = prompt_of(prompt)
    systems, alone = engines_and_alone(
        members, text, response, size.branches, drafting=(True, False)
    )
    first = size.branches[0]
    length = len(systems[f"engine, B = {first}"]().text.encode())
    for name, make in TOKEN_BY_TOKEN.items():
        systems[name] = partial(make(members).run, text, length)
    rows = take_turns("base", point, systems, size.repeats)
    report.rows += rows.values()
    report.rows += _each_alone(rows[alone[first]])
    for branches, limit, most in ((1, 0.9, 2.0), (3, 1.3, 4.0)):
        row = rows[f"engine, B = {branches}"]
        report.targets += [
            Target(
                f"engine / members' generate(), B = {branches}, {point}",
                row.median / rows[alone[branches]].median,
                limit,
            ),
            Target(
                f"tokens processed per committed token after the prompt, B = {branches}",
                row.per_token,
                most,
                unit="tokens",
            ),
            Target(
                f"readings of each prompt token, B = {branches}",
                _prompt_readings(members, text, branches),
                1.0,
            ),
        ]
    for name in TOKEN_BY_TOKEN:
        ratio = rows[f"engine, B = {first}"].per_byte / rows[name].per_byte
        report.targets.append(Target(f"engine / {name}, per byte, B = {first}", ratio, 1.0))
    _paper(report, members, prompt, size)


def prompts(report: Report, size: Size) -> None:
    """Vary the length of the prompt; run the paper's loop only with the longest prompt."""
    response = size.base[1]
    members = embedded()
    for prompt in size.prompts:
        text = prompt_of(prompt)
        systems, alone = engines_and_alone(members, text, response, (1, 3))
        point = point_of(prompt, response)
        rows = take_turns("prompts", point, systems, size.repeats, warm=run_once(alone))
        report.rows += rows.values()
    longest = _paper(report, members, size.prompts[-1], size)
    for branches, limit in ((1, 50.0), (3, 100.0)):
        ratio = longest[branches].per_byte / rows[f"engine, B = {branches}"].per_byte
        name = f"the paper's loop / engine, per byte, B = {branches}, prompt {size.prompts[-1]}"
        report.targets.append(Target(name, ratio, limit, at_least=True))


def responses(report: Report, size: Size) -> None:
    """Vary the length of the response."""
    prompt = size.base[0]
    for response in size.responses:
        systems, alone = engines_and_alone(embedded(), prompt_of(prompt), response, (3,))
        point, warm = point_of(prompt, response), run_once(alone)
        report.rows += take_turns("responses", point, systems, size.repeats, warm=warm).values()


def members(report: Report, size: Size) -> None:
    """Vary the number of members. The fourth is a copy of the first with noisy weights."""
    prompt, response = size.base
    for count in size.members:
        systems, alone = engines_and_alone(embedded(count), prompt_of(prompt), response, (3,))
        point, warm = f"{point_of(prompt, response)}, {count} members", run_once(alone)
        report.rows += take_turns("members", point, systems, size.repeats, warm=warm).values()


def quotes(report: Report, size: Size) -> None:
    """Compare answers that quote the prompt: short ones and a long, scripted one.

    A short answer ends with an end-of-sequence token, which ``generate()`` also has to produce.
    """
    trained = embedded(endless=False)
    cases = _quoted_cases(size.questions)
    conversations = [question_messages(case.question, case.passages) for case in cases]
    encoded = [[m.backend.codec.encode_messages(turns) for m in trained] for turns in conversations]
    systems: dict[str, System] = {}
    for branches in (1, 3):
        engine = make_engine(trained, branching_factor=branches)
        answers = [outcome_of(engine.generate(messages=turns)) for turns in conversations]
        lengths = [[tokens + 1 for tokens in answer.tokens.values()] for answer in answers]
        systems[f"engine, B = {branches}"] = partial(_answer_all, engine, conversations)
        systems[f"generate(), as B = {branches}"] = partial(
            _generate_all, trained, encoded, lengths
        )
    one_token = [[1 for _ in trained] for _ in conversations]
    systems["generate(), one token"] = partial(_generate_all, trained, encoded, one_token)
    point = f"{len(cases)} questions over three passages"
    rows = take_turns("quotes", point, systems, size.repeats)
    report.rows += rows.values()
    _against_alone(report, rows, {1: 0.9, 3: 1.3}, "answers that quote")
    for branches, most in ((1, 2.0), (3, 4.0)):
        row, own = rows[f"engine, B = {branches}"], rows[f"generate(), as B = {branches}"]
        name = "tokens processed per committed token after the prompt, answers that quote"
        report.targets.append(Target(f"{name}, B = {branches}", row.per_token, most, unit="tokens"))
        prompts = rows["generate(), one token"].median
        ratio = (row.median - prompts) / (own.median - prompts)
        report.figures.append(
            (
                f"answers that quote, B = {branches}: engine / generate() beyond the prompts, "
                f"which are {prompts / own.median:.0%} of generate()",
                f"{ratio:.2f} x",
            )
        )

    shape, prompt, response = size.quote
    text = prompt_of(prompt)
    scripted = _scripted(shape, len(text))
    quoted = " " + text[len(text) // 3 :].split(" ", 1)[1]
    write_script(scripted, text, quoted, AGREEING)
    systems, alone = engines_and_alone(scripted, text, response, (1, 3), drafting=(True, False))
    point = f"{point_of(prompt, response)}, long quotation, scripted {shape} members"
    rows = take_turns("quotes", point, systems, size.repeats, warm=run_once(alone))
    report.rows += rows.values()
    _against_alone(report, rows, {1: 0.7, 3: 0.7}, f"long quotation, scripted {shape} members")


def random_members(report: Report, size: Size) -> None:
    """Measure the cost of forward passes with random-weight members, which rarely agree."""
    for shape, prompt, response, branches in size.random:
        pair = random_weights(shape)
        systems, alone = engines_and_alone(pair, prompt_of(prompt), response, branches)
        point, warm = f"{point_of(prompt, response)}, two of {shape}", run_once(alone)
        report.rows += take_turns("random", point, systems, size.repeats, warm=warm).values()


def long_prompts(report: Report, size: Size) -> None:
    """Compare the cost of a committed word after a long and after a short prompt, at B = 3."""
    shape, short, long, response = size.long
    pair = random_weights(shape)
    engine = make_engine(pair)
    costs: dict[int, float] = {}
    for prompt in (short, long):
        system: System = partial(run_engine, engine, prompt_of(prompt), response)
        point = f"{point_of(prompt, response)}, two of {shape}"
        systems = {"engine, B = 3": system}
        warm = systems if prompt == long else ()  # the short prompt was the warm-up
        row = take_turns("long", point, systems, size.repeats, warm=warm)["engine, B = 3"]
        report.rows.append(row)
        costs[prompt] = row.part("per word")
    name = f"committed word after {long} / after {short} prompt tokens, B = 3"
    report.targets.append(Target(name, costs[long] / costs[short], 2.0))


def concurrent(report: Report, size: Size) -> None:
    """Compare concurrent requests with one request at a time.

    As on a server, only some of the requests run at the same time: when one ends, the next one
    starts. A forward pass that several requests share counts once. The sequential run is not
    repeated.
    """
    shape, prompt, response, requests = size.concurrent
    pair = random_weights(shape)
    most = size.at_once[-1]
    texts = [prompt_of(prompt, seed) for seed in range(requests)]
    for branches in (1, 3):
        options: dict[str, Any] = {"branching_factor": branches, "max_new_tokens": response}
        systems: dict[str, System] = {}
        for count in size.at_once:
            engine = make_engine(pair, max_requests=count, **options)
            systems[f"{count} at once"] = _metered(pair, partial(engine.generate_batch, texts))
        point = f"{requests} requests, {point_of(prompt, response)}, two of {shape}, B = {branches}"
        engine.generate(texts[0])
        alone = _one_by_one(engine, pair, texts, point)
        last = f"{most} at once"
        rows = take_turns("concurrent", point, {last: systems.pop(last)}, size.repeats)
        if branches == 1:
            rows |= take_turns("concurrent", point, systems, 1, warm=systems)
        report.rows += [alone, *rows.values()]
        others = [row.outcome.text for row in rows.values()]
        others.append(add_up([outcome_of(each) for each in _threads(engine, texts)]).text)
        report.targets += [
            Target(
                f"throughput of {most} at once / one at a time, {shape} members, B = {branches}",
                alone.median / rows[last].median,
                {1: 5.0, 3: 4.0}[branches],
                at_least=True,
            ),
            Target(
                f"ways to run {requests} requests (batches, threads) that change a text, "
                f"B = {branches}",
                sum(text != alone.outcome.text for text in others),
                0,
                unit="",
            ),
        ]


def prefix(report: Report, size: Size) -> None:
    """Compare requests that share a prompt prefix, with and without the prefix cache."""
    length, response = size.prefix
    tails = itertools.count()
    shared = prompt_of(length)
    systems: dict[str, System] = {}
    for name, kept in (("nothing kept", 0), ("prefix kept", 1 << 28)):
        engine = make_engine(embedded(prefix_cache_bytes=kept))
        systems[name] = partial(_run_with_tail, engine, shared, tails, response)
    point = f"{point_of(length, response)}, prompt shared but for its end"
    rows = take_turns("prefix", point, systems, size.repeats)
    report.rows += rows.values()
    ratio = rows["prefix kept"].median / rows["nothing kept"].median
    report.figures.append((f"a shared prefix of {length} tokens kept / not kept", f"{ratio:.2f} x"))


def memory_use(report: Report, size: Size) -> None:
    """Measure peak memory per prompt token and per concurrent request in separate processes."""
    short, long = size.memory
    many = size.at_once[-1]
    base = memory.in_process("peak", short, 1)
    per_token = (memory.in_process("peak", long, 1) - base) / (long - short)
    per_request = (memory.in_process("peak", short, many) - base) / (many - 1)
    rows = sum(memory.row_bytes(member.model.config) for member in embedded())
    report.figures += [
        (
            f"peak memory per prompt token ({short} to {long} tokens), three members",
            f"{per_token:,.0f} bytes, of which key/value rows {rows:,}",
        ),
        (
            f"peak memory per request at once (2 to {many}, prompt {short}), three members",
            f"{per_request:,.0f} bytes, of which key/value rows {rows * short:,}",
        ),
    ]


def first_span(report: Report, size: Size) -> None:
    """Compare time and memory until the first span with the members' own prefill."""
    first_words.compare(report, size.first_words, size.first_memory)


def start(report: Report, size: Size) -> None:
    """Measure what the time from a command to its first words consists of."""
    start_up.measure(report, size.starts)


def on_servers(report: Report, size: Size) -> None:
    """Compare members on inference servers with the same members in this process."""
    servers.compare(report, *size.servers)


def branches(report: Report, size: Size) -> None:
    """Count where forward passes and tokens go, with and without drafting. Nothing is timed."""
    prompt, response = size.base
    count = size.at_once[-1]
    conversations = [
        question_messages(case.question, case.passages) for case in _quoted_cases(size.questions)
    ]
    for b in (1, 3):
        for drafting in (True, False):
            prose = partial(passes.prose, count, prompt, response, b, drafting=drafting)
            counts = {
                f"{count} texts of prose": prose(),
                f"{count} texts of prose at once": prose(at_once=True),
                "short answers": passes.answers(conversations, b, drafting=drafting),
            }
            how = f"B = {b}" + ("" if drafting else ", no drafting")
            report.figures += [
                (f"per committed token, {what}, {how}", each.line())
                for what, each in counts.items()
            ]


def growth(report: Report, size: Size) -> None:
    """Measure the growth of resident memory over many requests."""
    first, last = size.growth
    found = memory.in_process("growth", first, last)
    name = f"growth of resident memory from request {first} to {last}"
    report.targets.append(Target(name, found, 1.0, unit="%"))


def count_operations(report: Report, size: Size) -> None:
    """Count the operations of passes that several requests share."""
    operations.compare(report, *size.operations)


COMPARISONS: Final[Mapping[str, Callable[[Report, Size], None]]] = {
    "base": base,
    "prompts": prompts,
    "responses": responses,
    "members": members,
    "quotes": quotes,
    "random": random_members,
    "long": long_prompts,
    "concurrent": concurrent,
    "prefix": prefix,
    "branches": branches,
    "memory": memory_use,
    "growth": growth,
    "operations": count_operations,
    "first_words": first_span,
    "start_up": start,
    "servers": on_servers,
}


def point_of(prompt: int, response: int) -> str:
    return f"prompt {prompt}, response {response}"


def engines_and_alone(
    members: Members,
    prompt: str,
    response: int,
    branches: Sequence[int],
    drafting: Sequence[bool] = (True,),
) -> tuple[dict[str, System], dict[int, str]]:
    """Make engines, and runs of ``generate()`` that write the same number of tokens per member.

    Returns:
        The systems by name, and for each B the name of its ``generate()`` system.
    """
    systems: dict[str, System] = {}
    alone: dict[int, str] = {}
    ids = [member.encode(prompt) for member in members]
    for b in branches:
        for drafts in drafting:
            engine = make_engine(members, drafting=drafts, branching_factor=b)
            name = f"engine, B = {b}" + ("" if drafts else ", no drafting")
            systems[name] = partial(run_engine, engine, prompt, response)
        new = list(systems[f"engine, B = {b}"]().tokens.values())
        alone[b] = f"generate(), as B = {b}"
        systems[alone[b]] = partial(run_generate, members, ids, new)
    return systems, alone


def run_once(alone: Mapping[int, str]) -> list[str]:
    """Return the names of the engines that `engines_and_alone` has already run."""
    return [f"engine, B = {branches}" for branches in alone]


def _each_alone(row: Row) -> list[Row]:
    """Split a row of ``generate()`` into one row per member."""
    run = row.outcome
    return [
        replace(
            row,
            system=f"generate(), {name} alone",
            seconds=row.parts[name],
            outcome=Outcome(
                run.text,
                tokens={name: run.tokens[name]},
                passes={name: run.passes[name]},
                processed={name: run.processed[name]},
                prompt={name: run.prompt[name]},
            ),
            parts={},
        )
        for name in run.tokens
    ]


def _against_alone(
    report: Report, rows: Mapping[str, Row], limits: Mapping[int, float], what: str
) -> None:
    for b, limit in limits.items():
        ratio = rows[f"engine, B = {b}"].median / rows[f"generate(), as B = {b}"].median
        report.targets.append(
            Target(f"engine / members' generate(), {what}, B = {b}", ratio, limit)
        )


def _paper(report: Report, members: Members, prompt: int, size: Size) -> dict[int, Row]:
    """Time some rounds of the paper's loop and return the rows by B.

    All rounds cost about the same time.
    """
    rows = {}
    for branches in (1, 3):
        loop = PaperLoop(members, branches)
        loop.round(prompt_of(prompt))
        outcome = loop.run(prompt_of(prompt), size.paper_rounds)
        seconds = sum(outcome.parts.values())
        point = f"prompt {prompt}, {size.paper_rounds} rounds"
        rows[branches] = Row(
            "paper", point, f"the paper's loop, B = {branches}", (seconds,), outcome
        )
    report.rows += rows.values()
    return rows


def _prompt_readings(members: Members, prompt: str, branches: int) -> float:
    """Return how often a model reads each prompt token on average; the maximum of the members."""
    readings = []
    engine = make_engine(members, branching_factor=branches)
    for member in members:
        length = len(member.encode(prompt))
        counts: list[int] = []
        record = partial(_record, counts, length)
        handle = member.model.register_forward_pre_hook(record, with_kwargs=True)
        engine.generate(prompt, max_new_tokens=8)
        handle.remove()
        readings.append(sum(counts) / length)
    return max(readings)


def _record(counts: list[int], length: int, _: Any, __: Any, inputs: Mapping[str, Any]) -> None:
    """Record how many tokens of a pass have a position below `length`."""
    positions = inputs.get("position_ids")
    if positions is None:
        cache = inputs.get("past_key_values")
        done = 0 if cache is None else cache.get_seq_length()
        positions = done + torch.arange(inputs["input_ids"].shape[-1])
    counts.append(int((positions < length).sum()))


def _quoted_cases(count: int) -> list[Case]:
    """Draw held-out questions whose answers are quotations from their passages."""
    names = Names(random.Random("speed quotes"), "heldout")
    drawn = (draw_case(names, skill) for skill in itertools.cycle(QUOTED))
    quoted = (case for case in drawn if any(case.answer in p.text for p in case.passages))
    return list(itertools.islice(quoted, count))


def _scripted(shape: str, positions: int) -> Members:
    """Make two random-weight members with empty scripts."""
    scripted: list[Member] = []
    for index in range(2):
        tokenizer = transformers.AutoTokenizer.from_pretrained(member_paths()[index])
        model = llama(SHAPES[shape], len(tokenizer), seed=index)
        make_scripted(model, positions)
        scripted.append(make_member(f"scripted-{index}", model, tokenizer))
    return tuple(scripted)


def _answer_all(engine: AdaFuseEngine, conversations: Sequence[Any]) -> Outcome:
    return add_up([outcome_of(engine.generate(messages=turns)) for turns in conversations])


def _generate_all(
    members: Members, prompts: Sequence[Sequence[list[int]]], lengths: Sequence[Sequence[int]]
) -> Outcome:
    pairs = zip(prompts, lengths, strict=True)
    return add_up([run_generate(members, ids, new) for ids, new in pairs])


def _run_with_tail(
    engine: AdaFuseEngine, prompt: str, tails: Iterator[int], response: int
) -> Outcome:
    """Run the engine on a prompt that ends differently each time."""
    return run_engine(engine, f"{prompt}\n\nNote {next(tails)}:", response)


def _one_by_one(engine: AdaFuseEngine, members: Members, texts: Sequence[str], point: str) -> Row:
    """Run and time the requests one after the other."""
    start = time.perf_counter()
    outcome = _metered(members, lambda: [engine.generate(text) for text in texts])()
    seconds = time.perf_counter() - start
    return Row("concurrent", point, "one at a time", (seconds,), outcome)


def _metered(members: Members, run: Callable[[], list[Generation]]) -> System:
    """Make a system that adds up generations and counts the passes that the models really run."""

    def system() -> Outcome:
        for member in members:
            member.meter.read()
        outcome = add_up([outcome_of(generation) for generation in run()])
        counts = {member.name: member.meter.read() for member in members}
        return replace(
            outcome,
            passes={name: passes for name, (passes, _) in counts.items()},
            processed={name: tokens for name, (_, tokens) in counts.items()},
        )

    return system


def _threads(engine: AdaFuseEngine, texts: Sequence[str]) -> list[Generation]:
    """Run each request in its own thread."""
    found: dict[int, Generation] = {}

    def run(index: int) -> None:
        found[index] = engine.generate(texts[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(texts))]
