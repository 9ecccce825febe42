"""A server with OpenAI's protocol: one ensemble for many applications.

`create_app` returns an ASGI application, which ``adafuse serve`` runs. This function needs the
extra ``serve``; importing this package does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adafuse_llm.errors import MissingDependencyError, install_command
from adafuse_llm.serving_config import ServingConfig

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from adafuse_llm.engine import AdaFuseEngine

__all__ = ["ServingConfig", "create_app"]


def create_app(
    engine: AdaFuseEngine, config: ServingConfig | None = None, *, api_keys: Sequence[str] = ()
) -> Starlette:
    """Return an ASGI application that serves an engine. The caller closes the engine.

    With `api_keys`, requests need one of them, except those to ``/``, ``/health`` and ``/ready``.

    Raises:
        InvalidOptionError: a member has the name of the ensemble, or a key cannot be used.
        MissingDependencyError: the extra ``serve`` is not installed.
    """
    try:
        from adafuse_llm.serving.app import build_app
        from adafuse_llm.serving.service import Service
    except ImportError as error:
        raise MissingDependencyError(
            f"the server needs {error.name}: {install_command('serve')}"
        ) from error
    service = Service(config or ServingConfig())
    service.open(engine)
    return build_app(service, api_keys)
