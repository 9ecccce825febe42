"""Members in real processes: results, deaths, faults and ends of processes."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from llama_index.llms.adafuse import AdaFuseLLM as LlamaIndexLLM

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    InvalidOptionError,
    LoadError,
    MemberError,
    MemberSpec,
    RequestTimeoutError,
    RuntimeConfig,
    UnsupportedModelError,
)
from adafuse_llm.backends import NodeQuery, TokenTree
from adafuse_llm.backends.remote import processes
from adafuse_llm.embedded import heldout_questions, member_paths
from adafuse_llm.errors import EngineClosedError, MemberOutOfMemoryError
from adafuse_llm.loading import members
from adafuse_llm.loading.processes import share_of_threads
from adafuse_llm.runtime import scheduler
from langchain_adafuse import ChatAdaFuse
from tests.support.forks import in_child
from tests.support.paths import ROOT
from tests.support.remote import (
    aborting,
    dying,
    fake,
    killable,
    process_member,
    process_of,
    unloadable,
    unsupported,
)

TIMES: Any = {"rounds": {"__all__": {"elapsed"}}}
PATIENCE = 30.0
WREN, _, FINCH = (str(path) for path in member_paths())


def gone(pid: int, seconds: float = PATIENCE) -> bool:
    """Whether a process ends in time."""
    deadline = time.monotonic() + seconds
    while _runs(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# Embedded members -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def apart() -> Iterator[AdaFuseEngine]:
    """Two embedded members, each in a process of its own."""
    with AdaFuseEngine.from_pretrained(
        [MemberSpec(WREN, process=True), {"path": FINCH, "process": True}]  # type: ignore[list-item]
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def together() -> Iterator[AdaFuseEngine]:
    """The same members in this process."""
    with AdaFuseEngine.from_pretrained([WREN, FINCH]) as engine:
        yield engine


LONG = "The ferry to Orrin"
QUESTIONS = [[{"role": "user", "content": q.question}] for q in heldout_questions()[:400:100]]


@pytest.mark.parametrize("drafting", [False, True])
def test_members_in_processes_decode_as_members_of_this_process(
    apart: AdaFuseEngine, together: AdaFuseEngine, drafting: bool
) -> None:
    runtime = RuntimeConfig(drafting=drafting)
    engines = [AdaFuseEngine(each.backends, runtime=runtime) for each in (apart, together)]
    for engine in engines:  # so that no rows of other tests are cached
        for backend in engine.backends:
            backend.clear_prefix_cache()  # type: ignore[attr-defined]
    for messages in QUESTIONS:
        got, want = (engine.generate(messages=messages, max_new_tokens=24) for engine in engines)
        assert got.text == want.text
        if not drafting:
            assert got.model_dump(exclude=TIMES) == want.model_dump(exclude=TIMES)
    for engine in engines:
        engine.close()  # does not close members that it did not load
    assert all(psutil.pid_exists(process_of(backend)) for backend in apart.backends)


def test_draws_and_grammars_are_those_of_members_of_this_process(
    apart: AdaFuseEngine, together: AdaFuseEngine
) -> None:
    options: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 5, "top_p": 0.9},
        {"regex": "(yes|no), (1|2|3)+"},
    ]
    for each in options:
        texts = [
            engine.generate("The ferry to Orrin", max_new_tokens=8, **each).text
            for engine in (apart, together)
        ]
        assert texts[0] == texts[1]


def test_eight_threads_get_the_same_texts_as_one(apart: AdaFuseEngine) -> None:
    prompts = [f"What is {n} + 7?" for n in range(8)]
    alone = [apart.generate(prompt, max_new_tokens=8).text for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(lambda p: apart.generate(p, max_new_tokens=8).text, prompts))
    assert crowd == alone


def test_a_killed_process_is_replaced_within_the_request(apart: AdaFuseEngine, caplog: Any) -> None:
    want = apart.generate(LONG, max_new_tokens=40).text
    victim = process_of(apart.backends[1])
    stream = apart.stream(LONG, max_new_tokens=40)
    next(stream)
    os.kill(victim, signal.SIGKILL)
    *_, last = stream
    assert last.generation is not None
    assert last.generation.text == want
    assert process_of(apart.backends[1]) != victim
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.getMessage() == (
        f"member 'finch': its process {victim} was ended by signal SIGKILL, perhaps because the "
        "machine ran out of memory. The member is started again"
    )


def test_an_engine_is_usable_after_an_interrupted_stream(apart: AdaFuseEngine) -> None:
    pids = [process_of(backend) for backend in apart.backends]
    for pid in pids:
        os.kill(pid, signal.SIGINT)  # a terminal sends it to all processes
    with pytest.raises(KeyboardInterrupt):
        for _ in apart.stream(LONG):
            raise KeyboardInterrupt
    assert apart.generate(messages=QUESTIONS[0], max_new_tokens=8).text
    assert [process_of(backend) for backend in apart.backends] == pids


def test_closing_an_engine_ends_the_processes_that_it_started(apart: AdaFuseEngine) -> None:
    """The last test with these members."""
    pids = [process_of(backend) for backend in apart.backends]
    apart.close()
    assert all(gone(pid, 0.5) for pid in pids)
    with pytest.raises(EngineClosedError):
        apart.generate("x")


@pytest.mark.parametrize("process", [False, True])
def test_a_missing_model_is_an_error_before_a_process_starts(process: bool) -> None:
    with pytest.raises(LoadError, match="the folder does not exist"):
        AdaFuseEngine.from_pretrained([MemberSpec("no/such/folder", process=process)])
    assert not psutil.Process().children(recursive=True)


# Fakes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def member(tmp_path_factory: Any) -> Iterator[Any]:
    """A fake in a process, which does what the files in its folder say."""
    folder = tmp_path_factory.mktemp("faults")
    made: Any = process_member(killable, str(folder))
    made.folder = folder
    yield made
    made.close()


def ask(member: Any) -> Any:
    tree = TokenTree([1, 2, 3])
    return member.evaluate([NodeQuery(tree, (tree.root,), (), 3)])


def test_r16_a_process_that_dies_in_every_pass_fails_the_request_only(member: Any) -> None:
    (member.folder / "die").touch()
    with AdaFuseEngine([member]) as engine:
        with pytest.raises(MemberError, match=r"ended by signal SIGKILL, perhaps.*started again"):
            engine.generate(" a", max_new_tokens=2)
        (member.folder / "die").unlink()
        assert engine.generate(" a", max_new_tokens=2).text


def test_a_process_that_exits_is_started_again(member: Any, caplog: Any) -> None:
    (member.folder / "exit").touch()
    assert ask(member) == ask(fake())
    assert "ended with exit code 3, and standard error may show the cause" in caplog.text
    assert "The member is started again" in caplog.text


def test_an_error_in_the_process_has_its_type_and_shows_where_it_was_raised(member: Any) -> None:
    (member.folder / "fail").touch()
    with pytest.raises(MemberOutOfMemoryError, match=r"out of memory .MemoryError: no room") as got:
        ask(member)
    (member.folder / "fail").unlink()
    assert "in evaluate" in str(got.value.__cause__)
    assert ask(member) == ask(fake())


def test_a_request_ends_on_time_while_its_process_hangs(member: Any) -> None:
    (member.folder / "hang").touch()
    with AdaFuseEngine([member]) as engine:
        with pytest.raises(RequestTimeoutError):
            engine.generate(" a", timeout=0.2)
        assert member.free_bytes() > 0  # answered during the pass
        (member.folder / "hang").unlink()
        assert engine.generate(" a", max_new_tokens=2).text


def test_a_forked_child_starts_a_process_of_its_own(member: Any) -> None:
    want, parent = ask(member), process_of(member)

    def task() -> bool:
        same = ask(member) == want and process_of(member) != parent
        member.close()
        return same

    assert in_child(task)
    assert process_of(member) == parent
    assert ask(member) == want


def test_closing_ends_a_call_that_waits_for_a_process_that_is_stopped(
    member: Any, monkeypatch: Any
) -> None:
    """The last test with this member."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.2)
    pid = process_of(member)
    os.kill(pid, signal.SIGSTOP)  # it cannot end by itself
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, member)
        time.sleep(0.1)
        member.close()
        with pytest.raises(MemberError, match="'fake' failed: it was closed"):
            waiting.result(PATIENCE)
    assert gone(pid)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (unloadable, LoadError, "member 'fake' cannot be loaded: RuntimeError: no such model"),
        (unsupported, UnsupportedModelError, "^no causal model$"),
        (dying, LoadError, "member 'fake' cannot be loaded: its process .* with exit code 5"),
        (aborting, LoadError, "ended by signal SIGABRT, and standard error may show the cause"),
    ],
)
def test_a_process_that_cannot_load_its_member_is_a_load_error(
    make: Any, kind: type[LoadError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        process_member(make)


SCRIPT = """
import sys
from tests.support.remote import ask_process
print("pid", ask_process(), flush=True)
sys.stdin.readline()
"""


def test_a_script_without_a_guard_starts_a_process_that_ends_when_the_script_is_killed(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as running:
        assert running.stdout is not None
        word, pid = running.stdout.readline().split()  # the noise of the process is not here
        assert word == "pid"
        running.send_signal(signal.SIGKILL)
    assert gone(int(pid), 2.0)


def test_an_engine_that_nobody_needs_ends_the_processes_of_its_members(monkeypatch: Any) -> None:
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 0.01)
    engine = AdaFuseEngine([process_member(fake)])
    engine.generate(" a", max_new_tokens=2)
    pid = process_of(engine.backends[0])
    del engine
    deadline = time.monotonic() + PATIENCE
    while not gone(pid, 0.1) and time.monotonic() < deadline:
        gc.collect()  # once the engine's threads have ended
    assert gone(pid, 0)


def test_an_engine_that_cannot_be_made_ends_the_processes_of_its_members(monkeypatch: Any) -> None:
    made = process_member(fake)
    monkeypatch.setattr(members, "load_members", lambda *args, **options: ([made], None))
    with pytest.raises(InvalidOptionError, match="no such member"):
        AdaFuseEngine.from_pretrained(["x"], config=AdaFuseConfig(use=["no such member"]))
    assert gone(process_of(made), 0.5)


def test_members_in_processes_can_be_described_to_the_frameworks() -> None:
    described: Any = [{"path": WREN, "process": True, "threads": 1}]
    for model in (ChatAdaFuse(members=described), LlamaIndexLLM(members=described)):
        assert model._ensemble.members == (MemberSpec(WREN, process=True, threads=1),)


@pytest.mark.quick
def test_members_share_the_cores() -> None:
    cores = share_of_threads(1)
    assert cores >= 1
    assert share_of_threads(cores) == 1
    assert share_of_threads(2 * cores) == 1
    assert share_of_threads(0) == cores
