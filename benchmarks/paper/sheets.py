"""A report as tables of text, the same for terminals, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from adafuse_llm.evaluation.statistics import SIGNIFICANT, Comparison, p_value
from adafuse_llm.report.page import count
from benchmarks.paper.report import Cell, Line, Report, Section

NO_BREAK = "\u00a0"


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        section: the part that it belongs to.
        title, note: above and below it.
        columns: headings.
        rows: as many cells each.
        names: how many columns hold names; the others are numbers.
    """

    section: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    names: int = 1


def sheets(report: Report) -> list[Sheet]:
    """All tables of a report, in order."""
    found = []
    for section in report.sections:
        if section.name == "table-1":
            found += [_scores(report, section), *_tests(report, section), *_claims(report)]
        elif section.lines:
            found += _sweep(report, section)
        if section.name == "figure-2":
            found += _words(report)
    return found


def markdown(sheet: Sheet) -> str:
    """A sheet as a Markdown table, without its title."""
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


def _scores(report: Report, section: Section) -> Sheet:
    """The layout of the paper's Table 1: systems down, tasks across."""
    columns = ["system"]
    for task in report.tasks:
        groups = _groups(section, task)
        columns += [*groups, "all" if groups and len(report.tasks) == 1 else task]
    if len(report.tasks) > 1:
        columns.append("mean")
    rows = []
    for line in section.lines:
        row = [line.name]
        for task in report.tasks:
            cell = line.cells[task]
            row += [f"{cell.evaluation.groups[each].value:.1f}" for each in _groups(section, task)]
            row.append(f"{cell.score.value:.1f}{cell.failures}")
        if len(report.tasks) > 1:
            row.append(f"{fmean(cell.score.value for cell in line.cells.values()):.1f}")
        rows.append(tuple(row))
    asked = ", ".join(
        f"{task} ({report.tasks[task]}): {n:,}" for task, n in section.questions.items()
    )
    return Sheet(
        section.name,
        section.title,
        tuple(each.replace("_", " ") for each in columns),
        tuple(rows),
        f"Scores in percent. Questions: {asked}. {section.about}",
    )


def _groups(section: Section, task: str) -> tuple[str, ...]:
    return tuple(section.lines[0].cells[task].evaluation.groups)


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
            "Score with its 95 % interval; relative gain over the best peer"
            f"{f' ({best.name})' if best else ''}; per answer: seconds with "
            f"{count(report.max_requests, 'question')} at a time, tokens (processed, or kept of "
            "an earlier prompt), those beyond the prompt, forward passes, all members together; "
            "p-values of paired tests against "
            f"the best member{f' ({member.name})' if member else ''} and the best peer."
            f"{_about_failures(section, task)}",
        )


def _failed_column(section: Section, task: str) -> tuple[str, ...]:
    """A column for answers that failed, where there are any."""
    return ("failed",) if any(line.cells[task].evaluation.failed for line in section.lines) else ()


def _failures(section: Section, line: Line, task: str) -> tuple[str, ...]:
    return tuple(str(line.cells[task].evaluation.failed) for _ in _failed_column(section, task))


def _about_failures(section: Section, task: str) -> str:
    if not any(line.cells[task].evaluation.lost for line in section.lines):
        return " Failed answers count as wrong." if _failed_column(section, task) else ""
    return (
        " Failed answers count as wrong. Those that failed of the run (out of memory, say) are "
        "asked again by the same command; until then the row is not tested."
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


def _claims(report: Report) -> Iterator[Sheet]:
    for task in report.tasks:
        claims = [claim for claim in report.claims if claim.task == task]
        tests = [f"{claim.comparison.test}, " for claim in claims if claim.comparison][:1]
        if claims:
            yield Sheet(
                "table-1",
                f"Is AdaFuse above? {task}",
                ("AdaFuse", "against", "points", "p", "p, Holm", "tokens", "shown"),
                tuple(
                    (
                        claim.ours,
                        claim.theirs,
                        "-" if found is None else found.difference.shown("+"),
                        _p_value(found),
                        "-" if claim.adjusted is None else p_value(claim.adjusted),
                        f"{claim.tokens[0]:.0f} to {claim.tokens[1]:.0f}",
                        claim.verdict
                        if found
                        else f"nothing: {count(sum(claim.lost), 'answer')} failed",
                    )
                    for claim in claims
                    for found in [claim.comparison]
                ),
                f"{''.join(tests) or 'Paired tests, '}two-sided; shown at p < {SIGNIFICANT:g}. "
                "Holm's p-value is adjusted for all the rivals of a row. Tokens: per answer, ours "
                "to theirs.",
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
                found = cell.versus.get("reference")
                row += [f"{found.difference.value:+.1f}" if found else "-", _p_value(found)]
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
            f"{'' if section.name == 'figure-5' else ', the first of those of Table 1'}."
            f"{_about_failures(section, task)}",
        )


ABOUT_SURE = " Sure: of the words that members considered, those begun with a margin of at least τ."


def _words(report: Report) -> Iterator[Sheet]:
    for task, systems in report.words.items():
        sure = report.sure.get(task, {})
        sure_column = ("sure",) if sure else ()
        sizes = sorted({size for found in systems.values() for size in found})
        if sizes:
            yield Sheet(
                "words",
                f"Words per round, {task}",
                ("system", *(count(size, "word") for size in sizes), "rounds", *sure_column),
                tuple(
                    (
                        name,
                        *(f"{share:.1f} %" for share in shares(found, sizes)),
                        f"{sum(found.values()):,}",
                        *(f"{sure[name]:.1f} %" for _ in sure_column),
                    )
                    for name, found in systems.items()
                ),
                "Share of the rounds of Table 1's answers. A round of no word ended the response."
                f"{ABOUT_SURE if sure else ''}",
            )


def shares(found: Mapping[int, int], sizes: Sequence[int]) -> list[float]:
    """Percent of rounds by their number of words."""
    total = sum(found.values()) or 1
    return [100 * found.get(size, 0) / total for size in sizes]


def _p_value(found: Comparison | None) -> str:
    return "-" if found is None else p_value(found.p_value)
