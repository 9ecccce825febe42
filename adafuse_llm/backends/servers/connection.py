"""HTTP calls to one server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import httpx

from adafuse_llm.backends.at_fork import after_fork
from adafuse_llm.errors import MemberError, MemberUnavailableError

logger = logging.getLogger(__name__)

TIMEOUT: Final = httpx.Timeout(300.0, connect=10.0)
"""Maximum seconds to wait for the next part of an answer, and to connect. The wait for the first
part includes the computation."""

PATIENCE_SECONDS: Final = 300.0
"""Seconds for which `post` repeats a call. A server needs minutes to load a large model."""

FIRST_DELAY, LAST_DELAY = 0.1, 2.0
"""Seconds between two attempts. They double from the first delay to the last."""

NOT_READY = (429, 502, 503, 504)
"""Status codes of a busy or loading server, or of a proxy whose server does not answer."""

MAX_REASON: Final = 300
"""Maximum number of characters of a server's message in an error."""

_TURNS: dict[str, threading.Lock] = {}
"""`Connection.turn` by address."""


class Connection:
    """The connections to one server, whose address has no ``/v1``. Any thread can use them.

    Calls change nothing on the server, so `post` repeats them until the server answers. If the
    server refuses a call, methods raise a `MemberError`. If it does not answer, they raise a
    `MemberUnavailableError`.

    Attributes:
        losses: number of times that the server has stopped answering.
        problem: why the last attempt of `post` had no answer; "" if it had one.
        turn: a lock that all members of this process on the same server share. A member holds it
            during an evaluation.
    """

    def __init__(
        self, member: str, url: str, api_key: str | None = None, key_source: str | None = None
    ) -> None:
        self.url = url
        self.losses, self.problem = 0, ""
        self.turn = _TURNS.setdefault(url, threading.Lock())
        self._member = member
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._key_source = key_source
        self._closed = threading.Event()
        after_fork(self._connect)

    def _connect(self) -> None:
        self._client = httpx.Client(base_url=self.url, headers=self._headers, timeout=TIMEOUT)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Hold `turn`. Raise a `MemberUnavailableError` if the connection is closed meanwhile."""
        # a member of another engine can hold the lock for minutes, while it repeats calls
        while not self.turn.acquire(timeout=FIRST_DELAY):
            if self._closed.is_set():
                raise MemberUnavailableError(self._member, "it was closed")
        try:
            yield
        finally:
            self.turn.release()

    def close(self) -> None:
        """Close all connections. Calls that wait for the server fail."""
        self._closed.set()
        self._client.close()

    def error(self, reason: str) -> MemberError:
        return MemberError(self._member, f"server {self.url}: {reason}")

    def find(self, path: str, body: Any = None) -> Any:
        """Return the answer to a GET or, with a body, a POST request; None for an unknown path."""
        answer = self._send("GET" if body is None else "POST", path, body)
        return None if answer.status_code in (404, 405, 501) else self._checked(answer)

    def post(self, path: str, body: Any) -> Any:
        """Return the answer to a POST request. Without one, repeat it for `PATIENCE_SECONDS`."""
        # a server that loads or restarts does not answer for a while
        until, delay = time.monotonic() + PATIENCE_SECONDS, FIRST_DELAY
        while not self._closed.is_set():
            try:
                answer = self._send("POST", path, body)
            except MemberUnavailableError as error:
                self.problem = str(error)
                if delay == FIRST_DELAY and not self._closed.is_set():
                    self.losses += 1
                    logger.warning(
                        "%s. The call is repeated for up to %g seconds", error, PATIENCE_SECONDS
                    )
                if time.monotonic() + delay > until:
                    raise
                self._closed.wait(delay)
                delay = min(2 * delay, LAST_DELAY)
            else:
                self.problem = ""
                return self._checked(answer)
        raise MemberUnavailableError(self._member, "it was closed")

    def post_all(self, path: str, bodies: Sequence[Any]) -> list[Any]:
        """Return the answers to several POST requests, which run at the same time."""
        if len(bodies) < 2:
            return [self.post(path, body) for body in bodies]
        with ThreadPoolExecutor(len(bodies)) as threads:
            return list(threads.map(lambda body: self.post(path, body), bodies))

    def _send(self, method: str, path: str, body: Any) -> httpx.Response:
        try:
            answer = self._client.request(method, path, json=body)
        except httpx.TransportError as error:
            problem = f"It does not answer ({type(error).__name__})"
        except RuntimeError:  # another thread closed the client
            problem = "The member was closed"
        else:
            if answer.status_code not in NOT_READY:
                return answer
            problem = _reason(answer)
        # another attempt may succeed
        raise MemberUnavailableError(self._member, f"server {self.url}: {problem}")

    def _checked(self, answer: httpx.Response) -> Any:
        # name what the user can mend, or else the server's reason
        if answer.status_code in (401, 403):
            given = f"It refuses the key in the environment variable {self._key_source!r}"
            needed = "It needs a key. Pass api_key_env, the name of an environment variable with it"
            raise self.error(f"{given if self._headers else needed}")
        if answer.is_redirect:
            raise self.error("It redirects to another address. Pass that address, if you trust it")
        if answer.status_code != 200:
            raise self.error(_reason(answer))
        try:
            return answer.json()
        except ValueError as error:
            raise self.error("Its answer is not JSON. Is the address right?") from error


def _reason(answer: httpx.Response) -> str:
    # look for the message, for which servers use different entries
    try:
        reason = answer.json()
        if isinstance(reason, dict):
            reason = reason.get("error", reason.get("detail", reason))
        if isinstance(reason, dict):
            reason = reason.get("message", reason)
    except ValueError:
        reason = answer.text
    text = " ".join(str(reason).split())
    return f"HTTP {answer.status_code}: {text[:MAX_REASON]}"
