"""Hosts in Ray actors, on any machine of a Ray cluster.

Messages are encoded with msgpack. Every wait for an actor has a time limit: Ray itself would wait
without an error for a machine that does not exist, and for one that does not come back. Only
questions to the head node have none, because Ray ends the program if the head node is lost.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgpack
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from adafuse_llm.backends.remote.protocol import HostDied, Message, value_of
from adafuse_llm.errors import LoadError
from adafuse_llm.forks import after_fork

logger = logging.getLogger(__name__)

QUESTIONS: Final = "questions"
"""The concurrency group of an actor's methods that answer at once, even during a pass."""

RETRY_SECONDS: Final = 5.0
"""Seconds to wait for an actor that could not be placed the last time."""

POLL_SECONDS: Final = 1.0
"""Seconds between two looks at an actor that starts or loads."""

MAX_FAILURES: Final = 3
"""Number of actors that may end before they have started."""

MAX_REASON: Final = 300
"""Maximum number of characters of an error of Ray in an error of this package."""

REPORT_SECONDS: Final = 5.0
"""Seconds between two log messages about the progress of an actor that loads."""

AUTHENTICATION: Final = "RAY_AUTH_MODE"
"""Environment variable that turns the authentication of Ray on (``token``) or off."""

_OF_PARENT: Final[list[Any]] = []
"""What a forked child has of the channels of its parent."""

UNITS: Final = {"CPU": "CPU", "GPU": "GPU", "memory": "bytes of memory"}


def pack(message: Any) -> bytes:
    """Encode a message."""
    packed: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return packed


def unpack(data: bytes) -> Any:
    """Decode a message. Tuples come back as lists."""
    return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)


class Limits(Protocol):
    """How long to wait for an actor, in seconds."""

    @property
    def placement_timeout(self) -> float:
        """For a machine with free resources, and for the actor to start there."""
        ...

    @property
    def load_timeout(self) -> float:
        """For the member to be loaded."""
        ...

    @property
    def call_timeout(self) -> float:
        """For the reply to a message."""
        ...


def connect(address: str | None) -> None:
    """Connect this program to a Ray cluster, unless it is connected already.

    Args:
        address: ``HOST:PORT`` of the head node, or ``auto`` for the cluster that this machine
            belongs to. None stands for the environment variable ``RAY_ADDRESS``, or ``auto``.

    Raises:
        LoadError: there is no cluster at the address, this machine does not belong to it, this
            program is connected to another one, or the cluster has no authentication.
    """
    if ray.is_initialized():
        _check_cluster(address)
        _check_authentication()
        return
    _check_authentication(is_connected=False)
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        with _own_signals():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:MAX_REASON].rstrip(" .") or type(error).__name__
        raise LoadError(
            f"this program cannot join the Ray cluster at {address!r}: {reason}. Start Ray on this "
            "machine: `ray start --head` for the first machine of a cluster, and `ray start "
            "--address=HOST:6379` for every other one. All need the same authentication token "
            "(RAY_AUTH_MODE, RAY_AUTH_TOKEN)."
        ) from error
    _check_authentication()


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the program's own handler of SIGTERM, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # None: the handler is not one of Python
            signal.signal(signal.SIGTERM, before)


def _check_cluster(address: str | None) -> None:
    own = ray.get_runtime_context().gcs_address
    host, separator, port = (address or "").rpartition(":")
    if not separator:
        return
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    if f"{host}:{port}" != own:
        raise LoadError(
            f"this program is connected to the Ray cluster at {own!r} already, so a member cannot "
            f"run in the cluster at {address!r}. A program can use one cluster."
        )


def _check_authentication(*, is_connected: bool = True) -> None:
    """Check that the cluster asks for a token. Ray sets the variable when it finds a token."""
    mode = os.environ.get(AUTHENTICATION, "").lower()
    if mode in ("token", "disabled") or (not mode and not is_connected):
        return
    raise LoadError(
        "the Ray cluster has no authentication: everyone who can reach its ports can run code on "
        f"its machines. Set {AUTHENTICATION}=token and the same RAY_AUTH_TOKEN on all machines, "
        "before `ray start` and for this program. If the network is closed to others, set "
        f"{AUTHENTICATION}=disabled."
    )


