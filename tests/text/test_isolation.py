"""Grammars that are tried in another process: what kills, blocks or fills it stays there."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from multiprocessing import spawn
from typing import Any

import psutil
import pytest

pytest.importorskip("llguidance")

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    GrammarError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    Tool,
)
from adafuse_llm.adapters.enforcing import enforced
from adafuse_llm.adapters.reply_form import ReplyForm
from adafuse_llm.text import grammar as grammars
from adafuse_llm.text import isolation
from adafuse_llm.text.grammar import Grammar
from adafuse_llm.text.grammar_trial import MAX_BYTES, MAX_CPU_SECONDS
from adafuse_llm.text.isolation import isolated, try_grammar
from adafuse_llm.text.matchers import HEADER
from tests.support.forks import in_child
from tests.support.hostile import RULES, SCHEMAS, SWELLING, chain, lark_chain, lark_json
from tests.support.models import Recipe, backend

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")

MANY = 'start: "a" "b"*\n'
SLOW = "start: " + " ".join(f'"x{number}"' for number in range(60_000))
"""A grammar that takes more than two seconds, or on a fast processor first the memory."""
LARGE = "start: /" + "|".join(f"x{number}y" for number in range(130_000)) + "/"
"""A grammar that takes more than 100 MB of memory."""


def trial(
    lark: str, cancel: threading.Event | None = None, timeout: float | None = None
) -> str | None:
    with isolated(cancel, timeout):
        return try_grammar(f"{HEADER}\n{lark}", search=True)


def children() -> list[psutil.Process]:
    """Return the trials that run."""
    return psutil.Process().children()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let slow trials, which are less urgent than all else, wait as long as the machine is busy."""
    monkeypatch.setattr(isolation, "MAX_WAIT_SECONDS", 500.0)


@pytest.mark.parametrize(
    "lark",
    [
        lark_chain(RULES["rules"], 5_000),
        *(lark_json(chain(step, 5_000)) for step in SCHEMAS.values()),
    ],
    ids=("rules", *SCHEMAS),
)
def test_a_crash_of_native_code_is_an_error_of_its_request(lark: str) -> None:
    with pytest.raises(GrammarError, match="crashes the library llguidance"):
        trial(lark)
    assert trial(MANY) == "a"


def test_an_engine_tries_grammars_and_the_schemas_of_tools() -> None:
    with AdaFuseEngine([backend(Recipe("llama", "bytelevel", seed=1, layers=1))]) as engine:
        options: dict[str, Any] = {"grammar": lark_chain(RULES["rules"], 5_000)}
        with pytest.raises(GrammarError, match="option 'grammar': the grammar crashes"):
            engine.generate("the", **options)
        with pytest.raises(GrammarError, match="option 'grammar': the grammar crashes"):
            engine.check_grammar(**options)
        tool = Tool("swell", "", parameters=chain(SCHEMAS["objects"], 5_000))
        with pytest.raises(GrammarError, match="'swell': the grammar crashes"):
            enforced(engine, ReplyForm((tool,), "auto"), {}, True)
        assert engine.generate("the", regex="[a-z]{3}", max_new_tokens=4).text


@pytest.mark.parametrize(
    ("lark", "reason"),
    [
        (SLOW, f"more than {MAX_CPU_SECONDS} seconds of computing|MiB of memory"),
        (LARGE, f"more than {MAX_BYTES // 2**20} MiB of memory"),
    ],
    ids=("slow", "large"),
)
def test_what_takes_too_much_is_refused(lark: str, reason: str) -> None:
    used = psutil.Process().cpu_times().user
    with pytest.raises(GrammarError, match=reason):
        trial(lark)
    assert psutil.Process().cpu_times().user - used < 1
    assert trial(MANY) == "a"


def test_the_search_for_a_text_happens_in_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "found_closing", lambda *_: pytest.fail("it was searched here"))
    with isolated():
        grammar = Grammar.of(AdaFuseConfig(regex="[h-j]{5}"))
        assert grammar is not None
        assert grammar.text().closing() == "hhhhh"
        # a fast processor reaches the maximum length first, a slow one the maximum time
        with pytest.raises(GrammarError, match=r"no text .*that fits the grammar was found"):
            Grammar.of(AdaFuseConfig(regex=SWELLING[0]))
        with pytest.raises(GrammarError, match="no text fits the grammar"):
            Grammar.of(AdaFuseConfig(grammar="start: a\na: a"))


def test_a_short_trial_does_not_wait_for_long_ones() -> None:
    threads = [threading.Thread(target=_refused, args=(SWELLING[0],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(children()) < len(threads):
        time.sleep(0.01)
    began = time.monotonic()
    assert trial('start: "short"') == "short"
    assert time.monotonic() - began < MAX_CPU_SECONDS
    assert len(children()) >= len(threads) // 2
    for thread in threads:
        thread.join()


def _refused(regex: str) -> None:
    with pytest.raises(GrammarError):
        trial(f"start: /{regex}/")


@pytest.mark.parametrize("has_time_limit", [False, True])
def test_a_cancelled_request_stops_waiting_and_its_trial_stops(has_time_limit: bool) -> None:
    cancel = threading.Event()
    threading.Timer(0.3, cancel.set).start()
    began = time.monotonic()
    with pytest.raises(RequestTimeoutError if has_time_limit else RequestCancelledError):
        trial(SLOW, None if has_time_limit else cancel, 0.3 if has_time_limit else None)
    assert time.monotonic() - began < 1.5
    while children():
        assert time.monotonic() - began < 1.9, "the trial still runs"
        time.sleep(0.01)


def test_requests_that_wait_for_a_place_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation._trials, "_places", threading.BoundedSemaphore(1))
    thread = threading.Thread(target=_refused, args=(SWELLING[0],))
    thread.start()
    while not children():
        time.sleep(0.01)
    with pytest.raises(RequestTimeoutError, match="time limit of the request"):
        trial('start: "late"', timeout=0.1)
    thread.join()
    assert trial(MANY) == "a"


def test_a_harmless_grammar_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trial('start: "once"') == "once"
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it was tried again"))
    assert trial('start: "once"') == "once"


def test_a_forked_process_tries_grammars_while_its_parent_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation._trials, "_places", threading.BoundedSemaphore(1))
    assert isolation._trials._places.acquire()
    assert in_child(lambda: trial('start: "forked"') == "forked")


def test_without_another_process_grammars_are_compiled_here_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolation, "_trials", isolation._Trials())
    monkeypatch.setattr(spawn, "get_executable", lambda: "/bin/false")
    assert trial('start: "x"') is trial('start: "y"') is None
    assert caplog.text.count("without a trial") == 1
    monkeypatch.setattr(isolation._trials, "can_start", True)
    with pytest.raises(QueueFullError, match="did not start"):
        trial('start: "x"')


def test_an_application_that_is_its_own_interpreter_starts_no_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    monkeypatch.setattr(isolation, "_trials", isolation._Trials())
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert trial('start: "f"') is None
    monkeypatch.delattr(sys, "frozen")
    monkeypatch.setenv(isolation.MARK, "1")
    assert trial('start: "f"') is None
