"""`adafuse serve`: serve the ensemble to applications, in the form of OpenAI's API."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from contextlib import closing
from ipaddress import ip_address

from adafuse_llm import AdaFuseEngine, AdaFuseError, MissingDependencyError
from adafuse_llm.cli.common import OPTIONS, Command, Parser, Setup
from adafuse_llm.cli.terminal import tell
from adafuse_llm.errors import install_command
from adafuse_llm.serving_config import REFUSED, RUNTIME, VARIABLE, ServerConfig, read_keys

logger = logging.getLogger(__name__)

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Host names by which a machine reaches itself."""


def add_flags(parser: Parser) -> None:
    """Add the flags of this command."""
    parser.flag("--host NAME")
    parser.flag("--port NUMBER")
    parser.flag("--api-key-file FILE", type=str)
    parser.flag("--served-model-name NAME")
    parser.flag("--max-requests NUMBER")
    parser.flag("--log-level LEVEL", "Lowest level of log messages: debug, info, warning, error.")


def serve(setup: Setup, _flags: Namespace) -> int:
    """Serve the ensemble to applications, in the form of OpenAI's API.

    The flags for decoding set defaults for requests. The server listens at once, and answers
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

    config = setup.file.serving
    if is_local := _is_loopback(config.host):
        # refuse other names: a web site could make its own name stand for 127.0.0.1, and so use
        # the server through a browser on this machine
        hosts = dict.fromkeys((*config.allowed_hosts, *LOOPBACK, config.host))
        config = config.model_copy(update={"allowed_hosts": tuple(hosts)})
    keys = read_keys(config.api_key_file, os.environ)
    service = Service(config)
    app = build_app(service, keys)
    listener = listen(config.host, config.port)
    url = url_of(config.host, listener)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("adafuse_llm").setLevel(config.log_level.upper())
    logging.getLogger("uvicorn").setLevel("DEBUG" if config.log_level == "debug" else "WARNING")
    with closing(listener):
        if not keys and not is_local:
            tell(
                "warning: everyone who can reach this address can use the server. Set API keys "
                f"(--api-key-file or {VARIABLE}), or listen at 127.0.0.1"
            )
        logger.info("listening at %s; the members are loading", url)

        def announce(engine: AdaFuseEngine) -> None:
            root = config.root_path
            page = f"page {root}/, " if config.page else ""
            print(  # noqa: T201
                f"adafuse serves {', '.join(engine.members)} at {url} "
                f"({page}API {root}/v1, metrics {root}/metrics)",
                flush=True,
            )
            if not engine.can_enforce:
                try:
                    engine.check_grammar(regex="a")
                except AdaFuseError as problem:
                    only = "tools and JSON are only described to the members, not enforced"
                    tell(f"warning: {only}: {problem}")

        return run(app, service, listener, setup.load, config=config, on_ready=announce)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


COMMAND = Command(
    serve, add_flags, kinds=(*OPTIONS, ServerConfig), refused=REFUSED, defaults=RUNTIME
)