class Placement:
    """Resources in a cluster for several actors. They are reserved together.

    They are free again when `leave` was called for every actor, or when the object is collected.

    Args:
        names: the members' names.
        bundles: the resources of each member's actor, as Ray names them.

    Attributes:
        remove: function that frees the resources at once.
    """

    def __init__(self, names: Sequence[str], bundles: Sequence[Mapping[str, float]]) -> None:
        self._names = list(names)
        self._bundles = [dict(bundle) for bundle in bundles]
        self._group = placement_group(self._bundles, strategy="SPREAD")
        self._used = set(range(len(bundles)))
        self._owner = os.getpid()
        self.remove = weakref.finalize(self, _remove_group, self._group, self._owner)

    def wait(self, seconds: float) -> None:
        """Wait until all resources are reserved.

        Raises:
            LoadError: they are not reserved in time.
        """
        if self._group.wait(min(seconds, POLL_SECONDS)):
            return
        wanted = _wanted(self._names, self._bundles)
        logger.info("Ray looks for machines with free resources for %s", wanted)
        if not self._group.wait(max(0.0, seconds - POLL_SECONDS)):
            raise LoadError(
                f"the ensemble cannot be loaded: {self._problem(range(len(self._names)), seconds)}"
            )

    def strategy(self, index: int) -> PlacementGroupSchedulingStrategy:
        """Return where Ray places the actor of a member."""
        return PlacementGroupSchedulingStrategy(self._group, index)

    def resources(self, index: int) -> dict[str, Any]:
        """Return the resources of an actor as options of Ray."""
        bundle = self._bundles[index]
        named = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
        own = {name: bundle[key] for name, key in named.items() if key in bundle}
        rest = {key: value for key, value in bundle.items() if key not in named.values()}
        return {"num_cpus": 0, **own, "resources": rest}

    def problem(self, index: int, seconds: float) -> str:
        """Return why the actor of a member could not start in time."""
        if (node := self.node(index)) is None:
            return self._problem([index], seconds)
        return (
            f"its actor on {node['NodeManagerAddress']} did not start within {seconds:g} seconds. "
            "The machine may be busy; set a longer placement_timeout."
        )

    def node(self, index: int) -> Mapping[str, Any] | None:
        """Return the machine with the resources of a member; None while there is none."""
        chosen = placement_group_table(self._group)["bundles_to_node_id"].get(index)
        alive = (node for node in ray.nodes() if node["Alive"])
        return next((node for node in alive if node["NodeID"] == chosen), None)

    def leave(self, index: int) -> None:
        """Free the resources if all other members have left, too."""
        self._used.discard(index)
        if not self._used:
            self.remove()

    def _problem(self, wanted: Sequence[int], seconds: float) -> str:
        alive = [node for node in ray.nodes() if node["Alive"]]
        lacking = [
            index
            for index in wanted
            if not any(_fits(self._bundles[index], node["Resources"]) for node in alive)
        ]
        short = lacking or wanted
        named = _wanted([self._names[i] for i in short], [self._bundles[i] for i in short])
        machines = "; ".join(
            f"{node['NodeManagerAddress']} has {_totals(self._bundles, node['Resources'])}"
            for node in alive
        )
        advice = (
            "No machine has so much. Start Ray on one that has (ray start), or ask for less."
            if lacking
            else "Together with what runs already, this does not fit. Stop other programs of the "
            "cluster, or start Ray on more machines."
        )
        return (
            f"Ray did not find a machine within {seconds:g} seconds for {named}. {advice} Machines "
            f"of the cluster: {machines}."
        )


def _remove_group(group: PlacementGroup, owner: int) -> None:
    if os.getpid() == owner and ray.is_initialized():
        with contextlib.suppress(Exception):
            remove_placement_group(group)


def _fits(bundle: Mapping[str, float], resources: Mapping[str, float]) -> bool:
    return all(resources.get(key, 0) >= value for key, value in bundle.items())


