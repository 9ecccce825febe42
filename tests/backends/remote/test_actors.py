"""Members in Ray actors on several nodes: results, lost actors and nodes, placement and ends."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.llms.adafuse import AdaFuseLLM as LlamaIndexLLM

from adafuse_llm import (
    AdaFuseEngine,
    LoadError,
    MemberError,
    MemberSpec,
    MemberUnavailableError,
    RequestTimeoutError,
    RuntimeConfig,
)
from adafuse_llm.embedded import heldout_questions, member_paths
from adafuse_llm.errors import EngineClosedError
from tests.support.forks import in_child
from tests.support.gguf_files import embedded_gguf
from tests.support.paths import ROOT
from tests.support.ray_cluster import Nodes

pytestmark = pytest.mark.ray

TIMES: Any = {"rounds": {"__all__": {"elapsed"}}}
WREN, HERON, FINCH = (str(path) for path in member_paths())
PATIENCE = 25.0
"""Seconds for a lost node to come back."""

LONG = "The ferry to Orrin"
PROMPTS = ["What does the mill cost?", "def f(x):\n    ", "🙂 你好，世界", "\n", "a " * 400]
QUESTIONS = [[{"role": "user", "content": q.question}] for q in heldout_questions()[:200:100]]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A cluster with the nodes ``north`` and ``south``."""
    cluster = Nodes("north", "south")
    yield cluster
    cluster.close()


def on(node: str, path: str, **options: Any) -> MemberSpec:
    return MemberSpec(path, ray={"num_cpus": 0.5, "resources": {node: 1}, **options})


@pytest.fixture(scope="module")
def apart(nodes: Nodes) -> Iterator[AdaFuseEngine]:
    """Two members on different nodes."""
    specs = [
        on("north", WREN, address=nodes.address),
        on("south", FINCH, placement_timeout=PATIENCE, call_timeout=20),
    ]
    with AdaFuseEngine.from_pretrained(specs) as engine:
        yield engine


@pytest.fixture(scope="module")
def together() -> Iterator[AdaFuseEngine]:
    """The same members in this process."""
    with AdaFuseEngine.from_pretrained([WREN, FINCH]) as engine:
        yield engine


def process_of(member: Any) -> int:
    return int(member.host.split()[1])


@pytest.mark.parametrize("drafting", [False, True])
def test_members_on_nodes_decode_as_members_of_this_process(
    apart: AdaFuseEngine, together: AdaFuseEngine, drafting: bool
) -> None:
    runtime = RuntimeConfig(drafting=drafting)
    engines = [AdaFuseEngine(each.backends, runtime=runtime) for each in (apart, together)]
    for engine in engines:
        for backend in engine.backends:
            backend.clear_prefix_cache()  # type: ignore[attr-defined]
    inputs: list[dict[str, Any]] = [
        *({"messages": messages} for messages in QUESTIONS),
        *({"prompt": prompt} for prompt in PROMPTS),
    ]
    for each in inputs:
        got, want = (engine.generate(**each, max_new_tokens=16) for engine in engines)
        assert got.text == want.text
        if not drafting:
            assert got.model_dump(exclude=TIMES) == want.model_dump(exclude=TIMES)


def test_draws_grammars_and_scores_are_those_of_members_of_this_process(
    apart: AdaFuseEngine, together: AdaFuseEngine
) -> None:
    options: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 5, "top_p": 0.9, "n": 2},
        {"regex": "(yes|no), (1|2|3)+"},
        {"logprobs": True, "top_logprobs": 3},
        {"choices": ["red", "green", "blue"]},
    ]
    for each in options:
        got, want = (
            engine.generate(LONG, max_new_tokens=8, **each) for engine in (apart, together)
        )
        assert got.text == want.text
        assert [set(r.logprobs) for r in got.rounds] == [set(r.logprobs) for r in want.rounds]
        assert [a.text for a in got.alternatives] == [a.text for a in want.alternatives]


