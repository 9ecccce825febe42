"""Load members in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adafuse_llm.backends.base import Backend
from adafuse_llm.backends.remote import Channel, HostDied, MemberText
from adafuse_llm.backends.remote.processes import ProcessConnector
from adafuse_llm.errors import LoadError
from adafuse_llm.loading.collection import pause_collection, resume_collection
from adafuse_llm.loading.hosts import HostLoading


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
        advice: as for `ProcessConnector`.
    """

    name: str
    make: Callable[[], Backend]
    text: Callable[[], MemberText]
    threads: int | None
    share: int
    advice: str


class ProcessLoading(HostLoading[Channel]):
    """Members that load side by side in their processes.

    Args:
        plans: the members.
    """

    def __init__(self, plans: Sequence[ProcessPlan]) -> None:
        super().__init__([plan.name for plan in plans])
        self._plans = plans

    def _start(self) -> None:
        bars = bool(self._plans) and _progress_bars()
        started = [
            ProcessConnector(
                *(plan.name, _make, plan.make, plan.threads, plan.share, bars), advice=plan.advice
            )
            for plan in self._plans
        ]
        self._connectors.extend(started)
        for connector in started:
            connector.start()
        for name, connector in zip(self._names, started, strict=True):
            self._channels.append(_connected(name, connector))

    def _texts(self) -> list[MemberText]:
        return [plan.text() for plan in self._plans]


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
