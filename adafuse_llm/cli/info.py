"""`adafuse info`: describe models and check whether they can work together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import psutil
import typer
from rich.table import Table
from rich.text import Text

from adafuse_llm import AdaFuseEngine, AdaFuseError, LoadError, MissingDependencyError
from adafuse_llm.backends.file_facts import gguf_facts
from adafuse_llm.backends.gguf.header import GGUFFacts
from adafuse_llm.cli.common import FAILED, Setup
from adafuse_llm.cli.facts import describe, describe_header
from adafuse_llm.cli.terminal import one_line, print_json, stdout_console
from adafuse_llm.embedded import member_paths
from adafuse_llm.loading.specs import as_specs, member_names
from adafuse_llm.report.styles import printable
from adafuse_llm.strategies.registry import UNEVEN
from adafuse_llm.text.exactness import change_of
from adafuse_llm.text.prompt_warnings import mixed_templates

PROBES = {
    "plain text": "\nTwo  spaces, 3.5 lines.",
    "emoji": " 🙂",
    "Chinese": " 你好",
    "decomposed accents": " cafe\u0301",
    "compatibility characters": " \ufb01le \uff21 x\u00b2",
    "the character \u2581": " a\u2581b",
    "no-break spaces": " 10\u00a0km, 10\u202fm",
    "invisible characters": " co\u00adop a\u200bb",
    "tabs and Windows line ends": " a\tb\r\nc",
}
"""Texts that a tokenizer must preserve. A member cannot score a candidate that its tokenizer
changes.
"""

SMALL_WINDOW = 512


class Finding(NamedTuple):
    """A problem or a warning about one member, or about several whose names ``+`` joins.

    A problem prevents the ensemble from working.
    """

    level: Literal["problem", "warning", "note"]
    member: str
    text: str


def info(
    setup: Setup,
    *,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Folders, GGUF files, Hub IDs or servers. Default: the embedded members.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Describe models and check whether they can work together. Load one model at a time.

    Of a GGUF model, only the header is read if llama.cpp is not installed or memory is short.

    Exit codes: 0 the models can work together; 1 they cannot.
    """
    facts: list[dict[str, Any]] = []
    findings: list[Finding] = []
    paths = models or [*map(str, member_paths())]
    as_specs(paths, setup.revision)
    for model in paths:
        described, found = _inspect(model, setup)
        facts += described
        findings += found
    if mixture := mixed_templates({fact["member"]: fact["chat_template"] for fact in facts}):
        findings.append(Finding("warning", "+".join(fact["member"] for fact in facts), mixture))
    if uneven := _uneven({fact["member"]: fact.get("parameters") for fact in facts}):
        findings.append(uneven)
    together = not any(finding.level == "problem" for finding in findings)
    if as_json:
        report = {
            "members": facts,
            "can_work_together": together,
            "is_chat_model": any(fact["chat_template"] for fact in facts),
            "findings": [finding._asdict() for finding in findings],
        }
        print_json(report)
    else:
        _print(facts, findings, _verdict(len(paths), facts, together=together))
    return 0 if together else FAILED


