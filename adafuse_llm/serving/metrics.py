"""Metrics of the server for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.results import StreamEvent

SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Upper bounds of the buckets of histograms, in seconds."""


class Metrics(Collector):
    """Counters, histograms and gauges of one server, in a registry of their own.

    `engine` returns the engine, or None while members load. Each reading of the metrics calls it.
    """

    def __init__(self, engine: Callable[[], AdaFuseEngine | None]) -> None:
        self._engine = engine
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"adafuse_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"adafuse_{name}", text, labels, registry=registry, buckets=SECONDS)

        self._requests = counter("requests", "HTTP requests that have ended.", "route", "outcome")
        self._seconds = histogram(
            "request_seconds", "Seconds from a request to the end of its response.", "route"
        )
        self.first_text = histogram(
            "first_text_seconds", "Seconds from a request to the first text of its response."
        )
        self._rounds = counter("rounds", "Rounds of decoding.")
        self._joint = counter("rounds_joint", "Rounds in which several members made proposals.")
        self._unanimous = counter(
            "rounds_unanimous", "Joint rounds in which all proposed the same text, and no other."
        )
        self._tokens = counter(
            "tokens", "Tokens: processed ones of all work, others of responses.", "member", "kind"
        )
        self._passes = counter("forward_passes", "Forward passes.", "member")
        self._work: dict[str, tuple[int, int]] = {}  # the counted part of `Scheduler.work`
        registry.register(self)
        ProcessCollector(registry=registry)

    def request(self, route: str, outcome: str, seconds: float) -> None:
        """Count a request that has ended, and its seconds. `route` must be one of a few names."""
        self._requests.labels(route, outcome).inc()
        self._seconds.labels(route).observe(seconds)

    def event(self, event: StreamEvent) -> None:
        """Count the round of an event, and the tokens of a finished response."""
        if event.round is not None:
            self._rounds.inc()
            if (unanimous := event.round.is_unanimous) is not None:
                self._joint.inc()
                self._unanimous.inc(unanimous)
        if event.generation is not None:
            usage = event.generation.usage
            for kind in ("prompt", "completion", "cached"):
                for name, tokens in getattr(usage, f"{kind}_tokens").items():
                    self._tokens.labels(name, kind).inc(tokens)

    def exposition(self) -> tuple[bytes, str]:
        """Return the text of all metrics for Prometheus, and the content type of this text."""
        engine = self._engine()
        for name, work in {} if engine is None else engine.scheduler.work.items():
            before = self._work.get(name, (0, 0))
            self._passes.labels(name).inc(work[0] - before[0])
            self._tokens.labels(name, "processed").inc(work[1] - before[1])
            self._work[name] = work
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Yield gauges of the engine's state. The registry calls this for each reading."""
        engine = self._engine()
        is_ready = engine is not None and not engine.closed
        yield GaugeMetricFamily("adafuse_ready", "Whether the members are loaded.", int(is_ready))
        if engine is None:
            return
        scheduler = engine.scheduler
        text = "Responses that are being decoded. A request with n=2 has two."
        yield GaugeMetricFamily("adafuse_requests_running", text, scheduler.running)
        text = "Responses that wait for their turn."
        yield GaugeMetricFamily("adafuse_requests_waiting", text, scheduler.waiting)
        text = "Bytes of key/value cache that running requests reserve."
        reserved = GaugeMetricFamily("adafuse_cache_reserved_bytes", text, labels=["device"])
        text = "Bytes of key/value cache that running requests may reserve."
        limits = GaugeMetricFamily("adafuse_cache_limit_bytes", text, labels=["device"])
        for device, (used, limit) in scheduler.cache_use.items():
            reserved.add_metric([device], used)
            limits.add_metric([device], limit)
        yield from (reserved, limits)
