"""A report as tables of text, for terminals, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from adafuse_llm.report.page import count
from benchmarks.paper.long import ALL_TASKS, THIRDS, Decisions, Long, total
from benchmarks.paper.report import Cell, Line, Report, Section
from benchmarks.paper.statistics import SIGNIFICANT, Comparison, p_value

NO_BREAK = "\u00a0"


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        section: name of its part.
        title: heading above the table.
        columns: headings of the columns.
        rows: cells of each row.
        note: text below the table.
        names: number of columns that hold names. They come first; the others hold numbers.
    """

    section: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    names: int = 1


def sheets(report: Report) -> list[Sheet]:
    """Return all tables of a report, in order."""
    tables: list[Sheet] = []
    for section in report.sections:
        if section.size == "table":
            tables += _scores(report, section)
            tables += _tests(report, section)
            tables += _claims(report, section)
        elif section.lines:
            tables += _sweep(report, section)
        if section.name == "figure-2":
            tables += _words(report)
    if report.long is not None:
        tables += [*_lengths(report.long), *_decisions(report.long), *_sentences(report.long)]
    return tables


def markdown(sheet: Sheet) -> str:
    """Return a sheet as a Markdown table, without its title."""
    lines = [f"| {' | '.join(map(_escaped, sheet.columns))} |"]
    for row in sheet.rows:
        names = (_escaped(cell).replace(" = ", f"{NO_BREAK}={NO_BREAK}") for cell in row)
        numbers = (_escaped(cell).replace(" ", NO_BREAK) for cell in row[sheet.names :])
        lines.append(f"| {' | '.join([*islice(names, sheet.names), *numbers])} |")
    lines.insert(1, f"|{'---|' * sheet.names}{'---:|' * (len(sheet.columns) - sheet.names)}")
    return "\n".join([*lines, *(["", sheet.note] if sheet.note else [])])


def _escaped(text: str) -> str:
    for mark in "\\|[]*_<":
        text = text.replace(mark, f"\\{mark}")
    return text


def _scores(report: Report, section: Section) -> Iterator[Sheet]:
    """Yield the table of scores in the layout of the paper's Table 1: one column per task.

    The scores by group follow the score of a single task. With several tasks, they have tables of
    their own.
    """
    one = len(report.tasks) == 1
    columns = ["system"]
    for task in report.tasks:
        groups = _groups(section, task) if one else ()
        columns += [*groups, "all" if groups else task]
    if not one:
        columns.append("mean")
    rows = []
    for line in section.lines:
        row = [line.name]
        for task in report.tasks:
            row += _by_group(line, section, task) if one else ()
            cell = line.cells[task]
            row.append(f"{cell.score.value:.1f}{cell.failures}")
        if not one:
            row.append(f"{fmean(cell.score.value for cell in line.cells.values()):.1f}")
        rows.append(tuple(row))
    questions = ", ".join(
        f"{task} ({report.tasks[task]}): {n:,}{_from(report, task)}"
        for task, n in section.questions.items()
    )
    yield Sheet(
        section.name,
        section.title,
        _headings(columns),
        tuple(rows),
        f"Scores in percent. Questions: {questions}. {section.about}",
    )
    for task in () if one else report.tasks:
        if groups := _groups(section, task):
            yield Sheet(
                section.name,
                f"{section.title}: {task} by group",
                _headings(["system", *groups]),
                tuple((line.name, *_by_group(line, section, task)) for line in section.lines),
                f"Scores in percent ({report.tasks[task]}).",
            )


def _from(report: Report, task: str) -> str:
    """Return which question is the first one, or no text for question 1."""
    first = report.first.get(task, 1)
    return f", from question {first:,} on" if first > 1 else ""


def _headings(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.replace("_", " ") for name in names)


def _by_group(line: Line, section: Section, task: str) -> list[str]:
    groups = line.cells[task].evaluation.groups
    return [f"{groups[name].value:.1f}" for name in _groups(section, task)]


def _groups(section: Section, task: str) -> tuple[str, ...]:
    """Return the groups of a task. One group alone is the task itself and does not count."""
    groups = tuple(section.lines[0].cells[task].evaluation.groups)
    return groups if len(groups) > 1 else ()


