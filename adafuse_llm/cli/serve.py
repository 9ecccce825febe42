"""`adafuse serve`: serve the ensemble to applications, in the form of OpenAI's API."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from ipaddress import ip_address
from typing import Any

import typer

from adafuse_llm import AdaFuseEngine, MissingDependencyError
from adafuse_llm.cli.common import Setup
from adafuse_llm.errors import install_command
from adafuse_llm.serving import settings
from adafuse_llm.serving_config import ServerConfig

REFUSED = settings.REFUSED
"""Options that this command refuses, with the reason."""

FLAGS = (
    *("host", "port", "api_key_file", "served_model_name"),
    *("max_requests", "strict", "log_level"),
)
"""Options of the server and the engine that have a flag."""

DEFAULTS: dict[str, Any] = {**settings.RUNTIME}
"""Default options that differ from those of other commands."""

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine for programs that run on it."""

OPEN = (
    "warning: everyone who can reach this address can use the server. Set API keys "
    f"(--api-key-file or {settings.VARIABLE}), or listen at 127.0.0.1"
)
"""What the command prints if other machines can use the server without a key."""


NOT_ENFORCED = (
    "warning: tools and JSON are described to the members, but not enforced. This needs the extra "
    "grammar ({command}), and members and a strategy that support it"
)
"""What the command prints if responses cannot be made to fit a schema."""


def serve(setup: Setup) -> int:
    """Serve the ensemble to applications, in the form of OpenAI's API.

    The flags for decoding are the defaults of requests. The server listens at once, and answers
    requests when the members are loaded. Ctrl-C or the signal SIGTERM stops it: running requests
    may take drain_seconds more, and then end with the text so far. A second Ctrl-C stops it
    immediately.
    """
    try:
        from adafuse_llm.serving.app import build_app
        from adafuse_llm.serving.server import listen, run, url_of
        from adafuse_llm.serving.service import Service
    except ImportError as error:
        raise MissingDependencyError(
            f"adafuse serve needs {error.name}: {install_command('cli,serve')}"
        ) from error

    config = _with_local_hosts(setup.serving)
    keys = settings.read_keys(config.api_key_file, os.environ)
    service = Service(config)
    app = build_app(service, keys)
    listener = listen(config.host, config.port)
    url = url_of(config.host, listener)
    with closing(listener), _logging(config.log_level) as logger, ExitStack() as stack:
        if not keys and not _is_loopback(config.host):
            typer.echo(OPEN, err=True)
        logger.info("listening at %s; the members are loading", url)

        def load() -> AdaFuseEngine:
            stack.enter_context(setup.quiet())
            return setup.load()

        def announce(engine: AdaFuseEngine) -> None:
            page = "page /, " if config.page else ""
            typer.echo(
                f"adafuse serves {', '.join(engine.members)} at {url} ({page}API /v1, metrics "
                "/metrics)"
            )
            if not engine.can_enforce:
                typer.echo(NOT_ENFORCED.format(command=install_command("grammar")), err=True)

        return run(app, service, listener, load, config=config, on_ready=announce)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_local_hosts(config: ServerConfig) -> ServerConfig:
    """Return the options with the names of this machine as allowed hosts.

    This applies if only this machine can reach the server. Otherwise, a page of another site could
    use it from a browser on this machine, under a name of its own that stands for 127.0.0.1.
    """
    if not _is_loopback(config.host):
        return config
    hosts = dict.fromkeys((*config.allowed_hosts, *LOOPBACK, config.host))
    return config.model_copy(update={"allowed_hosts": tuple(hosts)})


@contextmanager
def _logging(level: str) -> Iterator[logging.Logger]:
    """Send the log of this package to stderr, and the server's if it is important."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    levels = {"adafuse_llm": level.upper(), "uvicorn": "DEBUG" if level == "debug" else "WARNING"}
    loggers = [logging.getLogger(name) for name in levels]
    before = [(each.level, each.propagate) for each in loggers]
    for each in loggers:
        each.setLevel(levels[each.name])
        each.addHandler(handler)
        each.propagate = False
    try:
        yield logging.getLogger(__name__)
    finally:
        for each, (old, propagates) in zip(loggers, before, strict=True):
            each.removeHandler(handler)
            each.setLevel(old)
            each.propagate = propagates
