"""What every way to run the server shares: API keys, defaults, and options that it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from adafuse_llm.errors import InvalidInputError

VARIABLE: Final = "ADAFUSE_SERVER_KEYS"
"""Environment variable with API keys, separated by commas."""

KEY: Final = re.compile("[!-~]+")
"""An API key: visible ASCII characters."""

RUNTIME: Final[Mapping[str, Any]] = {"max_waiting": 256}
"""Defaults of `RuntimeConfig` in a server. Clients can try again, so fewer requests wait than
elsewhere."""

REFUSED: Final = {
    "n": "a client asks for the number of responses in its request",
    "continue_final_message": "a client sends the messages in its request",
}
"""Options of `AdaFuseConfig` that a server refuses as defaults, with the reason."""


def read_keys(path: str | None, environment: Mapping[str, str]) -> list[str]:
    """Return the API keys of a file and of the environment.

    A file has one key on each line. Empty lines and lines that begin with ``#`` do not count.

    Raises:
        InvalidInputError: the file cannot be read, it or the variable has no keys, or a key is not
            usable.
    """
    sources = []
    if path is not None:
        lines = [line.strip() for line in _read(path).splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        sources.append((f"API key file {path}", found))
    if (text := environment.get(VARIABLE)) is not None:
        sources.append((VARIABLE, [part.strip() for part in text.split(",") if part.strip()]))
    for source, found in sources:
        if not found:
            raise InvalidInputError(
                f"{source} has no keys. Write at least one, or remove it to serve without keys."
            )
        for number, key in enumerate(found, start=1):
            if not KEY.fullmatch(key):
                raise InvalidInputError(
                    f"{source}: key {number} is not usable. A key has letters, digits and "
                    "punctuation of ASCII, without spaces."
                )
    return [key for _, found in sources for key in found]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidInputError(f"API key file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"API key file {path} is not UTF-8 text") from error