def test_eight_threads_get_the_same_texts_as_one(apart: AdaFuseEngine) -> None:
    prompts = [f"What is {n} + 7?" for n in range(8)]
    alone = [apart.generate(prompt, max_new_tokens=8).text for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(lambda p: apart.generate(p, max_new_tokens=8).text, prompts))
    assert crowd == alone


def test_a_framework_uses_members_on_nodes(nodes: Nodes, together: AdaFuseEngine) -> None:
    described: Any = [{"path": WREN, "ray": {"num_cpus": 0.2, "resources": {"north": 1}}}, FINCH]
    llm = LlamaIndexLLM(members=described, max_new_tokens=8)
    here = LlamaIndexLLM(engine=together, max_new_tokens=8)
    with llm.engine:
        assert llm.complete("What is 3 + 4?").text == here.complete("What is 3 + 4?").text


def test_a_killed_actor_is_replaced_within_the_request(apart: AdaFuseEngine, caplog: Any) -> None:
    want = apart.generate(LONG, max_new_tokens=40).text
    victim = process_of(apart.backends[1])
    stream = apart.stream(LONG, max_new_tokens=40)
    next(stream)
    os.kill(victim, signal.SIGKILL)
    *_, last = stream
    assert last.generation is not None
    assert last.generation.text == want
    assert process_of(apart.backends[1]) != victim
    assert apart.backends[1].restarts == 1  # type: ignore[attr-defined]
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert f"member 'finch': its actor {victim} on 127.0.0.1 was lost" in record.getMessage()
    assert "The member is started again" in record.getMessage()


def test_a_request_ends_on_time_while_its_actor_hangs(apart: AdaFuseEngine) -> None:
    want = apart.generate(LONG, max_new_tokens=12).text
    victim = process_of(apart.backends[1])
    os.kill(victim, signal.SIGSTOP)
    with pytest.raises(RequestTimeoutError):
        apart.generate(LONG, max_new_tokens=12, timeout=0.5)
    os.kill(victim, signal.SIGCONT)
    assert apart.generate(LONG, max_new_tokens=12).text == want
    assert process_of(apart.backends[1]) == victim


def test_a_lost_node_that_comes_back_costs_time_only(
    nodes: Nodes, apart: AdaFuseEngine, caplog: Any
) -> None:
    want = apart.generate(LONG, max_new_tokens=40).text
    stream = apart.stream(LONG, max_new_tokens=40)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, stream)
        nodes.lose("south")
        time.sleep(2)
        nodes.add("south")
        *_, last = rest.result(2 * PATIENCE)
    assert last.generation is not None
    assert last.generation.text == want
    assert "member 'finch': its actor" in caplog.text


def test_a_node_that_is_lost_for_good_fails_only_requests_that_need_it(
    nodes: Nodes, apart: AdaFuseEngine
) -> None:
    alone = apart.generate(LONG, max_new_tokens=60, use=["wren"]).text
    both = apart.generate(LONG, max_new_tokens=24).text
    stream = apart.stream(LONG, max_new_tokens=40)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        unharmed = pool.submit(apart.generate, LONG, max_new_tokens=60, use=["wren"])
        nodes.lose("south")
        began = time.monotonic()
        with pytest.raises(MemberUnavailableError, match=r"'finch' failed: it could.*south"):
            for _ in stream:
                pass
        assert (
            time.monotonic() - began < PATIENCE + 5
        )  # the time limit, and the loss must be noticed
        assert unharmed.result(5).text == alone
    began = time.monotonic()
    with pytest.raises(MemberUnavailableError, match="'finch' failed"):
        apart.generate(LONG)
    assert time.monotonic() - began < 7  # it does not wait for the whole time again
    assert apart.generate(LONG, max_new_tokens=60, use=["wren"]).text == alone
    nodes.add("south")
    assert apart.generate(LONG, max_new_tokens=24).text == both


