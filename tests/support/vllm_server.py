"""A real vLLM in a process of its own, from an environment of its own (``make test-vllm``)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

ENVIRONMENT = os.environ.get("ADAFUSE_VLLM", ".venv-vllm")
"""Folder of the environment in which vLLM is installed."""

START_SECONDS = 600
SETTINGS: Mapping[str, str] = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}


@contextmanager
def vllm_server(
    folder: Path, *flags: str, port: int = 0, name: str = "smollm", log: Path | None = None
) -> Iterator[str]:
    """Run a checkpoint in float32, and yield the address of the server when it is ready."""
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    command = [
        *(str(Path(ENVIRONMENT, "bin", "vllm").absolute()), "serve", str(folder)),
        *("--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32"),
        *("--max-model-len", "2048", *flags),
    ]
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with (
        open(log or os.devnull, "wb") as output,  # noqa: PTH123  # os.devnull
        subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env={**inherited, **SETTINGS},
            start_new_session=True,
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"vLLM did not start (exit status {process.poll()})")
