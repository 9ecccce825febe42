"""How well the confidence of an ensemble separates right answers from wrong ones.

    python -m benchmarks.confidence                                 # embedded members
    make real
    python -m benchmarks.confidence --real --data BENCHMARKS        # SmolLM2 + Qwen, GGUF files

The larger member alone and the ensemble answer the questions of each task. The regression is fitted
on the first ones, and measured on others. BENCHMARKS is a folder with the paper's test sets. Every
answer is saved at once, so after an interruption, the same command goes on. ``--signals`` tries two
more: whether each member's own answer is equal, and how much likelier the passage makes the answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adafuse_llm import AdaFuseEngine, GGUFMember, InvalidInputError, RuntimeConfig
from adafuse_llm.cli.terminal import cancel_on_interrupt
from adafuse_llm.evaluation.comparison import Score
from adafuse_llm.evaluation.confidence import Array, Reliability, fit, predicted, reliability
from adafuse_llm.evaluation.files import Results
from benchmarks.paper.decode import Record, Runner, Work
from benchmarks.paper.metrics import load_metric
from benchmarks.paper.suites import Row
from benchmarks.paper.tasks import Question, load_task
from benchmarks.real.members import real_files

SAMPLES = 2000
"""Number of bootstrap samples for the difference of two areas."""


@dataclass(frozen=True)
class Measured:
    """A task: its metric, how many questions to fit on, and the first and last to measure on.

    `stop` ends an answer where the metric stops reading it.
    """

    name: str
    metric: str
    fit: int
    first: int
    last: int
    stop: tuple[str, ...] | None = None


TASKS = (
    Measured("squad", "exact_match", fit=300, first=301, last=800, stop=("\n",)),
    Measured("embedded", "contains", fit=300, first=301, last=720),
    Measured("gsm8k", "number", fit=100, first=301, last=396),
)

SIGNALS = {
    "larger member's sum and length": ("larger", "length"),
    "the pair's signals": ("logprob", "smaller", "agreement", "length"),
    "both": ("logprob", "smaller", "larger", "agreement", "length"),
}
"""The features that a regression reads, by the name of its line in the table."""

MORE_SIGNALS = {
    "both, own answers": (*SIGNALS["both"], "own"),
    "both, passage": (*SIGNALS["both"], "passage"),
    "both, own answers, passage": (*SIGNALS["both"], "own", "passage"),
}
"""The features that `--signals` tries, too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit code: 0, or 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.confidence", description=__doc__)
    parser.add_argument("--real", action="store_true", help="SmolLM2 + Qwen instead of two others")
    parser.add_argument("--data", type=Path, help="folder with TASK.jsonl and TASK.prompt.txt")
    parser.add_argument("--task", action="append", default=[], help="only this task; repeatable")
    parser.add_argument("--strategy", default="auto", help="of the ensemble")
    parser.add_argument("--fit", type=int, help="number of questions to fit on")
    parser.add_argument("--limit", type=int, help="number of questions to measure on")
    parser.add_argument("--signals", action="store_true", help="try two more signals")
    parser.add_argument("--output", type=Path, default=Path("results/confidence"))
    given = parser.parse_args(arguments)
    engine, larger = _engine(given.real, given.strategy)
    with engine, cancel_on_interrupt() as cancel:
        identity = {"members": list(engine.members), "real": given.real}
        runner = Runner(engine, given.output, identity, cancel=cancel)
        for task in TASKS if given.real else TASKS[1:2]:
            if not given.task or task.name in given.task:
                report = _measure(runner, engine, larger, task, given)
                sys.stdout.write(report)
                with (given.output / "confidence.md").open("a", encoding="utf-8") as file:
                    file.write(report)
    return 0


def _engine(real: bool, strategy: str) -> tuple[AdaFuseEngine, str]:
    """Load two members. Return the engine, and the name of the larger or better member."""
    runtime = RuntimeConfig(max_requests=8)
    if not real:
        engine = AdaFuseEngine.from_embedded(strategy=strategy, runtime=runtime)
        return engine, "wren"
    files = real_files()
    if not {"smollm", "qwen"} <= files.keys():
        raise InvalidInputError("the files of smollm and qwen are missing: run `make real`")
    members = [GGUFMember(str(files[name]), name=name) for name in ("smollm", "qwen")]
    return AdaFuseEngine.from_pretrained(members, strategy=strategy, runtime=runtime), "qwen"


def _measure(
    runner: Runner, engine: AdaFuseEngine, larger: str, task: Measured, given: argparse.Namespace
) -> str:
    """Return the table of a task in Markdown."""
    known, most = load_task(task.name), given.limit or task.last
    questions = known.questions(given.data)
    size = given.fit or task.fit
    chosen = [*questions[:size], *questions[task.first - 1 : task.last][:most]]
    work = Work(known, chosen, [load_metric(task.metric)], chat=False)
    options = {} if task.stop is None else {"stop": task.stop}
    rows = (
        Row(name="alone", strategy="single", use=(larger,), options=options),
        Row(name="ensemble", strategy=engine.strategy.name, options=options),
    )
    alone, ensemble = (runner.records(row, work, len(chosen)) for row in rows)
    tried = SIGNALS
    if given.signals:
        tried = {**SIGNALS, **MORE_SIGNALS}
        singles = (
            Row(name=m, strategy="single", use=(m,), options=options) for m in engine.members
        )
        own = [runner.records(row, work, len(chosen)) for row in singles]
        gains = _gains(engine, ensemble, work, given.output / task.name / "gains.jsonl")
        ensemble = _with_signals(ensemble, own, gains, work)
    count, better = len(engine.members), engine.members.index(larger)
    places = {
        "logprob": [0],
        "larger": [1 + better],
        "smaller": [1 + n for n in range(count) if n != better],
        "agreement": [1 + count],
        "length": [2 + count],
        "own": [*range(3 + count, 3 + 2 * count)],
        "passage": [*range(3 + 2 * count, 3 + 3 * count)],
    }
    lines, sure = [_line(f"{larger} alone", alone, [0, -1], size, work)], {}
    for name, signals in tried.items():
        columns = [n for each in signals for n in places[each]]
        lines.append(_line(f"ensemble: {name}", ensemble, columns, size, work))
        sure[name] = lines[-1][1]
    _, right, test = _split(ensemble, size, work)
    heads = "| signals | right, % | area | calibration error | right at 30 % | 50 % | 70 % |"
    text = [heads, "|---|---:|---:|---:|---:|---:|---:|", *(line for line, _ in lines)]
    title = f"\n{task.name}: {engine.strategy.name}, fitted on {size}, measured on {sum(test)}\n"
    theirs, *_, base = SIGNALS
    endings = []
    for name, than in [(base, theirs), *((name, base) for name in tried if name not in SIGNALS)]:
        gain = _difference(sure[name], sure[than], right[test])
        endings.append(f"Area of {name} minus the area of {than}: {gain.shown('+')} points")
    return "\n".join([title, *text, "", *endings, ""])


