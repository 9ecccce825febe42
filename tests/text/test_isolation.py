"""Grammars that are tried in another process: what kills, blocks or fills it stays there."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("llguidance")

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    GrammarError,
    RequestCancelledError,
    RequestTimeoutError,
)
from adafuse_llm.config import RuntimeConfig
from adafuse_llm.text import grammar as grammars
from adafuse_llm.text import isolation
from adafuse_llm.text.grammar import Grammar
from adafuse_llm.text.isolation import (
    CAN_ISOLATE,
    MAX_BYTES,
    MAX_CPU_SECONDS,
    TrialTokens,
    isolated,
    try_grammar,
)
from adafuse_llm.text.matchers import HEADER
from tests.support.forks import in_child
from tests.support.hostile import RULES, SCHEMAS, SWELLING, chain, lark_chain, lark_json
from tests.support.models import Recipe, backend

pytestmark = pytest.mark.skipif(not CAN_ISOLATE, reason="this system has no fork")

MANY = 'start: "a" "b"*\n'
SLOW = "start: " + " ".join(f'"x{number}"' for number in range(60_000))
"""A grammar that takes more than two seconds to compile."""
LARGE = "start: /" + "|".join(f"x{number}y" for number in range(130_000)) + "/"
"""A grammar that takes more than 100 MB of memory."""

TOKENS = TrialTokens((*(bytes([byte]) for byte in range(256)), b"<end>"), (256,), (256,))


def trial(
    lark: str, cancel: threading.Event | None = None, timeout: float | None = None
) -> str | None:
    with isolated(True, cancel, timeout):
        return try_grammar(f"{HEADER}\n{lark}", search=True)


def children() -> list[psutil.Process]:
    """Return the trials that run."""
    helper = isolation._trials._helper
    assert helper is not None
    return psutil.Process(helper.process.pid).children()


@pytest.fixture(scope="module", autouse=True)
def helper() -> Iterator[None]:
    trial(MANY)
    yield
    isolation._trials.close()


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
def test_r3_v1_a_crash_of_native_code_is_an_error_of_its_request(lark: str) -> None:
    with pytest.raises(GrammarError, match="crashes the library llguidance"):
        trial(lark)
    assert trial(MANY) == "a"


def test_r3_v1_a_crash_is_an_error_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "check_grammar", lambda _: None)
    engine = AdaFuseEngine(
        [backend(Recipe("llama", "bytelevel", seed=1, layers=1))],
        runtime=RuntimeConfig(grammar_isolation=True),
    )
    with engine:
        options: dict[str, Any] = {"grammar": lark_chain(RULES["rules"], 5_000)}
        with pytest.raises(GrammarError, match="option 'grammar': the grammar crashes"):
            engine.generate("the", **options)
        with pytest.raises(GrammarError, match="option 'grammar': the grammar crashes"):
            engine.check_grammar(**options)
        assert engine.generate("the", regex="[a-z]{3}", max_new_tokens=4).text


def test_r3_v1_members_vocabularies_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TrialTokens | None] = []

    def record(lark: str, tokens: TrialTokens | None = None, *, search: bool = False) -> str | None:
        seen.append(tokens)
        return try_grammar(lark, tokens, search=search)

    monkeypatch.setattr(grammars, "try_grammar", record)
    member = backend(Recipe("llama", "bytelevel", seed=1, layers=1))
    engine = AdaFuseEngine([member], runtime=RuntimeConfig(grammar_isolation=True))
    with engine:
        engine.check_grammar(regex="[a-f]{4}")
    assert seen[0] is None
    assert seen[1] is not None
    texts = list(member.token_texts)
    assert seen[1].tokens[texts.index("a")] == b"a"
    helper = isolation._trials._helper
    assert helper is not None
    assert seen[1].key in helper.known


@pytest.mark.parametrize(
    ("lark", "reason"),
    [
        (SLOW, f"more than {MAX_CPU_SECONDS} seconds of computing"),
        (LARGE, f"more than {MAX_BYTES // 2**20} MiB of memory"),
    ],
    ids=("slow", "large"),
)
def test_r3_v2_what_takes_too_much_is_refused(lark: str, reason: str) -> None:
    used = psutil.Process().cpu_times().user
    with pytest.raises(GrammarError, match=reason):
        trial(lark)
    assert psutil.Process().cpu_times().user - used < 1
    assert trial(MANY) == "a"


def test_r3_v2_the_search_for_a_text_happens_in_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "found_closing", lambda *_: pytest.fail("it was searched here"))
    with isolated(True):
        grammar = Grammar.of(AdaFuseConfig(regex="[h-j]{5}"))
        assert grammar is not None
        assert grammar.text().closing() == "hhhhh"
        # a fast processor reaches the maximum length first, a slow one the maximum time
        with pytest.raises(GrammarError, match=r"no text .*that fits the grammar was found"):
            Grammar.of(AdaFuseConfig(regex=SWELLING[0]))
        with pytest.raises(GrammarError, match="no text fits the grammar"):
            Grammar.of(AdaFuseConfig(grammar="start: a\na: a"))


def test_r3_v2_a_short_trial_does_not_wait_for_long_ones() -> None:
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
def test_r3_v2_a_cancelled_request_stops_waiting_and_its_trial_stops(has_time_limit: bool) -> None:
    cancel = threading.Event()
    threading.Timer(0.3, cancel.set).start()
    began = time.monotonic()
    with pytest.raises(RequestTimeoutError if has_time_limit else RequestCancelledError):
        trial(SLOW, None if has_time_limit else cancel, 0.3 if has_time_limit else None)
    assert time.monotonic() - began < 1.5
    while children():
        assert time.monotonic() - began < 1.9, "the trial still runs"
        time.sleep(0.01)


def test_r3_v2_requests_that_wait_for_a_place_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation._trials, "_places", threading.BoundedSemaphore(1))
    thread = threading.Thread(target=_refused, args=(SWELLING[0],))
    thread.start()
    while not children():
        time.sleep(0.01)
    with pytest.raises(RequestTimeoutError, match="time limit of the request"):
        trial(MANY, timeout=0.1)
    thread.join()
    assert trial(MANY) == "a"


def test_a_helper_that_died_is_replaced() -> None:
    helper = isolation._trials._helper
    assert helper is not None
    assert trial(MANY) == "a"
    with isolated(True):
        assert try_grammar(f"{HEADER}\n{MANY}", TOKENS) == ""
    helper.process.kill()
    helper.process.wait()
    with isolated(True):
        assert try_grammar(f"{HEADER}\n{MANY}", TOKENS) == ""
    assert isolation._trials._helper is not helper


def test_a_forked_process_has_a_helper_of_its_own() -> None:
    helper = isolation._trials._helper
    assert helper is not None

    def try_there() -> bool:
        assert isolation._trials._helper is None
        assert trial(MANY) == "a"
        assert isolation._trials._helper is not None
        isolation._trials.close()
        return True

    assert in_child(try_there)
    assert trial(MANY) == "a"
    assert isolation._trials._helper is helper


def test_the_helper_loads_no_torch_and_ends_with_its_process() -> None:
    code = (
        "import os, signal, threading\n"
        "from adafuse_llm.text import isolation\n"
        "with isolation.isolated(True):\n"
        "    isolation.try_grammar('start: \"a\"')\n"
        "print(isolation._trials._helper.process.pid, flush=True)\n"
        "signal.pause()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        helper = psutil.Process(int(process.stdout.readline()))
        loaded = {Path(each.path).name for each in helper.memory_maps()}
        process.send_signal(signal.SIGKILL)
    assert any("_lib.abi3" in name for name in loaded)
    assert not any("torch" in name for name in loaded)
    psutil.wait_procs([helper], timeout=5)
    assert not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE


@pytest.mark.quick
def test_without_isolation_nothing_is_tried() -> None:
    assert try_grammar("start: a") is None
    with isolated(True), isolated(False):
        assert try_grammar("start: a") is None


@pytest.mark.quick
def test_a_system_without_fork_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from adafuse_llm import InvalidOptionError

    monkeypatch.setattr(isolation, "CAN_ISOLATE", False)
    with pytest.raises(InvalidOptionError, match="'grammar_isolation': this system has no fork"):
        AdaFuseEngine(
            [backend(Recipe("llama", "bytelevel", seed=1, layers=1))],
            runtime=RuntimeConfig(grammar_isolation=True),
        )
