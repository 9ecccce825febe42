"""The helper process of `adafuse_llm.text.isolation`, and the children that it forks."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from adafuse_llm.errors import GrammarError
from adafuse_llm.text.closing import MAX_SECONDS, Effort, Failure, found_closing
from adafuse_llm.text.isolation import (
    DIED,
    FOUND,
    MAX_BYTES,
    MAX_CPU_SECONDS,
    OUT_OF_MEMORY,
    QUICK_CPU_SECONDS,
    REFUSED,
    STACK_BYTES,
    TrialTokens,
)
from adafuse_llm.text.matchers import byte_tokenizer, compiled, llguidance

NICENESS = 10
"""How much less urgent slow trials are than the main process."""


def serve(control: int) -> None:
    """Answer messages until the main process ends.

    Args:
        control: a socket. For each message, it receives another socket, to which the main process
            writes the message, and from which it reads the answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the main process
    _Server(socket.socket(fileno=control)).run()


class _Server:
    """The loop of the helper.

    Args:
        control: the socket to the main process.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._tokenizers: dict[str | None, Any] = {None: byte_tokenizer()}
        self._trials: dict[int, Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._accept)
        self._ended, wakeup = os.pipe()
        for end in (self._ended, wakeup):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup)
        self._selector.register(self._ended, selectors.EVENT_READ, self._reap)

    def run(self) -> None:
        """Answer messages until the main process ends."""
        with suppress(EOFError):
            while True:
                for key, _ in self._selector.select():
                    key.data()
        for pid in self._trials:
            os.kill(pid, signal.SIGKILL)

    def _accept(self) -> None:
        data, sockets, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            raise EOFError
        connection = Connection(sockets[0])
        try:
            message = connection.recv()
        except (EOFError, OSError):
            connection.close()
            return
        if isinstance(message, TrialTokens):
            self._tokenizers[message.key] = _tokenizer(message)
            with connection, suppress(OSError):
                connection.send_bytes(FOUND.encode())
            return
        pid = os.fork()
        if pid == 0:
            lark, key, search, is_slow = message
            _limit_trial(is_slow=is_slow)
            _run_trial(connection, self._tokenizers[key], lark, search=search)
        self._trials[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._stop(pid))

    def _stop(self, pid: int) -> None:
        """End a trial whose answer nobody awaits: the other end of its connection is closed."""
        os.kill(pid, signal.SIGKILL)
        self._selector.unregister(self._trials[pid])

    def _reap(self) -> None:
        """Close the connections of trials that have ended. Report the end of those that died."""
        with suppress(BlockingIOError):
            os.read(self._ended, 1000)
        while self._trials:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._trials.pop(pid) as connection:
                with suppress(KeyError):
                    self._selector.unregister(connection)
                if code := os.waitstatus_to_exitcode(status):
                    with suppress(OSError):
                        connection.send_bytes(f"{DIED} {code}".encode())


def _tokenizer(tokens: TrialTokens) -> Any:
    library = llguidance()
    wrapper = library.TokenizerWrapper(_Tokens(tokens))
    return library.LLTokenizer(wrapper, eos_token=list(tokens.ends))


class _Tokens:
    """The tokens of a vocabulary, as llguidance reads them."""

    bos_token_id = None

    def __init__(self, tokens: TrialTokens) -> None:
        self.tokens = list(tokens.tokens)
        self.special_token_ids = list(tokens.special)
        self.eos_token_id = tokens.ends[0]

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError  # trials encode nothing


def _limit_trial(*, is_slow: bool) -> None:
    """Limit what this process may use. The system ends it if it uses more."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if is_slow:
        os.nice(NICENESS)
    else:
        signal.setitimer(signal.ITIMER_PROF, QUICK_CPU_SECONDS)  # ends with SIGPROF
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS + 1))
    with suppress(OSError, ValueError):  # macOS
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _run_trial(connection: Connection, tokenizer: Any, lark: str, *, search: bool) -> NoReturn:
    """Try a grammar, and end this process."""

    def work() -> None:
        try:
            connection.send_bytes(_answer(tokenizer, lark, search=search).encode())
            os._exit(0)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        finally:
            os._exit(1)

    threading.stack_size(STACK_BYTES)
    threading.Thread(target=work).start()
    while True:
        time.sleep(MAX_CPU_SECONDS)


def _answer(tokenizer: Any, lark: str, *, search: bool) -> str:
    """Compile a grammar, search for a text that fits it, and return the answer."""
    matcher = compiled(tokenizer, lark)
    if matcher.is_error():
        return FOUND  # the main process finds the same error
    try:
        if not search:
            matcher.compute_bitmask()
            return FOUND
        found = found_closing(matcher, Effort(expires=time.thread_time() + MAX_SECONDS))
    except GrammarError as error:
        return f"{REFUSED} {error}"
    return f"{REFUSED} {found.value}" if isinstance(found, Failure) else f"{FOUND} {found.decode()}"
