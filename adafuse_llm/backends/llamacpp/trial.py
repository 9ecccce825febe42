"""Try each new GGUF file in a child process, before this one loads it.

Native code can end its process: on a processor whose instructions it needs and does not find, by a
defect of one of its kernels, or because of what a file holds. A chat template can run without end
or fill the memory. So a child process renders the template, loads the file with the settings of the
member, and checks its numbers. The verdict is kept in the user's cache folder, for each library,
processor, settings and file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distribution
from itertools import product
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from adafuse_llm import errors
from adafuse_llm.backends.gguf.header import GGUFFacts, read_facts, read_tokens
from adafuse_llm.backends.llamacpp.context import Context, Entry
from adafuse_llm.backends.llamacpp.library import find_library, load_library
from adafuse_llm.backends.llamacpp.model import Model
from adafuse_llm.backends.llamacpp.vocabulary import LlamaText
from adafuse_llm.errors import AdaFuseError, LoadError, UnsupportedModelError
from adafuse_llm.text.isolation import MARK, interpreter

logger = logging.getLogger(__name__)

SECONDS, SECONDS_PER_GIB = 120, 30
"""CPU time of a child process, and what is added for a GiB of weights."""

PATIENCE: Final = 5
"""A child process may take so many times its CPU time, because it waits for disks and others."""

TEMPLATE_SECONDS, TEMPLATE_BYTES = 3, 2**30
"""CPU time and memory to render a chat template a few times. Usual ones take milliseconds."""

SPARE_BYTES: Final = 8 * 2**30
"""Address space of a child process, to which three times the size of the weights are added."""

CELLS: Final = 256
"""Number of tokens in the cache of a child process."""

TOLERANCE: Final = 0.1
"""Largest accepted mean error of the logits, relative to their standard deviation. Results for
quantized weights and caches depend on the size of the pass."""

HASHED_BYTES: Final = 2**26
"""Largest size of files that are known by their bytes. Larger ones are known by their path, size
and time."""

BOOTSTRAP: Final = (
    "import sys; "
    "sys.path[:] = filter(None, sys.path); "  # not from the folder that the user works in
    "import json; "
    "start = json.load(sys.stdin); "
    "sys.path[:] = start['path']; "
    "from adafuse_llm.backends.llamacpp.trial import load; "
    "load(**start['task'])"
)
"""What a child process runs."""

REPORT: Final = b"adafuse: "
"""The beginning of each line of a child process's report. Libraries may print other lines."""

TOO_LONG: Final = -getattr(signal, "SIGXCPU", 24)
"""The exit code of a process whose CPU time is over."""

