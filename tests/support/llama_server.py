"""A real llama-server in a process of its own. It is that in the package xllamacpp."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.serving import free_port, wait_until_healthy

START_SECONDS = 120


@contextmanager
def llama_server(file: Path, *, port: int = 0) -> Iterator[str]:
    """Run a GGUF file with 4 slots of 2,048 tokens, and yield the address of the server."""
    port = port or free_port()
    command = [sys.executable, "-m", "tests.support.llama_server", str(file), str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, process, START_SECONDS)
            yield url
        finally:
            process.kill()


def main() -> None:
    import xllamacpp

    file, port = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.n_ctx, params.n_parallel = 8192, 4
    params.n_ubatch = 32  # numbers do not depend on what is computed together: see the guide
    params.no_extra_bufts = True  # llama.cpp crashes with them on some processors
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    assert server.listening_address
    time.sleep(3600)


if __name__ == "__main__":
    main()
