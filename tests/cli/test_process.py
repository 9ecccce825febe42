"""The command as a process: imports, pipes, terminals and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from adafuse_llm import Generation

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and terminals of POSIX")


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_help_loads_no_model_library():
    code = (
        "import sys; from adafuse_llm.cli import create_app; create_app(); "
        "sys.exit(bool({'torch', 'transformers', 'bm25s'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.quick
@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_named(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from adafuse_llm.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: the command line needs {missing}: ")
    assert done.stderr.endswith('pip install "adafuse-llm[cli]"\n')


def test_bars_that_are_switched_off_are_no_warning():
    done = subprocess.run(
        [sys.executable, "-c", "from adafuse_llm.cli import main; main()", "info"],
        env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_ctrl_c_ends_a_stream_with_the_text_so_far(start, members):
    process = start("generate", "the mill", *members, "--json", "--max-new-tokens", 8000)
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == b""
    lines = [json.loads(line) for line in (first + rest).splitlines()]
    generation = Generation.model_validate(lines[-1]["generation"])
    assert generation.finish_reason == "cancelled"
    assert generation.text == "".join(decided.text for decided in generation.rounds)
    assert len(generation.rounds) == len(lines) - 1


def test_a_closed_pipe_is_no_error(start, members):
    process = start("generate", "the mill", *members, "--max-new-tokens", 8000)
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == b""


def test_an_interrupted_run_resumes(start, adafuse, members, tmp_path):
    items = [{"question": f"{number}?", "answer": ""} for number in range(24)]
    test_set = tmp_path / "set.jsonl"
    test_set.write_text("".join(json.dumps(item) + "\n" for item in items))
    flags = ["run", "--test-set", test_set, *members, "--max-new-tokens", 30]
    output = tmp_path / "out.jsonl"
    process = start(*flags, "--output", output)
    wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted: run the same command again to resume" in errors
    done = output.read_bytes()
    assert done.endswith(b"\n")
    assert 2 <= done.count(b"\n") < len(items)
    output.write_bytes(done[:-10])
    assert adafuse(*flags, "--output", output).exit_code == 0
    through = tmp_path / "through.jsonl"
    assert adafuse(*flags, "--output", through).exit_code == 0
    assert output.read_bytes() == through.read_bytes()


def test_a_terminal_sees_the_answer_grow(start, members, tmp_path):
    pty = pytest.importorskip("pty")
    (tmp_path / "a.md").write_text("The mill was founded by Ada Brook.\n")
    leader, follower = pty.openpty()
    process = start(
        "ask", "Who founded the mill?", "--docs", tmp_path, *members, "--max-new-tokens", 8000,
        stdout=follower,
    )  # fmt: skip
    os.close(follower)
    shown = b""
    while b"\x1b[2K" not in shown:
        shown += os.read(leader, 4096)
    process.send_signal(signal.SIGINT)
    while chunk := _read(leader):
        shown += chunk
    os.close(leader)
    assert process.wait(timeout=60) == 130
    assert process.stderr.read() == b""
    text = shown.decode()
    assert text.index("Who founded the mill?") < text.index("● otter") < text.index("Sources")
    assert "interrupted" in text


def _read(descriptor):
    try:
        return os.read(descriptor, 4096)
    except OSError:  # how Linux says that the other side is closed
        return b""
