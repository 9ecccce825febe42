"""The server as an application of Ray Serve, which runs replicas of it on several machines.

`app` builds the application. Its import path in a configuration file of Ray Serve, and for
``serve run``, is ``adafuse_llm.ray.serve:app``.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, model_validator

from adafuse_llm.config import AdaFuseConfig, Options, RuntimeConfig
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import (
    AdaFuseError,
    EngineClosedError,
    InvalidOptionError,
    MissingDependencyError,
    QueueFullError,
    RequestTimeoutError,
    install_command,
    short_repr,
)
from adafuse_llm.loading.config_file import ConfigFile, read_config
from adafuse_llm.serving.settings import REFUSED, RUNTIME, VARIABLE, read_keys

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from ray.serve import Application
    from starlette.applications import Starlette

__all__ = ["ReplicaOptions", "app"]

logger = logging.getLogger(__name__)

NAME: Final = "adafuse"
"""Name of the deployment."""

HTTP: Final = "it belongs to http_options in the configuration file of Ray Serve"

UNUSED: Final = {
    "host": HTTP,
    "port": HTTP,
    "trusted_proxies": "the log has the address that connects to Ray Serve",
    "drain_seconds": "graceful_shutdown_timeout_s of the deployment takes its place",
    "send_timeout": "the proxy of Ray Serve sends the responses",
}
"""Options of `ServerConfig` without an effect under Ray Serve, with the reason."""

END_SECONDS: Final = 30.0
"""Seconds that a replica has for its end, after the time that its requests may take."""

NO_LIMIT_SECONDS: Final = 86_400.0
"""Seconds that requests of a stopped replica may take if they have no limit."""

CLOSE_SECONDS: Final = 5.0
"""Seconds for members to finish their forward passes when a replica ends."""

TRIAL_SECONDS: Final = 10.0
"""Maximum seconds of the trial after a request has failed. Ray waits 30 for a health check."""

CANCEL_SECONDS: Final = 10.0
"""Maximum seconds to find the replica with a stream."""

EXPORT_SECONDS: Final = 5.0
"""Seconds between two copies of the metrics. Ray itself passes metrics on every ten seconds."""


class ReplicaOptions(Options):
    """Arguments of `app`, which a configuration file of Ray Serve has under ``args``.

    Raises:
        InvalidOptionError: an argument is unknown or out of range.
    """

    config: str | None = Field(
        default=None,
        min_length=1,
        description="Path of a configuration file, as for `adafuse serve --config`. Default: the "
        "embedded members.",
    )
    min_replicas: int = Field(
        default=1, ge=1, description="Minimum number of replicas if `max_replicas` is set."
    )
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of replicas. Ray Serve then starts and stops replicas by the "
        "number of requests. Default: `num_replicas` of the deployment, which is 1.",
    )

    @model_validator(mode="after")
    def _check_replicas(self) -> ReplicaOptions:
        if self.max_replicas is None and "min_replicas" in self.model_fields_set:
            raise ValueError("min_replicas needs max_replicas")
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas must be at least min_replicas")
        return self


def app(args: Mapping[str, Any]) -> Application:
    """Build the server as an application of Ray Serve.

    Each replica loads all members. It is healthy when they are loaded. It finishes its requests
    before it stops.

    Args:
        args: the fields of `ReplicaOptions`.

    Raises:
        InvalidInputError: the configuration file is missing, or its contents cannot be used.
        InvalidOptionError: an argument is unknown or out of range.
        MissingDependencyError: the extras ``ray`` and ``serve`` are not installed.
    """
    try:
        from ray import serve

        import adafuse_llm.serving.app  # noqa: F401  # the replicas need it
    except ImportError as error:
        raise MissingDependencyError(
            f"replicas of the server need {error.name}: {install_command('ray,serve')}"
        ) from error
    options = ReplicaOptions(**args)
    file = _server_file(ConfigFile() if options.config is None else read_config(options.config))
    deployment = serve.deployment(
        serve.ingress()(_Replica), name=NAME, **_deployment_options(options, file)
    )
    application: Application = deployment.bind(file)
    return application


def _server_file(file: ConfigFile) -> ConfigFile:
    """Check a configuration file for replicas, and return it with the defaults of the server.

    Raises:
        InvalidOptionError: the file has a default that a server refuses.
    """
    for name, reason in REFUSED.items():
        given = file.options.get(name)
        if given is not None and given != AdaFuseConfig.model_fields[name].default:
            raise InvalidOptionError(f"option {name!r}: {reason}; got {short_repr(given)}")
    for name, reason in UNUSED.items():
        if name in file.serving.model_fields_set:
            logger.warning("option %r has no effect under Ray Serve: %s", name, reason)
    given = file.runtime.model_dump(include=file.runtime.model_fields_set)
    runtime = RuntimeConfig(**{**RUNTIME, **given})
    return file.model_copy(update={"runtime": runtime})


def _deployment_options(options: ReplicaOptions, file: ConfigFile) -> dict[str, Any]:
    """Return the options of the deployment. A configuration file of Ray Serve overrides them."""
    runtime, serving = file.runtime, file.serving
    chosen: dict[str, Any] = {
        # some more than the engine decodes: requests for tokens, and those that are next
        "max_ongoing_requests": math.ceil(1.5 * runtime.max_requests),
        "max_queued_requests": runtime.max_waiting or -1,
        "graceful_shutdown_timeout_s": (serving.request_timeout or NO_LIMIT_SECONDS) + END_SECONDS,
    }
    if options.max_replicas is not None:
        chosen["autoscaling_config"] = {
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": runtime.max_requests,
        }
    return chosen


class _Replica:
    """A replica of the server. Ray Serve calls its methods.

    Args:
        file: members and options.
    """

    def __init__(self, file: ConfigFile) -> None:
        from adafuse_llm.serving.app import build_app
        from adafuse_llm.serving.service import Service

        _log_like_serve(file.serving.log_level)
        self._service = Service(file.serving)
        self._service.cancel_elsewhere = self._cancel_elsewhere
        try:
            keys = read_keys(file.serving.api_key_file, os.environ)
            self._asgi = build_app(self._service, keys, is_replica=True)
            self._engine = AdaFuseEngine.from_config(file)
            self._service.open(self._engine)
        except AdaFuseError as error:  # Ray Serve shows the traceback: only the last line helps
            self.__del__()
            raise error.with_traceback(None) from None
        if not keys:
            logger.warning(
                "everyone who can reach the proxies of Ray Serve can use the server. Set API keys "
                "(api_key_file or %s)",
                VARIABLE,
            )
        self._failures = 0
        self._export = _Export(self._service.metrics.collect)

    def __serve_build_asgi_app__(self) -> Starlette:  # Ray Serve's name
        """Return the application."""
        return self._asgi

    def cancel_stream(self, stream: str, requests: Sequence[int]) -> bool:
        """End some requests of a stream of `RemoteEngine`. Return whether the stream runs here."""
        return self._service.cancel_stream(stream, requests)

    async def _cancel_elsewhere(self, stream: str, requests: Sequence[int]) -> bool:
        """Let all replicas look for a stream. Ray Serve may send a request to any of them."""
        from ray import serve

        here = serve.get_replica_context()
        handle = serve.get_deployment_handle(here.deployment, here.app_name)
        asked = handle.broadcast("cancel_stream", stream, requests)
        found = await asked.results_async(timeout_s=CANCEL_SECONDS, return_exceptions=True)
        return any(each is True for each in found)

    async def check_health(self) -> None:
        """Raise an error if the replica cannot serve requests.

        If requests have failed since the last check, this tries a forward pass of every member.

        Raises:
            AdaFuseError: the engine is closed, or a member fails.
        """
        if self._engine.closed:
            raise EngineClosedError("the engine of this replica is closed")
        if (failures := self._service.failures) != self._failures:
            try:
                await self._engine.ascore("a", (" b",), timeout=TRIAL_SECONDS)
            except (QueueFullError, RequestTimeoutError):
                return  # it is busy: the next check tries again
            self._failures = failures

    def __del__(self) -> None:
        """Close the engine. Ray Serve calls this when the requests have ended."""
        if (export := self.__dict__.pop("_export", None)) is not None:
            export.close()
        if (engine := self.__dict__.get("_engine")) is not None and not engine.closed:
            self._service.cancel_all()
            engine.close(CLOSE_SECONDS)


def _log_like_serve(level: str) -> None:
    """Send the log of this package to the log of the replica."""
    own = logging.getLogger("adafuse_llm")
    own.handlers = list(logging.getLogger("ray.serve").handlers)
    own.setLevel(level.upper())
    own.propagate = False


class _Export:
    """Copies metrics to Ray, whose nodes export the metrics of their replicas.

    Ray has counters and gauges with the same names and labels. The buckets, counts and sums of
    histograms become counters, because histograms of Ray take single values.

    Args:
        collect: function that returns the metrics.
    """

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect
        self._known: dict[str, Any] = {}
        self._counted: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adafuse metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy the metrics a last time, and end the thread."""
        self._ends.set()
        self._thread.join(EXPORT_SECONDS)

    def _run(self) -> None:
        while not self._ends.wait(EXPORT_SECONDS):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        from ray.serve import metrics

        for family in self._collect():
            for sample in family.samples:
                name, labels = sample.name.removesuffix("_total"), dict(sample.labels)
                if not name.startswith("adafuse_") or name.endswith("_created"):
                    continue
                kind = metrics.Gauge if family.type == "gauge" else metrics.Counter
                if name not in self._known:
                    self._known[name] = kind(name, family.documentation, tuple(labels))
                if kind is metrics.Gauge:
                    self._known[name].set(sample.value, labels)
                    continue
                key = (name, tuple(labels.items()))
                if (more := sample.value - self._counted.get(key, 0.0)) > 0:
                    self._known[name].inc(more, labels)
                    self._counted[key] = sample.value