NATIVE: Final = ("SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE", "SIGABRT", "on Windows")
"""How native code crashes. Other signals come from outside, such as SIGKILL without memory."""

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
        vocabulary_only: whether no weights are loaded.
    """

    reorder: bool = False
    gpu_layers: int | None = None
    flash_attention: bool | None = None
    cache_type: str = "f16"
    vocabulary_only: bool = False


def try_file(facts: GGUFFacts, label: str, wanted: Settings) -> tuple[Settings, int | None]:
    """Return settings with which a file does not end or block the process that loads it.

    These are the wanted ones, or those that keep weights in the order of the file. In the second
    case, a warning says so, once in a process.

    Args:
        facts: what the header of the file says.
        label: text that names the member in errors.
        wanted: the settings of a member.

    Returns:
        The settings, and the bytes of a token in the member's cache. These are None without
        weights, or if no child process could be started.

    Raises:
        LoadError: the file ends the process with all settings, or takes too much time or memory;
            or the model computes NaN.
        UnsupportedModelError: the model cannot be a member.
        MissingDependencyError: llama.cpp is not installed.
    """
    path = _path(facts, wanted)
    with suppress(OSError, ValueError, KeyError):
        kept = json.loads(path.read_text("utf-8"))
        return _chosen(wanted, kept["crash"], path), kept["cell_bytes"]
    report, first = _try(facts, label, wanted), None
    if wanted.reorder and report.get("crash", "").endswith(NATIVE):
        first = report["crash"]
        report = _try(facts, label, replace(wanted, reorder=False))
    if "crash" in report:
        raise LoadError(
            f"{label} cannot be loaded: {_reason(facts.files[0], report)}. Download the file "
            "again, or use another GGUF file, a llama.cpp that is compiled for this processor "
            "(docs/guides/gguf.md says how), or the transformers model."
        )
    if "cell_bytes" not in report:
        return wanted, None
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"crash": first, "cell_bytes": report["cell_bytes"]}, file)
        Path(file.name).replace(path)
    return _chosen(wanted, first, path), report["cell_bytes"]


def _chosen(wanted: Settings, crash: str | None, path: Path) -> Settings:
    """Return the wanted settings, or safe ones if a child process crashed with the wanted ones."""
    if crash is None:
        return wanted
    _warn(crash, path.parent)
    return replace(wanted, reorder=False)


@functools.cache
def _warn(crash: str, folder: Path) -> None:
    logger.warning(
        "llama.cpp (%s) ended a trial process by %s on this processor, so members keep their "
        "weights in the order of the file, which is slower. To try again after a change of this "
        "machine, delete %s",
        *(" ".join(find_library()), crash, folder),
    )


def _try(facts: GGUFFacts, label: str, settings: Settings) -> dict[str, Any]:
    """Load a file in a child process, and return its report.

    It has ``crash`` or ``cell_bytes``, or neither if the child did not start.

    Raises:
        AdaFuseError: the error of the child.
    """
    seconds = SECONDS + SECONDS_PER_GIB * facts.weight_bytes / 2**30
    task = {"path": str(facts.files[0]), "label": label, "weights": facts.weight_bytes}
    task |= {"seconds": seconds, "settings": asdict(settings)}
    try:
        child = subprocess.run(  # noqa: S603  # this interpreter, and our own code
            [interpreter(), "-c", BOOTSTRAP],
            input=json.dumps({"path": [*map(str, sys.path)], "task": task}).encode(),
            capture_output=True,
            timeout=PATIENCE * seconds,
            env={**os.environ, "GGML_NO_BACKTRACE": "1", MARK: "1"},
            check=False,
        )
        code, output = child.returncode, child.stdout
        problem = child.stderr.decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        code, output, problem = TOO_LONG, error.stdout or b"", ""
    except OSError as error:
        code, output, problem = 0, b"", str(error)
    lines = (line.removeprefix(REPORT) for line in output.splitlines() if line.startswith(REPORT))
    report = {key: value for line in lines for key, value in json.loads(line).items()}
    if "error" in report:
        raise getattr(errors, report["error"])(report["text"])
    if (crash := crash_of(code)) is not None:
        report |= {"crash": crash, "problem": problem.strip().partition("\n")[0]}
    elif not report.keys() & {"crash", "cell_bytes"}:
        logger.debug("%s could not be tried in a child process: %s", label, problem)
    return report


def crash_of(code: int) -> str | None:
    """Return what a process ended with, such as ``"signal SIGSEGV"``; None for a usual exit.

    Args:
        code: the exit code of the process, as `subprocess` gives it.
    """
    if code == TOO_LONG:
        return "too much CPU time"
    if code >= WINDOWS_CODE:
        return f"exit code {code:#x} on Windows"
    known = {-each.value: each.name for each in signal.Signals}
    return f"signal {known.get(code, -code)}" if code < 0 else None


def _reason(path: Path, report: Mapping[str, Any]) -> str:
    """Return why a child process could not load a file."""
    step = "rendering its chat template" if report.get("renders") else "loading it"
    if report["crash"].startswith("too much"):
        return f"{step} takes {report['crash']}"
    tokens = read_tokens(path)
    for token in (token for token, count in Counter(tokens).items() if count > 1 and token):
        first, second = [number for number, each in enumerate(tokens) if each == token][:2]
        return f"its tokens {first} and {second} are the same ({token!r})"
    problem = f" ({report['problem']})" if report["problem"] else ""
    name, version = find_library()
    return f"llama.cpp ({name} {version}) ended a trial process by {report['crash']}{problem}"


def _path(facts: GGUFFacts, settings: Settings) -> Path:
    """Return the file of a verdict, by all on which it depends."""
    name, version = find_library()
    library = distribution(name).read_text("RECORD")  # the files of the package, with their hashes
    known = [name, version, library, _processor(), asdict(settings)]
    known += map(_identity, facts.files)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        folder = folder.expanduser()
    except RuntimeError:  # the user has no home
        folder = Path(tempfile.gettempdir())
    key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "adafuse-llm" / "llama.cpp" / f"{key}.json"


def _identity(path: Path) -> str:
    """Return what changes with the content of a file."""
    status = path.stat()
    if status.st_size <= HASHED_BYTES:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


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


def measure(model: Model, settings: Settings) -> int:
    """Compare the logits of a tree of tokens with those of the same tokens in a sequence.

    Returns:
        The bytes of a token in the cache.

    Raises:
        LoadError: the model computes NaN.
        UnsupportedModelError: the logits differ, or llama.cpp cannot compute them.
    """
    first, second, third, fourth = (n * (model.vocabulary - 1) // 3 for n in range(4))
    tree = [
        *(Entry(first, 0, [0, 1], False), Entry(second, 1, [0, 1], True)),
        *(Entry(third, 2, [0], False), Entry(fourth, 2, [1], True), Entry(third, 3, [1], True)),
    ]
    line = [Entry(each.token, each.position, [2], each.keep) for each in (*tree[:2], *tree[3:])]
    context = Context(
        model,
        cells=CELLS,
        threads=1,
        flash_attention=settings.flash_attention,
        cache_type=settings.cache_type,
    )
    try:
        in_tree = context.run(tree)
        plain = torch.cat([context.run(line[:3]), context.run(line[3:])])
        whole = context.state_bytes(2)
        context.cut(2, 1)
        size = (whole - context.state_bytes(2)) // (len(line) - 1)
    except RuntimeError as error:
        raise UnsupportedModelError(f"{model.label} cannot be a member: {error}") from error
    finally:
        context.close()
    if torch.isnan(in_tree).any():
        raise LoadError(
            f"{model.label} cannot be loaded: the model computes NaN. The file "
            f"{model.path.name!r} may be damaged; download it again."
        )
    difference = (in_tree - plain).abs().mean() / plain.std()
    if not difference <= TOLERANCE:  # also if it is NaN
        raise UnsupportedModelError(
            f"{model.label} cannot be a member: llama.cpp gives other numbers for a tree of tokens "
            f"than for the same tokens in a sequence (relative error {difference:.2g})"
        )
    return max(1, size)


# In the child process -------------------------------------------------------------------------


def load(path: str, label: str, settings: Mapping[str, Any], weights: int, seconds: float) -> None:
    """Render the chat template of a file, load the file, and check its numbers.

    Args:
        path: the file.
        label: text that names the member in errors.
        settings: the fields of `Settings`.
        weights: bytes of the weights.
        seconds: CPU time for loading the file.
    """
    wanted, cell_bytes = Settings(**settings), None
    memory = 2**50 if load_library().llama_supports_gpu_offload() else 3 * weights + SPARE_BYTES
    try:
        _render(read_facts(path).chat_template or {})
        with _limits(seconds, memory):
            if wanted.vocabulary_only:
                LlamaText.from_file(path)
            else:
                layers = wanted.gpu_layers
                model = Model(Path(path), label, gpu_layers=layers, reorder=wanted.reorder)
                with suppress(UnsupportedModelError):  # a member may have another tokenizer
                    LlamaText(model)
                cell_bytes = measure(model, wanted)
        _tell(cell_bytes=cell_bytes)
    except MemoryError:
        _tell(crash="too much memory")
    except AdaFuseError as error:
        _tell(error=type(error).__name__, text=str(error))


def _render(template: str | Mapping[str, str]) -> None:
    """Render chat templates in a few ways, as far as they can be rendered.

    Raises:
        MemoryError: that takes too much memory.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    templates = {"": template} if isinstance(template, str) else template
    turns = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
    function = {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    _tell(renders=True)
    with _limits(TEMPLATE_SECONDS, TEMPLATE_BYTES):
        for each, messages, given in product(templates.values(), (turns, turns[1:]), (None, tools)):
            try:
                render_jinja_template([messages], given, chat_template=each)
            except MemoryError:
                raise
            except Exception as error:  # a template may raise any exception; the codec reports it
                logger.debug("the chat template raises %r", error)
    _tell(renders=False)


def _tell(**what: Any) -> None:
    """Tell the parent process something. The last value of a name counts."""
    sys.stdout.write(f"{REPORT.decode()}{json.dumps(what)}\n")
    sys.stdout.flush()


@contextmanager
def _limits(seconds: float, memory: int) -> Iterator[None]:
    """Limit the CPU time and the address space that this process takes from now on.

    Windows has no such limits.
    """
    try:
        import resource
    except ImportError:
        yield
        return
    wanted = {
        resource.RLIMIT_CPU: math.ceil(time.process_time() + seconds),
        resource.RLIMIT_AS: psutil.Process().memory_info().vms + memory,
        resource.RLIMIT_CORE: 0,
    }
    before = {kind: resource.getrlimit(kind) for kind in wanted}
    for kind, value in wanted.items():
        hard = before[kind][1]
        with suppress(OSError, ValueError):  # macOS does not limit the address space
            resource.setrlimit(kind, (value if hard < 0 else min(value, hard), hard))
    try:
        yield
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)
