"""Metrics of the server for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.results import Generation, Round
from adafuse_llm.summary import is_unanimous, proposers

__all__ = ["Metrics"]

SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Upper bounds of the buckets of the histograms."""

TOKENS: Final = {
    "prompt": "prompt_tokens",
    "completion": "completion_tokens",
    "cached": "cached_tokens",
    "processed": "tokens_processed",
}
"""Fields of `Usage` by the value of the label ``kind``."""

GetEngine = Callable[[], AdaFuseEngine | None]


class Metrics:
    """Counters and gauges of one server, in a registry of their own. They are thread-safe.

    Args:
        engine: function that returns the engine, or None while members load. Gauges ask it when
            they are read.
    """

    def __init__(self, engine: GetEngine) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter(
            "requests", "HTTP requests that have ended, by outcome.", "route", "outcome"
        )
        self._seconds = self._histogram(
            "request_seconds",
            "Seconds from the arrival of a request to the end of its response.",
            "route",
        )
        self._first_text = self._histogram(
            "first_text_seconds",
            "Seconds from the arrival of a request to the first text of its response.",
        )
        self._rounds = self._counter("rounds", "Rounds of decoding.")
        self._joint = self._counter(
            "rounds_joint", "Rounds in which several members made proposals."
        )
        self._unanimous = self._counter(
            "rounds_unanimous", "Joint rounds in which all proposed the same text, and no other."
        )
        self._wins = self._counter(
            "wins", "Joint rounds whose committed text the member proposed.", "member"
        )
        self._decided = self._counter(
            "decided", "Joint rounds whose committed text the member alone proposed.", "member"
        )
        self._tokens = self._counter(
            "tokens",
            "Tokens of finished responses, in the vocabulary of the member.",
            "member",
            "kind",
        )
        self._passes = self._counter(
            "forward_passes", "Forward passes for finished responses.", "member"
        )
        self._registry.register(_EngineState(engine))
        ProcessCollector(registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"adafuse_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"adafuse_{name}", text, labels, registry=self._registry, buckets=SECONDS)

    def request(self, route: str, outcome: str, seconds: float) -> None:
        """Count a request that has ended.

        Args:
            route: the path of the route, such as ``/v1/chat/completions``. Use a fixed set of
                values: each one becomes a time series.
            outcome: ``ok``, ``cancelled`` (the client left), ``refused`` (status 4xx), ``busy``
                (429), ``failed`` (5xx) or ``timeout``.
            seconds: seconds from the arrival of the request to the end of the response.
        """
        self._requests.labels(route, outcome).inc()
        self._seconds.labels(route).observe(seconds)

    def first_text(self, seconds: float) -> None:
        """Record the seconds from the arrival of a request to its first text."""
        self._first_text.observe(seconds)

    def round(self, done: Round) -> None:
        """Count a round, and the members that proposed its text."""
        self._rounds.inc()
        members = proposers(done)
        if (unanimous := is_unanimous(done)) is None:
            return
        self._joint.inc()
        self._unanimous.inc(unanimous)
        for name in members:
            self._wins.labels(name).inc()
        if len(members) == 1:
            self._decided.labels(members[0]).inc()

    def generation(self, generation: Generation) -> None:
        """Count the tokens and forward passes of a response and of its alternatives."""
        for each in (generation, *generation.alternatives):
            for kind, field in TOKENS.items():
                for name, tokens in getattr(each.usage, field).items():
                    self._tokens.labels(name, kind).inc(tokens)
            for name, passes in each.usage.forward_passes.items():
                self._passes.labels(name).inc(passes)

    def exposition(self) -> tuple[bytes, str]:
        """Return all metrics as text for Prometheus, and the content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _EngineState(Collector):
    """The state of the engine at the time when metrics are read."""

    def __init__(self, engine: GetEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        engine = self._engine()
        is_ready = engine is not None and not engine.closed
        text = "Whether the members are loaded: 1 or 0."
        yield GaugeMetricFamily("adafuse_ready", text, value=int(is_ready))
        if engine is None:
            return
        scheduler = engine.scheduler
        text = "Responses that are being decoded. A request with n=2 has two."
        yield GaugeMetricFamily("adafuse_requests_running", text, value=scheduler.running)
        text = "Responses that wait for their turn."
        yield GaugeMetricFamily("adafuse_requests_waiting", text, value=scheduler.waiting)
        text = "Bytes of key/value cache that running requests reserve."
        reserved = GaugeMetricFamily("adafuse_cache_reserved_bytes", text, labels=["device"])
        text = "Bytes of key/value cache that running requests may reserve."
        limits = GaugeMetricFamily("adafuse_cache_limit_bytes", text, labels=["device"])
        for device, (used, limit) in scheduler.cache_use.items():
            reserved.add_metric([device], used)
            limits.add_metric([device], limit)
        yield reserved
        yield limits
