"""Measure answers to typed questions: with one order of the options, all orders, and a fit.

    python -m benchmarks.real.members --files smollm gemma qwen qwen-1.5b
    python -m benchmarks.decisions --data BENCHMARKS          # the table of docs/does-it-pay.md

BENCHMARKS is a folder with the paper's test sets. Members read each question in all orders of its
options. A file receives the log-probabilities of the labels, one line for each question, order and
member. All results are computed from it, and after an interruption, the same command goes on. The
fit is cross-validated, with all questions about an article of SQuAD in one fold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from adafuse_llm import AdaFuseEngine, Answer, Choice, GGUFMember, InvalidInputError, Predicate
from adafuse_llm.decisions import Question, ask, label_logprobs
from adafuse_llm.embedded import heldout_questions, member_paths
from adafuse_llm.evaluation.comparison import share
from adafuse_llm.evaluation.confidence import Array, area, calibration_error, softmax
from adafuse_llm.evaluation.decisions import Labeled, fit_decisions
from adafuse_llm.evaluation.files import Results
from benchmarks.real.members import ALL, real_files

ARTICLES = (303, 473, 581, 705, 922, 1137, 1378, 1484, 1715, 1898, 2000)
"""Rows of SQuAD's file at which an article begins, and the end of the last one."""

LONGEST, SHORTEST = 600, 300  # characters of a passage alone, and of each of three
LANGUAGES = ("Danish", "Dutch", "English", "German")

FITTED = 200  # questions of a fit that is tested on others
QUANTILES = (0.025, 0.5, 0.975)

REAL = ("smollm", "gemma", "qwen", "qwen-1.5b")
TASKS = {
    "passage": REAL,
    "which": REAL[:3],
    "language": REAL[:3],
    "fact": tuple(path.name for path in member_paths()),
}
"""The members of each task."""

HEADS = """\
| task | system | right, % | area, % | calibration error, points | changed by the order, % |
|---|---|---:|---:|---:|---:|"""

Asked = tuple[tuple[Question, str], ...]
Article = dict[str, list[tuple[str, list[str]]]]  # by passage, questions with accepted answers


@dataclass(frozen=True)
class Case:
    """Questions about one state with their right options. All cases of a group are in one fold."""

    task: str
    group: int
    state: str
    asked: Asked


