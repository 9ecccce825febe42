"""Load members in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from typing_extensions import Self

from adafuse_llm.backends.base import Backend
from adafuse_llm.backends.remote import Channel, HostDied, MemberText, RemoteBackend, join_host
from adafuse_llm.backends.remote.processes import ProcessConnector
from adafuse_llm.errors import LoadError
from adafuse_llm.loading.collection import pause_collection, resume_collection


@dataclass(frozen=True)
class ProcessPlan:
    """A member to load in a process.

    Attributes:
        name: the member's name.
        make: loads the member in the process. It must support pickle.
        text: loads the member's text side in this process.
        threads: number of CPU threads of torch; None for as many as torch would use, but not more
            than `share`.
        share: the member's share of the CPU's cores.
    """

    name: str
    make: Callable[[], Backend]
    text: Callable[[], MemberText]
    threads: int | None
    share: int


class ProcessLoading:
    """Members that load side by side in their processes.

    It is a context manager that ends the processes if the block fails.

    Args:
        plans: the members.
    """

    def __init__(self, plans: Sequence[ProcessPlan]) -> None:
        self._plans = plans
        bars = bool(plans) and _progress_bars()
        self._connectors = [
            ProcessConnector(plan.name, _make, plan.make, plan.threads, plan.share, bars)
            for plan in plans
        ]
        self._channels: list[Channel] = []
        self._members: list[RemoteBackend] = []

    def __enter__(self) -> Self:
        try:
            for connector in self._connectors:
                connector.start()
            for plan, connector in zip(self._plans, self._connectors, strict=True):
                self._channels.append(_connected(plan.name, connector))
        except BaseException:
            self._end()
            raise
        return self

    def members(self) -> list[RemoteBackend]:
        """Wait until all members are loaded, and return them in order.

        Raises:
            LoadError: a member cannot be loaded.
        """
        texts = [plan.text() for plan in self._plans]  # while the processes load the weights
        for plan, text, connector, channel in zip(
            self._plans, texts, self._connectors, self._channels, strict=True
        ):
            self._members.append(join_host(plan.name, text, connector, channel))
        return self._members

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._end()

    def _end(self) -> None:
        for connector in self._connectors:
            connector.close()
        for channel in self._channels:
            channel.close()


def share_of_threads(lanes: int) -> int:
    """Return the number of CPU threads for each of `lanes` members that run at the same time."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores // max(1, lanes))


def _connected(name: str, connector: ProcessConnector) -> Channel:
    try:
        return connector()
    except HostDied as error:
        raise LoadError(f"member {name!r} cannot be loaded: {error.reason}") from error


def _progress_bars() -> bool:
    from transformers.utils import logging

    return bool(logging.is_progress_bar_enabled())


def _make(
    make: Callable[[], Backend], threads: int | None, share: int, progress_bars: bool
) -> Backend:
    """Load a member. This function runs in the member's process.

    Args:
        make: loads the member.
        threads: number of threads for torch; None for the share.
        share: number of threads if torch would not use fewer.
        progress_bars: whether to show progress while the weights are loaded.
    """
    pause_collection()
    import torch
    from transformers.utils import logging

    if not progress_bars:
        logging.disable_progress_bar()
    torch.set_num_threads(threads or min(share, torch.get_num_threads()))
    backend = make()
    resume_collection()
    return backend
