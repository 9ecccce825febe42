"""Every error adafuse-llm raises on purpose.

    AdaFuseError
    ├── InvalidInputError(ValueError)         what the caller passed cannot be used
    │   ├── InvalidOptionError                an option is unknown, out of range or unusable here
    │   ├── ContextWindowError                a prompt does not fit a member's context window
    │   └── CacheMemoryError                  a request does not fit the memory for caches
    ├── LoadError(OSError)                    a member cannot be loaded
    │   └── UnsupportedModelError             it loads, but cannot take part in an ensemble
    ├── MemberError(RuntimeError)             a member failed while decoding
    │   └── MemberOutOfMemoryError(MemoryError)
    ├── DecodingError(RuntimeError)           no candidate could be chosen
    ├── MalformedReplyError(ValueError)       a reply is not of the form that was asked for
    ├── EngineClosedError(RuntimeError)       the engine was closed
    └── MissingDependencyError(ImportError)   an optional package is not installed

A message says what is wrong, what is allowed, what was received and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AdaFuseError",
    "CacheMemoryError",
    "ContextWindowError",
    "DecodingError",
    "EngineClosedError",
    "InvalidInputError",
    "InvalidOptionError",
    "LoadError",
    "MalformedReplyError",
    "MemberError",
    "MemberOutOfMemoryError",
    "MissingDependencyError",
    "UnsupportedModelError",
]


class AdaFuseError(Exception):
    """Root of the tree: catch this to catch all of them."""


class InvalidInputError(AdaFuseError, ValueError):
    """What the caller passed cannot be used; nothing has been computed."""


class InvalidOptionError(InvalidInputError):
    """An option is unknown, out of range, or cannot be used here."""


class ContextWindowError(InvalidInputError):
    """A prompt leaves a member no room in its context window."""


class CacheMemoryError(InvalidInputError):
    """A request would hold more key/value cache than a device may, even if it ran alone."""


class LoadError(AdaFuseError, OSError):
    """A member cannot be loaded from the given folder or hub id."""


class UnsupportedModelError(LoadError):
    """A model exists but cannot take part in an ensemble; the message says why."""


class MemberError(AdaFuseError, RuntimeError):
    """A member failed while decoding. The engine stays usable.

    Attributes:
        member: the name of the member that failed.
    """

    def __init__(self, member: str, reason: str) -> None:
        super().__init__(f"member {member!r} failed: {reason}")
        self.member = member
        self.reason = reason

    def __reduce__(self) -> tuple[type[MemberError], tuple[str, str]]:
        return type(self), (self.member, self.reason)


class MemberOutOfMemoryError(MemberError, MemoryError):
    """A member ran out of memory; its request's memory has been freed."""


class DecodingError(AdaFuseError, RuntimeError):
    """No candidate of a round could be scored by any member, or a ranker failed."""


class MalformedReplyError(AdaFuseError, ValueError):
    """No reply was of the form that was asked for, such as JSON that fits a schema."""


class EngineClosedError(AdaFuseError, RuntimeError):
    """The engine was closed and takes no more requests."""


class MissingDependencyError(AdaFuseError, ImportError):
    """An optional package is needed for what was asked; the message names the extra."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, of whatever library, says that there is no memory."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)  # torch on a CPU
    )


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the closest allowed name, or an empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
