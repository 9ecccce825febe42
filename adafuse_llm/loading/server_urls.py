"""Addresses of members on inference servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from adafuse_llm.errors import InvalidOptionError, nearest, short_list, short_repr

APIS = ("vllm", "sglang", "llama-server")
"""Names of the APIs of servers."""

IN_QUERY = ("tokenizer", "api_key_env")
"""Settings that an address can have as query parameters."""

END = "/v1"
"""End of the addresses that clients of OpenAI's API take."""

MAX_URL = 2048
"""Maximum length of an address."""


@dataclass(frozen=True)
class ServerAddress:
    """The address of a member on a server.

    Attributes:
        url: address of the server, without ``/v1``.
        model: name of the model on the server; None for the only one.
        api: one of `APIS`; None to detect it.
        options: settings in the query of the address, by the names in `IN_QUERY`.
    """

    url: str
    model: str | None
    api: str | None
    options: Mapping[str, str]

    @property
    def path(self) -> str:
        """The address in the form that `parse_address` reads, without a query."""
        api = "" if self.api is None else f"{self.api}+"
        model = "" if self.model is None else f"/{self.model}"
        return (
            f"{api}{self.url}{END}{model}"
            if "/" in _after_host(self.url)
            else (f"{api}{self.url}{model}")
        )


def is_address(text: str) -> bool:
    """Return whether a text is the address of a server, not a path or a hub id."""
    return "://" in text


def parse_address(text: str) -> ServerAddress:
    """Read an address such as ``vllm+http://host:8000/model?tokenizer=folder``.

    If the server's own address has a path, ``/v1`` separates it from the model.

    Raises:
        InvalidOptionError: it is not such an address.
    """
    scheme, _, rest = text.partition("://")
    api, plus, protocol = scheme.rpartition("+")
    if plus and api not in APIS:
        raise InvalidOptionError(
            f"the address of a server begins with one of {', '.join(f'{a}+http://' for a in APIS)} "
            f"or http://; got {short_repr(text)}.{nearest(api, APIS)}"
        )
    location, _, query = rest.partition("?")
    base, found, model = location.partition(f"{END}/")
    if not found and not location.endswith(END):
        base, _, model = location.partition("/")
    return ServerAddress(
        check_url(f"{protocol}://{base}"), unquote(model) or None, api or None, _options(query)
    )


def check_url(url: str) -> str:
    """Return the address of a server, without ``/v1`` and slashes at its end.

    Raises:
        InvalidOptionError: it cannot be used. The message does not show it if it has a password.
    """
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        parts, has_port = urlsplit(""), False
    if "@" in url:
        raise InvalidOptionError(
            "the address of a server must not have a name or password. Put the key into an "
            "environment variable, and pass its name: api_key_env"
        )
    is_plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not has_port
        or not is_plain
        or parts.query
        or parts.fragment
    ):
        raise InvalidOptionError(
            "url must be the address of a server, such as 'http://127.0.0.1:8000'; got "
            f"{short_repr(url)}"
        )
    return url.rstrip("/").removesuffix(END).rstrip("/")


def _options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in IN_QUERY:
            raise InvalidOptionError(
                f"the address of a server has no setting {short_repr(name)}; its settings are: "
                f"{short_list(IN_QUERY)}"
            )
    return options


def _after_host(url: str) -> str:
    return url.partition("://")[2]
