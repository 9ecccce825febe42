"""Metrics: what Prometheus reads after requests, and while members load."""

import threading
from contextlib import closing
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adafuse_llm import AdaFuseEngine, RuntimeConfig
from adafuse_llm.backends import FakeBackend
from adafuse_llm.request import Request
from adafuse_llm.serving.metrics import Metrics
from tests.support.waiting import PATIENCE, background, wait_until

pytestmark = pytest.mark.quick


def samples(metrics: Metrics) -> dict[str, float]:
    """The value of each series, by its name with its labels."""
    body, content_type = metrics.exposition()
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def writer(first: str, second: str):
    def rule(text: str) -> dict[str, float]:
        if text.endswith(":"):
            return {first: 0.9, " x": 0.1}
        return {"<end>": 1.0, second: 0.0} if text.endswith(second) else {second: 1.0, "<end>": 0.0}

    return rule


@pytest.mark.parametrize("other", [" a", " c"], ids=["agrees", "differs"])
def test_rounds_tokens_and_passes_are_counted(other: str) -> None:
    members = [FakeBackend("wren", writer(" a", " b")), FakeBackend("heron", writer(other, " b"))]
    with AdaFuseEngine(members) as engine:
        metrics = Metrics(lambda: engine)
        done: list[Any] = []
        for use in (None, "wren"):
            for event in engine.stream("x:", max_words=1, use=use):
                metrics.event(event)
            done.append(event.generation)
        with closing(engine.open([Request(prompt="x:")])) as left:
            next(iter(left))  # a client that leaves
        passes = sum(each.usage.forward_passes["wren"] for each in done)
        series = "adafuse_forward_passes_total{member=wren}"
        wait_until(lambda: samples(metrics)[series] > passes)
        found = samples(metrics)
    rounds = done[0].rounds
    assert found["adafuse_rounds_total"] == len(rounds) + len(done[1].rounds)
    assert found["adafuse_rounds_joint_total"] == len(rounds) > 1
    assert found["adafuse_rounds_unanimous_total"] == len(rounds) - (other == " c")
    for kind, field in (("prompt", "prompt_tokens"), ("completion", "completion_tokens")):
        tokens = sum(getattr(each.usage, field)["wren"] for each in done)
        assert found[f"adafuse_tokens_total{{kind={kind},member=wren}}"] == tokens > 0
    processed = sum(each.usage.tokens_processed["wren"] for each in done)
    assert found["adafuse_tokens_total{kind=processed,member=wren}"] > processed


def test_requests_count_by_outcome_and_in_histograms() -> None:
    metrics = Metrics(lambda: None)
    metrics.request("/v1/completions", "ok", 0.2)
    metrics.request("/v1/completions", "busy", 0.001)
    metrics.first_text.observe(0.07)
    found = samples(metrics)
    for outcome in ("ok", "busy"):
        assert found[f"adafuse_requests_total{{outcome={outcome},route=/v1/completions}}"] == 1
    assert found["adafuse_request_seconds_count{route=/v1/completions}"] == 2
    assert found["adafuse_first_text_seconds_bucket{le=0.05}"] == 0
    assert found["adafuse_first_text_seconds_bucket{le=0.1}"] == 1
    assert found["adafuse_ready"] == 0
    assert "adafuse_requests_running" not in found  # no members are loaded


class Large(FakeBackend):
    """A member whose requests need memory."""

    def cache_bytes(self, tokens: int) -> int:
        return 10 * tokens


def test_gauges_show_what_runs_and_waits_now() -> None:
    blocked = threading.Event()

    def wait(_: str) -> dict[str, float]:
        blocked.wait(PATIENCE)
        return {"<end>": 1.0, " a": 0.0}

    runtime = RuntimeConfig(max_requests=1, cache_bytes=10**6)
    member = Large("wren", wait)
    with AdaFuseEngine([member], runtime=runtime) as engine:
        metrics = Metrics(lambda: engine)
        calls = [background(engine.generate, "x:") for _ in range(3)]
        wait_until(lambda: samples(metrics)["adafuse_requests_running"] == 1)
        wait_until(lambda: samples(metrics)["adafuse_requests_waiting"] == 2)
        busy = samples(metrics)
        blocked.set()
        assert all(call.result() for call in calls)
        wait_until(lambda: samples(metrics)["adafuse_requests_running"] == 0)
        idle = samples(metrics)
    assert busy["adafuse_cache_limit_bytes{device=cpu}"] == 10**6
    assert 0 < busy["adafuse_cache_reserved_bytes{device=cpu}"] < 10**6
    assert idle["adafuse_cache_reserved_bytes{device=cpu}"] == 0
    assert (idle["adafuse_ready"], samples(metrics)["adafuse_ready"]) == (1, 0)
