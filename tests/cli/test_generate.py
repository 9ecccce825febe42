"""`adafuse generate`: text, colors, JSON, pages."""

import json
import re
import signal
import threading

import pytest

from adafuse_llm import AdaFuseEngine, Generation
from adafuse_llm.backends import FakeBackend

pytestmark = pytest.mark.quick

COLOR = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}


@pytest.fixture
def change(monkeypatch):
    def call(function):
        real = AdaFuseEngine.stream
        monkeypatch.setattr(
            AdaFuseEngine, "stream", lambda *args, **options: map(function, real(*args, **options))
        )

    return call


def test_a_form_that_a_limit_cut_is_named_on_stderr(adafuse):
    short = adafuse("generate", "the", "--max-new-tokens", 4, "-o", "regex=[a-z]{2,}")
    assert re.fullmatch("[a-z]{2,}\n", short.stdout)
    assert "4 tokens" in short.stderr
    assert adafuse("generate", "the", "-o", "regex=[a-z]").stderr == ""


def test_control_sequences_of_a_model_reach_a_pipe_but_no_terminal(adafuse, fakes, change):
    change(lambda event: event.model_copy(update={"text": f"{event.text}\x1b[2J"}))
    assert "\x1b[2J" in adafuse("generate", "x:").stdout
    assert "\x1b[2J" not in adafuse("generate", "x:", env=COLOR).stdout


def test_what_the_flags_say_is_what_the_engine_is_asked(adafuse, fakes, spy):
    seen = []

    def record(options):
        seen.append({name: value for name, value in options.items() if name != "cancel"})
        options.pop("continue_final_message", None)  # which fakes cannot do

    spy("stream", record)
    adafuse("generate", "-", input="é\n\nFounder:\n")
    adafuse("generate", "-", input="Founder:\n\n")
    adafuse("generate", "Who?", "--chat", "--system", "Be brief.")
    adafuse("generate", "Who?", "--chat", "--prefill", "It was ")
    system, user, reply = (
        {"role": role, "content": text}
        for role, text in (("system", "Be brief."), ("user", "Who?"), ("assistant", "It was "))
    )
    assert seen == [
        {"prompt": "é\n\nFounder:"},  # less one newline
        {"prompt": "Founder:\n"},
        {"messages": [system, user]},
        {"messages": [user, reply], "continue_final_message": True},
    ]
    refused = adafuse("generate", "x:", "--prefill", "y")
    assert refused.exit_code == 2
    assert "--prefill needs --chat" in refused.stderr


def test_json_gives_the_generation_in_one_line(adafuse, fakes):
    (line,) = adafuse("generate", "Founder:", "--json").stdout.splitlines()
    generation = Generation.model_validate(json.loads(line)["generation"])
    assert generation.text == "Ada Brook did"
    assert "".join(played.text for played in generation.rounds) == generation.text


def test_ctrl_c_ends_a_stream_with_the_text_so_far(adafuse, fakes, change, monkeypatch):
    interrupted, evaluate = threading.Event(), FakeBackend.evaluate
    starts: dict[str, int] = {}

    def wait_after_the_first_round(member, queries):
        size = len(queries[0].tree.ids)
        if size > starts.setdefault(member.name, size):
            interrupted.wait(20)
        return evaluate(member, queries)

    def interrupt(event):
        if not interrupted.is_set():  # the second Ctrl-C ends the program at once
            signal.raise_signal(signal.SIGINT)
            interrupted.set()
        return event

    monkeypatch.setattr(FakeBackend, "evaluate", wait_after_the_first_round)
    change(interrupt)
    result = adafuse("generate", "Founder:", "--json")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    generation = json.loads(result.stdout.splitlines()[-1])["generation"]
    assert generation["finish_reason"] == "cancelled"
    assert generation["text"] in ("Ada", "Ada Brook")  # the next round may have begun


def test_spans_have_the_look_of_the_member_that_wins(adafuse, fakes):
    shown = adafuse("generate", "Founder:", env=COLOR).stdout
    wren, agreed = "\x1b[38;5;74m", "\x1b[1m"
    for part in (f"{wren}● wren", f"{wren} Brook\x1b", f"{agreed} did\x1b", "strategy adafuse"):
        assert part in shown
    shown = adafuse("generate", "Founder:", env={**COLOR, "NO_COLOR": "1"}).stdout
    assert "● wren" in shown
    assert wren not in shown


def test_reasoning_is_apart_from_the_answer(adafuse, fakes, change):
    def reason(event):
        text = event.text.replace("Ada Brook", "Ada</think>Brook").replace("Ada", "Ada</think>")
        generation = event.generation and event.generation.model_copy(
            update={"text": "Ada</think> Brook did", "reply_prefix": "<think>"}
        )
        changes = {"text": text, "generation": generation, "reply_prefix": "<think>"}
        return event.model_copy(update=changes)

    change(reason)
    assert adafuse("generate", "Founder:").stdout == "Ada</think> Brook did\n"
    shown = adafuse("generate", "Founder:", env=COLOR).stdout
    assert "\x1b[2;3mAda</think>\x1b[0m" in shown
    assert "\x1b[2;3m Brook" not in shown
    told = json.loads(adafuse("generate", "Founder:", "--json").stdout.splitlines()[-1])
    assert (told["reasoning"], told["answer"]) == ("Ada", "Brook did")
