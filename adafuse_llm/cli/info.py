"""`adafuse info`: describe models and check whether they can work together."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from adafuse_llm import AdaFuseEngine, AdaFuseError, LoadError
from adafuse_llm.cli.common import FAILED, Setup, one_line, print_json, stdout_console
from adafuse_llm.report.styles import printable

PROBES = {"plain text": "\nTwo  spaces, 3.5 lines.", "emoji": " 🙂", "Chinese": " 你好"}
"""Texts that a tokenizer must preserve. A member cannot score a candidate that its tokenizer
changes.
"""

SMALL_WINDOW = 512


class Finding(NamedTuple):
    """A problem or a warning about one member. A problem prevents the ensemble from working."""

    level: Literal["problem", "warning"]
    member: str
    text: str


def info(
    setup: Setup,
    *,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...", help="Folders or Hub IDs of models. Default: the embedded members."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Describe models and check whether they can work together. Load one model at a time.

    Exit codes: 0 the models can work together; 1 they cannot.
    """
    facts: list[dict[str, Any]] = []
    findings: list[Finding] = []
    for model in replace(setup, models=tuple(models or ())).paths():
        described, found = _inspect(model, setup)
        facts += described
        findings += found
    together = not any(finding.level == "problem" for finding in findings)
    if as_json:
        report = {
            "members": facts,
            "can_work_together": together,
            "findings": [finding._asdict() for finding in findings],
        }
        print_json(report)
    else:
        _print(facts, findings, together)
    return 0 if together else FAILED


def _inspect(model: str, setup: Setup) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Load one model, describe it, and close it."""
    try:
        with replace(setup, models=(model,)).engine() as engine:
            return [describe(model, engine)], examine(engine)
    except LoadError as error:
        return [], [Finding("problem", model, one_line(str(error)))]


def describe(path: str, engine: AdaFuseEngine) -> dict[str, Any]:
    """Return facts about the only member of an engine."""
    backend: Any = engine.backends[0]
    model, tokenizer = backend.model, backend.tokenizer
    return {
        "member": backend.name,
        "path": path,
        "architecture": type(model).__name__,
        "tokenizer": type(tokenizer).__name__,
        "tokenizer_kind": _tokenizer_kind(tokenizer),
        "vocabulary": len(tokenizer),
        "chat_template": backend.codec.has_chat_template,
        "context_window": backend.context_window,
        "end_tokens": [tokenizer.convert_ids_to_tokens(i) for i in sorted(backend.end_ids)],
        "cache": backend.form,
        "parameters": model.num_parameters(),
        "memory_bytes": model.get_memory_footprint(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def examine(engine: AdaFuseEngine) -> list[Finding]:
    """Return the problems and warnings about the only member of an engine."""
    backend = engine.backends[0]
    findings = []

    def find(level: Literal["problem", "warning"], text: str) -> None:
        findings.append(Finding(level, backend.name, text))

    context = backend.codec.encode_prompt("a b")
    for name, probe in PROBES.items():
        if not backend.codec.encode_continuation(context, probe)[1]:
            level: Literal["problem", "warning"] = "problem" if name == "plain text" else "warning"
            find(level, f"its tokenizer loses {name}, so it cannot score candidates with such text")
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


def _tokenizer_kind(tokenizer: Any) -> str:
    """Name the tokenizer's algorithm, and say whether it works on bytes or on characters."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return "slow"
    pipeline = json.loads(fast.to_str())
    kind = str(pipeline["model"]["type"])
    if "ByteLevel" in json.dumps([pipeline["pre_tokenizer"], pipeline["decoder"]]):
        return f"byte-level {kind}"
    return f"{kind} with bytes" if pipeline["model"].get("byte_fallback") else kind


def _print(facts: list[dict[str, Any]], findings: list[Finding], together: bool) -> None:
    console = stdout_console()
    if facts:
        console.print(_table(facts))
    for finding in findings:
        style = "red" if finding.level == "problem" else "yellow"
        named = finding.text.startswith("member ")  # errors name the member themselves
        text = finding.text if named else f"{finding.member}: {finding.text}"
        line = Text(f"{finding.level}: ", style).append(printable(text), "default")
        console.print(line, soft_wrap=True)
    verdict = f"These models {'can' if together else 'cannot'} work together"
    windows = [fact["context_window"] for fact in facts if fact["context_window"]]
    if together and windows:
        verdict += f"; prompt and answer share a window of {min(windows):,} tokens"
    console.print(Text(f"{verdict}.", "bold"))


def _table(facts: list[dict[str, Any]]) -> Table:
    """Return a table with a column per member and a row per fact."""
    table = Table(show_header=True, header_style="bold")
    table.add_column("")
    for fact in facts:
        table.add_column(Text(printable(fact["member"])), overflow="fold")
    for key, label in _LABELS.items():
        table.add_row(label, *(Text(printable(_shown(key, fact[key]))) for fact in facts))
    return table


_LABELS = {
    "architecture": "architecture",
    "tokenizer": "tokenizer",
    "tokenizer_kind": "kind",
    "vocabulary": "vocabulary",
    "chat_template": "chat template",
    "context_window": "context window",
    "end_tokens": "end tokens",
    "cache": "cache",
    "parameters": "parameters",
    "memory_bytes": "memory",
    "dtype": "dtype",
}


def _shown(key: str, value: Any) -> str:
    if key == "memory_bytes":
        return f"{value / 2**20:,.1f} MiB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(value) or "none"
    if value is None:
        return "no limit"
    return f"{value:,}" if isinstance(value, int) else str(value)
