"""Try llama.cpp in a child process before it computes in this one, which it could take down.

Native code can end its process: on a processor whose instructions it needs and does not find, or by
a defect of one of its kernels. So a child process decodes a tiny model with the settings of a
member. The verdict is kept in the user's cache folder, for each library, processor and settings.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distribution
from multiprocessing import spawn
from pathlib import Path
from typing import Any, Final

from adafuse_llm.backends.llamacpp.library import find_library
from adafuse_llm.errors import LoadError

logger = logging.getLogger(__name__)

SECONDS: Final = 120
"""Time that a child process has."""

BOOTSTRAP: Final = (
    "import json, sys; "
    "start = json.load(sys.stdin); "
    "sys.path[:] = start['path']; "
    "from adafuse_llm.backends.llamacpp.trial import decode; "
    "decode(start['settings'])"
)
"""What a child process runs."""

TYPES: Final = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K"),
    *("Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "F16", "BF16"),
)
"""The types of the tiny model's weights: seven matrices in each of two layers."""

SIZE: Final = 256
"""Number of rows and columns of these matrices. It is the smallest one for all types."""


SIGNALS: Final = frozenset({"SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE", "SIGABRT"})
"""The signals of crashes. Others come from outside, such as SIGKILL if memory runs out."""

WINDOWS_CODE: Final = 0xC0000000
"""The smallest exit code of crashes on Windows."""


@dataclass(frozen=True)
class Settings:
    """The settings of a member that decide which native code runs.

    Attributes:
        reorder: as for `Model`.
        gpu_layers: as for `LlamaCppBackend`.
        flash_attention: as for `LlamaCppBackend`.
        cache_type: as for `LlamaCppBackend`.
    """

    reorder: bool
    gpu_layers: int | None
    flash_attention: bool | None
    cache_type: str


def survivable(wanted: Settings, label: str) -> Settings:
    """Return settings with which llama.cpp does not end the process.

    These are the wanted ones, or those that keep weights in the order of the file. In the second
    case, a warning says so, once in a process.

    Args:
        wanted: the settings of a member.
        label: text that names the member in errors.

    Raises:
        LoadError: llama.cpp ends the process with all of them.
        MissingDependencyError: llama.cpp is not installed.
    """
    if (crash := _verdict(wanted)) is None:
        return wanted
    safe = replace(wanted, reorder=False)
    if safe != wanted and _verdict(safe) is None:
        _warn(crash, _path(_facts(wanted)))
        return safe
    raise LoadError(
        f"{label} cannot be loaded: {_trial(crash)}. Install a llama.cpp that is compiled for this "
        "processor (docs/guides/gguf.md says how), pass other settings, or use the transformers "
        f"model. To try again, delete {_path(_facts(safe)).parent}"
    )


@functools.cache
def _warn(crash: str, path: Path) -> None:
    logger.warning(
        "%s, so members keep their weights in the order of the file, which is slower. To try "
        "again after a change of this machine, delete %s",
        _trial(crash),
        path,
    )


def _trial(crash: str) -> str:
    name, version = find_library()
    return f"llama.cpp ({name} {version}) ended a trial process by {crash} on this processor"


@functools.cache
def _verdict(settings: Settings) -> str | None:
    """Return the crash that ends a process with these settings, or None."""
    facts = _facts(settings)
    with suppress(OSError, ValueError, KeyError):
        kept: str | None = json.loads(_path(facts).read_text("utf-8"))["crash"]
        return kept
    try:
        crash = _crash_of_child(settings)
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("llama.cpp could not be tried in a child process: %s", error)
        return None
    with suppress(OSError):
        path = _path(facts)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({**facts, "crash": crash}, file, indent=1)
        Path(file.name).replace(path)
    return crash


