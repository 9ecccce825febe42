"""Hosts in processes of their own on this machine.

A process starts with a new interpreter, not with a copy of this one. It imports the package, not
the script that started it. So it works from scripts without a ``__main__`` guard, from notebooks
and after a fork. Two connections lead to it: one for messages, and one for questions that are
answered during a pass. The process ends when the second one ends, so it never outlives its
parent.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import spawn
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final

from adafuse_llm.backends.base import Backend
from adafuse_llm.backends.crashes import crash_of, signal_name
from adafuse_llm.backends.remote.host import Host
from adafuse_llm.backends.remote.protocol import HostDied, Message, encoded_load_error
from adafuse_llm.forks import after_fork

GRACE_SECONDS: Final = 2.0
"""Seconds that a process has to end by itself, and again after it was asked to terminate."""

POLL_SECONDS: Final = 0.02
"""Seconds after which a process that ended before it could connect is noticed."""

BOOTSTRAP: Final = (
    "import os, pickle, signal, sys; "
    "signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "start = pickle.load(sys.stdin.buffer); "
    "sys.path[:] = start['path']; "
    "from adafuse_llm.backends.remote.processes import run; "
    "run(start)"
)
"""What a process runs. It reads its address and its task from its input, where no one else can."""

ADVICE: Final = "and standard error may show the cause"
"""What messages add to the end of a process, unless the connector knows more."""

Make = Callable[..., Backend]
"""A function that loads a backend. It must be importable: a function of a module."""


class ProcessConnector:
    """A function that starts a host in a process and returns the channel to it.

    Args:
        name: the member's name, for errors.
        make: loads the backend in the process.
        arguments: the arguments of `make`. They must support pickle.
        advice: what a crash of the process means and what to do, for messages.
    """

    def __init__(self, name: str, make: Make, *arguments: Any, advice: str = ADVICE) -> None:
        self._name = name
        self._advice = advice
        self._task = pickle.dumps((name, make, arguments))
        self._folder = str(Path.cwd())
        self._started: _Starting | None = None

    def start(self) -> None:
        """Start a process without waiting for it. The next call returns the channel to it."""
        if self._started is None:
            self._started = _Starting(self._task, self._folder, self._advice)

    def __call__(self) -> ProcessChannel:
        """Return the channel to a process that was started, or to a new one.

        Raises:
            HostDied: the process ended before it could connect.
        """
        self.start()
        assert self._started is not None
        starting, self._started = self._started, None
        return starting.connect()

    def close(self) -> None:
        """End a process that was started and has no channel yet."""
        if self._started is not None:
            self._started.stop()
            self._started = None


class _Starting:
    """A process that has not connected yet.

    Args:
        task: what the process does, encoded.
        folder: working directory of the process.
        advice: as for `ProcessConnector`.
    """

    def __init__(self, task: bytes, folder: str, advice: str) -> None:
        self._advice = advice
        if _exit.has_begun:
            raise HostDied("the program ends", is_closed=True)
        self._folder = tempfile.TemporaryDirectory(prefix="adafuse-", ignore_cleanup_errors=True)
        self._key = secrets.token_bytes(32)
        address = None if sys.platform == "win32" else str(Path(self._folder.name, "host"))
        self._listener = Listener(address, authkey=self._key)
        start = {
            "address": self._listener.address,
            "key": self._key,
            "path": sys.path,
            "task": task,
        }
        self._process = subprocess.Popen(  # noqa: S603  # this interpreter, and our own code
            [os.fsdecode(spawn.get_executable()), "-c", BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # the process itself directs it to its stderr
            cwd=folder,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(pickle.dumps(start))

    def connect(self) -> ProcessChannel:
        """Wait until the process has connected, and return the channel to it."""
        is_connected = threading.Event()
        watcher = threading.Thread(target=self._wake, args=(is_connected,), daemon=True)
        watcher.start()
        try:
            main, control = self._listener.accept(), self._listener.accept()
        except BaseException as error:
            self._process.kill()
            if isinstance(error, (OSError, EOFError)):
                raise HostDied(_outcome(self._process, self._advice)) from error
            raise
        finally:
            is_connected.set()
            watcher.join()
            self._release()
        if self._process.poll() is not None:
            raise HostDied(_outcome(self._process, self._advice))
        return ProcessChannel(self._process, main, control, self._advice)

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._release()

    def _release(self) -> None:
        self._listener.close()
        self._folder.cleanup()

    def _wake(self, is_connected: threading.Event) -> None:
        """Connect in place of the process if it has ended, because `accept` has no timeout."""
        while not is_connected.wait(POLL_SECONDS):
            if self._process.poll() is not None:
                with contextlib.suppress(OSError, EOFError):
                    Client(self._listener.address, authkey=self._key).close()


class ProcessChannel:
    """The channel to a host in a process of this machine.

    The process ends when the channel is closed or garbage collected, or when this program ends. A
    forked child cannot use the channel of its parent, and does not end the parent's process.

    Args:
        process: the process.
        main: connection for messages.
        control: connection for questions.
        advice: as for `ProcessConnector`.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], main: Connection, control: Connection, advice: str
    ) -> None:
        self._running = _Running(process, main, control, advice)
        self._asking = threading.Lock()
        after_fork(self._renew)
        weakref.finalize(self, self._running.end).atexit = False  # `_exit` ends them in time
        _exit.running.add(self._running)

    def _renew(self) -> None:
        self._running.leave_to_parent()

    @property
    def host(self) -> str:
        return f"process {self._running.process.pid}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process."""
        return self._running.process

    def send(self, message: Message) -> None:
        with self._running.failures():
            self._running.main.send_bytes(pickle.dumps(message))

    def receive(self) -> Message:
        with self._running.failures():
            return _message(self._running.main)

    def ask(self, question: Message) -> Message:
        with self._asking, self._running.failures():
            self._running.control.send_bytes(pickle.dumps(question))
            return _message(self._running.control)

    def close(self) -> None:
        self._running.end()


