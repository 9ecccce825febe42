"""`RemoteEngine`: an engine that uses the members of a server through OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pydantic_core import to_json
from typing_extensions import Unpack, override

from adafuse_llm import errors
from adafuse_llm.backends.at_fork import after_fork
from adafuse_llm.config import AdaFuseConfig, DecodeOptions
from adafuse_llm.errors import AdaFuseError, InvalidInputError, ServerError, ServerNotReadyError
from adafuse_llm.interface import Engine
from adafuse_llm.remote.wire import ResponseReader, read_error
from adafuse_llm.request import Checked, Request, converted, numbered
from adafuse_llm.results import MemberInfo, Scores
from adafuse_llm.run import Deliver, Run

if TYPE_CHECKING:
    import httpx

READY_SECONDS, CANCEL_SECONDS = 0.25, 0.05
"""Seconds between checks of whether the server is ready, and of whether a request is cancelled."""

CONNECT_SECONDS, SEND_SECONDS = 10.0, 60.0
"""Maximum seconds: to connect, or for a step of a GET request; to send a part of a POST request."""

KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]
"""Socket options. If all exist, connections to a vanished machine fail within half a minute."""

CLOSED = "this engine is closed; create a new one"

T = TypeVar("T")
Work = Callable[[int, Deliver], Coroutine[Any, Any, None]]
"""Sends a request. Takes the number of the request's first response, and the function `deliver`."""


