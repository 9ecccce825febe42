"""Files are tried in a child process, so that a crash of llama.cpp takes no application down."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adafuse_llm import LoadError, child
from adafuse_llm.backends.llamacpp import LlamaCppBackend
from tests.support.gguf_files import embedded_gguf

pytestmark = pytest.mark.gguf

CRASHING = """
import ctypes, os
from adafuse_llm.backends.llamacpp import context
def crash(self, entries):
    {end}
context.Context.run = crash
"""
"""What a child process runs before its trial."""

SEGFAULT = "ctypes.string_at(0)"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without records of earlier trials."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "adafuse-llm" / "llama.cpp"


def member(name: str = "wren", **settings: Any) -> LlamaCppBackend:
    return LlamaCppBackend(embedded_gguf(name, "q8_0"), "m", context=512, **settings)


Sabotage = Callable[..., None]


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> Sabotage:
    """Let child processes end in the first pass."""

    def call(end: str = SEGFAULT) -> None:
        start, _, last = child.BOOTSTRAP.rpartition("run(")
        code = CRASHING.format(end=end)
        monkeypatch.setattr(child, "BOOTSTRAP", f"{start}exec({code!r}); run({last}")

    return call


def test_a_success_is_recorded_for_each_machine_settings_and_file(
    cache: Path, sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert member()
    sabotage()
    assert member()
    with pytest.raises(LoadError, match=r"ended a trial process .*repeatable=True"):
        member(cache_type="f32")
    with pytest.raises(LoadError):
        member("heron")
    monkeypatch.setattr("platform.node", lambda: "another one")
    with pytest.raises(LoadError):
        member()
    assert len([*cache.iterdir()]) == 1


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
