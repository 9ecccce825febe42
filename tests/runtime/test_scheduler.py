"""The scheduler: batches, order, memory, devices, failures and forks."""

import contextlib
import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    CacheMemoryError,
    EngineClosedError,
    InvalidInputError,
    MemberError,
    QueueFullError,
    Request,
    RequestCancelledError,
    RequestTimeoutError,
    RuntimeConfig,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.config import DecodeOptions
from adafuse_llm.runtime import scheduler
from adafuse_llm.runtime.budget import CacheBudget
from tests.support.waiting import PATIENCE, background, in_child, wait_until


def counting(text: str) -> dict[str, float]:
    """Write one dot after another, without end."""
    return {" .": 0.9, END: 0.1}


class Watched(FakeBackend):
    """A backend that records its evaluations, can call a function before each, and needs memory."""

    def __init__(
        self,
        name,
        rule=counting,
        before=lambda queries: None,
        bytes_per_token=0,
        free=2**30,
        **options,
    ):
        super().__init__(name, rule, **options)
        self.before = before
        self.bytes_per_token, self.free = bytes_per_token, free
        self.sizes = []
        self.order = []
        self.threads = set()
        self.live = set()

    def evaluate(self, queries):
        self.sizes.append(len(queries))
        self.threads.add(threading.current_thread())
        for query in queries:
            if id(query.tree) not in self.live:
                self.live.add(id(query.tree))
                self.order.append(self.codec.decode(query.tree.ids))
        self.before(queries)
        return super().evaluate(queries)

    def release(self, tree):
        self.threads.add(threading.current_thread())
        self.live.discard(id(tree))

    def cache_bytes(self, tokens):
        return tokens * self.bytes_per_token

    def free_bytes(self):
        return self.free


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_engine_that_has_written_writes_in_a_forked_child():
    with AdaFuseEngine([Watched("m")]) as engine:
        text = engine.generate("a:", max_new_tokens=3).text
        assert in_child(lambda: engine.generate("a:", max_new_tokens=3).text == text)


# Batches --------------------------------------------------------------------------------------


def test_a_batch_of_scores_shares_passes_and_equals_single_scores():
    member = Watched("m", vocabulary=[" ."])
    requests = [Request(prompt=prompt, texts=[" .", " . ."]) for prompt in ("x", "yes", "no no")]
    with AdaFuseEngine([member]) as engine:
        alone = [engine.open([each]).results()[0] for each in requests]
        member.sizes.clear()
        assert engine.open(requests).results() == alone
        assert member.sizes == [3]
        with pytest.raises(InvalidInputError, match="input 1 of the batch"):
            engine.open([requests[0], Request(prompt="x", texts=[""])])


def test_the_oldest_query_is_next_with_all_others_to_its_member():
    none: Any = None

    def pending(name: str) -> scheduler.PendingQuery:
        asked: Any = SimpleNamespace(member=SimpleNamespace(name=name))
        return scheduler.PendingQuery(none, asked)

    lane = scheduler._Lane("cpu")
    b1, a1, a2, b2 = lane.waiting = [pending(name) for name in "baab"]
    assert lane.next_batch() == [b1, b2]
    assert lane.waiting == [a1, a2]
    assert lane.next_batch() == [a1, a2]
    assert not lane.waiting


# Prompts in pieces ----------------------------------------------------------------------------


class Reading(FakeBackend):
    """A backend that reads 10 characters of a prompt in a piece, and records its passes.

    A pass is recorded as the first character of its prompt, in capitals if it reads a piece.
    """

    def __init__(self, before=lambda log: None, **options):
        super().__init__("m", counting, **options)
        self.log, self.before = "", before

    def read_piece(self, trees):
        for tree in trees:
            tree.state = tree.state or 0
        reading = [tree for tree in trees if len(tree.ids) - tree.state > 10]
        for tree in reading:
            self.record(tree, str.upper)
            tree.state += 10
        return [tree not in reading for tree in trees]

    def evaluate(self, queries):
        for query in queries:
            assert len(query.tree.ids) - query.tree.state <= 10
            self.record(query.tree, str.lower)
            query.tree.state = len(query.tree.ids)
        return super().evaluate(queries)

    def record(self, tree, case):
        self.log += case(self.codec.decode(tree.ids[:1]))
        self.before(self.log)

    def release(self, tree):
        tree.state = None


