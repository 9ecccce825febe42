"""Try each new grammar in a child process, before it is compiled here.

llguidance is native code. A hostile grammar can crash it, keep it busy, or fill the memory. So a
child process with limits of time, memory and stack compiles the grammar first. What the child
survives is harmless here. The child knows no member: its tokens
are the 256 bytes. Limits of llguidance bound what a member's vocabulary adds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path
from typing import Final

from adafuse_llm.errors import GrammarError, QueueFullError
from adafuse_llm.text.matchers import byte_tokenizer, compiled, next_bytes

logger = logging.getLogger(__name__)

MAX_CPU_SECONDS: Final = 2
"""Maximum CPU time of a trial in seconds. Trials of common schemas take 0.01 to 0.05."""

MAX_BYTES: Final = 128 * 2**20
"""Maximum memory of a trial."""

STACK_BYTES: Final = 2**20
"""Stack of a trial. llguidance reads grammars recursively, so deep ones crash it. Threads of this
process have 2 MiB or more, so what a trial survives is harmless here."""

NICENESS: Final = 10
"""How much less urgent a trial is than this process."""

MAX_WAIT_SECONDS: Final = 30.0
"""Maximum seconds that a trial waits for its place, and that it takes if the machine is busy."""

MAX_TRIALS: Final = 8
"""Maximum number of trials at the same time."""

MAX_VERDICTS: Final = 1_000
"""Maximum number of harmless grammars that are remembered, so that they are not tried again."""

MARK: Final = "ADAFUSE_TRIAL"
"""Environment variable of trials. A process that has it starts none, in case the interpreter
is an application that runs itself again."""

BOOTSTRAP: Final = """
import json, sys, types
folder, sys.path[:] = json.loads(sys.argv[1])
package = sys.modules["adafuse_llm"] = types.ModuleType("adafuse_llm")
package.__path__ = [folder]  # without the imports of the package, which take longer than a trial
from adafuse_llm.text.isolation import main
main()
"""
"""What a trial runs."""

READY: Final = "ready\n"
"""What a trial writes before it reads the grammar."""

HARMLESS = "harmless"
"""What a trial writes if it survives the grammar."""

_places = threading.BoundedSemaphore(MAX_TRIALS)
_has_started = threading.Event()
_harmless: OrderedDict[bytes, None] = OrderedDict()


def try_grammar(lark: str) -> None:
    """Try a grammar in a child process.

    If no child can be started, a warning is logged. A harmless grammar can still have errors.

    Raises:
        GrammarError: the grammar is harmful.
        QueueFullError: the machine is too busy.
    """
    key = hashlib.sha256(lark.encode()).digest()
    if key in _harmless:
        return
    end, output = _run(lark)
    _, ready, answer = output.partition(READY)
    if ready:
        _has_started.set()
    elif _has_started.is_set():
        raise QueueFullError(
            f"the process that tries the grammar did not start ({end}). Try again later."
        )
    else:
        _warn(end)
        answer = HARMLESS
    if answer != HARMLESS:
        raise GrammarError(
            f"the process that tried the grammar ended with {end}: the grammar takes more than "
            f"{MAX_CPU_SECONDS} seconds of computing or {MAX_BYTES // 2**20} MiB of memory, or it "
            "crashes the library llguidance. Simplify it."
        )
    _harmless[key] = None
    if len(_harmless) > MAX_VERDICTS:
        _harmless.popitem(last=False)


@functools.cache
def _warn(reason: str) -> None:
    logger.warning(
        "grammars are compiled without a trial in another process, because none can be started "
        "(%s). Do not accept grammars or schemas from strangers",
        reason,
    )


def _run(lark: str) -> tuple[str, str]:
    """Run a trial. Return how it ended, or why it did not start, and its output.

    Raises:
        QueueFullError: the machine is too busy.
    """
    setting = json.dumps([str(Path(__file__).parents[1]), [*map(str, sys.path)]])
    if _places.acquire(timeout=MAX_WAIT_SECONDS):
        try:
            trial = subprocess.run(  # noqa: S603  # this interpreter, and our own code
                [interpreter(), "-I", "-S", "-c", BOOTSTRAP, setting],
                input=lark.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # native code reports its failures there
                timeout=MAX_WAIT_SECONDS,
                # the GNU C library may reserve 64 MiB for a thread, which is half of `MAX_BYTES`
                env={**os.environ, "MALLOC_ARENA_MAX": "1", MARK: "1"},
                start_new_session=True,  # Ctrl-C is meant for this process
                check=False,
            )
            return f"exit code {trial.returncode}", trial.stdout.decode(errors="replace")
        except OSError as error:
            return str(error), ""
        except subprocess.TimeoutExpired:
            pass
        finally:
            _places.release()
    raise QueueFullError(
        f"the grammar could not be tried within {MAX_WAIT_SECONDS:g} seconds, because the machine "
        "is busy. Simplify the grammar, or try again later."
    )


def interpreter() -> str:
    """Return Python's interpreter, for a child process that has `MARK` in its environment.

    Raises:
        OSError: this application is its own interpreter, and would run itself again.
    """
    if MARK in os.environ or getattr(sys, "frozen", False):
        raise OSError("this application is no Python interpreter")
    return os.fsdecode(spawn.get_executable() or "")


# In the child process -------------------------------------------------------------------------


def main() -> None:
    """Read a grammar from the standard input, try it, and write the answer."""
    byte_tokenizer()
    _write(READY)
    lark = sys.stdin.buffer.read().decode()
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    limit_process(MAX_CPU_SECONDS, MAX_BYTES)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: _try(lark))
    thread.start()
    thread.join()


def _write(text: str) -> None:
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def limit_process(seconds: float, memory: int) -> None:
    """Limit the CPU time and the bytes of memory that this process takes from now on.

    The system ends it if it uses more. Windows has no such limits, and macOS none of memory.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    wanted = {
        resource.RLIMIT_CPU: math.ceil(time.process_time() + seconds),
        resource.RLIMIT_CORE: 0,
    }
    with suppress(OSError):  # macOS
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        wanted[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (value if hard < 0 else min(value, hard), hard))


def _try(lark: str) -> None:
    matcher = compiled(byte_tokenizer(), lark)
    if not matcher.is_error():  # else, whoever compiles the grammar finds the same error
        with suppress(GrammarError):
            next_bytes(matcher)
    _write(HARMLESS)
