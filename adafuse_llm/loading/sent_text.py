"""Send the text side of a member from the machine with its files to the machine of the engine.

The engine needs the tokenizer of every member, but no weights. So the files of the tokenizer are
sent, and of a GGUF file only its header, which holds the vocabulary.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from adafuse_llm.backends.gguf.header import read_facts, read_header
from adafuse_llm.backends.remote import MemberText
from adafuse_llm.errors import LoadError
from adafuse_llm.loading.gguf import GGUFPlan, has_tokenizer
from adafuse_llm.loading.huggingface import HuggingFacePlan, checkpoint_folder
from adafuse_llm.loading.plans import Plan, load_text
from adafuse_llm.loading.specs import MemberSpec

SUFFIXES: Final = frozenset(
    {".bpe", ".jinja", ".json", ".model", ".spm", ".tiktoken", ".txt", ".vocab"}
)
"""Endings of files that a tokenizer may need."""

TEMPLATES: Final = "additional_chat_templates"
"""Folder with further chat templates."""

MAX_FILE: Final = 64 * 2**20
"""Bytes above which a file is not a part of a tokenizer."""


def sent_text(plan: Plan) -> dict[str, Any]:
    """Return the files of a member's text side as plain values.

    Returns:
        ``"files"``: contents and full size of each file, by name. ``"gguf"``: name of the GGUF
        file; None for a transformers model.
    """
    if isinstance(plan, GGUFPlan):
        files = {each.name: read_header(each) for each in plan.facts.files}
        if has_tokenizer(plan):
            files.update(_small_files(plan.path.parent, with_code=False))
        return {"files": files, "gguf": plan.path.name}
    folder = checkpoint_folder(plan)
    return {
        "files": dict(_small_files(folder, with_code=plan.setting["trust_remote_code"])),
        "gguf": None,
    }


def received_text(
    spec: MemberSpec, name: str, defaults: Mapping[str, Any], sent: Mapping[str, Any]
) -> MemberText:
    """Load the text side of a member from the files that `sent_text` returned.

    Args:
        spec: the member.
        name: the member's name.
        defaults: whether to trust remote code, for a member that does not say it.
        sent: the files.

    Raises:
        LoadError: the tokenizer cannot be used.
        UnsupportedModelError: the vocabulary cannot be that of a member.
        MissingDependencyError: a package that the tokenizer needs is not installed.
    """
    folder = tempfile.TemporaryDirectory(prefix="adafuse-", ignore_cleanup_errors=True)
    try:
        _write(Path(folder.name), sent["files"], name)
        text = load_text(_plan(Path(folder.name), spec, name, defaults, sent["gguf"]))
    except BaseException:
        folder.cleanup()
        raise
    weakref.finalize(text, folder.cleanup)  # some tokenizers read their files later
    return text


def _small_files(folder: Path, *, with_code: bool) -> Iterator[tuple[str, tuple[bytes, int]]]:
    suffixes = SUFFIXES | ({".py"} if with_code else set())
    for path in (*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*.jinja")):
        is_index = path.name.endswith(".index.json")
        if path.suffix in suffixes and not is_index and path.is_file():
            size = path.stat().st_size
            if size <= MAX_FILE:
                yield path.relative_to(folder).as_posix(), (path.read_bytes(), size)


def _write(folder: Path, files: Mapping[str, Any], name: str) -> None:
    for relative, (content, size) in files.items():
        path = folder / relative
        if not path.resolve().is_relative_to(folder.resolve()):
            raise LoadError(f"member {name!r} cannot be loaded: its machine sent {relative!r}")
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.write(content)
            file.truncate(size)  # the weights of a GGUF file are a hole, which takes no space


def _plan(
    folder: Path, spec: MemberSpec, name: str, defaults: Mapping[str, Any], gguf: str | None
) -> Plan:
    if gguf is not None:
        path = folder / gguf
        return GGUFPlan(replace(spec, path=str(path), file=None), name, path, read_facts(path))
    trusted = spec.trust_remote_code
    setting = {
        "revision": None,
        "trust_remote_code": defaults["trust_remote_code"] if trusted is None else trusted,
    }
    return HuggingFacePlan(replace(spec, path=str(folder)), name, setting, None)