def _tests(report: Report, section: Section) -> Iterator[Sheet]:
    for task, metric in report.tasks.items():
        best = section.best(task, "peer")
        member = section.best(task, "member")
        rows = [
            (
                line.name,
                line.cells[task].score.shown(),
                _gain(line, best, task),
                *_costs(line.cells[task]),
                _p_value(line.cells[task].versus.get("best member")),
                _p_value(line.cells[task].versus.get("best peer")),
                *_failures(section, line, task),
            )
            for line in section.lines
        ]
        yield Sheet(
            section.name,
            f"{section.title}: {task}, intervals, cost and tests",
            (
                "system",
                metric.replace("_", " "),
                "gain",
                "seconds",
                "tokens",
                "decoding",
                "passes",
                "p, member",
                "p, peer",
                *_failed_column(section, task),
            ),
            tuple(rows),
            "Score: with its 95 % interval. Gain: relative to the best peer"
            f"{f' ({best.name})' if best else ''}. Per answer, for all members together: seconds "
            f"with {count(report.max_requests, 'question')} at a time; tokens (processed, or "
            "reused from an earlier prompt); decoding, the tokens after the prompt; forward "
            "passes. p: of paired tests against "
            f"the best member{f' ({member.name})' if member else ''} and the best peer."
            f"{_about_failures(section, task)}",
        )


def _failed_column(section: Section, task: str) -> tuple[str, ...]:
    """Return the heading of the column of failed answers, or no heading if none failed."""
    return ("failed",) if any(line.cells[task].evaluation.failed for line in section.lines) else ()


def _failures(section: Section, line: Line, task: str) -> tuple[str, ...]:
    return tuple(str(line.cells[task].evaluation.failed) for _ in _failed_column(section, task))


def _about_failures(section: Section, task: str) -> str:
    if not any(line.cells[task].evaluation.lost for line in section.lines):
        return " Failed answers count as wrong." if _failed_column(section, task) else ""
    return (
        " Failed answers count as wrong. If the run caused the failure, for example because memory "
        "ran out, the same command repeats the question. Until then the row is not tested."
    )


def _costs(cell: Cell) -> tuple[str, ...]:
    return (
        f"{cell.evaluation.seconds:.3f}",
        f"{cell.tokens:.0f}",
        f"{cell.decoding_tokens:.1f}",
        f"{sum(cell.evaluation.forward_passes.values()):.1f}",
    )


def _gain(line: Line, best: Line | None, task: str) -> str:
    cell = line.cells[task]
    if best is None or line.key == best.key or not best.cells[task].score.value:
        return "-"
    if cell.evaluation.lost:
        return "-"
    return f"{100 * (cell.score.value / best.cells[task].score.value - 1):+.1f} %"


ABOUT_ALL_TASKS = " Every question counts once, with the main metric of its task."


def _claims(report: Report, section: Section) -> Iterator[Sheet]:
    ours = [line.name for line in section.lines if line.kind == "adafuse"]
    for task in dict.fromkeys(claim.task for claim in report.claims):
        claims = [claim for claim in report.claims if claim.task == task and claim.ours in ours]
        tests = [f"{claim.comparison.test}, " for claim in claims if claim.comparison][:1]
        yield Sheet(
            section.name,
            f"Is AdaFuse above? {task}",
            ("AdaFuse", "against", "points", "p", "p, Holm", "tokens", "shown"),
            tuple(
                (
                    claim.ours,
                    claim.theirs,
                    "-" if comparison is None else comparison.difference.shown("+"),
                    _p_value(comparison),
                    "-" if claim.adjusted is None else p_value(claim.adjusted),
                    f"{claim.tokens[0]:.0f} to {claim.tokens[1]:.0f}",
                    claim.verdict
                    if comparison
                    else f"not tested: {count(sum(claim.lost), 'answer')} failed",
                )
                for claim in claims
                for comparison in [claim.comparison]
            ),
            f"{''.join(tests) or 'Paired tests, '}two-sided. Holm's p-value is "
            "adjusted for all rivals of a row. Shown: at Holm's p < "
            f"{SIGNIFICANT:g}. Tokens: per answer, of AdaFuse and of the rival."
            f"{ABOUT_ALL_TASKS if task == ALL_TASKS else ''}",
            names=2,
        )


def _sweep(report: Report, section: Section) -> Iterator[Sheet]:
    for task, metric in report.tasks.items():
        tested = section.reference is not None
        seconds = "seconds, alone" if section.timed else "seconds"
        rows = []
        for line in section.lines:
            cell = line.cells[task]
            row = [line.name, cell.score.shown()]
            if tested:
                comparison = cell.versus.get("reference")
                difference = f"{comparison.difference.value:+.1f}" if comparison else "-"
                row += [difference, _p_value(comparison)]
            costs = list(_costs(cell))
            if section.timed:
                costs[0] = f"{cell.evaluation.latency:.3f}"
            rows.append((*row, *costs, *_failures(section, line, task)))
        against = (f"against {section.reference}", "p") if tested else ()
        title = f"{section.title} ({task})" if len(report.tasks) > 1 else section.title
        yield Sheet(
            section.name,
            title,
            (
                "system",
                metric.replace("_", " "),
                *against,
                seconds,
                "tokens",
                "decoding",
                "passes",
                *_failed_column(section, task),
            ),
            tuple(rows),
            f"{section.about} {count(section.questions[task], 'question')}"
            f"{'' if section.name == 'figure-5' else ', the first ones of Table 1'}."
            f"{_about_failures(section, task)}",
        )