def _crash_of_child(settings: Settings) -> str | None:
    """Decode in a child process. Return the crash that ended it, or None.

    Raises:
        OSError: the child did not start.
        SubprocessError: the child did not finish, for a reason that says nothing about llama.cpp.
    """
    child = subprocess.run(  # noqa: S603  # this interpreter, and our own code
        [os.fsdecode(spawn.get_executable()), "-c", BOOTSTRAP],
        input=json.dumps({"path": sys.path, "settings": asdict(settings)}),
        text=True,
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    crash = crash_of(child.returncode)
    if child.returncode and crash is None:
        raise subprocess.SubprocessError(f"exit code {child.returncode}: {child.stderr[-2_000:]}")
    return crash


def crash_of(code: int) -> str | None:
    """Return what crash a process ended with, such as ``"signal SIGSEGV"``, or None.

    Args:
        code: the exit code of the process, as `subprocess` gives it.
    """
    if code >= WINDOWS_CODE:
        return f"exit code {code:#x}"
    known = {-each.value: each.name for each in signal.Signals if each.name in SIGNALS}
    return f"signal {known[code]}" if code in known else None


def _facts(settings: Settings) -> dict[str, Any]:
    """Return all that a verdict depends on. A package lists its files with their hashes."""
    name, version = find_library()
    files = distribution(name).read_text("RECORD") or ""
    return {
        "library": [name, version, hashlib.sha256(files.encode()).hexdigest()],
        "processor": _processor(),
        "settings": asdict(settings),
    }


@functools.cache
def _processor() -> str:
    """Return what the processor is and can do."""
    names = ("model name", "flags", "Features", "CPU part")
    with suppress(OSError):
        first, _, _ = Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")
        found = [line for line in first.splitlines() if line.startswith(names)]
        if found:
            return "\n".join(found)
    return f"{platform.machine()} {platform.processor()} {platform.release()}"


def _path(facts: Mapping[str, Any]) -> Path:
    """Return the file of a verdict."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        folder = folder.expanduser()
    except RuntimeError:  # the user has no home
        folder = Path(tempfile.gettempdir())
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "adafuse-llm" / "llama.cpp" / f"{key}.json"


# In the child process -------------------------------------------------------------------------


def decode(settings: Mapping[str, Any]) -> None:
    """Run a tiny model over one token, some, and many, in two sequences.

    This is the main function of a child process.
    """
    from adafuse_llm.backends.llamacpp.context import Context, Entry
    from adafuse_llm.backends.llamacpp.model import Model

    wanted = Settings(**settings)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tiny.gguf")
        write_tiny(path)
        model = Model(path, "a trial", gpu_layers=wanted.gpu_layers, reorder=wanted.reorder)
        context = Context(
            model,
            cells=SIZE,
            threads=2,
            flash_attention=wanted.flash_attention,
            cache_type=wanted.cache_type,
        )
        start = 0
        for count in (1, 5, 100):
            positions = range(start, start + count)
            context.run([Entry(1, position, [0, 1], keep=True) for position in positions])
            start += count
        context.close()
        model.close()


def write_tiny(path: Path) -> None:
    """Write a GGUF file of 2 MB with all `TYPES` of weights. All weights are 0."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(len(TYPES) // 7)
    writer.add_context_length(SIZE)
    writer.add_embedding_length(SIZE)
    writer.add_feed_forward_length(SIZE)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(SIZE)
    writer.add_tokenizer_model("no_vocab")
    ones = np.ones(SIZE, dtype=np.float32)
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    matrices = [("token_embd", "Q8_0"), ("output", "Q6_K")]
    for number, kind in enumerate(TYPES):
        matrices.append((f"blk.{number // 7}.{parts[number % 7]}", kind))
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(len(TYPES) // 7):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
    for name, kind in matrices:
        number = gguf.GGMLQuantizationType[kind]
        shape = gguf.quant_shape_to_byte_shape((SIZE, SIZE), number)
        writer.add_tensor(f"{name}.weight", np.zeros(shape, dtype=np.uint8), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
