"""Try every new GGUF file in a child process, before this process loads it.

Native code can end its process if the processor lacks an instruction, if a kernel has a defect, or
if a file is malformed. So a child process loads the file with the settings of the member, and
evaluates a few tokens. After a success, an empty file in the user's cache folder marks the
library, machine, settings and GGUF file, so that later loads need no trial.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final

import numpy as np

from adafuse_llm.backends.gguf.header import GGUFFacts, read_facts
from adafuse_llm.backends.llamacpp.context import Context, Entry
from adafuse_llm.backends.llamacpp.library import Model, Settings, find_library, load_library
from adafuse_llm.backends.llamacpp.vocabulary import LlamaVocabulary
from adafuse_llm.child import OUT_OF_TIME, begin, limit_process, run_limited
from adafuse_llm.errors import LoadError, UnsupportedModelError

logger = logging.getLogger(__name__)

SECONDS, SECONDS_PER_GIB = 120, 30
"""Maximum CPU time of a child process, in seconds: a base, and more for every GiB of weights."""

SPARE_BYTES: Final = 8 * 2**30
"""Bytes of address space of a child process, in addition to three times the size of the weights."""

TOLERANCE: Final = 0.1
"""Largest accepted mean error of the logits, relative to their standard deviation. Results for
quantized weights and caches depend on the size of the pass."""

HASHED_BYTES: Final = 2**26
"""Largest file, in bytes, that is identified by its content, and not by its path, size and time."""

OUT_OF_MEMORY, WINDOWS_CRASH = 91, 0xC0000000
"""Exit codes of a child process: out of memory, and the lowest one of a crash on Windows."""


def try_file(facts: GGUFFacts, label: str, settings: Settings) -> None:
    """Load a file in a child process, unless that has succeeded with these settings before.

    Raises:
        LoadError: the file ends the child process, or takes too much time or memory.
    """
    success = _record(facts, settings)
    with suppress(OSError):
        success.stat()
        return
    try:
        problem = _problem(facts, settings)
    except OSError as error:
        logger.debug("%s is loaded without a trial: %s", label, error)
        return
    if problem is not None:
        raise LoadError(
            f"{label} cannot be loaded: {problem}. Download the file again, or use other kernels "
            "of llama.cpp (repeatable=True), another GGUF file, a llama.cpp that is compiled for "
            "this processor (docs/guides/gguf.md says how), or the transformers model."
        )
    with suppress(OSError):
        success.parent.mkdir(parents=True, exist_ok=True)
        success.touch()


def _problem(facts: GGUFFacts, settings: Settings) -> str | None:
    # return why a child process cannot load the file; None if it can
    seconds = SECONDS + SECONDS_PER_GIB * facts.file_bytes / 2**30
    try:
        child = run_limited(
            try_here,
            5 * seconds,  # wall-clock seconds, because it also waits for disks and processes
            path=str(facts.files[0]),
            weights=facts.file_bytes,
            seconds=seconds,
            settings=asdict(settings),
        )
    except subprocess.TimeoutExpired:
        return "loading it takes too much time"
    # find out why the process ended
    code, cause = child.returncode, child.stderr.strip().partition("\n")[0]
    if not code:
        return None
    if code in (OUT_OF_TIME, OUT_OF_MEMORY):
        return f"loading it takes too much {'memory' if code == OUT_OF_MEMORY else 'CPU time'}"
    if 0 < code < WINDOWS_CRASH:
        raise OSError(f"exit code {code}: {cause}")
    # name the signal or the exit code of a crash
    names = {-known.value: f"signal {known.name}" for known in signal.Signals}
    return (
        f"llama.cpp ({' '.join(find_library())}) ended a trial process by "
        f"{names.get(code, f'exit code {code:#x}')}{cause and f' ({cause})'}"
    )


def _record(facts: GGUFFacts, settings: Settings) -> Path:
    # return the file that marks a success; its name depends on all that a success depends on
    name, _ = find_library()
    library = distribution(name).read_text("RECORD")  # the files of the package, with their hashes
    known = [library, platform.node(), asdict(settings), *map(_identity, facts.files)]
    key = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home
        folder = Path(tempfile.gettempdir())
    return folder / "adafuse-llm" / "llama.cpp" / key


def _identity(path: Path) -> str:
    # give copies of a small file the same identity
    status = path.stat()
    if status.st_size <= HASHED_BYTES:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


def load(facts: GGUFFacts, label: str, settings: Settings) -> tuple[Model, LlamaVocabulary]:
    """Load a file, and check a few logits, unless `settings` ask for the vocabulary only."""
    model = Model(facts.files[0], label, settings)
    vocabulary = LlamaVocabulary(model, facts)
    if not settings.vocabulary_only:
        _check(model)
    return model, vocabulary


def _check(model: Model) -> None:
    # evaluate a tree of tokens with two branches, and one branch as a sequence of its own
    first, second, third, fourth = (n * (model.vocabulary_size - 1) // 3 for n in range(4))
    tree = [
        Entry(first, 0, [0, 1], False),
        Entry(second, 1, [0, 1], True),
        Entry(third, 2, [0], False),
        Entry(fourth, 2, [1], True),
        Entry(third, 3, [1], True),
    ]
    line = [replace(entry, sequences=[2]) for entry in (*tree[:2], *tree[3:])]
    context = Context(model, cells=256, threads=1)
    try:
        several, one = context.run([*tree, *line[:3]]), context.run(line[3:])
    except RuntimeError as error:
        raise UnsupportedModelError(f"{model.label} cannot be a member: {error}") from error
    finally:
        context.close()
    # compare: tokens must have almost the same logits in the tree and in the sequence
    in_tree, plain = several[:3], np.concatenate([several[3:], one])
    if np.isnan(in_tree).any():
        raise LoadError(
            f"{model.label} cannot be loaded: the model computes NaN. The file "
            f"{model.path.name!r} may be damaged; download it again."
        )
    difference = np.abs(in_tree - plain).mean() / plain.std()
    if not difference <= TOLERANCE:  # true for NaN, too
        raise UnsupportedModelError(
            f"{model.label} cannot be a member: llama.cpp gives other numbers for a tree of tokens "
            f"than for the same tokens in a sequence (relative error {difference:.2g})"
        )


# In the child process -------------------------------------------------------------------------


def try_here(path: str, weights: int, seconds: float, settings: dict[str, Any]) -> None:
    """Load a file, and evaluate a few tokens, within `seconds` of CPU time."""
    begin()
    try:
        has_gpu = load_library().llama_supports_gpu_offload()  # a GPU may reserve any space
        limit_process(seconds, 2**50 if has_gpu else 3 * weights + SPARE_BYTES)
        with suppress(LoadError):  # the parent process raises it, too
            load(read_facts(path), path, Settings(**settings))
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
