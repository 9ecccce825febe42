"""The engine whose members are on a server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from typing_extensions import Unpack, override

from adafuse_llm.client import wire
from adafuse_llm.config import AdaFuseConfig, DecodeOptions
from adafuse_llm.errors import (
    InvalidInputError,
    InvalidOptionError,
    MissingDependencyError,
    ServerError,
    ServerNotReadyError,
    install_command,
)
from adafuse_llm.interface import Engine
from adafuse_llm.request import Checked, Request, check_input_text, converted
from adafuse_llm.results import MemberInfo
from adafuse_llm.run import RoundObserver, Run

if TYPE_CHECKING:
    from adafuse_llm.client.connection import Connection, Stream

KEY_VARIABLE = "ADAFUSE_API_KEY"
"""Environment variable with the key for the server."""

READY_SECONDS = 0.25
"""Seconds between two questions whether the server is ready."""


class RemoteEngine(Engine):
    """An engine whose members are on a server (``adafuse serve``).

    It is used like an `AdaFuseEngine` and gives the same results and errors. The default options
    are those of the server. It needs the extra ``client``.

    Creating it asks the server for its members. Each request uses the server again. So every
    method can raise `ServerError`. After an error, the engine stays usable and connects again.

    A stream differs in one point: the server begins to decode when it has checked the inputs, not
    when the first event is requested. The seconds of ``timeout`` count from then on, and the server
    can have a shorter limit of its own.

    While the server loads its members, or does not answer, requests raise `ServerNotReadyError`.
    With `ready_timeout`, creating the engine waits until the server is ready.

    A pickled engine has no key; the process that loads it reads the key from the environment.

    Args:
        url: address of the server, such as ``http://127.0.0.1:8000``.
        api_key: key for the server. Default: the environment variable ``ADAFUSE_API_KEY``.
        strategy: name of the strategy that decodes. Default: that of the server.
        on_round: function that the engine calls with every round of every request, as for
            `AdaFuseEngine`.
        connect_timeout: maximum seconds to connect to the server.
        ready_timeout: seconds to wait here until the server is ready; 0 to raise an error at once.

    Raises:
        ServerNotReadyError: the server does not answer, or still loads its members.
        ServerError: the server refuses the key, or cannot be used for another reason.
        InvalidInputError: `url` or `api_key` cannot be used.
        InvalidOptionError: the strategy is unknown, `connect_timeout` is not a positive number, or
            `ready_timeout` is a negative one.
        MissingDependencyError: the extra ``client`` is not installed.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        strategy: str | None = None,
        on_round: RoundObserver | None = None,
        connect_timeout: float = 10.0,
        ready_timeout: float = 0.0,
    ) -> None:
        super().__init__(on_round)
        self.url = _check_url(url)
        self._strategy = strategy
        self._connect_timeout = connect_timeout
        self._ready_timeout = ready_timeout
        key = _check_key(os.environ.get(KEY_VARIABLE) if api_key is None else api_key)
        if not _is_time(connect_timeout) or connect_timeout == 0:
            raise InvalidOptionError(
                f"connect_timeout must be a positive number of seconds; got {connect_timeout!r}"
            )
        if not _is_time(ready_timeout):
            raise InvalidOptionError(
                f"ready_timeout must be a number of seconds of at least 0; got {ready_timeout!r}"
            )
        self._connection = _connect(self.url, key, connect_timeout)
        try:
            self._info = self._ask_once_ready(ready_timeout)
        except BaseException:
            self._connection.close()
            raise
        self.members = tuple(each.name for each in self._info.members)
        self.config = AdaFuseConfig(**self._info.config)

    def _ask_once_ready(self, seconds: float) -> wire.Info:
        """Like `_ask`, but wait for a server that is not ready.

        Args:
            seconds: how long to wait.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                return self._ask()
            except ServerNotReadyError:
                if (rest := end - time.monotonic()) <= 0:
                    raise
                time.sleep(min(READY_SECONDS, rest))

    def _ask(self) -> wire.Info:
        """Ask the server for its members, options and abilities."""
        query = {} if self._strategy is None else {"strategy": self._strategy}
        return self._connection.get(wire.INFO, wire.Info, **query)

    @property
    @override
    def member_info(self) -> tuple[MemberInfo, ...]:
        return self._info.members

    @property
    @override
    def can_enforce(self) -> bool:
        return self._info.can_enforce

    @override
    def check_grammar(self, **overrides: Unpack[DecodeOptions]) -> None:
        body = wire.CheckRequest(strategy=self._strategy, options=self._options(overrides))
        self._connection.post(wire.CHECK, body, wire.Done)

    @override
    def _prompt_tokens(self, checked: Checked, overrides: DecodeOptions) -> dict[str, list[int]]:
        body = wire.TokensRequest(
            strategy=self._strategy,
            options=checked.config.model_dump(include={*overrides}),
            input=wire.Input.of(checked.prompt, checked.conversation),
        )
        return self._connection.post(wire.TOKENS, body, wire.Tokens).tokens

    @override
    def encode_text(self, text: str, **overrides: Unpack[DecodeOptions]) -> dict[str, list[int]]:
        check_input_text(text)
        body = wire.TokensRequest(
            strategy=self._strategy, options=self._options(overrides), text=text
        )
        return self._connection.post(wire.TOKENS, body, wire.Tokens).tokens

    @property
    @override
    def closed(self) -> bool:
        return self._connection.closed

    @override
    def close(self, timeout: float | None = None) -> None:
        """End running requests and close the connections. The server and its members stay.

        Args:
            timeout: maximum seconds to wait until the connections are closed.
        """
        self._connection.close(timeout)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, members=[{', '.join(self.members)}])"

    def __reduce__(self) -> tuple[Any, ...]:
        create = partial(
            type(self),
            strategy=self._strategy,
            on_round=self._on_round,
            connect_timeout=self._connect_timeout,
            ready_timeout=self._ready_timeout,
        )
        return create, (self.url,)

    @override
    def open(self, requests: Sequence[Request], on_round: RoundObserver | None = None) -> Run[Any]:
        return self._run_of(self._connection.open(*self._sent(requests)), on_round)

    @override
    async def aopen(
        self, requests: Sequence[Request], on_round: RoundObserver | None = None
    ) -> Run[Any]:
        return self._run_of(await self._connection.aopen(*self._sent(requests)), on_round)

    def _run_of(self, stream: Stream, on_round: RoundObserver | None) -> Run[Any]:
        """Return the run of a stream if the server has the members that this engine knows."""
        members = stream.head.members
        if members != self.members:
            stream.stop()
            raise ServerError(
                f"the server at {self.url} now has other members ({', '.join(members)}). "
                "Create a new RemoteEngine."
            )
        observers = (self._on_round, on_round)
        return Run(stream.head.size, stream.events.start, stream.stop, observers)

    def _sent(
        self, requests: Sequence[Request]
    ) -> tuple[wire.OpenRequest, list[int], list[threading.Event | None]]:
        """Return the form of requests, the request of each response, and what cancels a request.

        Raises:
            InvalidInputError: a request cannot be used.
        """
        checked = converted(requests, lambda request: request.checked(self.config))
        forms, owners = [], []
        for number, (request, given) in enumerate(zip(requests, checked, strict=True)):
            form = wire.OneRequest.of(
                given.prompt,
                given.conversation,
                texts=None if request.texts is None else tuple(request.texts),
                stops=request.stops,
                options=given.config.model_dump(include={*request.options}),
                timeout=request.timeout,
                is_cancelled=request.cancel is not None and request.cancel.is_set(),
            )
            forms.append(form)
            owners += [number] * (given.config.n if request.texts is None else 1)
        body = wire.OpenRequest(strategy=self._strategy, requests=tuple(forms))
        return body, owners, [request.cancel for request in requests]

    def _options(self, overrides: Any) -> dict[str, Any]:
        """Return the options of a call in their checked form.

        Raises:
            InvalidOptionError: an option is unknown or out of range.
        """
        return self.config.override(overrides).model_dump(include={*overrides})


def _connect(url: str, api_key: str | None, timeout: float) -> Connection:
    try:
        from adafuse_llm.client.connection import Connection
    except ImportError as missing:
        raise MissingDependencyError(
            f"RemoteEngine needs httpx: {install_command('client')}"
        ) from missing
    return Connection(url, api_key, timeout)


def _check_url(url: str) -> str:
    """Return an address without a slash at the end.

    Raises:
        InvalidInputError: it is not the address of a server.
    """
    example = "pass an address such as http://127.0.0.1:8000"
    if not isinstance(url, str):
        raise InvalidInputError(f"url must be text; got {type(url).__name__}: {example}")
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        has_name = "@" in parts.netloc
        _ = parts.port
    except ValueError:
        is_usable = has_name = False
    if has_name:
        raise InvalidInputError("url must have no user name or password: pass api_key=... instead")
    if not is_usable or parts.query or parts.fragment or not url.isascii():
        raise InvalidInputError(f"url must begin with http:// or https://; got {url!r}: {example}")
    url = url.rstrip("/")
    for path in (wire.ROOT, "/v1"):
        if url.endswith(path):
            raise InvalidInputError(
                f"url must be the address of the server without the path of a protocol; got "
                f"{url!r}: leave out {path}"
            )
    return url


def _is_time(seconds: float) -> bool:
    """Return whether a value is a number of seconds that threads can wait."""
    return isinstance(seconds, (int, float)) and 0 <= seconds <= threading.TIMEOUT_MAX


def _check_key(key: str | None) -> str | None:
    """Return a key without whitespace around it; None for an empty one.

    Raises:
        InvalidInputError: it cannot be sent.
    """
    key = (key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InvalidInputError("api_key must consist of printable ASCII characters")
    return key or None