def test_passes_of_other_requests_come_between_the_pieces_of_a_prompt():
    member = Reading()
    with AdaFuseEngine([member]) as engine:
        running = engine.stream("r", max_new_tokens=2000)
        next(running)
        long = background(engine.generate, "l" * 105, max_new_tokens=2)
        list(running)
        assert long.result(PATIENCE).text == " . ."
    assert member.log.count("L") == 10
    between = member.log.split("L")[1:-1]
    assert {len(passes) for passes in between} == {scheduler.READ_PATIENCE + 1}, member.log


def test_a_prompt_is_read_while_a_member_on_another_device_computes():
    is_read = threading.Event()
    busy = Watched("busy", before=lambda queries: is_read.wait(PATIENCE), device="one")
    with AdaFuseEngine([busy, Reading(device="two")]) as engine:
        writing = background(engine.generate, "r", max_new_tokens=2, use=["busy"])
        wait_until(lambda: busy.sizes)
        long = background(engine.generate, "l" * 105, max_new_tokens=2, use=["m"])
        assert long.result(PATIENCE).text == " . ."
        assert not writing.done()
        is_read.set()


@pytest.fixture
def pass_a_minute(monkeypatch):
    now = time.monotonic
    return lambda: monkeypatch.setattr(time, "monotonic", lambda: now() + 60)


@pytest.mark.parametrize("how", ["cancelled", "late", "abandoned", "closed"])
def test_a_request_that_ends_reads_no_further_piece(how, pass_a_minute):
    three, gate = threading.Event(), threading.Event()

    def before(log):
        if log.endswith("LLL") and not three.is_set():
            three.set()
            gate.wait(PATIENCE)

    member, cancel = Reading(before), threading.Event()
    with AdaFuseEngine([member]) as engine:
        options: Any = {"timeout": 60} if how == "late" else {"cancel": cancel}
        run = engine.open([Request(prompt="l" * 500, **options)])
        long = background(run.results)
        assert three.wait(PATIENCE)
        end: Any = {"cancelled": cancel.set, "abandoned": run.close, "late": pass_a_minute}
        end.get(how, lambda: engine.close(0))()
        if how == "cancelled":
            assert long.result(PATIENCE)[0].finish_reason == "cancelled"
        else:
            with pytest.raises((RequestTimeoutError, RequestCancelledError, EngineClosedError)):
                long.result(PATIENCE)
        gate.set()
        if how != "closed":
            assert engine.generate("r", max_new_tokens=1).text == " ."
    assert member.log.count("L") == 3


def test_an_error_in_a_piece_ends_its_request_alone():
    def before(log):
        if log.endswith("B"):
            raise ValueError("no room")

    with AdaFuseEngine([Reading(before)]) as engine:
        good, bad = (background(engine.generate, c * 55, max_new_tokens=2) for c in "gb")
        with pytest.raises(MemberError, match=r"'m'.*no room"):
            bad.result(PATIENCE)
        assert good.result(PATIENCE).text == " . ."


# Memory ---------------------------------------------------------------------------------------

FEW: DecodeOptions = {
    "max_words": 1,
    "branching_factor": 1,
    "max_word_tokens": 1,
    "max_new_tokens": 7,
}
"""With these a request of one prompt token needs 9 tokens at a member alone, 10 at each of two."""


@pytest.mark.quick
def test_requests_start_in_order_of_arrival_within_the_memory_limit():
    """With 20 bytes, two short requests run at the same time. The long request waits until no other
    request runs, and the later ones wait behind it.
    """
    most = 0

    def before(queries):
        nonlocal most
        sizes = [len(query.tree.ids) for query in queries]
        most = max(most, len(sizes))
        assert len(sizes) == 1 or max(sizes) < 12

    prompts = ["a", "b", "long" * 3, "c", "d"]
    member = Watched("dots", before=before, bytes_per_token=1)
    with AdaFuseEngine([member], runtime=RuntimeConfig(cache_bytes=20)) as engine:
        results = engine.generate_batch(prompts, **FEW)
    assert [result.text for result in results] == [" ." * 7] * 5
    assert member.order == prompts
    assert most == 2


