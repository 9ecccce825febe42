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
    sources = {}
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise InvalidInputError(f"API key file {path}: {reason}") from error
        sources[f"API key file {path}"] = [
            each for each in lines if not each.lstrip().startswith("#")
        ]
    if VARIABLE in environment:
        sources[VARIABLE] = environment[VARIABLE].split(",")
    keys: list[str] = []
    for source, given in sources.items():
        found = [each.strip() for each in given if each.strip()]
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
        keys += found
    return keys
