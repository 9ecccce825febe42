"""Real inference servers in processes of their own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

VLLM = os.environ.get("ADAFUSE_VLLM", ".venv-vllm")
"""Folder of the environment in which vLLM is installed (``make test-vllm``)."""

VLLM_SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # threads that wait for each other are slow on a busy machine
}


@contextmanager
def llama_server(file: Path, *, port: int = 0, slots: int = 0) -> Iterator[str]:
    """Run a GGUF file with one thread, and yield the address of the server.

    It is the llama-server in the package xllamacpp.

    Args:
        file: the model.
        port: the port; 0 for a free one.
        slots: number of requests at once, each of up to 2,048 tokens. With 0, there are 4, and
            numbers do not depend on what is computed together.
    """
    command = [sys.executable, "-m", "tests.real.servers", str(file), "--slots", str(slots)]
    with running(command, port or free_port(), 120) as url:
        yield url


@contextmanager
def vllm_server(folder: Path, *flags: str, port: int = 0) -> Iterator[str]:
    """Run a checkpoint in float32, and yield the address of the server when it is ready."""
    port = port or free_port()
    command = [
        *(str(Path(VLLM, "bin", "vllm").absolute()), "serve", str(folder)),
        *("--served-model-name", "smollm", "--host", "127.0.0.1"),
        *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32"),
        *("--max-model-len", "2048", *flags),
    ]
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with running(command, port, 3600, {**inherited, **VLLM_SETTINGS}) as url:
        yield url


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def running(
    command: Sequence[str], port: int, seconds: float, env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a server, wait until it is ready, and kill it with its children at the end."""
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=env,
        start_new_session=True,
    ) as process:
        try:
            end = time.monotonic() + seconds
            while not is_healthy(url):
                if time.monotonic() > end or process.poll() is not None:
                    raise RuntimeError(f"the server did not start (status {process.poll()})")
                time.sleep(0.2)
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    """Run a llama-server: ``FILE --slots SLOTS --port PORT``."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    slots = int(sys.argv[3])
    params.hostnames, params.port = ["127.0.0.1"], int(sys.argv[5])
    params.n_parallel = slots or 4
    params.n_ctx = 2048 * params.n_parallel
    if not slots:
        params.n_ubatch = 32  # numbers do not depend on what is computed together: see the guide
    params.no_extra_bufts = True  # llama.cpp crashes with them on some processors
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    assert server.listening_address
    time.sleep(3600)


if __name__ == "__main__":
    main()
