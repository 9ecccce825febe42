"""Files are tried in a child process, so that a crash of llama.cpp takes no application down."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine, LoadError, child
from adafuse_llm.backends.llamacpp import LlamaCppBackend
from adafuse_llm.backends.llamacpp.library import load_library
from tests.support.gguf_files import embedded_gguf

pytestmark = pytest.mark.gguf

CRASHING = """
import ctypes, os, signal
from adafuse_llm.backends.llamacpp import context
original = context.Context.run
def crash(self, entries):
    if {condition}:
        {end}
    return original(self, entries)
context.Context.run = crash
"""
"""What a child process runs before its trial."""

SEGFAULT = "ctypes.string_at(0)"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without verdicts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "adafuse-llm" / "llama.cpp"


def member(name: str = "m", **settings: Any) -> LlamaCppBackend:
    return LlamaCppBackend(embedded_gguf("wren", "q8_0"), name, context=512, **settings)


Sabotage = Callable[..., None]


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> Sabotage:
    """Let child processes end in the first pass."""

    def call(end: str = SEGFAULT, condition: str = "True") -> None:
        start, _, last = child.BOOTSTRAP.rpartition("run(")
        code = CRASHING.format(condition=condition, end=end)
        monkeypatch.setattr(child, "BOOTSTRAP", f"{start}exec({code!r}); run({last}")

    return call


def test_a_verdict_is_kept_for_each_machine_settings_and_file(
    cache: Path, sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert member(repeatable=True)
    sabotage()
    assert member(repeatable=True)
    with pytest.raises(LoadError):
        member(repeatable=True, cache_type="f32")
    with pytest.raises(LoadError):
        LlamaCppBackend(embedded_gguf("heron", "q8_0"), "m", context=512, repeatable=True)
    monkeypatch.setattr("platform.node", lambda: "another one")
    with pytest.raises(LoadError):
        member(repeatable=True)
    assert len([*cache.iterdir()]) == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals")
def test_a_crash_with_reordered_weights_leads_to_safe_settings_and_a_warning(
    sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sabotage(condition="arguments['settings']['reorder']")
    library = load_library()
    load, used = library.llama_model_load_from_file, []

    def recorded(path: bytes, params: Any) -> Any:
        used.append(params.use_extra_bufts)
        return load(path, params)

    monkeypatch.setattr(library, "llama_model_load_from_file", recorded)
    members = [member("a"), member("b")]
    assert used == [False, False]
    (record,) = (each for each in caplog.records if each.levelno == logging.WARNING)
    assert "'a'" in record.getMessage() and "SIGSEGV" in record.getMessage()
    assert Path(record.getMessage().rpartition("delete ")[2]).exists()
    assert AdaFuseEngine(members).generate("The mill", max_new_tokens=2).text


def test_a_machine_without_a_cache_folder_or_processes_has_members(
    cache: Path, sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.parent.write_text("a file")
    assert member()
    sabotage("os._exit(3)")
    assert member()
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: None)
    assert member()


def test_a_file_is_tried_whatever_the_working_folder_and_other_libraries_do(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path / "more"])
    noise = "import sys; sys.stdout.reconfigure(newline='\\r\\n'); print('Hello')"  # as on Windows
    monkeypatch.setattr(child, "BOOTSTRAP", f"{noise}{child.BOOTSTRAP}")
    assert member() and len([*cache.iterdir()]) == 1