def cases(data: Path, rounds: int) -> list[Case]:
    """Return the cases of some rounds. A round has questions about every article."""
    rng = random.Random(1)
    articles: list[Article] = [{} for _ in ARTICLES[1:]]
    rows = (data / "squad.jsonl").read_text(encoding="utf-8").splitlines()
    for article, (begin, end) in zip(articles, itertools.pairwise(ARTICLES), strict=True):
        for row in map(json.loads, rows[begin:end]):
            passage, question = row["question"].rsplit("\n", 1)
            article.setdefault(passage, []).append((question, row["answer"]))
    passages = [_passage(article, rng) for article in articles]
    triples = [_which(article, rng) for article in articles]
    languages, facts = _language(data / "flores_en_de.jsonl"), _fact(rng)
    found = []
    for part in range(rounds):
        for number in range(len(articles)):
            found.append(Case("passage", number, *next(passages[number])))
            if (number // 2 + part) % 2 == 0:
                found.append(Case("which", number, *next(triples[number])))
        found += [Case("language", number, *next(languages)) for number in range(8)]
        found += [Case("fact", number, *next(facts)) for number in range(40)]
    return found


def _passage(article: Article, rng: random.Random) -> Iterator[tuple[str, Asked]]:
    """Yield passages, each with two questions about it and two about other passages."""
    for passage in rng.sample([*article], len(article)):
        text = _cut(passage, LONGEST)
        own = [question for question, answers in article[passage] if _holds(text, answers)]
        others = [
            question
            for other, known in article.items()
            for question, answers in known
            if other != passage and not _holds(text, answers)
        ]
        if len(own) > 1:
            chosen = [*rng.sample(own, 2), *rng.sample(others, 2)]
            asked = [Predicate(f"Does the text answer this question? {each}") for each in chosen]
            yield text, tuple(zip(asked, ("yes", "yes", "no", "no"), strict=True))


def _which(article: Article, rng: random.Random) -> Iterator[tuple[str, Asked]]:
    """Yield three passages of an article, and for each a question that only this one answers."""
    names = ["passage 1", "passage 2", "passage 3"]
    while True:
        passages = rng.sample([*article], 3)
        texts = [_cut(passage, SHORTEST) for passage in passages]
        fitting = [
            [
                question
                for question, answers in article[passage]
                if [each for each in texts if _holds(each, answers)] == [text]
            ]
            for passage, text in zip(passages, texts, strict=True)
        ]
        if all(fitting):
            chosen = [rng.choice(each) for each in fitting]
            asked = [Choice(f"Which passage answers this? {each}", names) for each in chosen]
            state = "\n\n".join(f"Passage {n}: {text}" for n, text in enumerate(texts, start=1))
            yield state, tuple(zip(asked, names, strict=True))


def _language(path: Path) -> Iterator[tuple[str, Asked]]:
    """Yield sentences: English and German take turns."""
    question = Choice("In which language is this text?", LANGUAGES)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        key, right = ("answer", "German") if number % 2 else ("question", "English")
        yield json.loads(line)[key], ((question, right),)


def _fact(rng: random.Random) -> Iterator[tuple[str, Asked]]:
    """Yield questions of the embedded members. Wrong options are similar words of the passages."""
    for each in heldout_questions():
        form = re.sub(r"\d+", r"\\d+", re.sub(r"[A-Z][a-z]+", "[A-Z][a-z]+", each.answer))
        text = "\n\n".join(passage.text for passage in each.passages)
        others = sorted({*re.findall(rf"\b{form}\b", text)} - {each.answer})
        if each.answer in text and len(others) > 2:
            options = [each.answer, *rng.sample(others, 3)]
            yield text, ((Choice(each.question, options), each.answer),)


def _cut(passage: str, length: int) -> str:
    return passage if len(passage) <= length else passage[:length].rsplit(" ", 1)[0]


def _holds(text: str, answers: Sequence[str]) -> bool:
    return any(answer.lower() in text.lower() for answer in answers)


def measure(task: str, chosen: Mapping[int, Case], path: Path) -> dict[int, list[dict[str, Any]]]:
    """Let the members read the cases of a task that are not in the file yet.

    Return the lines of the file by the number of their case. Case 3 has the lines from 300 on.
    """
    results = Results(path)
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    with results.resumed({"lengths": [LONGEST, SHORTEST]}) as lines:
        for line in lines:
            found[line["line"] // 100].append(line)
        if missing := [number for number in chosen if number not in found]:
            with _engine(task) as engine:
                for number in track(missing, task):
                    for line in _read(engine, chosen[number], 100 * number):
                        results.append(line)
                        found[number].append(line)
    return found


def _engine(task: str) -> AdaFuseEngine:
    if task == "fact":
        return AdaFuseEngine.from_embedded()
    files = real_files(ALL)
    if missing := [name for name in TASKS[task] if name not in files]:
        raise InvalidInputError(f"the files of {', '.join(missing)} are missing: fetch them first")
    specs = [GGUFMember(path=str(files[name]), name=name, context=8192) for name in TASKS[task]]
    return AdaFuseEngine.from_pretrained(specs)


def _read(engine: AdaFuseEngine, case: Case, first: int) -> list[dict[str, Any]]:
    """Return a line for each question, order and member: log-probabilities of the labels."""
    questions = {str(number): question for number, (question, _) in enumerate(case.asked)}
    requests, _ = ask(engine, [case.state], questions, {})
    orders = [(name, order) for name, asked in questions.items() for order in asked.orders(None)]
    lines: list[dict[str, Any]] = []
    for (name, order), scores in zip(orders, engine.open(requests).results(), strict=True):
        for member in engine.members:
            line = {"line": first + len(lines), "question": int(name), "member": member}
            lines.append({**line, "logprobs": label_logprobs(member, order, scores)})
    return lines


def report(task: str, cases: Sequence[Case], read: Sequence[list[dict[str, Any]]]) -> str:
    """Return the rows of a task: each member alone, all members together, and the fit."""
    members = TASKS[task]
    questions: list[Labeled] = []
    reads: list[Array] = []  # of each question, [orders, members, options]
    states: list[int] = []  # of each question, the index of its case
    for index, (case, lines) in enumerate(zip(cases, read, strict=True)):
        for number, (question, right) in enumerate(case.asked):
            options = question.orders(1)[0]
            logprobs = [line["logprobs"] for line in lines if line["question"] == number]
            table = np.array([[each[option] for option in options] for each in logprobs])
            reads.append(table.reshape(-1, len(members), len(options)))
            questions.append(Labeled(f"group {case.group}", question, right))
            states.append(index)
    means = [each.mean(axis=0) for each in reads]
    answers = [_answer(members, each) for each in reads]
    rights = [each.options.index(each.right) for each in questions]
    rows = [HEADS]

    def add(system: str, probabilities: Sequence[Array], changed: str = "0.0") -> None:
        pairs = zip(probabilities, rights, strict=True)
        is_right = np.array([each.argmax() == right for each, right in pairs])
        sure = np.array([each.max() for each in probabilities])
        cells = [share(int(is_right.sum()), len(reads)).shown(), "", changed]
        if task == "passage":
            first = np.array([each[0] for each in probabilities])
            cells[1] = area(first, np.array(rights) == 0).shown()
        cells.insert(2, f"{calibration_error(sure, is_right):.1f}")
        rows.append(f"| {task}, {len(reads)} | {system} | {' | '.join(cells)} |")

    for number, member in enumerate(members):
        own = [each[:, number] for each in reads]
        changed = share(sum(member in each.swayed for each in answers), len(answers)).shown()
        add(f"{member}, one order", [softmax(each[0]) for each in own], changed)
        add(f"{member}, all orders", [softmax(each.mean(axis=0)) for each in own])
    add("equal weights, log-probabilities", [softmax(each.mean(axis=0)) for each in means])
    add("equal weights, probabilities", [softmax(each).mean(axis=(0, 1)) for each in reads])
    hits = [each.argmax(axis=1) == right for each, right in zip(means, rights, strict=True)]
    wrong = share(sum(not any(each) for each in hits), len(hits)).shown()
    notes = [f"{task}: all members are wrong: {wrong} %"]
    with suppress(InvalidInputError):  # there are too few questions for a fit
        fit = fit_decisions(questions, answers)
        shown = fit.area.shown() if fit.area else ""
        cells = [fit.accuracy.shown(), shown, f"{fit.error:.1f}", "0.0"]
        rows.append(f"| {task}, {len(reads)} | fitted | {' | '.join(cells)} |")
        notes.append(fit.model_dump_json(exclude={"curve"}))
        groups = np.array([int(each.state.split()[1]) for each in questions])
        half = groups < np.median(np.unique(groups))
        notes += [_tested(questions, answers, reads, [known]) for known in (half, ~half)]
        # leave out so many states at a time that each fit has about `FITTED` questions
        rest = len(questions) - FITTED
        for seed in range(3 if rest > 0 else 0):
            parts = max(2, round(len(questions) / rest))
            part = np.random.default_rng(seed).permutation(max(states) + 1)[states] % parts
            fits = [part != each for each in np.unique(part)]
            notes.append(_tested(questions, answers, reads, fits))
    return "\n".join([*rows, "", *notes, ""])


def _answer(members: Sequence[str], read: Array) -> Answer:
    """Return the answer whose log-probabilities are `read`, [orders, members, options]."""
    likely = {
        name: {str(option): float(p) for option, p in enumerate(own)}
        for name, own in zip(members, softmax(read.mean(axis=0)), strict=True)
    }
    changes = np.ptp(read.argmax(axis=2), axis=0) > 0  # [members]
    swayed = tuple(itertools.compress(members, changes))
    return Answer(probabilities=likely[members[0]], members=likely, mass={}, swayed=swayed)


def _tested(
    questions: Sequence[Labeled],
    answers: Sequence[Answer],
    reads: Sequence[Array],
    fits: Sequence[NDArray[np.bool_]],
) -> str:
    """Fit on the questions that each of `fits` marks, and test on the others. Return a line.

    It also has the calibration error that answers with perfect probabilities would have by chance.
    """
    sure, is_right = list[float](), list[bool]()
    for known in fits:
        marked = np.flatnonzero(known).tolist()
        labeled = [replace(questions[n], state=str(n)) for n in marked]  # no folds are needed here
        fit = fit_decisions(labeled, [answers[n] for n in marked]).calibration
        weights = np.array([*fit.weights.values()])
        for n in np.flatnonzero(~known).tolist():
            options = questions[n].options
            intercepts = np.array([fit.intercepts.get(option, 0.0) for option in options])
            fair = softmax(weights @ reads[n].mean(axis=0) / fit.temperature + intercepts)
            sure.append(float(fair.max()))
            is_right.append(int(fair.argmax()) == options.index(questions[n].right))
    claimed = np.array(sure)
    draws = np.random.default_rng(1).random((1000, len(sure))) < claimed
    low, mean, high = np.quantile([calibration_error(claimed, each) for each in draws], QUANTILES)
    return (
        f"fitted on {round(np.mean([known.sum() for known in fits]))}, tested on {len(sure)}: "
        f"{share(sum(is_right), len(is_right)).shown()} % right, calibration error "
        f"{calibration_error(claimed, np.array(is_right)):.1f} points; by chance {mean:.1f} "
        f"[{low:.1f}, {high:.1f}]"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decisions", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the paper's test sets")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--rounds", type=int, default=4, help="up to 10, each of 103 questions")
    parser.add_argument("--output", type=Path, default=Path("results/decisions.jsonl"))
    given = parser.parse_args(arguments)
    numbered = [*enumerate(cases(given.data, given.rounds))]
    for task in given.task:
        chosen = {number: case for number, case in numbered if case.task == task}
        found = measure(task, chosen, given.output)
        print(report(task, [*chosen.values()], [found[number] for number in chosen]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
