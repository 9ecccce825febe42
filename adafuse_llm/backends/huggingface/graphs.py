"""Record a computation once, to repeat it as a whole (CUDA graphs)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

Call = Callable[[], torch.Tensor]
"""A computation whose inputs and buffers are the same tensors every time."""

Record = Callable[[Call], Call]
"""Turns a computation into one that repeats it. Any later call overwrites its result."""


def direct(call: Call) -> Call:
    """Record nothing: call the operations one by one."""
    return call


class CudaGraphs:
    """Records what a computation launches on a GPU, to launch all of it at once.

    Graphs share one pool of memory for what they compute: a result must be read before any of
    them is repeated.

    Args:
        device: the GPU that all of it runs on.
    """

    _recording = threading.Lock()  # one at a time in a process

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Call) -> Call:
        """Run once, so that libraries initialize themselves, then record."""
        with self._recording, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                call()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.stream(current),  # a recording that fails leaves its own stream set
                torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ),
            ):
                result = call()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
