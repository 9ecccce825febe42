"""The ASGI application."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adafuse_llm.errors import AdaFuseError
from adafuse_llm.serving.access import middlewares
from adafuse_llm.serving.errors import ApiError, api_error
from adafuse_llm.serving.http import error_response
from adafuse_llm.serving.openai_routes import routes
from adafuse_llm.serving.page import page_route
from adafuse_llm.serving.service import Service

CLIENT_CLOSED = 499
"""Status code for the log if the client left before the response. Nobody receives it."""


def build_app(service: Service, api_keys: Sequence[str] = ()) -> Starlette:
    """Return the application of a service, whose engine may come later.

    Args:
        service: the service.
        api_keys: keys of which every request needs one. Empty: no request needs a key.
    """
    work = routes(service)
    counted = {route.path for route in work if "POST" in (route.methods or ())}

    def count(path: str, outcome: str, seconds: float) -> None:
        if path in counted:
            service.metrics.request(path, outcome, seconds)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        if service.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, 503)

    async def metrics(_: Request) -> Response:
        body, kind = service.metrics.exposition()
        return Response(body, media_type=kind)

    app = Starlette(
        middleware=middlewares(service.config, api_keys, count=count),
        routes=[
            Route("/health", health, methods=["GET"]),
            Route("/ready", ready, methods=["GET"]),
            *work,
            Route("/metrics", metrics),
            *([page_route()] if service.config.page else []),
        ],
        exception_handlers=dict.fromkeys(
            (ApiError, AdaFuseError, HTTPException, ClientDisconnect),
            partial(_failed, [route.path for route in work]),
        ),
    )
    app.state.service = service
    return app


async def _failed(paths: Sequence[str], request: Request, error: Exception) -> Response:
    """Return the response for an error; also for an address or a method that does not exist."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED)
    if not isinstance(error, HTTPException):
        return error_response(api_error(error))
    path, code = request.url.path[:200], "not_found"
    message = (
        f"there is no address {path!r} here. The server has {', '.join(paths)}. OpenAI's clients "
        "need a base address that ends in /v1. If a proxy adds a path, set -o root_path=/PATH."
    )
    if error.status_code == 405:
        message, code = f"{path} does not take the method {request.method}", "method_not_allowed"
    return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))
