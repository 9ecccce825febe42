"""Record a computation once and repeat it as a whole (CUDA graphs)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

Call = Callable[[], torch.Tensor]
"""A computation that uses the same input tensors and buffers in every call."""

Record = Callable[[Call], Call]
"""A function that records a computation and returns a function that repeats it. A result is valid
until the next call of any recorded computation."""


def direct(call: Call) -> Call:
    """Return `call` without recording it. Its operations run one by one."""
    return call


class CudaGraphs:
    """A recorder of the kernels that a computation launches on a GPU.

    All graphs of one recorder share one memory pool for their results. So read a result before you
    run any of these graphs again.

    Args:
        device: the GPU that runs the computations.
    """

    _recording = threading.Lock()  # a process can make only one recording at a time

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Call) -> Call:
        """Run `call` once, so that libraries initialize themselves, and then record it."""
        with self._recording, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                call()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.stream(current),  # restores the stream after a failure
                torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ),
            ):
                result = call()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
