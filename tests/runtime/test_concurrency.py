"""Simultaneous, cancelled and failing requests, which do not affect other requests."""

import asyncio
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from adafuse_llm import AdaFuseEngine, EngineClosedError, MemberError, MemberOutOfMemoryError
from adafuse_llm.backends import Query
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from tests.runtime.test_scheduler import Watched
from tests.support.compare import approximately, as_data
from tests.support.models import TRIPLE, Recipe, backend, engine, model, tokenizer
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

PROMPTS = [
    "The ferry to Orrin leaves at nine.",
    "Who keeps the light?",
    "Bread",
    "In winter the harbour freezes. " * 6,
    "One, two,",
    "The post\n\n",
    "She wrote",
    "Caf\u00e9",
]
OPTIONS: dict[str, Any] = {"margin_threshold": 0.3, "max_new_tokens": 10, "top_p": 0.9}
OPTIONS |= {"temperature": 0.7, "seed": 2}


@pytest.fixture(scope="module")
def serial() -> list[dict[str, Any]]:
    return [as_data(engine(*TRIPLE).generate(prompt, **OPTIONS)) for prompt in PROMPTS]


@pytest.fixture
def ensemble() -> Iterator[AdaFuseEngine]:
    with AdaFuseEngine([backend(member) for member in TRIPLE]) as made:
        yield made


async def test_threads_tasks_and_batches_give_what_one_gives(
    ensemble: AdaFuseEngine, serial: list[dict[str, Any]]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        threads = list(pool.map(lambda prompt: ensemble.generate(prompt, **OPTIONS), PROMPTS))
    tasks = await asyncio.gather(*(ensemble.agenerate(prompt, **OPTIONS) for prompt in PROMPTS))
    batch = await asyncio.to_thread(ensemble.generate_batch, PROMPTS, **OPTIONS)
    for results in (threads, tasks, batch):
        assert [as_data(result) for result in results] == approximately(serial)


# Cancellation ---------------------------------------------------------------------------------


def passes_settle(member: Watched) -> bool:
    """Return whether the number of passes stays the same for a while."""
    before = len(member.sizes)
    time.sleep(0.15)
    return len(member.sizes) == before


@pytest.mark.quick
@pytest.mark.parametrize("how", ["stream", "task"])
async def test_a_closed_stream_and_a_cancelled_task_stop_forward_passes(how: str) -> None:
    member = Watched("slow", before=lambda queries: time.sleep(0.002))
    with AdaFuseEngine([member]) as ensemble:
        if how == "stream":
            stream = ensemble.stream("x", max_new_tokens=100_000)
            await asyncio.to_thread(lambda: [next(stream) for _ in range(3)])
            stream.close()
        else:
            task = asyncio.create_task(ensemble.agenerate("x", max_new_tokens=100_000))
            await asyncio.to_thread(wait_until, lambda: member.sizes)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        at = len(member.sizes)
        wait_until(lambda: not member.live)
        assert len(member.sizes) - at <= 8  # the passes of one round
        assert passes_settle(member)


# Failures -------------------------------------------------------------------------------------


def failing(error: BaseException, at: int) -> Callable[[Sequence[Query]], None]:
    """Fail from a call on, for the request of that call."""
    calls, failed = itertools.count(1), list[Any]()

    def before(queries: Sequence[Query]) -> None:
        if next(calls) == at:
            failed.append(queries[0].tree)
        if any(query.tree in failed for query in queries):
            raise error

    return before


def too_long(queries: Sequence[Query]) -> None:
    if any(len(query.tree.ids) > 40 for query in queries):
        raise RuntimeError("too long for me")


@pytest.mark.parametrize(
    ("error", "raised", "at"),
    [
        (RuntimeError("a wire came loose"), MemberError, 1),
        (MemoryError("no more"), MemberOutOfMemoryError, 4),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), MemberOutOfMemoryError, 1),
    ],
)
def test_an_error_names_the_failing_member_and_the_engine_stays_usable(
    error: Exception, raised: type[MemberError], at: int
) -> None:
    bad = Watched("bad", before=failing(error, at))
    with AdaFuseEngine([Watched("good"), bad]) as ensemble:
        with pytest.raises(raised, match="'bad'") as caught:
            ensemble.generate("x", max_new_tokens=9)
        assert type(caught.value) is raised
        assert (caught.value.__cause__, caught.value.member) == (error, "bad")
        assert ensemble.generate("x", max_new_tokens=9).text
    assert len(bad.order) == 2
    assert not bad.live


