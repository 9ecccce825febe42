"""`adafuse chat`: answers, the conversation so far, commands, errors, Ctrl-C."""

import os
import select
import signal
import subprocess
import sys

import pytest

from adafuse_llm import AdaFuseEngine
from tests.cli.test_process import _read


@pytest.fixture
def asked(monkeypatch):
    """The messages of each call of the engine."""
    calls = []
    stream = AdaFuseEngine.stream

    def record(self, *args, **options):
        calls.append([(each["role"], each["content"]) for each in options["messages"]])
        return stream(self, *args, **options)

    monkeypatch.setattr(AdaFuseEngine, "stream", record)
    return calls


@pytest.mark.quick
def test_a_pipe_gets_only_the_answers(adafuse, fakes, asked):
    result = adafuse("chat", "--system", "Be brief.", input="Who did?\\\nQuick\n\nAnd then?\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Ada Brook did\nAda Brook did\n"
    start = [("system", "Be brief."), ("user", "Who did?\nQuick")]
    assert asked == [start, [*start, ("assistant", "Ada Brook did"), ("user", "And then?")]]


@pytest.mark.quick
def test_questions_come_with_passages_of_documents_and_history_without(
    adafuse, fakes, asked, tmp_path
):
    (tmp_path / "mill.md").write_text("# Mill\n\nAda Brook founded it.")
    result = adafuse("chat", "--docs", tmp_path, input="Who founded the mill?\nAnd then?\n")
    assert result.exit_code == 0, result.output
    (first,), (before, _, second) = asked
    assert "[1] # Mill\n\nAda Brook founded it." in first[1]
    assert before[1] == "Who founded the mill?"
    assert "Ada Brook founded it." in second[1]  # found by the question before
    assert second[1].endswith("Question: And then?")


@pytest.mark.quick
def test_commands_explain_the_last_answer(adafuse, fakes, asked):
    result = adafuse(
        "chat", input="Who?\n/why\n/why 2\n/why 9\n/alone\n/help\n/new\nWho?\n/quit\nWho?\n"
    )
    assert result.exit_code == 0, result.output
    shown = result.stdout
    assert "rounds 0 to 2" in result.stderr
    assert 'over " Stone"' in shown
    assert "3 rounds · 1.0 words per round" in shown
    assert "round 2" in shown
    assert "● wren" in shown
    assert "begin a new conversation" in shown
    assert asked == [[("user", "Who?")], [("user", "Who?")]]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/why", "/why"),
        ("/wy", "/why"),
    ],
)
def test_a_wrong_command_is_an_error_and_the_conversation_goes_on(
    adafuse, fakes, asked, line, message
):
    result = adafuse("chat", input=f"{line}\nWho?\n")
    assert message in result.stderr.partition("error: ")[2]
    assert result.stdout == "Ada Brook did\n"
    assert result.exit_code == 0


def test_a_message_that_fails_is_not_kept(adafuse, members, asked):
    result = adafuse("chat", *members, "--max-new-tokens", 5, input=f"{'mill ' * 9000}\nmill\n")
    assert result.stderr.count("error:") == 1
    assert [len(call) for call in asked] == [1, 1]
    assert len(result.stdout.splitlines()) >= 1


CHAT = """
import fcntl, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from adafuse_llm.cli import chat
from adafuse_llm.cli.terminal import cancel_on_interrupt
for line in chat._lines(lambda: None):
    with cancel_on_interrupt():
        print("ASKED", repr(line), flush=True)
        time.sleep(0.5)
        print("ANSWERED", flush=True)
"""


def reader(leader):
    """A function that reads a terminal until a text appears, and returns what is before it."""
    shown = b""

    def read_until(text):
        nonlocal shown
        while text not in shown:
            shown += os.read(leader, 4096)
        before, _, shown = shown.partition(text)
        return before

    return read_until


@pytest.mark.parametrize("paste", [b"one\ntwo\n\nthree", b"\x1b[200~one\rtwo\r\rthree\x1b[201~"])
def test_pasted_lines_are_one_message(paste):
    pty = pytest.importorskip("pty")
    pytest.importorskip("readline")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CHAT],
        stdin=follower,
        stdout=follower,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(follower)
    read_until = reader(leader)
    read_until(b"> ")
    os.write(leader, paste)
    read_until(b"three")
    os.write(leader, b"\n")
    read_until(b"ASKED")
    assert read_until(b"\r\n").strip() == b"'one\\ntwo\\n\\nthree'"
    os.close(leader)
    process.wait(timeout=30)


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_conversation(start, members):
    pty = pytest.importorskip("pty")
    leader, follower = pty.openpty()
    process = start("chat", *members, "--max-new-tokens", 8000, stdin=follower, stdout=follower)
    os.close(follower)
    read_until = reader(leader)
    read_until(b"> ")
    os.write(leader, b"the mill\n")
    read_until(b"the mill\r\n")
    read_until(b" ")
    process.send_signal(signal.SIGINT)
    read_until(b"stopped")
    read_until(b"> ")
    ready: list[int] = []
    while not ready:  # a signal between the prompt and the read of a line waits for the next key
        process.send_signal(signal.SIGINT)  # drops what was entered, which is nothing
        ready, _, _ = select.select([leader], [], [], 2)
    read_until(b"> ")
    os.write(leader, b"/quit\n")
    while _read(leader):
        pass
    os.close(leader)
    assert process.wait(timeout=60) == 0
