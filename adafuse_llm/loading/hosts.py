"""What members in processes and members in Ray actors share while they load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Generic, TypeVar

from typing_extensions import Self

from adafuse_llm.backends.remote import Channel, Connector, MemberText, RemoteBackend, join_host

AnyChannel = TypeVar("AnyChannel", bound=Channel)


class HostLoading(ABC, Generic[AnyChannel]):
    """Members that load side by side in their hosts.

    It is a context manager that ends the hosts if the block fails.

    Args:
        names: the members' names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._connectors: list[Connector] = []
        self._channels: list[AnyChannel] = []

    @abstractmethod
    def _start(self) -> None:
        """Start all hosts, and add their connectors and channels."""

    @abstractmethod
    def _texts(self) -> list[MemberText]:
        """Return the text sides of the members, in order."""

    def members(self) -> list[RemoteBackend]:
        """Wait until all members are loaded, and return them in order.

        Raises:
            LoadError: a member cannot be loaded.
        """
        texts = self._texts()  # while the hosts load the weights
        return [
            join_host(name, text, connector, channel)
            for name, text, connector, channel in zip(
                self._names, texts, self._connectors, self._channels, strict=True
            )
        ]

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

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