def test_a_forked_process_cannot_use_the_actors_of_its_parent(apart: AdaFuseEngine) -> None:
    def task() -> bool:
        with pytest.raises(MemberError, match="a forked process cannot use it"):
            apart.generate(LONG, max_new_tokens=2)
        return True

    assert in_child(task)
    assert apart.generate(LONG, max_new_tokens=2).text


def test_closing_an_engine_frees_what_its_members_had(nodes: Nodes, apart: AdaFuseEngine) -> None:
    """The last test with these members."""
    apart.close()
    assert free("south") == 10
    with pytest.raises(EngineClosedError):
        apart.generate("x")


def free(resource: str, seconds: float = 10.0, amount: float = 10.0) -> float:
    """What is free of a resource, as soon as it is `amount`."""
    import ray

    deadline = time.monotonic() + seconds
    while (left := ray.available_resources().get(resource, 0)) != amount:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return float(left)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            MemberSpec(WREN, ray={"num_gpus": 2, "placement_timeout": 2}),
            r"did not find a machine within 2 seconds for 'wren' \(1 CPU, 2 GPU\). No machine has "
            r"so much. .*127.0.0.1 has 1 CPU, 0 GPU",
        ),
        (
            MemberSpec(WREN, ray={"num_cpus": 1, "resources": {"west": 1}, "placement_timeout": 2}),
            r"'wren' \(1 CPU, 1 west\)\. No machine has so much",
        ),
        (
            MemberSpec("/no/such/folder", ray={"resources": {"north": 1}}),
            "'folder'.*the folder does not exist",
        ),
        (
            MemberSpec(str(ROOT / "docs"), name="x", ray={"resources": {"north": 1}}),
            r"'x' .*is not a model folder",
        ),
    ],
)
def test_a_member_that_cannot_be_loaded_is_an_error_that_says_what_to_do(
    nodes: Nodes, spec: MemberSpec, message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        AdaFuseEngine.from_pretrained([FINCH, spec])
    assert free("north") == 10


def test_what_runs_already_is_named_if_a_member_finds_no_room(nodes: Nodes) -> None:
    specs = [MemberSpec(FINCH, ray={"num_cpus": 1, "placement_timeout": 2}) for _ in range(3)]
    with pytest.raises(LoadError, match="Together with what runs already, this does not fit"):
        AdaFuseEngine.from_pretrained(specs)
    assert free("CPU", amount=2.0) == 2.0


def test_an_engine_that_nobody_needs_frees_what_its_members_had(nodes: Nodes) -> None:
    engine = AdaFuseEngine.from_pretrained([on("north", FINCH)])
    assert free("north", amount=9.0) == 9
    del engine
    gc.collect()
    deadline = time.monotonic() + 30
    while free("north", 0.1) != 10 and time.monotonic() < deadline:
        gc.collect()  # once the engine's threads have ended
    assert free("north", 0) == 10


def test_a_second_cluster_and_one_without_authentication_are_refused(
    nodes: Nodes, monkeypatch: Any
) -> None:
    with pytest.raises(LoadError, match=r"is connected to the Ray cluster at .* already"):
        AdaFuseEngine.from_pretrained([MemberSpec(WREN, ray={"address": "127.0.0.1:1"})])
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(LoadError, match="the Ray cluster has no authentication"):
        AdaFuseEngine.from_pretrained([MemberSpec(WREN, ray={})])


def test_a_gguf_member_runs_in_an_actor(nodes: Nodes) -> None:
    path = embedded_gguf("wren")
    with AdaFuseEngine.from_pretrained([MemberSpec(str(path), threads=1)]) as here:
        want = here.generate(LONG, max_new_tokens=16)
    with AdaFuseEngine.from_pretrained([on("south", str(path))]) as there:
        assert there.generate(LONG, max_new_tokens=16).text == want.text