ABOUT_SURE = (
    ' The column "sure" shows the share of proposed words that began with a margin of at least τ.'
)


def _words(report: Report) -> Iterator[Sheet]:
    for task, systems in report.words.items():
        sure = report.sure.get(task, {})
        sure_column = ("sure",) if sure else ()
        sizes = sorted({size for rounds in systems.values() for size in rounds})
        if sizes:
            yield Sheet(
                "words",
                f"Words per round, {task}",
                ("system", *(count(size, "word") for size in sizes), "rounds", *sure_column),
                tuple(
                    (
                        name,
                        *(f"{share:.1f} %" for share in shares(rounds, sizes)),
                        f"{sum(rounds.values()):,}",
                        *(f"{sure[name]:.1f} %" for _ in sure_column),
                    )
                    for name, rounds in systems.items()
                ),
                "The table shows shares of the rounds in the answers of Table 1. A round without "
                "words ended the response."
                f"{ABOUT_SURE if sure else ''}",
            )


def shares(rounds: Mapping[int, int], sizes: Sequence[int]) -> list[float]:
    """Return the percentage of rounds that committed each number of words."""
    total = sum(rounds.values()) or 1
    return [100 * rounds.get(size, 0) / total for size in sizes]


def _lengths(long: Long) -> Iterator[Sheet]:
    for task, lengths in long.lengths.items():
        yield Sheet(
            "lengths",
            f"Score by length of the reference answer, {task}",
            ("system", *(f"{each.words} words" for each in lengths.bins)),
            (
                ("questions", *(f"{each.questions:,}" for each in lengths.bins)),
                *(
                    (name, *(each.shown() for each in means))
                    for name, means in lengths.means.items()
                ),
            ),
            "Mean score in percent, with its standard error.",
        )


ABOUT_DECISIONS = (
    "A round is unanimous if every member proposed the same text and nothing else. The winner "
    "changes if the text is from another member than in the last round that was not unanimous. A "
    "change is right if the text kept to the reference answer and the earlier member would have "
    "left it. A change is wrong if the text left the reference answer and the earlier member would "
    "have kept to it. A change makes no difference if both texts kept to the reference answer, or "
    "both left it. A round is judged if the current sentence agreed with the reference's sentence "
    "of the same number before this round. Changes in other rounds are neither right nor wrong. "
    "The last three columns are shares of the judged rounds. Kept: the text kept to the reference. "
    "Wrong choice: the text left the reference, although another candidate kept to it. No "
    "candidate: no candidate kept to the reference."
)


def _decisions(long: Long) -> Iterator[Sheet]:
    note = ABOUT_DECISIONS
    for task, systems in long.decisions.items():
        if systems:
            yield Sheet(
                "decisions",
                f"What rounds decide inside an answer, {task}",
                (
                    *("AdaFuse", "rounds of", "rounds", "unanimous"),
                    *("changes", "right", "wrong", "no difference"),
                    *("judged", "kept", "wrong choice", "no candidate"),
                ),
                tuple(
                    (name, place, *_decided(each))
                    for name, thirds in systems.items()
                    for place, each in zip((*THIRDS, "all"), (*thirds, total(thirds)), strict=True)
                ),
                note,
                names=2,
            )
            note = ""  # the first table explains the columns of all


def _decided(each: Decisions) -> tuple[str, ...]:
    return (
        f"{each.rounds:,}",
        _share(each.unanimous, each.rounds),
        f"{each.changes:,} ({_share(each.changes, each.rounds)})",
        *(f"{number:,}" for number in (each.right, each.wrong, each.neutral)),
        f"{each.judged:,}",
        *(_share(number, each.judged) for number in (each.kept, each.missed, each.unknown)),
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _sentences(long: Long) -> Iterator[Sheet]:
    for task, systems in long.sentences.items():
        yield Sheet(
            "sentences",
            f"Sentences per answer, {task}",
            ("system", "right", "wrong", "missing"),
            tuple(
                (name, f"{each.right:.2f}", f"{each.wrong:.2f}", f"{each.missing:.2f}")
                for name, each in systems.items()
            ),
            "A sentence is right if the reference answer has the same sentence, and wrong if not. "
            "A sentence is missing if only the reference answer has it. Each sentence states one "
            "fact or one step.",
        )


def _p_value(comparison: Comparison | None) -> str:
    return "-" if comparison is None else p_value(comparison.p_value)