class _Running:
    """A process and the connections to it.

    Closing a connection would not wake a thread that waits for it. So this class ends the process,
    and the connections are closed when nobody refers to them.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], main: Connection, control: Connection, advice: str
    ) -> None:
        self._advice = advice
        self.process = process
        self.main = main
        self.control = control
        self._owner = os.getpid()
        self._is_closed = False

    def leave_to_parent(self) -> None:
        """Close the copies of the connections that a forked child has."""
        if self._owner != os.getpid():
            self._is_closed = True
            self.main.close()
            self.control.close()

    def hang_up(self) -> None:
        """Ask the process to end, without waiting for it."""
        if self._owner == os.getpid() and not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(OSError, ValueError):
                self.control.send_bytes(pickle.dumps(("end",)))

    def end(self) -> None:
        """End the process, by force if necessary."""
        if self._owner != os.getpid():
            return
        self.hang_up()
        for force in (self.process.terminate, self.process.kill):
            try:
                self.process.wait(GRACE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                force()
        self.process.wait()
        _exit.running.discard(self)

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Convert errors of a connection to `HostDied`."""
        try:
            yield
        except (OSError, EOFError, ValueError, TypeError, pickle.UnpicklingError) as error:
            is_closed = self._is_closed
            reason = "it was closed" if is_closed else _outcome(self.process, self._advice)
            raise HostDied(reason, is_closed=is_closed) from error


def _message(connection: Connection) -> Message:
    message: Message = pickle.loads(connection.recv_bytes())  # noqa: S301  # our own process
    return message


def _outcome(process: subprocess.Popen[bytes], advice: str) -> str:
    """Return how a process has ended, and end it if it still runs.

    Args:
        process: the process.
        advice: as for `ProcessConnector`.
    """
    try:
        code = process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"its process {process.pid} closed its connection"
    if (crash := crash_of(code)) is not None:
        return f"its process {process.pid} was ended by {crash}, {advice}"
    if code >= 0:
        cause = f", {ADVICE}" if code else ""
        return f"its process {process.pid} ended with exit code {code}{cause}"
    name = signal_name(code)
    cause = "perhaps because the machine ran out of memory" if name == "SIGKILL" else ADVICE
    return f"its process {process.pid} was ended by signal {name}, {cause}"


class _Exit:
    """Ends all processes when the program ends.

    Attributes:
        has_begun: whether the program ends, so that no process may start.
        running: the processes.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.running: weakref.WeakSet[_Running] = weakref.WeakSet()

    def begin(self) -> None:
        """End all processes."""
        self.has_begun = True
        running = list(self.running)
        for each in running:
            each.hang_up()
        for each in running:
            each.end()


_exit = _Exit()
atexit.register(_exit.begin)


# In the process -------------------------------------------------------------------------------


def run(start: dict[str, Any]) -> None:
    """Serve a host until the other side ends. This is the main function of a process."""
    with contextlib.suppress(OSError):
        os.dup2(2, 1)  # output of libraries must not mix with output of the application
    main = Client(start["address"], authkey=start["key"])
    control = Client(start["address"], authkey=start["key"])
    hosts: list[Host] = []
    threading.Thread(target=_answer, args=(control, hosts), daemon=True).start()
    try:
        greeting = _load(start["task"], hosts)
        main.send_bytes(pickle.dumps(greeting))
        while hosts:
            main.send_bytes(pickle.dumps(hosts[0].handle(_message(main))))
        os._exit(0)  # without waiting for threads of libraries
    except (OSError, EOFError):  # the other side has ended
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _load(task: bytes, hosts: list[Host]) -> Message:
    """Load the backend, add its host to `hosts`, and return the first message."""
    name = "of this process"
    try:
        name, make, arguments = pickle.loads(task)  # noqa: S301  # from our own parent
        host = Host(make(*arguments))
        greeting = host.greeting()
    except BaseException as error:
        return encoded_load_error(name, error)
    hosts.append(host)
    return greeting


def _answer(control: Connection, hosts: list[Host]) -> None:
    """Answer questions, and end the process when the other side has ended."""
    try:
        while (question := _message(control)) != ("end",):
            control.send_bytes(pickle.dumps(hosts[0].handle(question)))
    finally:
        os._exit(0)
