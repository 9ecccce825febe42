"""Errors for addresses and methods that the server does not have."""

from __future__ import annotations

import re

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from adafuse_llm.errors import nearest
from adafuse_llm.serving.errors import ApiError
from adafuse_llm.serving.http import error_response

NOT_SUPPORTED = {
    "embeddings": "embeddings are not supported: the members write text",
    "responses": "stored responses are not supported: the server stores nothing. Create a response "
    "with POST /v1/responses, and send the whole conversation in 'input'",
    "conversations": "stored conversations are not supported: the server stores nothing",
    "rerank": "ranking is not supported; RemoteEngine has the method score",
    "score": "this form of scoring is not supported; RemoteEngine has the method score",
    "messages": "the API of Anthropic is not supported",
    **dict.fromkeys(
        ("assistants", "threads", "vector_stores"),
        "assistants, threads and stores are not supported: the server stores nothing",
    ),
    **dict.fromkeys(
        (
            *("audio", "batches", "containers", "evals", "files", "fine_tuning", "images"),
            *("moderations", "realtime", "uploads", "videos"),
        ),
        "this part of OpenAI's API is not supported: the server completes text",
    ),
    "api": "the API of Ollama is not supported: use the API of OpenAI",
}
"""What to say about addresses of other servers, by the first part of the path after ``/v1``."""

_PREFIX = re.compile(r"^(?:/v\d+)*/")


async def unknown(request: Request, error: Exception) -> Response:
    """Return the response for an error of the routing: what is wrong, and what the server has."""
    assert isinstance(error, HTTPException), "the application registers it for these"
    path, message, code = request.url.path, error.detail, "not_found"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        message = _not_found(path, _addresses(request))
    elif error.status_code == 405:
        code = "method_not_allowed"
        allowed = headers["Allow"] = ", ".join(sorted(headers.get("Allow", "").split(", ")))
        message = f"{path[:200]} does not take the method {request.method}; allowed: {allowed}"
    return error_response(ApiError(error.status_code, message, code=code, headers=headers))


def _not_found(path: str, addresses: list[str]) -> str:
    has = f"The server has {', '.join(addresses)}."
    rest = _PREFIX.sub("", path)
    if f"/v1/{rest}" in addresses and path != f"/v1/{rest}":
        return (
            f"there is no address {path[:200]!r} here; it is '/v1/{rest}'. OpenAI's clients need a "
            "base address that ends in /v1."
        )
    reason = NOT_SUPPORTED.get(rest.partition("/")[0])
    if reason is not None:
        return f"there is no address {path[:200]!r} here: {reason}. {has}"
    return f"there is no address {path[:200]!r} here.{nearest(path, addresses)} {has}"


def _addresses(request: Request) -> list[str]:
    """Return the addresses that clients use, without that of the page."""
    paths = (route.path for route in request.app.routes if isinstance(route, Route))
    return list(dict.fromkeys(path for path in paths if path != "/" and "{" not in path))
