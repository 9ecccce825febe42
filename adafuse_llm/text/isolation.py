"""Grammars that are tried in another process before they are compiled here.

llguidance is native code. A hostile grammar can crash it, keep it busy, or fill the memory. Inside
`isolated`, `try_grammar` compiles a grammar in a child process first. This process has limits of
time, memory and stack, so what it survives is harmless here.

The first trial starts a helper process. It has the members' vocabularies, and it forks a child for
each trial. This takes a few milliseconds. The helper itself never compiles a grammar. If it dies,
the next trial starts another one. It ends with this process.

Nearly all grammars are *quick*: their trial takes a few hundredths of a second. A trial that is not
over by then ends, and starts again as a *slow* one with more time. Slow trials are less urgent than
everything else, few of them run at the same time, and few may wait. So they hold up no quick ones,
however many a client sends.

    request ── socket ── helper ── fork ── child: compile, search for a text, exit
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any, Final

from adafuse_llm.errors import (
    GrammarError,
    InvalidOptionError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
)
from adafuse_llm.forks import after_fork

QUICK_CPU_SECONDS: Final = 0.25
"""Maximum CPU time of a quick trial in seconds. Trials of common schemas take 0.01 to 0.05."""

MAX_CPU_SECONDS: Final = 2
"""Maximum CPU time of a slow trial in seconds."""

MAX_WAIT_SECONDS: Final = 30.0
"""Maximum seconds that the trials of a request take and wait together, if the machine is busy."""

MAX_BYTES: Final = 128 * 2**20
"""Maximum memory of a trial, in addition to that of the helper. macOS does not enforce it."""

STACK_BYTES: Final = 4 * 2**20
"""Stack of a trial. Threads of the main process have 8 MiB or more, so they have twice as much."""

MAX_TRIALS: Final = 16
"""Maximum number of trials at the same time, and of threads that check grammars."""

MAX_SLOW_TRIALS: Final = 2
"""Maximum number of slow trials at the same time."""

MAX_SLOW_REQUESTS: Final = 8
"""Maximum number of requests whose slow trials run or wait. Others are refused. This is less than
`MAX_TRIALS`, so some threads always have time for quick trials."""

POLL_SECONDS: Final = 0.05
"""Seconds after which a cancelled request is noticed."""

OUT_OF_MEMORY: Final = 3
"""Exit code of a trial without memory."""

FOUND: Final = "found"
REFUSED: Final = "refused"
DIED: Final = "died"
"""First words of the answers of trials. The text, the reason or the exit code follows."""

BOOTSTRAP: Final = (
    "import json, sys; "
    "sys.path[:] = json.loads(sys.argv[2]); "
    "from adafuse_llm.text.isolation_helper import serve; "
    "serve(int(sys.argv[1]))"
)


CAN_ISOLATE: Final = hasattr(os, "fork") and hasattr(socket, "send_fds")
"""Whether this system has what trials need, as Linux and macOS have."""


def check_isolation() -> None:
    """Check that this system can isolate grammars.

    Raises:
        InvalidOptionError: it cannot.
    """
    if not CAN_ISOLATE:
        raise InvalidOptionError(
            "option 'grammar_isolation': this system has no fork, which this option needs; got "
            "True. Set it to False, and do not accept grammars from strangers."
        )


@dataclass(frozen=True)
class TrialTokens:
    """The tokens of a vocabulary, for trials.

    Attributes:
        tokens: the bytes of each token.
        special: ids of the special tokens.
        ends: ids of the tokens that end a response.
    """

    tokens: Sequence[bytes]
    special: Sequence[int]
    ends: Sequence[int]

    @functools.cached_property
    def key(self) -> str:
        """A text that differs for different vocabularies."""
        content = repr((self.tokens, self.special, self.ends)).encode()
        return hashlib.sha256(content).hexdigest()


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

    def enter(self, places: threading.Semaphore) -> None:
        """Wait for a place."""
        while not places.acquire(timeout=POLL_SECONDS):
            self.check()


_request: ContextVar[_Request | None] = ContextVar("request", default=None)


@contextmanager
def isolated(
    is_on: bool, cancel: threading.Event | None = None, timeout: float | None = None
) -> Iterator[None]:
    """Try the grammars that are compiled inside this context in another process first.

    Args:
        is_on: whether to do this.
        cancel: flag that ends the trials.
        timeout: seconds after which they end.
    """
    now = time.monotonic()
    expires = None if timeout is None else now + timeout
    token = _request.set(_Request(cancel, expires, now + MAX_WAIT_SECONDS) if is_on else None)
    try:
        yield
    finally:
        _request.reset(token)


def try_grammar(
    lark: str, tokens: TrialTokens | None = None, *, search: bool = False
) -> str | None:
    """Try a grammar in another process, if this is inside `isolated`.

    Args:
        lark: the grammar.
        tokens: a member's vocabulary; None for bytes.
        search: whether to search for a text that fits the grammar, too.

    Returns:
        The text that was found, which is empty without a search; None if the grammar was not tried.
        The grammar can still have errors that compiling tells.

    Raises:
        GrammarError: the grammar is harmful, or no text fits it.
        QueueFullError: the machine is too busy, or too many slow trials wait.
        RequestCancelledError: the request was cancelled.
        RequestTimeoutError: the time of the request is over.
    """
    request = _request.get()
    if request is None:
        return None
    return _trials.run(request, lark, tokens, search=search)


class _Helper:
    """The process that forks children for trials."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._sending = threading.Lock()
        self.known: set[str] = set()
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603  # this interpreter, and our own code
                [
                    os.fsdecode(spawn.get_executable()),
                    "-c",
                    BOOTSTRAP,
                    str(theirs.fileno()),
                    json.dumps(sys.path),
                ],
                pass_fds=[theirs.fileno()],
                # the GNU C library may reserve 64 MiB for a thread, which is half of `MAX_BYTES`
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # native code reports its failures there
            )

    def ask(self, message: Any) -> Connection:
        """Send a message, and return the connection to its answer.

        Raises:
            OSError: the helper has died.
        """
        ours, theirs = socket.socketpair()
        connection = Connection(ours.detach())
        try:
            with theirs, self._sending:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            connection.send(message)
        except BaseException:
            connection.close()
            raise
        return connection

    def learn(self, tokens: TrialTokens) -> None:
        """Tell the helper a vocabulary."""
        if tokens.key not in self.known:
            with self.ask(tokens) as connection:
                connection.recv_bytes()
            self.known.add(tokens.key)

    def leave(self) -> None:
        """Forget the helper in a forked process, to which it does not belong."""
        self._control.close()

    def close(self) -> None:
        """End the helper and its children."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(MAX_CPU_SECONDS)


def grammar_threads() -> ThreadPoolExecutor:
    """Return the threads in which requests with a grammar are checked.

    A check can wait for a trial. Requests without a grammar do not wait for these threads.
    """
    return _trials.threads


class _TooSlow(Exception):  # noqa: N818  # never leaves this module
    """A trial was not quick."""


class _Trials:
    """The helper of this process, how many trials it may run, and threads that wait for them."""

    def __init__(self) -> None:
        self._helper: _Helper | None = None
        after_fork(self._renew)

    def _renew(self) -> None:
        if self._helper is not None:
            self._helper.leave()
        self._helper = None
        self._starting = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_TRIALS)
        self._slow_places = threading.BoundedSemaphore(MAX_SLOW_TRIALS)
        self._slow_requests = threading.BoundedSemaphore(MAX_SLOW_REQUESTS)
        self.threads = ThreadPoolExecutor(MAX_TRIALS, "adafuse grammars")

    def run(self, request: _Request, lark: str, tokens: TrialTokens | None, *, search: bool) -> str:
        """Try a grammar, and return the text that was found.

        Raises:
            AdaFuseError: as `try_grammar`.
        """
        request.enter(self._places)
        try:
            return self._tried(request, lark, tokens, search, is_slow=False)
        except _TooSlow:
            pass
        finally:
            self._places.release()
        if not self._slow_requests.acquire(blocking=False):
            raise QueueFullError(
                f"{MAX_SLOW_REQUESTS} other requests try large grammars. Simplify the grammar, or "
                "try again later."
            )
        try:
            request.enter(self._slow_places)
            try:
                return self._tried(request, lark, tokens, search, is_slow=True)
            finally:
                self._slow_places.release()
        finally:
            self._slow_requests.release()

    def _tried(
        self,
        request: _Request,
        lark: str,
        tokens: TrialTokens | None,
        search: bool,
        *,
        is_slow: bool,
    ) -> str:
        for _ in range(2):
            request.check()
            helper = self._running_helper()
            try:
                if tokens is not None:
                    helper.learn(tokens)
                key = None if tokens is None else tokens.key
                with helper.ask((lark, key, search, is_slow)) as connection:
                    return _answer(connection, request)
            except RequestTimeoutError:  # which is an OSError, too
                raise
            except (OSError, EOFError):
                self._drop(helper)
        raise GrammarError("the process that tries grammars has died. Try again.")

    def _running_helper(self) -> _Helper:
        with self._starting:
            if self._helper is None:
                self._helper = _Helper()
            return self._helper

    def _drop(self, helper: _Helper) -> None:
        with self._starting:
            if self._helper is helper:
                self._helper = None
                helper.close()

    def close(self) -> None:
        """End the helper."""
        if self._helper is not None:
            self._drop(self._helper)


_trials = _Trials()
atexit.register(_trials.close)


def _answer(connection: Connection, request: _Request) -> str:
    """Wait for the end of a trial. If the connection is closed before, the trial ends at once.

    Returns:
        The text that was found.

    Raises:
        GrammarError: the grammar is refused.
        _TooSlow: the trial was not quick.
    """
    while not connection.poll(POLL_SECONDS):
        request.check()
    kind, _, rest = connection.recv_bytes().decode().partition(" ")
    if kind == FOUND:
        return rest
    if kind == DIED and int(rest) == -signal.SIGPROF:
        raise _TooSlow
    raise GrammarError(rest if kind == REFUSED else _reason(int(rest)))


def _reason(code: int) -> str:
    """Return why a grammar is refused whose trial ended with an exit code."""
    if code == -signal.SIGXCPU:
        what = f"takes more than {MAX_CPU_SECONDS} seconds of computing"
    elif code in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGKILL):
        what = f"takes more than {MAX_BYTES // 2**20} MiB of memory"
    else:
        what = "crashes the library llguidance"
    return f"the grammar {what}, so it cannot be used. Simplify it."