def test_a_failing_request_does_not_affect_simultaneous_requests(
    ensemble: AdaFuseEngine, serial: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member fails only on the long prompt, while seven other requests run."""
    bad = ensemble.backends[1]
    evaluate = bad.evaluate
    monkeypatch.setattr(bad, "evaluate", lambda queries: too_long(queries) or evaluate(queries))
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ensemble.generate, prompt, **OPTIONS) for prompt in PROMPTS]
        with pytest.raises(MemberError, match=bad.name):
            running.pop(3).result()
        assert [as_data(each.result()) for each in running] == approximately(
            serial[:3] + serial[4:]
        )


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
def test_nan_is_computed_again_and_not_cached(arch: str) -> None:
    recipe = Recipe(arch, "bytelevel", seed=91)
    moody = HuggingFaceBackend(model(recipe), tokenizer("bytelevel"), "moody")
    alone = HuggingFaceBackend(model(recipe), tokenizer("bytelevel"), "moody")
    with AdaFuseEngine([alone]) as ensemble:
        expected = [as_data(each) for each in ensemble.generate_batch(PROMPTS[:3], **OPTIONS)]
    layer = model(recipe).model.layers[0]
    calls: list[int] = []

    def spoil(limit: int) -> torch.utils.hooks.RemovableHandle:
        def hook(module: Any, args: Any, output: Any) -> Any:
            calls.append(1)
            return output * float("nan") if len(calls) <= limit else output

        calls.clear()
        return layer.register_forward_hook(hook)

    with AdaFuseEngine([moody]) as ensemble:
        with spoil(limit=1000), pytest.raises(MemberError, match=r"(?i)nan"):
            ensemble.generate_batch(PROMPTS[:3], **OPTIONS)
        with spoil(limit=1):
            results = ensemble.generate_batch(PROMPTS[:3], **OPTIONS)
    assert [as_data(result) for result in results] == approximately(expected)


@pytest.mark.quick
def test_a_failing_batch_raises_and_stops_its_other_requests() -> None:
    member = Watched("m", before=too_long)
    with AdaFuseEngine([member]) as ensemble:
        with pytest.raises(MemberError, match="too long"):
            ensemble.generate_batch(["x", "y" * 50], max_new_tokens=100_000)
        wait_until(lambda: not member.live)
        assert passes_settle(member)


# The end --------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_closed_engine_takes_no_requests() -> None:
    ensemble = AdaFuseEngine([Watched("m")])
    ensemble.close()
    ensemble.close()
    for call in (ensemble.generate, ensemble.stream):
        with pytest.raises(EngineClosedError):
            call("x")


SCRIPT = """
import sys, threading, time, torch
from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend

class Heavy(FakeBackend):  # it computes and is freed in a library, which takes a while
    def __init__(self, name):
        super().__init__(name, lambda text: {"a": 0.9, " ": 0.1})
        self.weights = [torch.ones(1 << 14) for _ in range(2_000)]
        self.matrix = torch.ones(700, 700)

    def evaluate(self, queries):
        self.matrix @ self.matrix
        return super().evaluate(queries)

def opened():
    return AdaFuseEngine([Heavy("a"), Heavy("b")])

def dropped():
    opened().generate("x", max_new_tokens=2)

def in_a_thread():
    options = {"max_new_tokens": 100_000}
    threading.Thread(target=opened().generate, args=("x",), kwargs=options, daemon=True).start()
    time.sleep(0.2)

def at_an_interrupt():
    engine = opened()
    engine.generate("x", max_new_tokens=2)
    raise KeyboardInterrupt

globals()[sys.argv[1]]()
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("how", "status"), [("dropped", 3), ("in_a_thread", 3), ("at_an_interrupt", -signal.SIGINT)]
)
def test_a_program_keeps_its_exit_status_however_it_leaves_its_engine(
    how: str, status: int
) -> None:
    command = [sys.executable, "-c", SCRIPT, how]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT
    )
    assert done.returncode == status, done.stderr