@pytest.mark.quick
def test_a_request_that_does_not_fit_is_an_error_before_anything_is_computed():
    members = [
        Watched("small", bytes_per_token=1, device="cuda:0"),
        Watched("large", bytes_per_token=50, device="cuda:1"),
    ]
    with AdaFuseEngine(members, runtime=RuntimeConfig(cache_bytes=499)) as engine:
        for call in (engine.generate, engine.stream):
            with pytest.raises(CacheMemoryError) as caught:
                call("x", **FEW)
        for part in ("500 bytes", "'cuda:1'", "499", "prompt", "max_new_tokens (7)", "cache_bytes"):
            assert part in str(caught.value)
        with pytest.raises(CacheMemoryError):
            engine.generate_batch(["x"] * 3, **FEW)
        assert not members[0].sizes
        fewer: DecodeOptions = {**FEW, "max_new_tokens": 6}
        assert engine.generate("x", **fewer).text == " ." * 6


def test_the_default_limit_counts_what_running_requests_may_hold():
    member = Watched("dots", bytes_per_token=1, free=20)
    budget = CacheBudget(None)
    (members,) = AdaFuseEngine([member])._encoder.members(
        Request(prompt="x").checked(AdaFuseConfig()), [(member, 1.0)], 5
    )

    def limit(free: int, *running: int) -> int:
        member.free = free
        with contextlib.suppress(CacheMemoryError):
            budget.needs(members, 256, 0, [{"cpu": each} for each in running])
        return budget.use(())["cpu"][1]

    assert limit(1000) == 500
    assert limit(700, 200, 100) == 500  # they may hold 300
    assert limit(500, 200, 100) == 400  # another process holds more
    assert limit(1200, 200, 100) == 600
    assert limit(600) == 300
    assert budget.fits([{"cpu": 200}], elsewhere=[{"cpu": 100}])
    assert not budget.fits([{"cpu": 200}], elsewhere=[{"cpu": 101}])


@pytest.mark.parametrize("runtime", [RuntimeConfig(cache_bytes=600), RuntimeConfig()])
def test_only_a_limit_that_nobody_set_becomes_smaller_where_memory_is_short(runtime):
    member = Watched("dots", bytes_per_token=1, free=1200)
    with AdaFuseEngine([member], runtime=runtime) as engine:
        whole: DecodeOptions = {**FEW, "max_new_tokens": -1}
        fixed: DecodeOptions = {**FEW, "max_new_tokens": 2048}
        assert engine.generate("x", **whole).usage.completion_tokens["dots"] > 256
        with pytest.raises(CacheMemoryError):
            engine.generate("x", **fixed)


def test_a_request_needs_no_more_than_the_context_window_and_its_branches():
    member = Watched("dots", context_window=8, bytes_per_token=1)
    options: DecodeOptions = {**FEW, "max_new_tokens": 100}
    with AdaFuseEngine([member], runtime=RuntimeConfig(cache_bytes=9)) as engine:
        assert engine.generate("x", **options).finish_reason == "length"
    with (
        AdaFuseEngine([member], runtime=RuntimeConfig(cache_bytes=8)) as engine,
        pytest.raises(CacheMemoryError, match="needs 9 bytes"),
    ):
        engine.generate("x", **options)


# Devices --------------------------------------------------------------------------------------


def adafuse_threads():
    return {each for each in threading.enumerate() if each.name.startswith("adafuse")}


class Beside(Watched):
    """A backend with a lane of its own."""

    lane = property(lambda self: f"member {self.name}")


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "device"), [(Watched, "cuda:1"), (Beside, "cuda:0")])
def test_members_of_different_lanes_run_at_the_same_time(kind, device):
    both = threading.Barrier(2)

    def meet(queries):
        if any(not query.tree.root.next for query in queries):  # the pass that reads the prompt
            both.wait(PATIENCE)

    members = [kind("a", before=meet, device="cuda:0"), kind("b", before=meet, device=device)]
    with AdaFuseEngine(members, strategy="adafuse") as engine:
        assert engine.generate("x", max_words=1, max_new_tokens=1).text == " ."


def test_a_member_with_threads_of_its_own_proposes_in_turn_with_others_on_its_device():
    def passes(*members):
        with AdaFuseEngine(members, strategy="adafuse") as engine:
            engine.generate("x", max_new_tokens=12)
        return sum(len(member.sizes) for member in members)

    in_turn = passes(Watched("a"), Watched("b"))
    assert passes(Watched("a"), Beside("b")) == in_turn
    assert passes(Beside("a"), Beside("b")) > in_turn  # none checks the other's words early


