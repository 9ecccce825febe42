"""The errors that adafuse-llm raises.

A message states what is wrong, what is allowed, what was given and what to do. The second base of a
class decides what frameworks do with it:

- `LookupError`: the request fails now and later. LlamaIndex and LangGraph raise it.
- `ValueError`: a reply does not have the requested form. LlamaIndex's extractors and synthesizers
  log it, and go on without this reply. LangGraph raises it.
- none, `ConnectionError`, `MemoryError` or `queue.Full`: a member, a server or the queue failed,
  perhaps only now. LlamaIndex raises it, and LangGraph tries again.
- `OSError`, `ImportError`, `TimeoutError`: loading failed, or time ran out. Both raise it.

LangChain's models raise subclasses of these errors that are also errors of langchain-core.
No error is a `RuntimeError`, because LlamaIndex's `asyncio_run` replaces such errors by its own.
"""

from __future__ import annotations

import difflib
import queue
import reprlib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "AdaFuseError",
    "CacheMemoryError",
    "ContextWindowError",
    "DecodingError",
    "EngineClosedError",
    "GrammarError",
    "InvalidInputError",
    "InvalidOptionError",
    "LoadError",
    "MalformedReplyError",
    "MemberError",
    "MemberOutOfMemoryError",
    "MemberUnavailableError",
    "MissingDependencyError",
    "QueueFullError",
    "RequestCancelledError",
    "RequestTimeoutError",
    "ServerError",
    "ServerNotReadyError",
    "UnsupportedModelError",
]


class AdaFuseError(Exception):
    """The base class of all errors of this package."""


class InvalidInputError(AdaFuseError, LookupError):
    """An argument cannot be used; nothing has been computed."""


class InvalidOptionError(InvalidInputError):
    """An option is unknown, out of range, or cannot be used here."""


class GrammarError(InvalidOptionError):
    """A schema, regular expression or grammar cannot be enforced; the message says why.

    Attributes:
        path: the keys that lead to the unenforceable part of a JSON schema; empty if unknown.
    """

    path: tuple[str, ...] = ()


class ContextWindowError(AdaFuseError, LookupError):
    """A prompt leaves no room for a response in a member's context window."""


class CacheMemoryError(AdaFuseError, LookupError):
    """A request needs more key/value cache than a device may hold, even if it runs alone."""


class LoadError(AdaFuseError, OSError):
    """A member cannot be loaded from its folder, file, Hub ID or server."""


class UnsupportedModelError(LoadError):
    """A model exists but cannot be a member of an ensemble; the message gives the reason."""


class MemberError(AdaFuseError):
    """A member failed on a request. The engine stays usable.

    Attributes:
        member: the name of the member that failed.
        reason: what went wrong.
    """

    def __init__(self, member: str, reason: str) -> None:
        super().__init__(f"member {member!r} failed: {reason}")
        self.member = member
        self.reason = reason

    def __reduce__(self) -> tuple[type[MemberError], tuple[str, str], dict[str, Any]]:
        return type(self), (self.member, self.reason), self.__dict__


class MemberOutOfMemoryError(MemberError, MemoryError):
    """A member ran out of memory. The memory of the failed request has been freed."""


class MemberUnavailableError(MemberError, ConnectionError):
    """The server of a member does not answer now, or runs another model."""


class DecodingError(AdaFuseError, LookupError):
    """No member could score any candidate of a round, or answer a typed question."""


class MalformedReplyError(AdaFuseError, ValueError):
    """No reply has the requested form, such as JSON that fits a schema."""


class RequestCancelledError(AdaFuseError, LookupError):
    """The caller cancelled a request without a result, closed its run, or read the run twice."""


class RequestTimeoutError(AdaFuseError, TimeoutError):
    """A request took longer than its ``timeout``. Other requests continue."""


class QueueFullError(AdaFuseError, queue.Full):
    """The queue is full (`RuntimeConfig.max_waiting`); nothing has been computed."""


class EngineClosedError(AdaFuseError, LookupError):
    """The engine is closed and accepts no more requests."""


class ServerError(AdaFuseError, ConnectionError):
    """The server of a `RemoteEngine` refuses the API key, breaks the connection, or fails."""


class ServerNotReadyError(ServerError):
    """The server of a `RemoteEngine` is starting, stopping or unreachable; try again later."""


class MissingDependencyError(AdaFuseError, ImportError):
    """A feature needs an optional package; the message names the extra to install."""


def install_command(extras: str) -> str:
    """Return the command that installs extras, such as ``"cli,serve"``.

    The command does not reinstall adafuse-llm. It only adds what the extras need.
    """
    return f'pip install "adafuse-llm[{extras}]"'


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, from any library, means that memory ran out."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)  # the message of torch on a CPU
    )


def as_member_error(name: str, error: BaseException) -> AdaFuseError:
    """Return an error of this package for an error that the member `name` raised while decoding."""
    if isinstance(error, AdaFuseError):
        return error
    reason = f"{type(error).__name__}: {error}"
    wrapped = MemberError(name, reason)
    if is_out_of_memory(error):
        wrapped = MemberOutOfMemoryError(
            name,
            f"out of memory ({reason}). Use a shorter prompt, fewer simultaneous requests, "
            "a smaller dtype or another device",
        )
    wrapped.__cause__ = error
    return wrapped


_SHORT_REPR = reprlib.Repr()  # reads only the beginning of a long value
_SHORT_REPR.maxlevel = 3
_SHORT_REPR.maxlist = _SHORT_REPR.maxtuple = _SHORT_REPR.maxdict = 6
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = 80
MAX_SHOWN = 200
MAX_NAMES = 50
MAX_NAME = 100


def short_repr(value: object) -> str:
    """Return `repr(value)` for an error message, with at most `MAX_SHOWN` characters."""
    text = _SHORT_REPR.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def short_list(names: Iterable[str]) -> str:
    """Join names for an error message. Beyond the first `MAX_NAMES`, only count them."""
    shown = [name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..." for name in names]
    more = f" and {len(shown) - MAX_NAMES} more" if len(shown) > MAX_NAMES else ""
    return (", ".join(shown[:MAX_NAMES]) or "none") + more


def nearest(name: str, allowed: Iterable[str], *, limit: int = 1, similarity: float = 0.6) -> str:
    """Return `` Did you mean 'x'?`` with up to `limit` similar names of `allowed`, or "".

    `similarity`: the lowest similarity that counts, from 0 to 1 (`difflib.get_close_matches`).
    """
    if len(name) > MAX_NAME:
        return ""
    close = difflib.get_close_matches(name, list(allowed), n=limit, cutoff=similarity)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
