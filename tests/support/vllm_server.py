"""A real vLLM in a process of its own, from an environment of its own (``make test-vllm``)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.serving import free_port, wait_until_healthy

ENVIRONMENT = os.environ.get("ADAFUSE_VLLM", ".venv-vllm")
"""Folder of the environment in which vLLM is installed."""

START_SECONDS = 3600
SETTINGS: Mapping[str, str] = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # threads that wait for each other are slow on a busy machine
}


@contextmanager
def vllm_server(folder: Path, *flags: str, port: int = 0) -> Iterator[str]:
    """Run a checkpoint in float32, and yield the address of the server when it is ready."""
    port = port or free_port()
    command = [
        *(str(Path(ENVIRONMENT, "bin", "vllm").absolute()), "serve", str(folder)),
        *("--served-model-name", "smollm", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32"),
        *("--max-model-len", "2048", *flags),
    ]
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**inherited, **SETTINGS},
        start_new_session=True,
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, process, START_SECONDS)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own
