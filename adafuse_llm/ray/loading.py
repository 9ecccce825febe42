"""Load members in Ray actors. Only this module and those that it imports need Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from adafuse_llm.backends.remote import HostDied, MemberText
from adafuse_llm.errors import InvalidOptionError, LoadError
from adafuse_llm.loading.hosts import HostLoading
from adafuse_llm.loading.ray_options import RayOptions
from adafuse_llm.loading.sent_text import received_text
from adafuse_llm.loading.specs import MemberSpec
from adafuse_llm.ray.actors import ActorChannel, ActorConnector, Placement, connect
from adafuse_llm.ray.on_node import NodeMember, task_of


class ActorLoading(HostLoading[ActorChannel]):
    """Members that load side by side in their actors.

    Args:
        specs: the members. Each one has `MemberSpec.ray`.
        names: the members' names.
        defaults: as for `plan_members`.
    """

    def __init__(
        self, specs: Sequence[MemberSpec], names: Sequence[str], defaults: Mapping[str, Any]
    ) -> None:
        super().__init__(names)
        self._specs = specs
        self._defaults = defaults
        self._options = [RayOptions(**(spec.ray or {})) for spec in specs]
        self._placement: Placement | None = None

    def _start(self) -> None:
        """Reserve the resources of all members, and start their actors."""
        connect(self._address())
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        bundles = [
            options.bundle(spec.threads, has_gpus=has_gpus)
            for spec, options in zip(self._specs, self._options, strict=True)
        ]
        self._placement = placement = Placement(self._names, bundles)
        placement.wait(max(options.placement_timeout for options in self._options))
        started = []
        for index, (spec, name, options) in enumerate(
            zip(self._specs, self._names, self._options, strict=True)
        ):
            task = task_of(spec, name, self._defaults, bundles[index])
            connector = ActorConnector(
                name, NodeMember, task, placement=placement, index=index, limits=options
            )
            started.append(connector)
            self._connectors.append(connector)
            connector.start()
        for connector in started:
            self._channels.append(connector())

    def _texts(self) -> list[MemberText]:
        texts = []
        for spec, name, channel in zip(self._specs, self._names, self._channels, strict=True):
            try:
                sent = channel.prepared()
            except HostDied as error:
                raise LoadError(f"member {name!r} cannot be loaded: {error.reason}") from error
            texts.append(received_text(spec, name, self._defaults, sent))
        return texts

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
        super()._end()
        if self._placement is not None:
            self._placement.remove()