class RemoteEngine(Engine):
    """An engine whose members are on a server (``adafuse serve``).

    Use it like an `AdaFuseEngine`: results and errors are the same. The server sets the default
    options. This class needs the extra ``client``.

    Each prompt becomes one request to the server. Methods that send requests can raise
    `ServerError`, after which the engine stays usable. If only the server can check something, such
    as the size of a prompt in tokens, the error comes in place of the first event. Closing a stream
    or setting ``cancel`` stops the request on the server. A cancelled response has a usage of 0.

    A pickled engine has no key; the process that loads it reads the key from the environment.

    Args:
        url: address of the server, such as ``http://127.0.0.1:8000``.
        api_key: key for the server. Default: the environment variable ``ADAFUSE_API_KEY``.
        strategy: name of the strategy that decodes. Default: the server's own strategy.
        ready_timeout: seconds to wait until the server is ready; 0 to ask it only once.

    Raises:
        ServerNotReadyError: the server does not answer, or still loads its members.
        ServerError: the server refuses the key, or cannot be used for another reason.
        InvalidInputError: `url` or `api_key` cannot be used, or the strategy is unknown.
        MissingDependencyError: the extra ``client`` is not installed.
    """

    member_info: tuple[MemberInfo, ...] = ()
    can_enforce = closed = False

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        strategy: str | None = None,
        ready_timeout: float = 0.0,
    ) -> None:
        self.url = _check_url(url)
        self._strategy = {} if strategy is None else {"strategy": strategy}
        self._ready_timeout = ready_timeout
        self._key = (os.environ.get("ADAFUSE_API_KEY", "") if api_key is None else api_key).strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise InvalidInputError("api_key must consist of printable ASCII characters")
        after_fork(self._renew)
        try:
            end = time.monotonic() + ready_timeout
            while True:
                try:
                    models = self._ask("/v1/models", **self._strategy)
                    break
                except ServerNotReadyError:
                    if (rest := end - time.monotonic()) <= 0:
                        raise
                    time.sleep(min(READY_SECONDS, rest))
            with self._naming_server():
                facts = models["data"][0]["adafuse"]
                self.member_info = tuple(map(MemberInfo.model_validate, facts["member_info"]))
                self.members = tuple(member.name for member in self.member_info)
                self.can_enforce = bool(facts["can_enforce"])
                self._resolved = facts.get("strategy", "")
                known = facts["config"].keys() & AdaFuseConfig.model_fields
                self.config = AdaFuseConfig(**{name: facts["config"][name] for name in known})
        except BaseException:
            self.close()
            raise

    @override
    def check_grammar(self, **overrides: Unpack[DecodeOptions]) -> None:
        checked = Request(prompt="x", options=overrides).checked(self.config)
        self._ask("/v1/completions", self._body(checked, check=True))

    @override
    def _tokens(self, checked: Checked, *, inside: bool) -> dict[str, list[int]]:
        answer = self._ask("/tokenize", {**self._body(checked), "add_special_tokens": not inside})
        with self._naming_server():
            tokens: dict[str, list[int]] = answer["adafuse"]["tokens"]
        return tokens

    @override
    def open(self, requests: Sequence[Request]) -> Run[Any]:
        if self.closed:
            raise errors.EngineClosedError(CLOSED)
        works = converted(requests, self._work)
        started: list[Future[None]] = []
        stopped = threading.Event()

        def start(deliver: Deliver) -> None:
            first = 0
            for number, (size, work) in enumerate(works):
                started.append(self._start(work(first, deliver)))
                place = (requests[number], number, len(works))
                started[-1].add_done_callback(partial(self._ended, deliver, place))
                first += size
            if stopped.is_set():
                stop()

        def stop() -> None:
            stopped.set()
            for work in started:
                work.cancel()

        return Run(sum(size for size, _ in works), start, stop)

    def _work(self, request: Request) -> tuple[int, Work]:
        checked, texts = request.checked(self.config), request.texts
        more: dict[str, Any] = {"as_engine": True, "rounds": True, "enforce": False}
        more["timeout"] = request.timeout
        if texts is not None:
            more |= {"texts": [*texts], "ends": request.ends}
        content = _json({**self._body(checked, **more), "stream": texts is None})
        path = "/v1/completions" if checked.conversation is None else "/v1/chat/completions"
        sent = self._client.build_request("POST", path, content=content)
        size = checked.config.n if texts is None else 0
        return size or 1, partial(self._respond, sent, request.cancel, size)

    def _body(self, checked: Checked, **more: Any) -> dict[str, Any]:
        options = checked.config.model_dump(include={*checked.request.options})
        extension = {**options, **self._strategy, **more}
        if (conversation := checked.conversation) is None:
            return {"prompt": checked.request.prompt, "adafuse": extension}
        extension["instructions"] = conversation.instructions
        if conversation.continues:
            extension["continue_final_message"] = True
        # without this field, the server would take reasoning out of the content
        messages = [
            {"reasoning_content": "", **message} if message["role"] == "assistant" else message
            for message in conversation.messages
        ]
        body: dict[str, Any] = {"adafuse": extension, "messages": messages}
        if conversation.tools:
            body["tools"] = [*map(vars, conversation.tools)]
            body["tool_choice"] = conversation.tool_choice
        return body

    # The connections ---------------------------------------------------------------------------

    def _renew(self) -> None:
        """Create an HTTP client, for a new engine and again in each forked child process."""
        try:
            import httpx
        except ImportError as missing:
            install = errors.install_command("client")
            raise errors.MissingDependencyError(f"RemoteEngine needs httpx: {install}") from missing
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS, write=SEND_SECONDS),
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
                socket_options=KEEP_ALIVE,
                verify=self.url.startswith("https:"),  # without TLS, no certificates are loaded
            ),
        )
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @override
    def close(self, timeout: float | None = None) -> None:
        """End running requests and close the connections. The server keeps running."""
        with self._lock:
            self.closed, thread = True, self._thread
        if thread is not None:
            self._end()
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _ask(self, path: str, body: object = None, **query: str) -> Any:
        if body is not None:
            sent = self._client.build_request("POST", path, content=_json(body))
        else:
            sent = self._client.build_request("GET", path, params=query, timeout=CONNECT_SECONDS)
        with self._naming_server():
            answer = self._start(self._client.send(sent)).result()
            return self._answer(answer.status_code, answer.content)

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine and return its future. The first call starts the event loop."""
        with self._lock:
            if self.closed:
                work.close()
                raise errors.EngineClosedError(CLOSED)
            if self._thread is None:
                begun: Future[Any] = Future()
                life = (_live(self._client, begun),)
                self._thread = threading.Thread(target=asyncio.run, args=life, daemon=True)
                self._thread.start()
                self._loop, end = begun.result()
                self._end = weakref.finalize(self, _end, os.getpid(), self._loop, end)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _respond(
        self, sent: httpx.Request, cancel: Any, size: int, first: int, deliver: Deliver
    ) -> None:
        """Deliver events of `size` responses, numbered from `first`; if `size` is 0, the scores."""
        readers = [ResponseReader() for _ in range(size)]
        reading = asyncio.ensure_future(self._read(sent, readers, first, deliver))
        try:
            while not reading.done() and not (cancel is not None and cancel.is_set()):
                await asyncio.wait({reading}, timeout=None if cancel is None else CANCEL_SECONDS)
        finally:
            reading.cancel()
            await asyncio.wait({reading})
        if not reading.cancelled():
            reading.result()
        elif not readers:
            message = "the request was cancelled before its texts were scored"
            raise errors.RequestCancelledError(message)
        for index, reader in enumerate(readers, start=first):
            if not reader.is_whole:
                deliver(index, reader.cancelled(self.members, self._resolved))

    async def _read(
        self, sent: httpx.Request, readers: list[ResponseReader], first: int, deliver: Deliver
    ) -> None:
        with self._naming_server():
            async with aclosing(await self._client.send(sent, stream=True)) as answer:
                if answer.status_code != 200 or not readers:
                    extension = self._answer(answer.status_code, await answer.aread())["adafuse"]
                    deliver(first, Scores.model_validate(extension["scores"][0]))
                    return
                async for chunk in _chunks(answer):
                    if "error" in chunk:
                        raise self._failure(chunk)
                    extension = chunk.get("adafuse", {})
                    if extension.get("finish_reason") == "cancelled":
                        raise self._error("stopped before the response was complete")
                    for choice in chunk["choices"]:
                        if (event := readers[choice["index"]].add(extension)) is not None:
                            deliver(first + choice["index"], event)
            if not all(reader.is_whole for reader in readers):
                raise self._error("ended the stream before the response was complete")

    def _ended(self, deliver: Deliver, place: tuple[Request, int, int], work: Future[None]) -> None:
        """Deliver an error if the request failed, or if the engine was closed."""
        if self.closed:
            deliver(0, errors.EngineClosedError(CLOSED))
        elif not work.cancelled() and (error := work.exception()) is not None:
            deliver(0, numbered(error, *place))

    def _answer(self, status: int, content: bytes) -> Any:
        if status == 200:
            return json.loads(content)
        try:
            failure = self._failure(json.loads(content))
        except (ValueError, TypeError, LookupError, AttributeError):
            reason = f"answers with the status {status}. Check that it is 'adafuse serve'"
            failure = self._error(reason, not_ready=status in (502, 503))
        raise failure

    def _failure(self, extension: Mapping[str, Any]) -> AdaFuseError:
        error = read_error(extension["adafuse"], extension["error"]["message"])
        if isinstance(error, ServerError):
            return self._error(f"says: {error}", not_ready=isinstance(error, ServerNotReadyError))
        return error

    def _error(self, reason: str, *, not_ready: bool = False) -> ServerError:
        kind = ServerNotReadyError if not_ready else ServerError
        return kind(f"the server at {self.url} {reason}")

    @contextmanager
    def _naming_server(self) -> Iterator[None]:
        """Turn errors of connections and of unreadable answers into ones that name the server."""
        import httpx

        try:
            yield
        except AdaFuseError:
            raise
        except Exception as error:
            if self.closed:
                raise errors.EngineClosedError(CLOSED) from None
            if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadTimeout)):
                reason = f"does not answer ({error}). Start it with 'adafuse serve', or check url"
                raise self._error(reason, not_ready=True) from error
            if isinstance(error, httpx.RequestError):
                raise self._error(f"closed the connection ({error})") from error
            raise self._error("answers in an unknown form. It must be 'adafuse serve'") from error

    def __reduce__(self) -> tuple[Any, ...]:
        settings: Any = {"ready_timeout": self._ready_timeout, **self._strategy}
        return partial(type(self), **settings), (self.url,)


async def _live(client: httpx.AsyncClient, begun: Future[Any]) -> None:
    """Keep a client open until an event is set. `begun` receives the event loop and this event."""
    async with client:
        end = asyncio.Event()
        begun.set_result((asyncio.get_running_loop(), end))
        await end.wait()


def _end(process: int, loop: asyncio.AbstractEventLoop, end: asyncio.Event) -> None:
    """Set `end`, which stops the loop, unless this process was forked from the loop's process."""
    if process == os.getpid():
        loop.call_soon_threadsafe(end.set)


async def _chunks(answer: httpx.Response) -> AsyncGenerator[Any, None]:
    rest = b""
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def _json(body: object) -> bytes:
    try:
        return to_json(body)
    except ValueError as error:
        raise InvalidInputError(f"the request cannot be written as JSON: {error}") from error


def _check_url(url: str) -> str:
    parts = urlsplit(url) if isinstance(url, str) and url.isascii() else urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise InvalidInputError(
            "url must be the address of a server, such as http://127.0.0.1:8000, without a user "
            "name: pass a key as api_key"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
