"""Servers for tests, on the loopback interface."""

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import uvicorn
from openai import OpenAI
from starlette.types import ASGIApp

from adafuse_llm import AdaFuseEngine
from adafuse_llm.serving import ServingConfig, create_app

CALCULATE: dict[str, Any] = {
    "name": "calculate",
    "description": "Compute a number.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
}
"""A function of OpenAI's API."""

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "31 * 44"}}\n</tool_call>'
"""A call of it, as members write it."""

COMMAND = "from adafuse_llm.cli import main; main()"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
START_SECONDS = 120


@contextmanager
def served(app: ASGIApp, port: int = 0) -> Iterator[str]:
    """Serve an application from a thread; yield its address, such as ``http://127.0.0.1:8000``."""
    listener = socket.create_server(("127.0.0.1", port))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does not, here
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        app,
        loop="asyncio",  # the event loop and the protocol of `adafuse serve`
        http="h11",
        log_level="warning",
        lifespan="on",
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@contextmanager
def openai_client(engine: AdaFuseEngine, **config: Any) -> Iterator[OpenAI]:
    """Serve an engine; yield OpenAI's client for it. It never tries again."""
    with (
        served(create_app(engine, ServingConfig(**config))) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@contextmanager
def server_process(*flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run ``adafuse serve`` on a free port; yield its address and its process when it is ready."""
    command = [sys.executable, "-c", COMMAND, "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield _address(process), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.communicate(timeout=60)


def _address(process: subprocess.Popen[str]) -> str:
    """Wait until the server is ready, and return its address."""
    assert process.stderr is not None, "the pipe is open"
    seen = []
    for line in process.stderr:
        seen.append(line)
        if (found := ADDRESS.search(line)) is not None:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            end = time.monotonic() + START_SECONDS
            while httpx.get(f"{found[0]}/ready").status_code != 200:
                assert time.monotonic() < end, "the server was not ready in time"
                time.sleep(0.05)
            return found[0]
    raise RuntimeError(f"the server ended: {''.join(seen)}")