def _wanted(names: Sequence[str], bundles: Sequence[Mapping[str, float]]) -> str:
    """Return members with the resources of their actors."""
    return " and ".join(
        f"{name!r} ({_listed(bundle)})" for name, bundle in zip(names, bundles, strict=True)
    )


def _listed(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {UNITS.get(key, key)}" for key, value in bundle.items())


def _totals(bundles: Sequence[Mapping[str, float]], resources: Mapping[str, float]) -> str:
    """Return what a machine has of the resources that somebody wants."""
    wanted = dict.fromkeys(key for bundle in bundles for key in bundle)
    return _listed({key: resources.get(key, 0) for key in wanted})


class ActorConnector:
    """A function that starts a host in an actor and returns the channel to it.

    Args:
        name: the member's name, for messages.
        kind: class of the actor. `adafuse_llm.ray.on_node.NodeMember` describes the methods
            that it has.
        task: the argument of `kind`.
        placement: the resources.
        index: number of the member in `placement`.
        limits: the time limits.
    """

    def __init__(
        self,
        name: str,
        kind: type,
        task: Mapping[str, Any],
        *,
        placement: Placement,
        index: int,
        limits: Limits,
    ) -> None:
        self._name = name
        self._kind = ray.remote(concurrency_groups={QUESTIONS: 1})(kind)
        self._task = pack(task)
        self._placement = placement
        self._index = index
        self._limits = limits
        self._owner = os.getpid()
        self._was_placed = True
        self._started: Any = None

    def start(self) -> None:
        """Ask for an actor without waiting for it. The next call returns the channel to it."""
        if self._started is None:
            self._started = self._kind.options(
                max_restarts=0,
                scheduling_strategy=self._placement.strategy(self._index),
                **self._placement.resources(self._index),
            ).remote(self._task)

    def __call__(self) -> ActorChannel:
        """Return the channel to an actor that was started, or to a new one.

        Raises:
            LoadError: the actor cannot start in time, or this process is a fork.
        """
        if os.getpid() != self._owner:
            raise LoadError(
                f"member {self._name!r} runs in a Ray actor, and a forked process cannot use it. "
                "Load the ensemble in the new process."
            )
        limit = self._limits.placement_timeout
        seconds = limit if self._was_placed else min(limit, RETRY_SECONDS)
        self._was_placed = False
        deadline = time.monotonic() + seconds
        failures = 0
        while time.monotonic() < deadline:
            node = self._placement.node(self._index)
            if node is None:
                time.sleep(POLL_SECONDS)
                continue
            try:
                if (channel := self._started_on(node["NodeID"], deadline)) is not None:
                    self._was_placed = True
                    return channel
            except RayError as error:
                failures += 1
                if failures == MAX_FAILURES:
                    raise LoadError(
                        f"member {self._name!r} cannot be loaded: its actor on "
                        f"{node['NodeManagerAddress']} did not start ({_last_line(error)}). All "
                        "machines of the cluster need the same version of adafuse-llm."
                    ) from error
                time.sleep(POLL_SECONDS)
        raise LoadError(
            f"member {self._name!r} cannot be loaded: "
            f"{self._placement.problem(self._index, seconds)}"
        )

    def _started_on(self, node_id: str, deadline: float) -> ActorChannel | None:
        """Wait for an actor, and return the channel to it.

        Return None at the deadline, and if its resources are not on the machine any more: Ray can
        leave an actor waiting for a machine that was lost.

        Raises:
            RayError: the actor ended.
        """
        self.start()
        actor, self._started = self._started, None
        try:
            question = _question(actor.where)
            while time.monotonic() < deadline:
                if ray.wait([question], timeout=POLL_SECONDS)[0]:
                    address, process = ray.get(question)
                    host = f"actor {process} on {address}"
                    return ActorChannel(self._name, actor, host, self._limits)
                node = self._placement.node(self._index)
                if node is None or node["NodeID"] != node_id:
                    break
        except BaseException:
            _kill(actor)
            raise
        _kill(actor)
        return None

    def close(self) -> None:
        """End an actor that was started and has no channel yet, and free its resources."""
        if os.getpid() != self._owner:
            return
        if self._started is not None:
            _kill(self._started)
            self._started = None
        self._placement.leave(self._index)


class ActorChannel:
    """The channel to a host in an actor.

    The actor ends when the channel is closed or garbage collected, or when this program ends.

    Args:
        name: the member's name, for messages.
        actor: the actor.
        host: where the actor runs, for messages.
        limits: the time limits.
    """

    def __init__(self, name: str, actor: Any, host: str, limits: Limits) -> None:
        self._name = name
        self._actor = actor
        self._host = host
        self._limits = limits
        self._owner = os.getpid()
        self._is_closed = False
        self._asking = threading.Lock()
        self._prepared = actor.prepare.remote()
        self._loaded: Any = actor.greet.remote()
        self._reply: Any = None
        after_fork(self._renew)

    def _renew(self) -> None:
        """Keep what belongs to Ray in a forked child: freeing it would disturb the parent."""
        if os.getpid() != self._owner:
            _OF_PARENT.append((self._actor, self._prepared, self._loaded, self._reply))

    @property
    def host(self) -> str:
        return self._host

    def prepared(self) -> Any:
        """Wait until the host has checked the member's files, and return what `kind.prepare` says.

        Raises:
            HostDied: the host has ended.
            AdaFuseError: the files cannot be used.
        """
        return value_of(self._get(self._prepared, self._limits.load_timeout))

    def send(self, message: Message) -> None:
        packed = pack(message)
        with self._failures():
            self._reply = self._actor.handle.remote(packed)

    def receive(self) -> Message:
        if self._loaded is not None:
            greeting, self._loaded = self._loaded, None
            return self._greeting(greeting)
        reply, self._reply = self._reply, None
        return self._get(reply, self._limits.call_timeout)

    def ask(self, question: Message) -> Message:
        packed = pack(question)
        with self._asking, self._failures():
            asked = _question(self._actor.answer, packed)
        return self._get(asked, self._limits.call_timeout)

    def close(self) -> None:
        self._is_closed = True
        if os.getpid() == self._owner:
            _kill(self._actor)

    def _greeting(self, greeting: Any) -> Message:
        """Wait until the host has loaded its backend, and log its progress meanwhile."""
        limit = self._limits.load_timeout
        begin, logged = time.monotonic(), -math.inf
        with self._failures():
            progress = _question(self._actor.progress)
            while not ray.wait([greeting], timeout=POLL_SECONDS)[0]:
                now = time.monotonic()
                if now - begin > limit:
                    break
                if ray.wait([progress], timeout=0)[0]:
                    text = ray.get(progress)
                    progress = _question(self._actor.progress)
                    if now - logged >= REPORT_SECONDS:
                        logged = now
                        logger.info("member %r (%s) %s", self._name, self._host, text)
        return self._get(greeting, max(0.0, begin + limit - time.monotonic()), limit)

    def _get(self, reference: Any, seconds: float, limit: float | None = None) -> Message:
        """Wait for a reply. `limit` is the number of seconds for messages."""
        with self._failures(limit or seconds):
            message: Message = unpack(ray.get(reference, timeout=seconds))
            return message

    @contextlib.contextmanager
    def _failures(self, seconds: float = 0.0) -> Iterator[None]:
        """Convert errors of Ray to `HostDied`."""
        try:
            yield
        except GetTimeoutError as error:
            raise HostDied(
                f"its {self._host} did not answer within {seconds:g} seconds",
                is_closed=self._is_closed,
            ) from error
        except (RayError, ValueError) as error:
            reason = (
                "it was closed"
                if self._is_closed
                else f"its {self._host} was lost: the process ended, or the machine cannot be "
                "reached. The machine's memory may be too small"
            )
            raise HostDied(reason, is_closed=self._is_closed) from error


def _question(method: Any, *arguments: Any) -> Any:
    return method.options(concurrency_group=QUESTIONS).remote(*arguments)


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):  # it has ended, or this program leaves the cluster
        ray.kill(actor)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
