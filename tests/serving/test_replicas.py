"""What a replica of the server does in one process, without Ray Serve."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from adafuse_llm import (
    AdaFuseEngine,
    EngineClosedError,
    InvalidInputError,
    InvalidOptionError,
    MemberError,
    MissingDependencyError,
    RuntimeConfig,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.errors import install_command
from adafuse_llm.loading.config_file import read_config

pytest.importorskip("starlette", reason="needs the extra [serve]")

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from adafuse_llm.ray import serve as replicas
from adafuse_llm.serving.service import Service
from adafuse_llm.serving_config import ServingConfig
from adafuse_llm.text.isolation import CAN_ISOLATE
from tests.support.paths import ROOT

pytestmark = pytest.mark.quick


def file_with(tmp_path, text):
    path = tmp_path / "ensemble.yaml"
    path.write_text(text)
    return replicas._server_file(read_config(path))


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError) as caught:
        replicas.app({})
    assert install_command("ray,serve") in str(caught.value)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"confg": "x"}, "unknown option 'confg'"),
        ({"max_replicas": 0}, "option 'max_replicas': input should be greater"),
        ({"min_replicas": 2}, "min_replicas needs max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas must be at least min_replicas"),
    ],
)
def test_an_argument_that_cannot_be_used_is_one_error(args, says):
    with pytest.raises(InvalidOptionError) as caught:
        replicas.ReplicaOptions(**args)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_deployment_fits_the_engine(tmp_path):
    file = file_with(tmp_path, "runtime: {max_requests: 8}\nserving: {request_timeout: 60}\n")
    chosen = replicas._deployment_options(replicas.ReplicaOptions(), file)
    assert chosen == {
        "max_ongoing_requests": 12,
        "max_queued_requests": 256,
        "graceful_shutdown_timeout_s": 90,
    }
    texts: dict[str, Any] = {"min_replicas": "2", "max_replicas": "4"}  # as `serve run` has them
    options = replicas.ReplicaOptions(**texts)
    assert replicas._deployment_options(options, file)["autoscaling_config"] == {
        "min_replicas": 2,
        "max_replicas": 4,
        "target_ongoing_requests": 8,
    }


def test_limits_can_be_absent(tmp_path):
    file = file_with(tmp_path, "runtime: {max_waiting: null}\nserving: {request_timeout: 0}\n")
    assert file.runtime == RuntimeConfig(max_waiting=None, grammar_isolation=CAN_ISOLATE)
    chosen = replicas._deployment_options(replicas.ReplicaOptions(), file)
    assert chosen["max_queued_requests"] == -1
    assert chosen["graceful_shutdown_timeout_s"] == 86_430


def test_the_file_of_the_guide_fits(tmp_path, caplog):
    page = (ROOT / "docs" / "guides" / "replicas.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```text\n(models:.*?)```", page, re.DOTALL)
    with caplog.at_level(logging.WARNING):
        file = file_with(tmp_path, block)
    assert file.models == ("/models/llama", "/models/mistral")
    assert file.serving.api_key_file == "/etc/adafuse/keys"
    assert not caplog.records
    chosen = replicas._deployment_options(replicas.ReplicaOptions(max_replicas=4), file)
    for name, value in {**chosen, **chosen["autoscaling_config"]}.items():
        if name in ("max_ongoing_requests", "target_ongoing_requests", "max_queued_requests"):
            (row,) = re.findall(rf"\| `{name}` \|.*\((\d+)\) \|", page)
            assert int(row) == value


def test_options_without_an_effect_are_warnings(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        file_with(tmp_path, "serving: {port: 80, drain_seconds: 3, max_choices: 4}\n")
    assert [record.getMessage() for record in caplog.records] == [
        "option 'port' has no effect under Ray Serve: it belongs to http_options in the "
        "configuration file of Ray Serve",
        "option 'drain_seconds' has no effect under Ray Serve: graceful_shutdown_timeout_s of the "
        "deployment takes its place",
    ]


def test_defaults_that_only_a_client_can_choose_are_refused(tmp_path):
    with pytest.raises(InvalidOptionError, match="option 'n': a client asks for the number"):
        file_with(tmp_path, "n: 2\ntemperature: 1\n")


class Broken(FakeBackend):
    """A member that can fail."""

    fails = False

    def evaluate(self, queries):
        if self.fails:
            raise RuntimeError("out of order")
        return super().evaluate(queries)


@pytest.fixture
def member():
    return Broken("wren", lambda _: {" a": 0.6, "<end>": 0.4})


@pytest.fixture
def replica(monkeypatch, tmp_path, member):
    """A replica with a scripted member."""
    monkeypatch.setattr(replicas, "_log_like_serve", lambda _: None)
    monkeypatch.setattr(replicas, "_Export", lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(AdaFuseEngine, "from_config", lambda _: AdaFuseEngine([member]))
    made = replicas._Replica(file_with(tmp_path, "max_words: 2\n"))
    yield made
    made.__del__()


def test_a_replica_is_healthy_until_its_engine_is_closed(replica):
    asyncio.run(replica.check_health())
    replica._engine.close()
    with pytest.raises(EngineClosedError):
        asyncio.run(replica.check_health())


def test_after_a_failed_request_the_members_are_tried(replica, member):
    member.fails = True
    asyncio.run(replica.check_health())  # no request has failed yet
    replica._service.failures += 1
    with pytest.raises(MemberError, match="out of order"):
        asyncio.run(replica.check_health())
    member.fails = False
    asyncio.run(replica.check_health())
    member.fails = True
    asyncio.run(replica.check_health())  # the trial is over


def test_the_end_of_a_replica_closes_its_engine(replica):
    replica.__del__()
    replica.__del__()
    assert replica._engine.closed


def test_a_replica_that_cannot_start_raises_one_error_and_closes_its_engine(
    monkeypatch, tmp_path, member
):
    engine = AdaFuseEngine([member])
    monkeypatch.setattr(replicas, "_log_like_serve", lambda _: None)
    monkeypatch.setattr(AdaFuseEngine, "from_config", lambda _: engine)
    with pytest.raises(InvalidOptionError, match="a member has the name 'wren'") as caught:
        replicas._Replica(file_with(tmp_path, "serving: {served_model_name: wren}\n"))
    assert caught.value.__cause__ is None
    assert engine.closed
    with pytest.raises(InvalidInputError, match="No such file"):
        replicas._Replica(file_with(tmp_path, f"serving: {{api_key_file: {tmp_path}/no}}\n"))


def test_a_replica_without_keys_warns(monkeypatch, tmp_path, replica, caplog):
    monkeypatch.delenv("ADAFUSE_SERVER_KEYS", raising=False)
    with caplog.at_level(logging.WARNING):
        replicas._Replica(file_with(tmp_path, "max_words: 2\n"))
    assert "everyone who can reach the proxies of Ray Serve" in caplog.text


MADE: dict[str, Recorded] = {}


class Recorded:
    """A metric of Ray that keeps what it receives."""

    def __init__(self, name: str, _: str, tags: tuple[str, ...]) -> None:
        self.tags = tags
        self.values: list[tuple[float, dict[str, str]]] = []
        MADE[name] = self

    def _keep(self, value: float, labels: dict[str, str]) -> None:
        self.values.append((value, labels))


class RecordedCounter(Recorded):
    inc = Recorded._keep


class RecordedGauge(Recorded):
    set = Recorded._keep


def test_counters_are_copied_as_differences_and_gauges_as_values(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    fake = SimpleNamespace(metrics=SimpleNamespace(Counter=RecordedCounter, Gauge=RecordedGauge))
    monkeypatch.setitem(sys.modules, "ray.serve", fake)
    MADE.clear()
    total = [3.0]

    def collect():
        done = CounterMetricFamily("adafuse_requests", "text", labels=["route"])
        done.add_metric(["/v1"], total[0])
        yield done
        yield GaugeMetricFamily("adafuse_ready", "text", value=1)
        yield GaugeMetricFamily("process_open_fds", "text", value=9)

    export = replicas._Export(collect)
    export._copy()
    total[0] = 5.0
    export._copy()
    export._copy()
    export.close()
    assert MADE["adafuse_requests"].tags == ("route",)
    assert MADE["adafuse_requests"].values == [(3.0, {"route": "/v1"}), (2.0, {"route": "/v1"})]
    assert MADE["adafuse_ready"].values == [(1, {})] * 4
    assert set(MADE) == {"adafuse_requests", "adafuse_ready"}


def test_failures_of_the_server_are_counted():
    service = Service(ServingConfig())

    async def fail(error):
        with pytest.raises(type(error)):
            async with service.admitted(lambda _: None):
                raise error

    asyncio.run(fail(InvalidInputError("wrong")))
    assert service.failures == 0
    asyncio.run(fail(MemberError("wren", "out of order")))
    assert service.failures == 1
