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
    advice = nearest(path, addresses)
    if (right := re.sub(r"^(/v\d+)*", "/v1", path)) in addresses:
        advice = f" It is {right!r}: OpenAI's clients need a base address that ends in /v1."
    elif prefix := next((path.removesuffix(a) for a in addresses if path.endswith(a)), ""):
        advice = f" If a proxy adds {prefix[:100]!r} to addresses, set -o root_path={prefix[:100]}."
    has = f"The server has {', '.join(addresses)}."
    return f"there is no address {path[:200]!r} here.{advice} {has}"


def _addresses(request: Request) -> list[str]:
    """Return the addresses that clients use, without that of the page."""
    paths = (route.path for route in request.app.routes if isinstance(route, Route))
    return list(dict.fromkeys(path for path in paths if path != "/" and "{" not in path))
