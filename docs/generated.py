"""Generated parts of the documentation: options from their models, flags from the command line,
tables from stored results, the model card.

    python -m docs.generated

writes them into the pages, between markers. `tests/docs/test_generated.py` fails if a page has an
older text. Charts are not in the pages, because they need HTML. Only the site has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from benchmarks.paper.statistics import SIGNIFICANT, chance, holm

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
REPOSITORY = re.findall('^Repository = "(.+)"$', PYPROJECT.read_text("utf-8"), re.MULTILINE)[0]
"""The address of the repository."""

RESULTS = Path(__file__).parent / "results"

PLACE = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
"""A generated text in a page, between its markers."""

CHARTS = re.compile(r"<!-- charts: (\w+) -->")
"""The place of charts in a page."""


def copy_cookbooks(source: Path, target: Path) -> None:
    """Copy the notebooks into the site's pages and adjust their links.

    The navigation lists them below their README, in its order.
    """
    target.mkdir(exist_ok=True)
    for copy in target.iterdir():
        if copy.is_file() and not (source / copy.name).exists():
            copy.unlink()  # of a notebook that has been renamed or removed
    for path in [*source.glob("*.ipynb"), *source.glob("*.md")]:
        text = path.read_text(encoding="utf-8").replace("](../docs/", "](../")
        if path.name == "README.md":
            names = dict.fromkeys(re.findall(r"\]\((\w+)\.ipynb\)", text))
            text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"
        (target / path.name).write_text(text, encoding="utf-8")


def pages() -> Iterator[Path]:
    """Yield the pages of the documentation."""
    for path in sorted(Path(__file__).parent.rglob("*.md")):
        if path.parent.name != "cookbooks":
            yield path


def filled(markdown: str) -> str:
    """Return a page with its generated texts as they are now."""

    def text(found: re.Match[str]) -> str:
        return f"<!-- generated: {found[1]} -->\n\n{GENERATORS[found[1]]()}\n\n<!-- end -->"

    return PLACE.sub(text, markdown)


def for_site(markdown: str) -> str:
    """Return a page with its charts, and with links to the notebooks of the site."""
    linked = markdown.replace("](../../cookbooks/", "](../cookbooks/")
    return CHARTS.sub(lambda found: suite_charts(SUITES[found[1]]), linked)


def configuration() -> str:
    """Return the options, with one table per model."""
    from adafuse_llm import AdaFuseConfig, RuntimeConfig
    from adafuse_llm.loading.ray_options import RayOptions
    from adafuse_llm.serving_config import ServerConfig

    return "\n\n".join(
        f"## {model.__name__}\n\n{_summary(model)}\n\n{_options(model)}"
        for model in (AdaFuseConfig, RuntimeConfig, ServerConfig, RayOptions)
    )


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")


def _options(model: type[BaseModel]) -> str:
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        kind = re.sub(r"typing\.|<class '(\w+)'>", r"\1", str(field.annotation))
        bounds = ", ".join(_bounds(field.metadata))
        kind = f"`{kind}`{f' ({bounds})' if bounds else ''}".replace("|", "\\|")
        default = field.get_default(call_default_factory=True)
        rows.append(f"| `{name}` | {kind} | `{default!r}` | {field.description} |")
    return "\n".join(rows)


def _bounds(metadata: list[Any]) -> Iterator[str]:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    for bound in metadata:
        for name, sign in signs.items():
            if hasattr(bound, name):
                yield f"{sign} {getattr(bound, name):g}"


def command_line() -> str:
    """Return the commands, each with a table of its flags."""
    import typer

    from adafuse_llm.cli import create_app

    root = typer.main.get_command(create_app())
    commands: dict[str, Any] = root.commands  # type: ignore[attr-defined]
    return "\n\n".join(_command(name, command) for name, command in commands.items())


def _command(name: str, command: Any) -> str:
    arguments: list[Any] = []
    flags: list[Any] = []
    for parameter in command.params:
        (arguments if parameter.param_type_name == "argument" else flags).append(parameter)
    usage = " ".join(
        ["adafuse", name, *((each.metavar or each.name).upper() for each in arguments)]
    )
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for flag in flags:
        default = flag.default if flag.default not in (None, [], (), False) else ""
        names = ", ".join(f"`{each}`" for each in flag.opts)
        text = (getattr(flag, "help", None) or "").replace("|", "\\|")
        rows.append(f"| {names} | {f'`{default}`' if default != '' else ''} | {text} |")
    return f"## adafuse {name}\n\n{command.help}\n\n```text\n{usage} [flags]\n```\n\n" + "\n".join(
        rows
    )


@cache
def _suite(name: str) -> Any:
    """Return stored results of ``python -m benchmarks.paper`` on the embedded members."""
    from benchmarks.paper.report import Report

    stored = RESULTS / f"{name}-suite.json"
    return Report.model_validate_json(stored.read_text(encoding="utf-8"))


def suite_run(suite: str) -> str:
    """Return the command, date, version and machine of the results."""
    report = _suite(suite)
    took = f"; decoding took {report.time}" if report.processor_seconds else ""
    return (
        f"Made on {report.date[:10]} with adafuse-llm {report.version} on a machine with "
        f"{report.machine}{took}."
    )


def suite_verdicts(suite: str) -> str:
    """Return the conclusions of the statistical tests."""
    from benchmarks.paper.report import verdicts

    return "\n".join(f"- {sentence}" for sentence in verdicts(_suite(suite)))


def suite_part(part: str, suite: str) -> str:
    """Return the tables of a part, and the systems that it leaves out."""
    from benchmarks.paper.sheets import markdown, sheets

    tables = [
        f"**{sheet.title}**\n\n{markdown(sheet)}"
        for sheet in sheets(_suite(suite))
        if sheet.section == part
    ]
    section = _suite(suite).section(part)
    absent = {} if section is None else section.absent
    return "\n\n".join([*tables, *(f"Left out: {name}: {why}." for name, why in absent.items())])


def suite_trace(suite: str) -> str:
    """Return the example answers, round by round."""
    return "\n\n".join(
        f"> {trace.question}\n\n```text\n{trace.bracketed}\n```" for trace in _suite(suite).traces
    )


def suite_charts(suite: str) -> str:
    """Return all charts."""
    from benchmarks.paper.page import suite_charts as charts

    return f"````{{raw}} html\n{charts(_suite(suite))}\n````"


def model_card() -> str:
    """Return the model card of the embedded members, which ships with them."""
    from adafuse_llm.embedded import member_paths

    card = member_paths()[0].parents[1] / "MODEL_CARD.md"
    return card.read_text(encoding="utf-8").strip()


def gains() -> str:
    """Return the comparison of AdaFuse with its best member in each task with long answers."""
    rows = [
        "| questions | best member alone | its score | ensemble | difference | tokens |",
        "|---|---|---:|---:|---|---:|",
    ]
    for claim in _suite("long").claims:
        if claim.kind != "member" or claim.ours != "AdaFuse, B = 3" or claim.comparison is None:
            continue
        found, difference = claim.comparison, claim.comparison.difference
        cells = [
            LONG_TASKS[claim.task],
            claim.theirs.removesuffix(" alone"),
            f"{found.theirs:.1f}",
            f"{found.ours:.1f}",
            f"{difference.value:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}], "
            f"{claim.verdict.replace('not shown', 'not significant')}",
            f"{claim.tokens[0] / claim.tokens[1]:.1f} times",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def pairs() -> str:
    """Return the scores of single members, of pairs and of all members on short questions."""
    section = _suite("embedded").section("table-2")
    assert section is not None
    rows = ["| members | right answers, percent | tokens per answer |", "|---|---:|---:|"]
    for line in section.lines:
        (cell,) = line.cells.values()
        rows.append(f"| {line.name} | {cell.score.shown()} | {cell.tokens:.0f} |")
    return "\n".join(rows)


def real_speed() -> str:
    """Return the costs of ensembles of real members, and how they were measured."""
    from benchmarks.speed.real import PARTS, table

    stored = json.loads((RESULTS / "real-speed.json").read_text(encoding="utf-8"))
    missing = [f"`{name}`" for name in PARTS if name not in stored]
    made = "; ".join(
        f"`{name}` on {part['date']}, {part['processor']}, load average {part['load']}"
        for name, part in stored.items()
    )
    rest = f" Not measured yet: {', '.join(missing)}." if missing else ""
    return f"{table(stored)}\n\nMeasured: {made}.{rest}"


def server_counts() -> str:
    """Return what members on servers ask and what the servers compute, per committed token."""
    stored = json.loads((RESULTS / "servers.json").read_text(encoding="utf-8"))
    points: dict[str, dict[str, str]] = {}
    for name, value in stored["figures"].items():
        point, what = name.split(": ")
        points.setdefault(point, {})[what] = value
    heads = list(next(iter(points.values())))
    rows = [f"| server, strategy | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    rows += (f"| {point} | {' | '.join(counts.values())} |" for point, counts in points.items())
    return "\n".join(rows)


LONG_TASKS = {
    "embedded_parts": "questions of several parts",
    "embedded_summary": "summaries of what passages say about a subject",
    "embedded_reasoning": "word problems of three to five steps",
    "embedded_plain": "mixed questions, without a chat template",
}
"""What the tasks with long answers ask."""


def rules() -> str:
    """Return the scores of the two rules that ``auto`` chooses from, with members of one size."""
    section = _suite("even").section("more")
    assert section is not None
    paper, mixture = (
        next(line for line in section.lines if line.name == name)
        for name in ("AdaFuse, B = 3", "mixture of words")
    )
    rows = [
        "| task | questions | `adafuse` | `mixture` | difference |",
        "|---|---:|---:|---:|---:|",
    ]
    for task, cell in paper.cells.items():
        other = mixture.cells[task]
        difference = other.versus["reference"].difference
        rows.append(
            f"| {LONG_TASKS.get(task, 'questions about facts')} | {section.questions[task]} "
            f"| {cell.score.value:.1f} | {other.score.value:.1f} "
            f"| {difference.value:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}] |"
        )
    return "\n".join(rows)


def real_scores(suite: str) -> str:
    """Return the scores of real members alone and of their ensembles, with 95 % intervals."""
    sections = _suite(suite).sections
    lines = {line.name: line for section in sections for line in section.lines}
    tasks = next(iter(lines.values())).cells
    heads = [f"{REAL_TASKS[task]}, {sections[0].questions[task]}" for task in tasks]
    rows = [f"| system | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    members = [line for line in lines.values() if line.kind == "member"]
    ours = [line for line in lines.values() if line.kind == "adafuse"]
    for line in (*members, *ours):
        scores = (line.cells[task].score.shown() for task in tasks)
        rows.append(f"| {line.name} | {' | '.join(scores)} |")
    return "\n".join(rows)


def real_gains(suite: str) -> str:
    """Return the differences of ensembles of real members from their best member, by task.

    The p-values have Holm's correction for all comparisons of the table. Those below 0.05 are bold.
    """
    tests = [(claim, claim.comparison) for claim in _suite(suite).claims if claim.comparison]
    cells: dict[str, dict[str, str]] = {}
    for (claim, test), p in zip(tests, holm([test.p_value for _, test in tests]), strict=True):
        found, mark = test.difference, "**" * (p < SIGNIFICANT)
        text = f"{found.value:+.1f} [{found.low:+.1f}, {found.high:+.1f}], {chance(p)}"
        cells.setdefault(claim.ours, {})[REAL_TASKS[claim.task]] = f"{mark}{text}{mark}"
    heads = list(next(iter(cells.values())))
    rows = [f"| system | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    rows += (f"| {name} | {' | '.join(found.values())} |" for name, found in cells.items())
    return "\n".join(rows)


REAL_TASKS = {
    "squad": "SQuAD",
    "nq": "NQ",
    "triviaqa": "TriviaQA",
    "embedded": "facts in passages",
    "gsm8k": "GSM8K",
    "flores_en_de": "FLORES, English to German",
    "flores_de_en": "FLORES, German to English",
    "embedded_summary": "summaries",
}
"""Headings of the tasks of the suites ``real`` and ``real-pairs``."""

SUITES = {"suite": "embedded", "long": "long", "real": "real", "real_pairs": "real-pairs"}
"""Names of stored results, by the first word of their generators."""

SUITE_PARTS = (
    *("table-1", "table-2", "figure-2", "words"),
    *("figure-4", "figure-5", "figure-6", "figure-7"),
    *("lengths", "decisions", "sentences"),
    *("smollm+qwen", "gemma+qwen", "all"),
)


def _generators(word: str, suite: str) -> dict[str, Callable[[], str]]:
    """Return the generators of stored results."""
    parts = {re.sub(r"\W", "_", part): partial(suite_part, part) for part in SUITE_PARTS}
    every: dict[str, Callable[[str], str]] = {
        "run": suite_run,
        "verdicts": suite_verdicts,
        "trace": suite_trace,
        "scores": real_scores,
        "gains": real_gains,
        **parts,
    }
    return {f"{word}_{name}": partial(generator, suite) for name, generator in every.items()}


GENERATORS: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "command_line": command_line,
    "gains": gains,
    "model_card": model_card,
    "pairs": pairs,
    "rules": rules,
    "real_speed": real_speed,
    "server_counts": server_counts,
    **{
        name: generator
        for word, suite in SUITES.items()
        for name, generator in _generators(word, suite).items()
    },
}


def main() -> None:
    """Write the generated texts into the pages."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text), encoding="utf-8")


if __name__ == "__main__":
    main()