def _inspect(model: str, setup: Setup) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Load one model, describe it, and close it."""
    facts = gguf_facts(model, setup.revision)
    if facts is not None and (reason := _why_not_loaded(facts)) is not None:
        (name,) = member_names(as_specs([model]))
        text = f"only its header was read, because {reason}"
        return [describe_header(model, name, facts)], [Finding("warning", name, text)]
    try:
        with replace(setup, models=(model,)).engine() as engine:
            return [describe(model, engine.backends[0])], examine(engine)
    except LoadError as error:
        return [], [Finding("problem", model, one_line(str(error)))]


def _why_not_loaded(facts: GGUFFacts) -> str | None:
    """Return why a GGUF model cannot be loaded on this machine; None if it can."""
    from adafuse_llm.backends.llamacpp.library import load_library

    try:
        library = load_library()
    except MissingDependencyError as error:
        return str(error)
    free = psutil.virtual_memory().available
    if facts.weight_bytes <= free or library.llama_supports_gpu_offload():
        return None
    return (
        f"its weights take {facts.weight_bytes / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB of "
        "memory are free"
    )


def examine(engine: AdaFuseEngine) -> list[Finding]:
    """Return the problems and warnings about the only member of an engine."""
    backend = engine.backends[0]
    findings = []

    def find(level: Literal["problem", "warning"], text: str) -> None:
        findings.append(Finding(level, backend.name, text))

    for name, probe in PROBES.items():
        if change := change_of(backend.codec, probe):
            level: Literal["problem", "warning"] = "problem" if name == "plain text" else "warning"
            find(
                level,
                f"its tokenizer loses {name} ({change}), so it cannot score candidates with such "
                "text",
            )
    if not backend.end_ids:
        find("warning", "it has no end token, so it never proposes to stop")
    window = backend.context_window
    if window is not None and window < SMALL_WINDOW:
        find("warning", f"its context window of {window} tokens limits the whole ensemble")
    if not backend.codec.has_chat_template:
        find("warning", "it has no chat template, so it reads messages as plain text (User: ...)")
    try:
        turns = [("system", "Be brief."), ("user", "Hello!")]
        backend.codec.encode_messages([{"role": role, "content": text} for role, text in turns])
    except AdaFuseError as error:
        find("problem", one_line(str(error)))
    return findings


def _uneven(parameters: Mapping[str, int | None]) -> Finding | None:
    """Return a note if members are so uneven that the default strategy weighs them by size."""
    known = {member: number for member, number in parameters.items() if number}
    if not known or len(known) < len(parameters):
        return None
    large, small = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    times = known[large] / known[small]
    if times < UNEVEN:
        return None
    return Finding(
        "note",
        small,
        f"{large} has {times:.1f} times as many parameters, so the default strategy is mixture, "
        f"which weighs members by their size. {small} changes little then; whether it helps at "
        "all, adafuse tune finds out",
    )


def _print(facts: list[dict[str, Any]], findings: list[Finding], verdict: str) -> None:
    console = stdout_console()
    if facts:
        console.print(_table(facts))
    for finding in findings:
        style = "red" if finding.level == "problem" else "yellow"
        named = finding.text.startswith("member ")  # errors name the member themselves
        text = finding.text if named else f"{finding.member}: {finding.text}"
        line = Text(f"{finding.level}: ", style).append(printable(text), "default")
        console.print(line, soft_wrap=True)
    console.print(Text(verdict, "bold"))


def _verdict(number: int, facts: list[dict[str, Any]], *, together: bool) -> str:
    """Say in a sentence whether the models can work together.

    Args:
        number: number of models.
        facts: facts about those that were loaded.
        together: whether they can.
    """
    can = "can" if together else "cannot"
    verdict = f"This model {can} be used" if number == 1 else f"These models {can} work together"
    windows = [fact["context_window"] for fact in facts if fact["context_window"]]
    if together and windows:
        verdict += f"; prompt and answer share a window of {min(windows):,} tokens"
    return f"{verdict}."


def _table(facts: list[dict[str, Any]]) -> Table:
    """Return a table with a column per member and a row per fact."""
    table = Table(show_header=True, header_style="bold")
    table.add_column("")
    for fact in facts:
        table.add_column(Text(printable(fact["member"])), overflow="fold")
    for key, label in _LABELS.items():
        if any(key in fact for fact in facts):
            cells = (_shown(key, fact[key]) if key in fact else "" for fact in facts)
            table.add_row(label, *(Text(printable(cell)) for cell in cells))
    return table


_LABELS = {
    "format": "format",
    "model": "name on the server",
    "architecture": "architecture",
    "tokenizer": "tokenizer",
    "tokenizer_kind": "kind",
    "vocabulary": "vocabulary",
    "chat_template": "chat template",
    "context_window": "context window",
    "listed_tokens": "listed tokens",
    "end_tokens": "end tokens",
    "cache": "cache",
    "cache_bytes_per_token": "cache per token",
    "parameters": "parameters",
    "memory_bytes": "memory",
    "dtype": "dtype",
    "files": "files",
    "followed_settings": "own settings",
    "ignored_settings": "ignored settings",
}


def _shown(key: str, value: Any) -> str:
    if key == "memory_bytes":
        return f"{value / 2**20:,.1f} MiB"
    if key == "cache_bytes_per_token":
        return f"{value / 2**10:,.1f} KiB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(value) or "none"
    if value is None:
        return "no limit"
    return f"{value:,}" if isinstance(value, int) else str(value)