def test_members_of_one_device_take_turns_on_its_thread():
    inside = threading.Lock()

    def alone(queries):
        assert inside.acquire(blocking=False)
        time.sleep(0.001)
        inside.release()

    pair = [Watched(name, before=alone, device="cuda:0") for name in "ab"]
    other = Watched("c", device="cuda:1")
    with AdaFuseEngine([*pair, other]) as engine, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda prompt: engine.generate(prompt, max_new_tokens=6), "stuvwxyz"))
    threads = [each.threads for each in (*pair, other)]
    assert threads[0] == threads[1] != threads[2]
    names = [[thread.name for thread in each] for each in threads]
    assert names == [["adafuse cuda:0"]] * 2 + [["adafuse cuda:1"]]


def test_a_request_that_fails_on_one_device_is_released_when_the_other_finishes():
    gate, happened = threading.Event(), []

    def fail(queries):
        raise RuntimeError("boom")

    def late(queries):
        assert gate.wait(PATIENCE)
        happened.append("evaluated")

    a, b = Watched("a", before=fail, device="cuda:0"), Watched("b", before=late, device="cuda:1")
    b.release = lambda tree: happened.append("released")  # type: ignore[method-assign]
    with AdaFuseEngine([a, b], strategy="adafuse") as engine:
        with pytest.raises(MemberError, match="'a'"):
            engine.generate("x")
        gate.set()
        wait_until(lambda: happened == ["evaluated", "released"])


def test_closing_ends_requests_and_waits_for_the_threads_of_all_devices():
    before = adafuse_threads()
    members = [Hanging("a", device="cuda:0"), Hanging("b", device="cuda:1")]
    engine = AdaFuseEngine(members, strategy="adafuse")
    running = background(engine.generate, "hang")
    assert all(each.inside.wait(PATIENCE) for each in members)
    closing = background(engine.close)
    assert isinstance(running.exception(PATIENCE), EngineClosedError)
    for each in members:
        assert not closing.done()
        each.gate.set()
    closing.result(PATIENCE)
    assert adafuse_threads() <= before
    assert not any(each.live for each in members)


@pytest.mark.quick
def test_a_defect_of_the_scheduler_reaches_every_caller(monkeypatch):
    def defect(batch):
        raise ZeroDivisionError("a defect")

    members = [Watched(f"on {device}", device=device) for device in ("cpu", "cuda:0")]
    with AdaFuseEngine(members, runtime=RuntimeConfig(max_requests=1)) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(scheduler, "_evaluate_batch", defect)
            running = [background(engine.generate, prompt) for prompt in "xyz"]
            for each in running:
                assert isinstance(each.exception(PATIENCE), ZeroDivisionError)
        assert engine.generate("x", max_new_tokens=5).text


# Passes that hang -----------------------------------------------------------------------------


class Hanging(Watched):
    """A backend whose passes for prompts that begin with "hang" wait for `gate`."""

    def __init__(self, name, rule=counting, **options):
        super().__init__(name, rule, self.hang, **options)
        self.gate = threading.Event()
        self.inside = threading.Event()
        self.most = 0
        self._running = 0

    def hang(self, queries):
        self._running += 1
        self.most = max(self.most, self._running)
        if any(self.codec.decode(query.tree.ids).startswith("hang") for query in queries):
            self.inside.set()
            assert self.gate.wait(3 * PATIENCE)
        self._running -= 1


@pytest.fixture
def hanging():
    member = Hanging("stuck", device="cuda:0")
    yield member
    member.gate.set()


def test_a_timeout_counts_the_time_in_the_queue_but_not_before_a_stream_is_read(hanging):
    with AdaFuseEngine([hanging], runtime=RuntimeConfig(max_requests=1)) as engine:
        background(engine.generate, "hang", max_new_tokens=1)
        assert hanging.inside.wait(PATIENCE)
        with pytest.raises(RequestTimeoutError, match="before it could start"):
            engine.generate("y", timeout=0.1)
        stream = engine.stream("y", timeout=1, max_new_tokens=2)
        time.sleep(1.1)
        hanging.gate.set()
        assert list(stream)[-1].generation is not None


