"""Options of the server, and its API keys. Once created, options are valid and never change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from adafuse_llm.config import Options, one_or_many
from adafuse_llm.errors import InvalidInputError

VARIABLE: Final = "ADAFUSE_SERVER_KEYS"
"""Environment variable with API keys, separated by commas."""

KEY: Final = re.compile("[!-~]+")
"""An API key: visible ASCII characters."""

RUNTIME: Final[Mapping[str, Any]] = {"max_waiting": 256}
"""Defaults of `RuntimeConfig` in a server. The queue is shorter than elsewhere, because clients can
try again."""

REFUSED: Final = {
    "n": "a client asks for the number of responses in its request",
    "continue_final_message": "a client sends the messages in its request",
}
"""Options of `AdaFuseConfig` that a server refuses as defaults, with the reasons."""


def _fit(pattern: str, message: str, texts: tuple[str, ...]) -> tuple[str, ...]:
    if not all(re.fullmatch(pattern, text, re.IGNORECASE) for text in texts):
        raise ValueError(message)
    return texts


def _root_path(text: str) -> str:
    """Return the path with a slash at its beginning only, or "" for no path."""
    path = text.strip("/")
    if not re.fullmatch(r"([\w.~-]+(/[\w.~-]+)*)?", path):
        raise ValueError("it must be a path without host, such as /llm")
    return path and f"/{path}"


Names = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]
_hosts = partial(
    _fit,
    r"\*|(\*\.)?[\w-]+(\.[\w-]+)*\.?|\[?[\da-f:.]*:[\da-f:.]*\]?",
    "each host must be a name or an address without scheme and port, such as llm.example.org "
    "or *.example.org",
)
_origins = partial(
    _fit,
    r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+",
    "each origin must have a scheme and a host, and no path, such as https://app.example.org",
)


class ServingConfig(Options):
    """Options of the server: names, limits, and who may use it."""

    served_model_name: str = Field(default="adafuse", min_length=1)
    """Name of the ensemble in requests. They can name a member instead."""
    allowed_hosts: Annotated[Names, AfterValidator(_hosts)] = ()
    """Names under which clients may reach the server, without ports, such as llm.example.org or
    *.example.org. `adafuse serve` at a loopback address, such as its default 127.0.0.1, also allows
    localhost, 127.0.0.1 and [::1]. Default elsewhere: any name."""
    root_path: Annotated[str, AfterValidator(_root_path)] = ""
    """Path under which a proxy offers the server, such as /adafuse, if the proxy does not remove it
    from the paths of requests. Default: none."""
    cors_origins: Annotated[Names, AfterValidator(_origins)] = ()
    """Origins whose pages may use the server from a browser, such as https://app.example.org.
    Default: none but the server's own page."""
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Maximum bytes of the body of a request."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Highest `max_tokens` that a request may have or gets by default. Default: no limit."""
    max_choices: int = Field(default=128, ge=1)
    """Maximum number of responses to one request: number of prompts times `n`."""
    request_timeout: Annotated[float | None, AfterValidator(lambda it: it or None)] = Field(
        default=600.0, ge=0, le=86_400
    )
    """Maximum seconds that a request takes, waiting included. 0: no limit."""
    drain_seconds: float = Field(default=5.0, ge=0, le=86_400)
    """Seconds that running requests may take after the signal to stop. Then they end with the text
    so far."""
    page: bool = True
    """Whether there is a page at /."""


class ServerConfig(ServingConfig):
    """Options of `adafuse serve`: those of the server, and where it listens."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Name or address of the interface to listen at. 0.0.0.0 stands for all interfaces with IPv4,
    and :: for all interfaces."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen at. 0: any free port."""
    api_key_file: str | None = Field(default=None, min_length=1)
    """Text file with the API keys, one per line. Clients need one of them. The variable
    ADAFUSE_SERVER_KEYS can also hold keys, separated by commas."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log messages. With info, every request has a line."""


def read_keys(path: str | None, environment: Mapping[str, str]) -> list[str]:
    """Return the API keys of a file, one per line (``#`` begins a comment line), and of `VARIABLE`.

    Raises:
        OSError: the file cannot be read.
        InvalidInputError: the file or the variable has no keys.
    """
    sources = {}
    if path is not None:
        sources[path] = Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines()
    if VARIABLE in environment:
        sources[VARIABLE] = environment[VARIABLE].split(",")
    keys: list[str] = []
    for source, lines in sources.items():
        usable = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
        if not usable:
            raise InvalidInputError(
                f"{source} has no keys. Write at least one, or remove it to serve without keys."
            )
        keys += usable
    return keys