def _with_signals(
    records: Sequence[Record], own: list[list[Record]], gains: list[list[float]], work: Work
) -> list[Record]:
    """Return records that have, as features, whether each member's own answer is equal, and gains.

    The own answers are [members, records], and the gains [records, members].
    """
    more, key = [], work.task.same
    for record, gain, *alone in zip(records, gains, *own, strict=True):
        equal = [float(key(each.answer) == key(record.answer)) for each in alone]
        features = record.features and (*record.features, *equal, *gain)
        more.append(record.model_copy(update={"features": features}))
    return more


def _gains(
    engine: AdaFuseEngine, records: Sequence[Record], work: Work, path: Path
) -> list[list[float]]:
    """Return how much the passages add to each member's log-probability of the answers, in nats."""
    results = Results(path)
    with results.resumed({"members": [*engine.members], "by": engine.strategy.name}) as known:
        done = {each["line"]: each["gains"] for each in known}
        for record, question in zip(records, work.questions, strict=True):
            if record.line in done:
                continue
            asked, left = question.request, _without_passages(question)
            gains = [0.0 for _ in engine.members]
            if record.answer and asked != left:
                sums = [_logprobs(engine, each, record.answer) for each in (asked, left)]
                gains = [a - b for a, b in zip(*sums, strict=True)]
            done[record.line] = gains
            results.append({"line": record.line, "gains": gains})
    return [done[record.line] for record in records]


def _without_passages(question: Question) -> dict[str, Any]:
    """Return the request of a question with the same instructions, but without passages."""
    if "prompt" in question.request:  # the passage of SQuAD is the line above the question
        before, _, after = question.request["prompt"].rpartition(question.text)
        return {"prompt": before + question.text.rpartition("\n")[2] + after}
    (message,) = question.request["messages"]
    instruction, *passages_and_question = message["content"].split("\n\n")
    content = "\n\n".join([instruction, *passages_and_question[-1:]])
    return {"messages": [{**message, "content": content}]}


def _logprobs(engine: AdaFuseEngine, request: Mapping[str, Any], answer: str) -> list[float]:
    """Return the log-probability of an answer by each member, 0 if it cannot write the answer."""
    (scored,) = engine.score(**request, continuations=[answer]).texts
    return [-scored.nll.get(m, 0.0) * scored.tokens.get(m, 0) for m in engine.members]


def _split(
    records: Sequence[Record], size: int, work: Work
) -> tuple[Array, NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the features of answers, which answers are right, and which ones to measure on."""
    answered = [n for n, each in enumerate(records) if each.features is not None]
    right = [records[n].statistics(work.metrics[0])[0] > 0 for n in answered]
    return (
        np.array([records[n].features for n in answered]),
        np.array(right),
        np.array([n >= size for n in answered]),
    )


def _line(
    name: str, records: Sequence[Record], columns: Sequence[int], size: int, work: Work
) -> tuple[str, Array]:
    """Return a line of the table, and the confidences of the answers to measure on."""
    table, right, test = _split(records, size, work)
    table = table[:, columns]
    sure = predicted(table[test], fit(table[~test], right[~test]))
    found: Reliability = reliability(sure.tolist(), right[test].tolist())
    curve = {each.answered: each.right for each in found.curve}
    cells = [name, curve[100].shown(), found.area.shown(), f"{found.error:.1f}"]
    cells += [curve[answered].shown() for answered in (30, 50, 70)]
    return f"| {' | '.join(cells)} |", sure


def _difference(ours: Array, theirs: Array, right: NDArray[np.bool_]) -> Score:
    """Return the difference of two areas on the same answers, with a bootstrap interval."""
    rng, drawn = np.random.default_rng(1), []

    def area(sure: Array, chosen: NDArray[Any]) -> float:
        hit, miss = sure[chosen][right[chosen]], sure[chosen][~right[chosen]]
        above = hit[:, None] - miss[None, :]
        return 100 * float(np.mean((above > 0) + 0.5 * (above == 0)))

    everything = np.arange(len(right))
    for _ in range(SAMPLES):
        chosen = rng.integers(len(right), size=len(right))
        if 0 < right[chosen].sum() < len(right):
            drawn.append(area(ours, chosen) - area(theirs, chosen))
    low, high = np.percentile(drawn, [2.5, 97.5])
    value = area(ours, everything) - area(theirs, everything)
    return Score(value=value, low=float(low), high=float(high))


if __name__ == "__main__":
    sys.exit(main())