@pytest.mark.quick
def test_closing_with_a_timeout_names_the_members_that_still_run(hanging, caplog):
    engine = AdaFuseEngine([hanging, Watched("dots", device="cuda:1")])
    running = background(engine.generate, "hang")
    assert hanging.inside.wait(PATIENCE)
    started = time.monotonic()
    engine.close(timeout=0.2)
    assert 0.2 <= time.monotonic() - started < PATIENCE
    assert isinstance(running.exception(PATIENCE), EngineClosedError)
    assert "a forward pass still runs: 'stuck'" in caplog.text
    caplog.clear()
    hanging.gate.set()
    engine.close(timeout=PATIENCE)
    assert not caplog.text
    assert not hanging.live


# The queue ------------------------------------------------------------------------------------


def unfinished(engine):
    """Number of requests that run or wait."""
    return engine.scheduler.running + engine.scheduler.waiting


@pytest.mark.quick
def test_a_call_that_finds_the_queue_full_fails_before_it_encodes(hanging, monkeypatch):
    encoded = []
    encode = hanging.codec.encode_prompt
    monkeypatch.setattr(hanging.codec, "encode_prompt", lambda t: encoded.append(t) or encode(t))
    runtime = RuntimeConfig(max_requests=1, max_waiting=2)
    with AdaFuseEngine([hanging], runtime=runtime) as engine:
        late_stream = engine.stream("late")
        others = [background(engine.generate, f"hang{n}", max_new_tokens=1) for n in range(3)]
        wait_until(lambda: unfinished(engine) == 3)
        for call in (engine.generate, engine.stream, engine.score):
            with pytest.raises(QueueFullError, match=r"2 others wait.*max_waiting=2"):
                call("x", ["a"]) if call == engine.score else call("x")
        with pytest.raises(QueueFullError):
            engine.generate_batch(["x", "y"])
        with pytest.raises(QueueFullError):
            next(late_stream)
        assert "x" not in encoded
        hanging.gate.set()
        assert all(other.result(PATIENCE).text for other in others)
        assert len(engine.generate_batch(["x"] * 9, max_new_tokens=1)) == 9  # a batch is one call
    assert unfinished(engine) == 0


ERRORS = {
    "score cancelled": RequestCancelledError,
    "closed": EngineClosedError,
    "late": RequestTimeoutError,
}


@pytest.mark.quick
@pytest.mark.parametrize("how", ["cancelled", "done", *ERRORS])
def test_every_request_that_ends_leaves_the_queue(hanging, how, pass_a_minute):
    """Requests end in the queue and while a pass hangs, and later requests find room."""
    cancel = threading.Event()
    runtime = RuntimeConfig(max_requests=1, max_waiting=1)
    options: Any = {"timeout": 60} if how == "late" else {"cancel": cancel}
    with AdaFuseEngine([hanging], runtime=runtime) as engine:
        ask: Any = partial(engine.generate, max_new_tokens=1, **options)
        if how == "score cancelled":
            ask = partial(engine.score, continuations=[" ."], **options)
        running = background(ask, "hang")
        assert hanging.inside.wait(PATIENCE)
        queued = background(ask, "y")
        wait_until(lambda: unfinished(engine) == 2)
        if how == "closed":
            background(engine.close)
        elif how == "done":
            hanging.gate.set()
        elif how == "late":
            pass_a_minute()
        else:
            cancel.set()
        wait_until(lambda: unfinished(engine) == 0)
        if how in ERRORS:
            errors = [each.exception(PATIENCE) for each in (running, queued)]
            assert [type(error) for error in errors] == [ERRORS[how]] * 2
            assert how != "late" or "'stuck'" in str(errors[0])
        else:
            reasons = {each.result(PATIENCE).finish_reason for each in (running, queued)}
            assert reasons == {"cancelled" if how == "cancelled" else "length"}
        hanging.gate.set()
        if how != "closed":
            assert engine.generate("z", max_new_tokens=1).text
    assert not hanging.live
    assert hanging.most == 1  # no other thread has used the model


# Slow requests --------------------------------------------------------------------------------

SLOW = 20.0
"""Seconds that a slow part of a request takes, unless the test ends it earlier."""


