"""`adafuse info`: describe models and check whether they can work together."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

from rich.table import Table
from rich.text import Text

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, LoadError, MissingDependencyError
from adafuse_llm.backends.base import Backend
from adafuse_llm.cli.common import FAILED, Command, Parser, Setup
from adafuse_llm.cli.terminal import one_line, print_json, stdout_console
from adafuse_llm.embedded import member_paths
from adafuse_llm.encoding import mixed_templates
from adafuse_llm.errors import short_repr
from adafuse_llm.loading.members import MESSAGES
from adafuse_llm.report.styles import printable
from adafuse_llm.text.codec import change_of
from adafuse_llm.tree.adjustment import changes_of

PROBES: Final = {
    "emoji": " 🙂",
    "Chinese": " 你好",
    "decomposed accents": " cafe\u0301",
    "compatibility characters": " \ufb01le \uff21 x\u00b2",
    "the character \u2581": " a\u2581b",
    "no-break spaces": " 10\u00a0km, 10\u202fm",
    "invisible characters": " co\u00adop a\u200bb",
    "tabs and Windows line ends": " a\tb\r\nc",
}
"""Texts that a tokenizer may change. A member cannot score a text that its tokenizer changes."""


class Finding(NamedTuple):
    """A finding about one or more members (names joined by ``+``). A problem prevents their use."""

    level: Literal["problem", "warning"]
    member: str
    text: str


def add_flags(parser: Parser) -> None:
    """Add the flags of this command."""
    text = "Folders, GGUF files, Hub IDs or servers. Default: the embedded members."
    parser.add_argument("models", nargs="*", metavar="MODEL", help=text)
    parser.flag("--json", "Print one JSON object.")


def info(setup: Setup, flags: Namespace) -> int:
    """Describe models, loaded one at a time, and check whether they can work together.

    Exit codes: 0 the models can work together; 1 they cannot.
    """
    facts: list[dict[str, Any]] = []
    findings: list[Finding] = []
    models = setup.file.models or [*map(str, member_paths())]
    for model in models:
        alone = replace(setup, file=setup.file.model_copy(update={"models": (model,)}))
        (spec,) = alone.file.members
        try:
            with alone.load(AdaFuseConfig()) as engine:
                facts.append(_described(spec.path, engine.backends[0]))
                findings += _examined(engine)
        except (LoadError, MissingDependencyError) as error:
            findings.append(Finding("problem", spec.path, one_line(str(error))))
    if mixture := mixed_templates({fact["member"]: fact["chat_template"] for fact in facts}):
        findings.append(Finding("warning", "+".join(fact["member"] for fact in facts), mixture))
    together = not any(finding.level == "problem" for finding in findings)
    if flags.json:
        report = {
            "members": facts,
            "can_work_together": together,
            "is_chat_model": any(fact["chat_template"] for fact in facts),
            "findings": [finding._asdict() for finding in findings],
        }
        print_json(report)
    else:
        can = "can" if together else "cannot"
        verdict = (
            f"This model {can} be used" if len(models) == 1 else f"These models {can} work together"
        )
        windows = [fact["context_window"] for fact in facts if fact["context_window"]]
        if together and windows:
            verdict += f"; prompt and answer share a window of {min(windows):,} tokens"
        _print(facts, findings, f"{verdict}.")
    return 0 if together else FAILED


def _described(path: str, backend: Backend) -> dict[str, Any]:
    from adafuse_llm.backends.huggingface import HuggingFaceBackend
    from adafuse_llm.backends.llamacpp.backend import LlamaCppBackend
    from adafuse_llm.backends.servers.backend import ServerBackend

    codec = backend.codec
    prompt = codec.encode_messages(MESSAGES)[:5]
    starts = [codec.decode_continuation(prompt[:i], prompt[i : i + 1]) for i in range(len(prompt))]
    facts = {
        "member": backend.name,
        "path": path,
        "chat_template": codec.has_chat_template,
        "conversation_begins": starts,
        "context_window": backend.context_window,
    }
    if isinstance(backend, HuggingFaceBackend):
        return facts | _huggingface(backend)
    if isinstance(backend, LlamaCppBackend):
        return facts | _gguf(backend)
    if isinstance(backend, ServerBackend):
        server = backend.facts
        facts |= {"format": server.version, "model": server.model, "files": server.source}
        facts |= {"listed_tokens": backend.listed_limit, "word_ends": backend.has_word_ends()}
    return facts | {"end_tokens": [str(token) for token in sorted(backend.end_ids)]}


def _huggingface(backend: Any) -> dict[str, Any]:
    model, tokenizer = backend.model, backend.tokenizer
    fast = getattr(tokenizer, "backend_tokenizer", None)
    followed = changes_of(backend.own_adjustment)
    return {
        "format": "transformers",
        "architecture": type(model).__name__,
        "tokenizer": type(tokenizer if fast is None else fast.model).__name__,
        "vocabulary": len(tokenizer),
        "end_tokens": [tokenizer.convert_ids_to_tokens(i) for i in sorted(backend.end_ids)],
        "cache": backend.form,
        "parameters": backend.parameters,
        "memory_bytes": model.get_memory_footprint(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "followed_settings": [f"{key}={short_repr(value)}" for key, value in followed.items()],
    }


def _gguf(backend: Any) -> dict[str, Any]:
    facts = backend.facts
    return {
        "format": "GGUF",
        "architecture": facts.architecture,
        "tokenizer": facts.tokenizer,
        "vocabulary": len(backend.tokenizer),
        "end_tokens": [backend.tokenizer.decode([i]) for i in sorted(backend.end_ids)],
        "cache": "tree",
        "cache_bytes_per_token": facts.cache_bytes(1, "f16"),
        "parameters": backend.parameters,
        "memory_bytes": facts.file_bytes,
        "files": len(facts.files),
    }


def _examined(engine: AdaFuseEngine) -> Iterator[Finding]:
    from adafuse_llm.backends.llamacpp.backend import LlamaCppBackend

    backend = engine.backends[0]
    codec, window = backend.codec, backend.context_window
    if isinstance(backend, LlamaCppBackend):
        for warning in backend.tokenizer.warnings:
            yield Finding("warning", backend.name, warning)
    for name, probe in PROBES.items():
        if change := change_of(codec, probe):
            text = f"its tokenizer loses {name} ({change}), so it cannot score candidates with it"
            yield Finding("warning", backend.name, text)
    if not backend.end_ids:
        yield Finding("warning", backend.name, "it has no end token, so it never proposes to stop")
    if window is not None and window < 512:
        text = f"its context window of {window} tokens limits the whole ensemble"
        yield Finding("warning", backend.name, text)
    if not codec.has_chat_template:
        text = "it has no chat template, so it reads messages as plain text (User: ...)"
        yield Finding("warning", backend.name, text)


def _print(facts: Sequence[dict[str, Any]], findings: Sequence[Finding], verdict: str) -> None:
    console = stdout_console()
    table = Table("", header_style="bold")
    for fact in facts:
        table.add_column(Text(printable(fact["member"])), overflow="fold")
    for key in dict.fromkeys(key for fact in facts for key in fact):
        cells = [_shown(key, fact[key]) if key in fact else "" for fact in facts]
        if key not in ("member", "path") and any(cells):
            label = key.replace("_bytes", "").replace("_", " ")
            table.add_row(label, *(Text(printable(cell)) for cell in cells))
    if facts:
        console.print(table)
    for finding in findings:
        style = "red" if finding.level == "problem" else "yellow"
        named = finding.text.startswith("member ")  # the text already names the member
        text = finding.text if named else f"{finding.member}: {finding.text}"
        line = Text(f"{finding.level}: ", style).append(printable(text), "default")
        console.print(line, soft_wrap=True)
    console.print(Text(verdict, "bold"))


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "no limit" if key == "context_window" else ""
    if key == "memory_bytes":
        return f"{value / 2**20:,.1f} MiB"
    if key == "cache_bytes_per_token":
        return f"{value / 2**10:,.1f} KiB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        if key == "conversation_begins":
            value = [json.dumps(text, ensure_ascii=False) for text in value]
        return " ".join(value) or ("none" if key == "end_tokens" else "")
    return f"{value:,}" if isinstance(value, int) else str(value)


COMMAND = Command(info, add_flags, "[MODEL ...]", kinds=())
