"""Grammars that are tried in another process: what kills, blocks or fills it stays there."""

import subprocess
import sys
import threading
from collections import OrderedDict
from functools import partial
from typing import Any

import psutil
import pytest

pytest.importorskip("llguidance")

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, GrammarError, QueueFullError, Tool, child
from adafuse_llm.adapters.reply_form import ReplyForm, enforced
from adafuse_llm.grammar import trial
from adafuse_llm.grammar.grammar import Grammar
from adafuse_llm.grammar.trial import MAX_BYTES, MAX_CPU_SECONDS, try_grammar
from benchmarks.hostile import RULES, SCHEMAS, chain, lark_chain
from tests.support.models import Recipe, backend

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")

MANY = 'start: "a" "b"*\n'
SLOW = "start: " + " ".join(f'"x{number}"' for number in range(60_000))
"""A grammar that takes more than two seconds, or on a fast processor first the memory."""
LARGE = "start: /" + "|".join(f"x{number}y" for number in range(130_000)) + "/"
"""A grammar that takes more than 100 MB of memory."""


@pytest.fixture(scope="module")
def untried() -> None:
    """Try grammars, unlike the other tests of texts."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let slow trials, which are less urgent than all else, wait as long as the machine is busy."""
    monkeypatch.setattr(trial, "MAX_WAIT_SECONDS", 500.0)


def test_a_crash_of_native_code_is_an_error_of_its_request() -> None:
    with pytest.raises(GrammarError, match=r"exit code -(6|7|10|11):"):
        try_grammar(lark_chain(RULES["rules"], 5_000))
    try_grammar(MANY)


def test_an_engine_tries_grammars_and_the_schemas_of_tools() -> None:
    with AdaFuseEngine([backend(Recipe("llama", "bytelevel", seed=1, layers=1))]) as engine:
        options: dict[str, Any] = {"grammar": lark_chain(RULES["rules"], 5_000)}
        for call in (partial(engine.generate, "the"), engine.check_grammar):
            with pytest.raises(GrammarError, match=r"option 'grammar': .*crashes"):
                call(**options)
        tool = Tool("swell", "", parameters=chain(SCHEMAS["objects"], 5_000))
        with pytest.raises(GrammarError, match=r"'swell': .*crashes"):
            enforced(engine, ReplyForm((tool,), "auto"), {}, True)
        assert engine.generate("the", regex="[a-z]{3}", max_new_tokens=4).text


@pytest.mark.parametrize(
    ("lark", "reason"),
    [
        pytest.param(SLOW, f"{MAX_CPU_SECONDS} seconds of computing or", marks=pytest.mark.slow),
        (LARGE, f"{MAX_BYTES // 2**20} MiB of memory"),
    ],
    ids=("slow", "large"),
)
def test_what_takes_too_much_is_refused_and_costs_this_process_nothing(
    lark: str, reason: str
) -> None:
    used = psutil.Process().cpu_times().user
    with pytest.raises(GrammarError, match=reason):
        try_grammar(lark)
    assert psutil.Process().cpu_times().user - used < 1
    assert not child.run_limited(trial.compile_here, 500, lark=lark).stderr
    try_grammar(MANY)


def test_a_trial_does_not_wait_for_a_long_one() -> None:
    with trial._places:
        try_grammar('start: "short"')


def test_on_a_busy_machine_a_grammar_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MAX_WAIT_SECONDS", 0.01)  # less than a process takes to start
    with pytest.raises(QueueFullError, match="busy"):
        try_grammar('start: "busy"')
    with pytest.raises(QueueFullError, match="busy"):
        Grammar.of(AdaFuseConfig(regex="busy"))
    monkeypatch.setattr(trial, "_places", threading.BoundedSemaphore(1))
    with trial._places, pytest.raises(QueueFullError, match="busy"):
        try_grammar('start: "busy"')


def test_a_harmless_grammar_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    try_grammar('start: "once"')
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it was tried again"))
    try_grammar('start: "once"')


@pytest.mark.parametrize(
    "start", ["raise SystemExit", "import sys; sys.modules['llguidance'] = None"]
)
def test_without_a_trial_grammars_are_compiled_with_a_warning(
    start: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial, "_has_started", threading.Event())
    monkeypatch.setattr(trial, "_harmless", OrderedDict())
    trial._warn.cache_clear()
    monkeypatch.setattr(child, "BOOTSTRAP", f"{start}{child.BOOTSTRAP}")
    try_grammar('start: "x"')
    try_grammar('start: "y"')
    assert caplog.text.count("without a trial") == 1
    trial._has_started.set()
    with pytest.raises(QueueFullError, match="did not start"):
        try_grammar('start: "z"')


@pytest.mark.parametrize("is_frozen", [True, False])
def test_an_application_that_is_its_own_interpreter_starts_no_trial(
    is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    monkeypatch.setattr(trial, "_has_started", threading.Event())
    if is_frozen:
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setenv(child.MARK, "1")
    try_grammar(f'start: "f{is_frozen}"')
