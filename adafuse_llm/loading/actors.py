"""Load members in Ray actors. Only this module and those that it imports need Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import ray
from typing_extensions import Self

from adafuse_llm.backends.remote import HostDied, RemoteBackend, join_host
from adafuse_llm.backends.remote.actors import ActorChannel, ActorConnector, Placement, connect
from adafuse_llm.errors import InvalidOptionError, LoadError
from adafuse_llm.loading.on_node import NodeMember, task_of
from adafuse_llm.loading.ray_options import RayOptions
from adafuse_llm.loading.sent_text import received_text
from adafuse_llm.loading.specs import MemberSpec


class ActorLoading:
    """Members that load side by side in their actors.

    It is a context manager that ends the actors if the block fails.

    Args:
        specs: the members. Each one has `MemberSpec.ray`.
        names: the members' names.
        defaults: as for `plan_members`.
    """

    def __init__(
        self, specs: Sequence[MemberSpec], names: Sequence[str], defaults: Mapping[str, Any]
    ) -> None:
        self._specs = specs
        self._names = names
        self._defaults = defaults
        self._options = [RayOptions(**(spec.ray or {})) for spec in specs]
        self._connectors: list[ActorConnector] = []
        self._channels: list[ActorChannel] = []
        self._placement: Placement | None = None

    def __enter__(self) -> Self:
        try:
            self._place()
        except BaseException:
            self._end()
            raise
        return self

    def members(self) -> list[RemoteBackend]:
        """Wait until all members are loaded, and return them in order.

        Raises:
            LoadError: a member cannot be loaded.
        """
        loading = list(zip(self._specs, self._names, self._connectors, self._channels, strict=True))
        texts = []
        for spec, name, _, channel in loading:  # while the actors load the weights
            try:
                sent = channel.prepared()
            except HostDied as error:
                raise LoadError(f"member {name!r} cannot be loaded: {error.reason}") from error
            texts.append(received_text(spec, name, self._defaults, sent))
        return [
            join_host(name, text, connector, channel)
            for text, (_, name, connector, channel) in zip(texts, loading, strict=True)
        ]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._end()

    def _place(self) -> None:
        """Reserve the resources of all members, and start their actors."""
        connect(self._address())
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        bundles = [
            options.bundle(spec.threads, has_gpus=has_gpus)
            for spec, options in zip(self._specs, self._options, strict=True)
        ]
        self._placement = placement = Placement(self._names, bundles)
        placement.wait(max(options.placement_timeout for options in self._options))
        for index, (spec, name, options) in enumerate(
            zip(self._specs, self._names, self._options, strict=True)
        ):
            task = task_of(spec, name, self._defaults, bundles[index])
            connector = ActorConnector(
                name, NodeMember, task, placement=placement, index=index, limits=options
            )
            self._connectors.append(connector)
            connector.start()
        self._channels.extend(connector() for connector in self._connectors)

    def _address(self) -> str | None:
        """Return the address of the cluster.

        Raises:
            InvalidOptionError: members name different clusters.
        """
        named = {options.address for options in self._options if options.address is not None}
        if len(named) > 1:
            raise InvalidOptionError(
                f"all members must run in the same Ray cluster; got {', '.join(sorted(named))}"
            )
        return next(iter(named), None)

    def _end(self) -> None:
        for channel in self._channels:
            channel.close()
        for connector in self._connectors:
            connector.close()
        if self._placement is not None:
            self._placement.remove()
