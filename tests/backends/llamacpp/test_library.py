"""The library llama.cpp is optional, and its messages go to Python's logging."""

import _ctypes
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from adafuse_llm.backends.llamacpp import declarations, library
from adafuse_llm.backends.llamacpp.library import Model, Settings, find_library, load_library
from adafuse_llm.errors import LoadError, MissingDependencyError

MISSING = "no-such-package"


@pytest.mark.quick
def test_the_first_package_that_is_installed_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PACKAGES", (MISSING,))
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[gguf\]"):
        load_library.__wrapped__()
    monkeypatch.setattr(library, "PACKAGES", (MISSING, "pytest", "numpy"))
    assert find_library() == ("pytest", pytest.__version__)
    assert ("xllamacpp", "llama-cpp-py-sync")[os.name == "nt"] == declarations.PACKAGE.name


@pytest.mark.quick
@pytest.mark.parametrize(
    ("version", "file", "problem"),
    [
        ("0.0.1", "pytest/__init__.py", "another version"),
        (pytest.__version__, "pytest/__init__.py", "header"),
        (pytest.__version__, _ctypes.__file__, "llama_backend_init"),
    ],
)
def test_another_library_is_refused(
    version: str, file: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = declarations.Package("pytest", version, file)
    monkeypatch.setattr(declarations, "PACKAGE", package)
    with pytest.raises(MissingDependencyError) as caught:
        declarations.load()
    assert problem in str(caught.value)
    assert str(caught.value).endswith(f". Run: pip install pytest=={version}")


DEFAULTS: dict[str, dict[str, Any]] = {
    "llama_model_default_params": {
        **dict.fromkeys(("n_gpu_layers", "load_mode"), -1),
        **dict.fromkeys(("split_mode", "lazy_mode", "use_extra_bufts"), 1),
    },
    "llama_context_default_params": {
        "n_batch": 2048,
        **dict.fromkeys(("n_ctx", "n_ubatch"), 512),
        **dict.fromkeys(("n_threads", "n_threads_batch"), 4),
        **dict.fromkeys(("rope_scaling_type", "pooling_type", "attention_type"), -1),
        **dict.fromkeys(("flash_attn_type", "yarn_ext_factor", "yarn_attn_factor"), -1),
        **dict.fromkeys(("yarn_beta_fast", "yarn_beta_slow", "defrag_thold"), -1),
        **dict.fromkeys(("n_seq_max", "n_outputs_max_per_seq", "type_k", "type_v"), 1),
        **dict.fromkeys(("offload_kqv", "no_perf", "op_offload", "swa_full"), True),
    },
}
"""What these functions return. All other fields are 0, False or null pointers."""


@pytest.mark.gguf
@pytest.mark.parametrize("name", DEFAULTS)
def test_the_fields_of_the_structures_stand_at_the_places_of_the_library(name: str) -> None:
    if find_library()[0] != declarations.PACKAGE.name:
        pytest.skip("llama-cpp-python has declarations of its own")
    params = getattr(load_library(), name)()
    found = {field: getattr(params, field) for field, _ in params._fields_}
    assert {field: value for field, value in found.items() if value} == DEFAULTS[name]


@pytest.mark.gguf
def test_messages_are_logged_and_not_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, "adafuse_llm.backends.llamacpp.library")
    with pytest.raises(LoadError):
        Model(tmp_path / "missing.gguf", "m", Settings())
    assert "failed to open GGUF file" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert capfd.readouterr() == ("", "")
