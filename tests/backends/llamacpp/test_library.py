"""The library llama.cpp is optional, and its messages go to Python's logging."""

from __future__ import annotations

import _ctypes
import ctypes
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adafuse_llm.backends.llamacpp import declarations, library
from adafuse_llm.backends.llamacpp.library import (
    find_library,
    load_library,
)
from adafuse_llm.backends.llamacpp.vocabulary import LlamaText
from adafuse_llm.errors import LoadError, MissingDependencyError

MISSING = "no-such-package"


@pytest.mark.quick
def test_an_error_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PACKAGES", (MISSING,))
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[gguf\]"):
        load_library.__wrapped__()


@pytest.mark.quick
def test_the_first_package_that_is_installed_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PACKAGES", (MISSING, "pytest", "numpy"))
    assert find_library() == ("pytest", pytest.__version__)
    assert ("xllamacpp", "llama-cpp-py-sync")[os.name == "nt"] == declarations.PACKAGE.name


@pytest.mark.quick
@pytest.mark.parametrize(
    ("version", "file", "problem"),
    [
        (
            "0.0.1",
            "pytest/__init__.py",
            f"another version of it is installed ({pytest.__version__}",
        ),
        (pytest.__version__, "pytest/__init__.py", "its library cannot be loaded (.*header"),
        (pytest.__version__, _ctypes.__file__, "its library has no function llama_backend_init"),
    ],
)
def test_another_library_is_refused(
    version: str, file: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = declarations.Package("pytest", version, file)
    monkeypatch.setattr(declarations, "PACKAGE", package)
    with pytest.raises(MissingDependencyError) as caught:
        declarations.load()
    says = f"GGUF members need pytest {version}, and {problem}"
    assert re.match(says.replace("(", r"\("), str(caught.value))
    assert str(caught.value).endswith(f". Run: pip install pytest=={version}")


def variants(structure: type[ctypes.Structure]) -> Iterator[tuple[str, list[Any]]]:
    """The fields of a structure without one field, and with one more at each place."""
    fields = [*structure._fields_]
    for place, (name, *_) in enumerate(fields):
        yield f"no {name}", fields[:place] + fields[place + 1 :]
        for kind in (ctypes.c_bool, ctypes.c_int32, ctypes.c_void_p):
            more = ("more", kind)
            yield f"{kind.__name__} before {name}", [*fields[:place], more, *fields[place:]]


USED = {
    "llama_model_default_params": {"n_gpu_layers", "vocab_only", "use_extra_bufts"},
    "llama_context_default_params": {
        *("n_ctx", "n_batch", "n_seq_max", "n_threads", "n_threads_batch", "flash_attn_type"),
        *("type_k", "type_v", "no_perf", "swa_full"),
    },
}
"""The fields that members set, except kv_unified, which shows in `trial.measure`."""


@pytest.mark.quick
@pytest.mark.parametrize("name", declarations.DEFAULTS)
def test_a_build_with_other_fields_is_refused(name: str) -> None:
    defaults = declarations.DEFAULTS
    ids, pointers = (ctypes.c_int32 * 1)(), (ctypes.POINTER(ctypes.c_int32) * 1)()
    batch = declarations.Batch(0, ids, None, ids, ids, pointers, (ctypes.c_int8 * 1)())
    library = SimpleNamespace(llama_batch_init=lambda *_: batch, llama_batch_free=lambda _: None)
    for each, value in defaults.items():
        setattr(library, each, lambda value=value: value)
    assert not [*declarations._differences(library)]
    expected, ours = defaults[name], type(defaults[name])
    moved = 0
    for what, fields in variants(ours):
        theirs = type("Theirs", (ctypes.Structure,), {"_fields_": fields})
        places = {field: getattr(theirs, field).offset for field, *_ in fields}
        if all(places.get(field) == getattr(ours, field).offset for field in USED[name]):
            continue  # members would work with this build
        moved += 1
        values = {field: getattr(expected, field, None) for field, *_ in fields}
        built = theirs(**{field: value for field, value in values.items() if value is not None})
        data = bytes(built).ljust(ctypes.sizeof(ours), b"\0")
        setattr(library, name, lambda data=data: ours.from_buffer_copy(data))
        assert [*declarations._differences(library)], what
    assert moved > 20


@pytest.mark.gguf
def test_messages_are_logged_and_not_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, "adafuse_llm.backends.llamacpp.library")
    with pytest.raises(LoadError):
        LlamaText.from_file(tmp_path / "missing.gguf")
    assert "failed to open GGUF file" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert capfd.readouterr() == ("", "")