@pytest.mark.quick
@pytest.mark.parametrize("part", ["tokenizer", "consumer"])
def test_a_slow_request_delays_no_other_request(part, monkeypatch):
    started, end = threading.Event(), threading.Event()
    members = [Watched(name, bytes_per_token=1) for name in "ab"]

    def wait(*_):
        started.set()
        end.wait(SLOW)

    def consume(engine):
        for _ in engine.stream("slow", **FEW):
            wait()

    encode = members[0].codec.encode_prompt
    if part == "tokenizer":
        wrapped: Any = lambda text: (text == "slow" and wait()) or encode(text)  # noqa: E731
        monkeypatch.setattr(members[0].codec, "encode_prompt", wrapped)
    with AdaFuseEngine(members, runtime=RuntimeConfig(cache_bytes=105)) as engine:
        if part == "consumer":
            slow = background(consume, engine)
        else:
            slow = background(engine.generate, "slow", **FEW)
        assert started.wait(PATIENCE)
        begun = time.monotonic()
        few: Any = {**FEW, "use": "b"}
        engine.generate("x", **few)
        engine.score("x", ["a"], use="b")
        assert not slow.done()
        assert time.monotonic() - begun < SLOW / 2
        end.set()
        slow.result(PATIENCE)


@pytest.mark.parametrize(("refused", "again"), [(0, True), (1, False), (2, True)])
def test_an_engine_survives_when_no_thread_can_start(monkeypatch, refused, again):
    """The request fails with the system's error, no thread is left, and the next request works."""
    start, started = threading.Thread.start, 0

    def refusing(thread: threading.Thread) -> None:
        nonlocal started
        if thread.name.startswith("adafuse"):
            started += 1
            if started > refused:
                raise RuntimeError("can't start new thread")
        start(thread)

    before = threading.enumerate()
    pair = [FakeBackend(name, counting, device=name) for name in "ab"]
    with AdaFuseEngine(pair) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refusing)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                engine.generate("x", max_new_tokens=2)
        if again:
            assert engine.generate("x", max_new_tokens=2).text
    assert not [each for each in threading.enumerate() if each not in before]


@pytest.mark.quick
def test_an_engine_that_nobody_uses_ends_its_threads_and_frees_its_members():
    """It needs no garbage collector."""
    before = threading.enumerate()
    gc.collect()
    gc.disable()
    try:
        engine = AdaFuseEngine([Watched("m"), Watched("n")])
        engine.generate("a:", max_new_tokens=3)
        assert [event.text for event in engine.stream("b:", max_new_tokens=3)]
        member = weakref.ref(engine.backends[0])
        del engine
        wait_until(lambda: member() is None)
        wait_until(lambda: not set(threading.enumerate()) - set(before))
    finally:
        gc.enable()


class Raises(threading.Event):
    """A flag that raises an exception after some looks at it."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        if self.looks == 0:  # only once
            raise ZeroDivisionError("a defect of the caller")
        return False


@pytest.mark.quick
@pytest.mark.parametrize(("looks", "max_requests"), [(1, 1), (3, 8)])
def test_a_flag_that_raises_ends_only_its_own_request(looks: int, max_requests: int) -> None:
    """The request runs, or waits behind another one."""
    slow = Watched("dots", before=lambda queries: time.sleep(0.02))
    with AdaFuseEngine([slow], runtime=RuntimeConfig(max_requests=max_requests)) as engine:
        other = background(engine.generate, "x", max_new_tokens=30)
        wait_until(lambda: engine.scheduler.running)
        with pytest.raises(ZeroDivisionError, match="a defect of the caller"):
            engine.generate("y", cancel=Raises(looks), max_new_tokens=100_000)
        assert other.result(PATIENCE).text == " ." * 30
        wait_until(lambda: unfinished(engine) == 0)


def test_a_request_that_is_abandoned_in_the_queue_ends(hanging):
    with AdaFuseEngine([hanging], runtime=RuntimeConfig(max_requests=1)) as engine:
        first = background(engine.generate, "hang", max_new_tokens=1)
        assert hanging.inside.wait(PATIENCE)
        runs = [engine.open([Request(prompt="y")]) for _ in range(2)]
        readers = [background(run.results) for run in runs]
        wait_until(lambda: engine.scheduler.waiting == 2)
        for run in runs:
            run.close()
        wait_until(lambda: engine.scheduler.waiting == 0)
        for reader in readers:
            with pytest.raises(RequestCancelledError):
                reader.result(PATIENCE)
        hanging.gate.set()
        assert first.result(PATIENCE).text == " ."
