"""Replicas of the server on Ray Serve, in a cluster of two nodes and a head."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import pytest
import yaml

from adafuse_llm import AdaFuseEngine, InvalidInputError, InvalidOptionError, RemoteEngine
from tests.support.paths import ROOT
from tests.support.ray_cluster import SETTINGS  # Ray reads the token once in a process

httpx = pytest.importorskip("httpx", reason="needs the extra [client]")
prometheus = pytest.importorskip("prometheus_client.parser", reason="needs the extra [serve]")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),  # in Ray
]

T = TypeVar("T")

CLIENTS = 32
MAX_ONGOING = 6
TOKENS = 24
LONG = {"prompt": "the mill", "max_tokens": 400}
ENDLESS = {**LONG, "max_tokens": 8000}
KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
PROMPTS = [
    f"What is {number} + {number % 7}?" if number % 2 else f"The {number}th visitor of the mill"
    for number in range(CLIENTS)
]
PATIENCE = {
    "RAY_metrics_report_interval_ms": "1000",
}


def guide_file() -> dict[str, Any]:
    """The configuration file of Ray Serve in the guide."""
    page = (ROOT / "docs" / "guides" / "replicas.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    values: dict[str, Any] = yaml.safe_load(block)
    return values


def wait_for(condition: Callable[[], T], seconds: float = 60) -> T:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)
    return value


class Served(NamedTuple):
    """A cluster that serves the embedded members.

    Attributes:
        address: address of the cluster.
        url: address of the server.
        folder: folder with the configuration file.
        log: folder with the logs of the replicas.
        port: port of the server.
    """

    address: str
    url: str
    folder: Path
    log: Path
    port: int

    def deploy(self, replicas: int, config: str = "ensemble.yaml") -> None:
        """Deploy the file of the guide, in the size of the cluster, as the guide shows."""
        values = guide_file()
        values |= {
            "proxy_location": "HeadOnly",  # the nodes have the same address
            "http_options": {"host": "127.0.0.1", "port": self.port},
        }
        (application,) = values["applications"]
        application["args"]["config"] = str(self.folder / config)
        application["deployments"][0] |= {
            "num_replicas": replicas,
            "max_ongoing_requests": MAX_ONGOING,
            "health_check_period_s": 1,
            "max_replicas_per_node": 1,
            "ray_actor_options": {"num_cpus": 1},
        }
        file = self.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(values))
        command = ["-m", "ray.serve.scripts", "run", "--non-blocking", "--address", self.address]
        done = subprocess.run(
            [sys.executable, *command, str(file)], capture_output=True, text=True, check=False
        )
        assert "Submitted deploy config successfully" in done.stdout + done.stderr, done.stderr

    def deployment(self) -> Any:
        from ray import serve

        application = serve.status().applications["adafuse"]
        return application.deployments.get("adafuse", application)

    def is_healthy(self, replicas: int) -> bool:
        status = self.deployment()
        assert "FAILED" not in status.status, status.message
        return status.status == "HEALTHY" and status.replica_states == {"RUNNING": replicas}

    def replicas(self) -> list[psutil.Process]:
        """Processes of replicas of this cluster."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if process.cmdline()[:1] == ["ray::ServeReplica:adafuse:adafuse"]:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def logs(self) -> dict[str, str]:
        """Contents of the logs of all replicas, by name."""
        return {each.name: each.read_text() for each in self.log.glob("replica_*")}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two nodes with one replica each, and a head with a proxy."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (SETTINGS | PATIENCE).items():
            patch.setenv(name, value)
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        memory = {"object_store_memory": 80 * 2**20}
        head = {"num_cpus": 0, "include_dashboard": False, **memory}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            cluster.add_node(num_cpus=1, **memory)
        ray.init(
            address=cluster.address,
            namespace="serve",
            log_to_driver=False,
            logging_level="warning",
        )
        try:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
            folder = tmp_path_factory.mktemp("ray")
            (folder / "keys").write_text(f"{KEY}\n")
            (folder / "ensemble.yaml").write_text(
                f"runtime: {{max_requests: 4}}\nserving: {{api_key_file: {folder}/keys}}\n"
            )
            logs = Path(cluster.head_node.get_logs_dir_path()) / "serve"
            found = Served(cluster.address, f"http://127.0.0.1:{port}", folder, logs, port)
            found.deploy(2)
            wait_for(lambda: "adafuse" in serve.status().applications)
            wait_for(lambda: found.is_healthy(2))
            yield found
        finally:
            serve.shutdown()
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module")
def engine() -> Iterator[AdaFuseEngine]:
    with AdaFuseEngine.from_embedded() as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: AdaFuseEngine) -> dict[str, str]:
    """The texts of a local engine, one request after another."""
    return {prompt: engine.generate(prompt, max_new_tokens=TOKENS).text for prompt in PROMPTS}


