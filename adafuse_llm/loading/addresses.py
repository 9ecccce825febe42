"""Addresses of members on inference servers."""

from __future__ import annotations

from typing import Literal, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from adafuse_llm.errors import InvalidOptionError, short_repr

Api = Literal["vllm", "sglang", "llama-server"]
"""Kinds of servers."""

IN_QUERY = ("tokenizer", "api_key_env")
"""Settings that an address can have as query parameters."""


def read_address(text: object) -> dict[str, str]:
    """Return the settings in an address such as ``vllm+http://host:8000/v1/model?tokenizer=folder``.

    ``/v1`` separates the server from the model, and can be left out if the server is only a host.
    The ``url`` of the result ends with it.

    Raises:
        InvalidOptionError: it is not such an address. The message does not show a password.
    """
    scheme, _, rest = text.partition("://") if isinstance(text, str) else ("", "", "")
    api, plus, protocol = scheme.rpartition("+")
    try:
        parts = urlsplit(f"{protocol}://{rest}")
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if "@" in rest.partition("/")[0]:
        raise InvalidOptionError(
            "the address of a server must not have a name or password. Put the key into an "
            "environment variable, and pass its name: api_key_env"
        )
    is_plain = rest.isascii() and rest.isprintable() and " " not in rest
    known = protocol in ("http", "https") and (api in get_args(Api) or not plus)
    if not (is_address and is_plain and known) or parts.fragment:
        raise InvalidOptionError(
            "url must be the address of a server, such as 'http://127.0.0.1:8000' or "
            f"'vllm+http://127.0.0.1:8000/NAME'; got {short_repr(text)}"
        )
    base, separator, model = f"{parts.path.rstrip('/')}/".partition("/v1/")
    if not separator:
        base, model = "", parts.path
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := settings.keys() - set(IN_QUERY):
        raise InvalidOptionError(
            f"the address of a server has no setting {short_repr(min(unknown))}; its settings are: "
            f"{', '.join(IN_QUERY)}"
        )
    settings |= {"url": f"{protocol}://{parts.netloc}{base}/v1"}
    settings |= {"model": unquote(model.strip("/")), "api": api}
    return {name: value for name, value in settings.items() if value}
