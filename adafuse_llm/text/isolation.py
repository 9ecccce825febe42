"""Grammars that are tried in another process before they are compiled here.

llguidance is native code. A hostile grammar can crash it, keep it busy, or fill the memory. Inside
`isolated`, `try_grammar` compiles a new grammar in a process of its own first. That process has
limits of time, memory and stack, so what it survives is harmless here. It knows no member: its
tokens are the 256 bytes. Limits of llguidance bound what a member's vocabulary adds.

    request ── python -c ── compile, search for a text, exit

If this process cannot start another one, it logs a warning once, and compiles grammars untried.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Final

from adafuse_llm.at_fork import after_fork
from adafuse_llm.errors import (
    GrammarError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
)
from adafuse_llm.text.grammar_trial import (
    FOUND,
    MAX_BYTES,
    MAX_CPU_SECONDS,
    OUT_OF_MEMORY,
    READY,
    REFUSED,
)

logger = logging.getLogger(__name__)

MAX_WAIT_SECONDS: Final = 30.0
"""Maximum seconds that the trials of a request take and wait together, if the machine is busy."""

MAX_TRIALS: Final = 16
"""Maximum number of trials at the same time, and of threads that check grammars."""

MAX_VERDICTS: Final = 1_000
"""Maximum number of harmless grammars that are remembered, so that they are not tried again."""

POLL_SECONDS: Final = 0.05
"""Seconds after which a cancelled request is noticed."""

MARK: Final = "ADAFUSE_TRIAL"
"""Environment variable of trials. A process that has it starts none, in case the interpreter
is an application that runs itself again."""

BOOTSTRAP: Final = """
import json, sys, types
folder, search, sys.path[:] = json.loads(sys.argv[1])
package = sys.modules["adafuse_llm"] = types.ModuleType("adafuse_llm")
package.__path__ = [folder]  # without the imports of the package, which take longer than a trial
from adafuse_llm.text.grammar_trial import main
main(search=search)
"""


@dataclass(frozen=True)
class _Request:
    """How long a request waits for trials.

    Attributes:
        cancel: flag that ends them.
        expires: the time at which they end, as `time.monotonic` counts it.
        latest: the time at which they end because the machine is busy.
    """

    cancel: threading.Event | None
    expires: float | None
    latest: float

    def check(self) -> None:
        if self.cancel is not None and self.cancel.is_set():
            raise RequestCancelledError("the request was cancelled while its grammar was tried")
        if self.expires is not None and time.monotonic() > self.expires:
            raise RequestTimeoutError(
                "the time limit of the request was over before its grammar was tried. Simplify "
                "the grammar, or try again later."
            )
        if time.monotonic() > self.latest:
            raise QueueFullError(
                f"the grammar could not be tried within {MAX_WAIT_SECONDS:g} seconds, because the "
                "machine is busy. Simplify the grammar, or try again later."
            )


_request: ContextVar[_Request | None] = ContextVar("request", default=None)


@contextmanager
def isolated(cancel: threading.Event | None = None, timeout: float | None = None) -> Iterator[None]:
    """Try the grammars that are compiled inside this context in another process first.

    Inside another such context, only the limits of the outer one count.

    Args:
        cancel: flag that ends the trials.
        timeout: seconds after which they end.
    """
    now = time.monotonic()
    expires = None if timeout is None else now + timeout
    token = _request.set(_request.get() or _Request(cancel, expires, now + MAX_WAIT_SECONDS))
    try:
        yield
    finally:
        _request.reset(token)


def try_grammar(lark: str, *, search: bool = False) -> str | None:
    """Try a grammar in another process, if this is inside `isolated`.

    Args:
        lark: the grammar.
        search: whether to search for a text that fits the grammar, too.

    Returns:
        The text that was found, which is empty without a search; None if the grammar was not tried.
        The grammar can still have errors that compiling tells.

    Raises:
        GrammarError: the grammar is harmful, or no text fits it.
        QueueFullError: the machine is too busy.
        RequestCancelledError: the request was cancelled.
        RequestTimeoutError: the time of the request is over.
    """
    request = _request.get()
    return None if request is None else _trials.run(request, lark, search=search)


def grammar_threads() -> ThreadPoolExecutor:
    """Return the threads in which requests with a grammar are checked.

    A check can wait for a trial. Requests without a grammar do not wait for these threads.
    """
    return _trials.threads


class _Trials:
    """The trials of this process, what they found, and threads that wait for them.

    Attributes:
        can_start: whether a trial has started.
    """

    def __init__(self) -> None:
        self.can_start = False
        self._has_warned = False
        self._found: OrderedDict[bytes, str] = OrderedDict()
        after_fork(self._renew)

    def _renew(self) -> None:
        self._places = threading.BoundedSemaphore(MAX_TRIALS)
        self.threads = ThreadPoolExecutor(MAX_TRIALS, "adafuse grammars")

    def run(self, request: _Request, lark: str, *, search: bool) -> str | None:
        """Try a grammar, and return the text that was found, as `try_grammar` does."""
        key = hashlib.sha256(f"{search}{lark}".encode()).digest()
        if (known := self._found.get(key)) is not None:
            return known
        code: object
        places = self._places
        while not places.acquire(timeout=POLL_SECONDS):
            request.check()
        try:
            try:
                trial = _start(search=search)
            except OSError as error:
                code, output = str(error), ""
            else:
                code, output = _output(trial, request, lark)
        finally:
            places.release()
        _, ready, answer = output.partition(READY)
        if not ready:
            self._note_untried(code if isinstance(code, str) else f"exit code {code}")
            return None
        self.can_start = True
        if answer.startswith(REFUSED):
            raise GrammarError(answer.removeprefix(REFUSED))
        if not answer.startswith(FOUND):
            raise GrammarError(_reason(code))
        self._found[key] = answer.removeprefix(FOUND)
        if len(self._found) > MAX_VERDICTS:
            self._found.popitem(last=False)
        return answer.removeprefix(FOUND)

    def _note_untried(self, reason: str) -> None:
        """Note that a trial did not start.

        Raises:
            QueueFullError: others have started, so this one may start later.
        """
        if self.can_start:
            raise QueueFullError(
                f"the process that tries the grammar did not start ({reason}). Try again later."
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a grammar is compiled without a trial in another process, because none can be "
                "started (%s). Do not accept grammars or schemas from strangers",
                reason,
            )


_trials = _Trials()


def interpreter() -> str:
    """Return Python's interpreter, for a child process that has `MARK` in its environment.

    Raises:
        OSError: this application is its own interpreter, and would run itself again.
    """
    if MARK in os.environ or getattr(sys, "frozen", False):
        raise OSError("this application is no Python interpreter")
    return os.fsdecode(spawn.get_executable() or "")


def _start(*, search: bool) -> subprocess.Popen[bytes]:
    """Start a trial.

    Raises:
        OSError: this is not possible.
    """
    setting = json.dumps([str(Path(__file__).parents[1]), search, [*map(str, sys.path)]])
    return subprocess.Popen(  # noqa: S603  # this interpreter, and our own code
        [interpreter(), "-I", "-S", "-c", BOOTSTRAP, setting],
        # the GNU C library may reserve 64 MiB for a thread, which is half of `MAX_BYTES`
        env={**os.environ, "MALLOC_ARENA_MAX": "1", MARK: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # native code reports its failures there
        start_new_session=True,  # Ctrl-C is meant for this process
    )


def _output(trial: subprocess.Popen[bytes], request: _Request, lark: str) -> tuple[object, str]:
    """Give a grammar to a trial, and return its exit code and its output. It ends with the request.

    Raises:
        AdaFuseError: as `try_grammar`.
    """
    with trial as process:
        output: list[bytes] = []
        is_over = threading.Event()

        def talk() -> None:
            try:
                output.append(process.communicate(lark.encode())[0])
            finally:  # whoever waits must not wait for ever
                is_over.set()

        threading.Thread(target=talk, name="adafuse trial").start()
        try:
            while not is_over.wait(POLL_SECONDS):
                request.check()
        finally:  # the wait can be interrupted, too, for example by Ctrl-C
            process.kill()
            is_over.wait()
        return process.returncode, b"".join(output).decode(errors="replace")


def _reason(code: object) -> str:
    """Return why a grammar is refused whose trial ended with an exit code."""
    ended = signal.Signals(-code).name if isinstance(code, int) and code < 0 else code
    if ended == "SIGXCPU":
        what = f"takes more than {MAX_CPU_SECONDS} seconds of computing"
    elif ended in (OUT_OF_MEMORY, "SIGABRT", "SIGKILL"):
        what = f"takes more than {MAX_BYTES // 2**20} MiB of memory"
    else:
        what = "crashes the library llguidance"
    return f"the grammar {what}, so it cannot be used. Simplify it."
