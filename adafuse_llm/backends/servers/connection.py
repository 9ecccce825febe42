"""HTTP calls to one server."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx

from adafuse_llm.at_fork import after_fork
from adafuse_llm.errors import MemberError, MemberUnavailableError

logger = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 10.0
"""Maximum seconds to connect."""

READ_SECONDS: Final = 300.0
"""Maximum seconds between two parts of an answer. The first part comes after the computation."""

PATIENCE_SECONDS: Final = 300.0
"""Seconds for which calls are repeated after a server has stopped answering. A server needs minutes
to load a large model again."""

FIRST_DELAY, LAST_DELAY = 0.1, 2.0
"""Seconds between two attempts, which double from the first to the last number."""

NOT_READY = (429, 502, 503, 504)
"""Status codes of a server that is busy or loads, or of a proxy whose server does not answer."""

PARALLEL: Final = 16
"""Maximum number of calls at the same time."""

MAX_REASON: Final = 300
"""Maximum number of characters of a server's message in an error."""

_TURNS: dict[tuple[int, str], threading.Lock] = {}
"""`Connection.turn` of every process and address."""


class Connection:
    """The connections to one server. Any thread can use them.

    All calls are idempotent: a call that failed is repeated until the server answers again.

    Args:
        member: the member's name, for errors.
        url: address of the server, without ``/v1``.
        api_key: key for the server, or None.
        key_source: name of the environment variable with the key, for errors.
        patience: seconds for which calls are repeated after the server has stopped answering.

    Attributes:
        url: the address.
        calls: number of answered calls.
        losses: number of times that the server has stopped answering.
        turn: a lock that all connections of this process to the same address share. A member holds
            it during an evaluation.
    """

    turn: threading.Lock

    def __init__(
        self,
        member: str,
        url: str,
        api_key: str | None = None,
        key_source: str | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.url = url
        self.calls = 0
        self.losses = 0
        self._member = member
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._key_source = key_source
        self._patience = patience
        self._closed = threading.Event()
        after_fork(self._renew)

    def _renew(self) -> None:
        timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        self._client = httpx.Client(base_url=self.url, headers=self._headers, timeout=timeout)
        self._threads = ThreadPoolExecutor(PARALLEL, "server")
        self._lock = threading.Lock()
        self.turn = _TURNS.setdefault((os.getpid(), self.url), threading.Lock())

    def close(self) -> None:
        """Close all connections. Calls that wait for the server fail."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def error(self, reason: str) -> MemberError:
        """Return an error of the member on this server."""
        return MemberError(self._member, f"server {self.url}: {reason}")

    def find(self, path: str, body: Any = None) -> Any:
        """Return the answer to a GET request; None if the server does not know the path.

        The call is not repeated.

        Args:
            path: the path.
            body: what to send in a POST request instead.

        Raises:
            MemberError: the server cannot be used.
        """
        try:
            method = "GET" if body is None else "POST"
            answer = self._client.request(method, path, json=body)
        except httpx.TransportError as error:
            raise self._unavailable(_problem(error)) from error
        if answer.status_code in NOT_READY:
            raise self._unavailable(_reason(answer))
        return None if answer.status_code in (404, 405, 501) else self._checked(answer)

    def post(self, path: str, body: Any) -> Any:
        """Return the answer to a POST request; repeat the call while the server does not answer.

        Raises:
            MemberError: the server refuses the request.
            MemberUnavailableError: the server does not answer, and has not for a while.
        """
        since, delay = time.monotonic(), FIRST_DELAY
        while not self._closed.is_set():
            try:
                answer = self._client.post(path, json=body)
            except httpx.TransportError as error:
                problem = _problem(error)
            except RuntimeError:  # the client was closed by another thread
                break
            else:
                if answer.status_code not in NOT_READY:
                    return self._checked(answer)
                problem = _reason(answer)
            if delay == FIRST_DELAY:
                self._note_loss(problem)
            if time.monotonic() - since + delay > self._patience:
                raise self._unavailable(problem)
            self._closed.wait(delay)
            delay = min(2 * delay, LAST_DELAY)
        raise MemberUnavailableError(self._member, "it was closed")

    def post_all(self, path: str, bodies: Sequence[Any]) -> list[Any]:
        """Return the answers to several requests, which run at the same time.

        Raises:
            MemberError: as for `post`.
        """
        if len(bodies) == 1:
            return [self.post(path, bodies[0])]
        try:
            return list(self._threads.map(lambda body: self.post(path, body), bodies))
        except RuntimeError as error:
            if not self._closed.is_set() or isinstance(error, MemberError):
                raise
            raise MemberUnavailableError(self._member, "it was closed") from error

    def _note_loss(self, problem: str) -> None:
        with self._lock:
            self.losses += 1
        logger.warning(
            "member %r: server %s: %s. The call is repeated until the server answers, for up to %g "
            "seconds",
            *(self._member, self.url, problem, self._patience),
        )

    def _unavailable(self, problem: str) -> MemberUnavailableError:
        return MemberUnavailableError(self._member, f"server {self.url}: {problem}")

    def _checked(self, answer: httpx.Response) -> Any:
        """Return the JSON of an answer.

        Raises:
            MemberError: the server refuses the request.
        """
        if answer.status_code in (401, 403):
            given = f"It refuses the key in the environment variable {self._key_source!r}"
            needed = "It needs a key. Pass api_key_env, the name of an environment variable with it"
            raise self.error(f"{given if self._headers else needed}")
        if answer.is_redirect:
            raise self.error("It redirects to another address. Pass that address, if you trust it")
        if answer.status_code != 200:
            raise self.error(_reason(answer))
        with self._lock:
            self.calls += 1
        try:
            return json.loads(answer.content)
        except ValueError as error:
            raise self.error("Its answer is not JSON. Is the address right?") from error


def _problem(error: httpx.TransportError) -> str:
    return f"It does not answer ({type(error).__name__})"


def _reason(answer: httpx.Response) -> str:
    """Return what an error of a server says, in one line."""
    try:
        found = answer.json()
        found = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
        found = found.get("message", found) if isinstance(found, dict) else found
    except ValueError:
        found = answer.text
    text = " ".join(str(found).split())
    return f"HTTP {answer.status_code}: {text[:MAX_REASON]}"