class Reply(NamedTuple):
    """What a client received.

    Attributes:
        text: the text.
        parts: number of events with text.
        problem: what went wrong, or None.
    """

    text: str
    parts: int
    problem: str | None


async def stream(
    client: Any, body: dict[str, Any], name: str, begun: asyncio.Semaphore | None = None
) -> Reply:
    """Send one request, and read its events."""
    import json

    body = {"model": "adafuse", "max_tokens": TOKENS, "stream": True, **body}
    pieces: list[str] = []
    is_complete = False
    try:
        headers = {**HEADERS, "X-Request-ID": name}
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                return Reply("", 0, f"{answer.status_code}: {(await answer.aread()).decode()[:80]}")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    is_complete = True
                elif line.startswith("data: "):
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
                    if begun is not None and len(pieces) == 1:
                        begun.release()
    except httpx.HTTPError as error:
        return Reply("".join(pieces), len(pieces), f"{type(error).__name__}: {error}")
    return Reply("".join(pieces), len(pieces), None if is_complete else "ended early")


async def all_at_once(url: str, during: Callable[[], None] = lambda: None) -> list[Reply]:
    """Let all clients send their requests, and do something when eight of them have text."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        begun = asyncio.Semaphore(0)
        work = [
            asyncio.ensure_future(stream(client, {"prompt": prompt}, f"client-{number}", begun))
            for number, prompt in enumerate(PROMPTS)
        ]
        for _ in range(8):  # more than one replica decodes
            await begun.acquire()
        await asyncio.to_thread(during)
        return await asyncio.gather(*work)


def exported(name: str, **labels: str) -> dict[str, float]:
    """What all nodes of the cluster export, by replica."""
    import ray

    found: Counter[str] = Counter()
    for node in ray.nodes():
        if node["Alive"]:
            text = httpx.get(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics").text
            for family in prometheus.text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == name and labels.items() <= sample.labels.items():
                        found[sample.labels["replica"]] += sample.value
    return dict(found)


def test_r3_v15_each_node_has_a_replica(served):
    """The file of the deployment asks for it. A process has its name some time after its start."""
    wait_for(lambda: len({process.ppid() for process in served.replicas()}) == 2)


def test_many_clients_receive_the_texts_of_one_engine_in_parts(served, expected):
    replies = asyncio.run(all_at_once(served.url))
    assert [each.problem for each in replies] == [None] * CLIENTS
    assert [each.text for each in replies] == [expected[prompt] for prompt in PROMPTS]
    assert max(each.parts for each in replies) > 2


def test_ray_exports_the_metrics_of_both_replicas(served):
    requests = {"route": "/v1/completions", "outcome": "ok"}

    def completed() -> dict[str, float]:
        return exported("ray_adafuse_requests_total", **requests)

    wait_for(lambda: sum(completed().values()) == CLIENTS)
    counts = completed()
    assert len(counts) == 2, "both replicas had requests"
    wait_for(lambda: exported("ray_adafuse_ready") == dict.fromkeys(counts, 1))
    histogram = "ray_adafuse_request_seconds"
    wait_for(lambda: exported(f"{histogram}_bucket_total", le="+Inf") == counts)
    wait_for(lambda: exported(f"{histogram}_count_total") == counts)
    answer = httpx.get(f"{served.url}/metrics", headers=HEADERS)
    assert answer.status_code == 404


def test_parts_arrive_before_the_end(served):
    async def times() -> list[float]:
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
            body = {"model": "adafuse", "stream": True, **LONG}
            async with client.stream(
                "POST", "/v1/completions", json=body, headers=HEADERS
            ) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                return [time.monotonic() async for line in answer.aiter_lines() if line]

    arrived = asyncio.run(times())
    assert len(set(arrived)) > 5
    assert arrived[0] - arrived[-1] < -0.5


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer other"}])
def test_a_request_without_a_valid_key_is_refused(served, headers):
    answer = httpx.get(f"{served.url}/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_a_response_has_one_request_id(served):
    headers = {**HEADERS, "X-Request-ID": "my-request"}
    answer = httpx.get(f"{served.url}/v1/models", headers=headers)
    assert answer.headers.get_list("x-request-id") == ["my-request"]


def test_a_body_that_is_too_large_is_refused(served):
    answer = httpx.post(f"{served.url}/v1/completions", headers=HEADERS, content=b" " * 5_000_000)
    assert answer.status_code == 413


def test_a_remote_engine_gets_texts_and_rounds(served, engine):
    prompt = PROMPTS[1]
    local = engine.generate(prompt, max_new_tokens=TOKENS)
    with RemoteEngine(served.url, api_key=KEY) as remote:
        events = list(remote.stream(prompt, max_new_tokens=TOKENS))
        scores = remote.score("a", ["b", "c"])
    assert "".join(event.text for event in events) == local.text
    assert events[-1].generation is not None
    assert events[-1].generation.usage.completion_tokens == local.usage.completion_tokens
    rounds = [event.round for event in events if event.round is not None]
    assert [each.text for each in rounds] == [each.text for each in local.rounds]
    assert scores.texts == engine.score("a", ["b", "c"]).texts


def test_a_remote_engine_cancels_streams_of_all_replicas(served):
    with RemoteEngine(served.url, api_key=KEY) as remote:
        for _ in range(6):  # a request to cancel goes to any of the two replicas
            cancel = threading.Event()
            events = remote.stream("the mill", max_new_tokens=8000, cancel=cancel)
            next(events)
            cancel.set()
            *_, last = events
            assert last.generation is not None
            assert last.generation.finish_reason == "cancelled"


def test_a_client_that_leaves_cancels_its_decode(served):
    headers = {**HEADERS, "X-Request-ID": "leaver"}
    body = {"model": "adafuse", "stream": True, **ENDLESS}
    url = f"{served.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        next(answer.iter_lines())
    line = re.compile("request=leaver .* outcome=cancelled")
    wait_for(lambda: any(map(line.search, served.logs().values())), 20)
    wait_for(lambda: set(exported("ray_adafuse_requests_running").values()) == {0}, 30)


def test_requests_elsewhere_survive_the_death_of_a_replica(served, expected):
    before = {process.pid for process in served.replicas()}
    killed: list[int] = []

    def kill() -> None:
        killed.append(served.replicas()[0].pid)
        os.kill(killed[0], signal.SIGKILL)

    replies = asyncio.run(all_at_once(served.url, kill))
    lost = [number for number, each in enumerate(replies) if each.problem is not None]
    print("lost:", [replies[number] for number in lost])  # shown with -rP
    assert len(lost) <= MAX_ONGOING, "only requests of the killed replica are lost"
    for number, reply in enumerate(replies):
        text = expected[PROMPTS[number]]
        if number in lost:
            assert text.startswith(reply.text)
        else:
            assert reply.text == text
    wait_for(lambda: {each.pid for each in served.replicas()} - before and served.is_healthy(2))
    assert killed[0] not in {each.pid for each in served.replicas()}
    replies = asyncio.run(all_at_once(served.url))
    assert [each.text for each in replies] == [expected[prompt] for prompt in PROMPTS]


def test_streams_end_before_their_replica_stops(served, engine):
    text = engine.generate(LONG["prompt"], max_new_tokens=LONG["max_tokens"]).text

    async def run() -> list[Reply]:
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
            work = [asyncio.ensure_future(stream(client, LONG, f"last-{n}")) for n in range(6)]
            await asyncio.sleep(0.5)
            await asyncio.to_thread(served.deploy, 1)
            return await asyncio.gather(*work)

    replies = asyncio.run(run())
    assert [each.problem for each in replies] == [None] * len(replies)
    assert {each.text for each in replies} == {text}
    wait_for(lambda: served.is_healthy(1))
    wait_for(lambda: len(served.replicas()) == 1)


def test_problems_of_the_configuration_are_the_last_line_of_a_message(served):
    from ray import serve

    def last_line(status: Any) -> str:
        return str(status.message).strip().rpartition("\n")[2]

    served.deploy(2, "missing.yaml")
    wait_for(lambda: serve.status().applications["adafuse"].status == "DEPLOY_FAILED")
    line = last_line(serve.status().applications["adafuse"])
    assert re.search("InvalidInputError: .*missing.yaml: No such file or directory", line)

    (served.folder / "lost.yaml").write_text(f"models: [{served.folder}/nothing]\n")
    served.deploy(2, "lost.yaml")
    wait_for(lambda: "LoadError" in served.deployment().message)
    line = last_line(served.deployment())
    assert line.startswith("adafuse_llm.errors.LoadError: ")
    assert f"{served.folder}/nothing" in line
    answer = httpx.get(f"{served.url}/v1/models", headers=HEADERS, timeout=60)
    assert answer.status_code == 200, "older replicas go on"


@pytest.mark.parametrize(
    ("args", "kind", "says"),
    [
        ({"confg": "x"}, InvalidOptionError, "unknown option 'confg'"),
        ({"config": "/nowhere.yaml"}, InvalidInputError, "/nowhere.yaml: No such file"),
    ],
)
def test_an_argument_that_cannot_be_used_is_one_error(args, kind, says):
    from adafuse_llm.ray.serve import app

    with pytest.raises(kind, match=says) as caught:
        app(args)
    assert len(str(caught.value).splitlines()) == 1
