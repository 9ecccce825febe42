"""How requests share the worker: places, order, failures, forks."""

from __future__ import annotations

import os
import threading
import time

import pytest

from adafuse_llm import AdaFuseEngine, FakeBackend, InvalidInputError, MemberError, RuntimeConfig
from adafuse_llm.backends.fake import END


def counting(text: str) -> dict[str, float]:
    """Writes one dot after another, for ever."""
    return {" .": 0.9, END: 0.1}


def test_no_more_requests_run_at_once_than_there_are_places():
    live: set[int] = set()
    most = 0

    class Watched(FakeBackend):
        def evaluate(self, asks):
            nonlocal most
            live.update(id(ask.tree) for ask in asks)
            most = max(most, len(live))
            return super().evaluate(asks)

        def release(self, tree):
            live.discard(id(tree))

    with AdaFuseEngine(
        [Watched("dots", counting)], runtime=RuntimeConfig(max_requests=3)
    ) as engine:
        results = engine.generate_batch([f"{n}:" for n in range(12)], max_new_tokens=5)
    assert [result.text.count(".") for result in results] == [6] * 12
    assert most == 3
    assert not live


def test_a_batch_fails_as_soon_as_one_of_its_prompts_does():
    def rule(text: str) -> dict[str, float]:
        if text.startswith("bad"):
            raise RuntimeError("boom")
        time.sleep(0.01)
        return counting(text)

    with AdaFuseEngine([FakeBackend("dots", rule)]) as engine:
        started = time.perf_counter()
        with pytest.raises(MemberError, match="'dots' failed: RuntimeError: boom"):
            engine.generate_batch(["good:", "bad:"], max_new_tokens=10_000)
        assert time.perf_counter() - started < 2
        assert engine.generate("good:", max_new_tokens=2).text.startswith(" .")


def test_a_request_that_was_given_up_while_it_waited_costs_nothing():
    member = FakeBackend("dots", counting)
    gate = threading.Event()

    def slow(text: str) -> dict[str, float]:
        gate.wait(5)
        return counting(text)

    with AdaFuseEngine([FakeBackend("slow", slow), member]) as engine:
        first = engine.stream("a:", max_new_tokens=1)
        worker = threading.Thread(target=lambda: list(first))
        worker.start()
        cancel = threading.Event()
        cancel.set()
        gate.set()
        cancelled = engine.generate("b:", cancel=cancel)
        worker.join()
    assert cancelled.finish_reason == "cancelled"
    assert cancelled.rounds == ()
    assert cancelled.usage.forward_passes == {"slow": 0, "dots": 0}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_engine_used_before_a_fork_works_in_the_child():
    with AdaFuseEngine([FakeBackend("dots", counting)]) as engine:
        expected = engine.generate("a:", max_new_tokens=3).text
        child = os.fork()
        if child == 0:
            same = engine.generate("a:", max_new_tokens=3).text == expected
            os._exit(0 if same else 1)
        deadline = time.monotonic() + 20
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.05)
        if done == (0, 0):
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert done == (child, 0)


@pytest.mark.parametrize("members", ["gpt2", ["gpt2", "opt"], [object()]])
def test_names_in_place_of_backends_point_to_from_pretrained(members):
    with pytest.raises(InvalidInputError, match="from_pretrained"):
        AdaFuseEngine(members)
