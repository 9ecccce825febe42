"""The command as a process: imports, pipes, terminals and Ctrl-C."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

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
    assert errors == b"interrupted\n"
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
    assert process.stderr.read() == b"interrupted\n"
    text = shown.decode()
    assert text.index("Who founded the mill?") < text.index("● otter") < text.index("Sources")
    assert "interrupted" in text


def _read(descriptor):
    try:
        return os.read(descriptor, 4096)
    except OSError:  # how Linux says that the other side is closed
        return b""


@pytest.fixture
def endless(members, tmp_path):
    """The flags of a run that writes a result every now and then, and its output."""
    items = [{"question": f"{number}?", "answer": ""} for number in range(1000)]
    test_set, output = tmp_path / "set.jsonl", tmp_path / "out.jsonl"
    test_set.write_text("".join(json.dumps(item) + "\n" for item in items))
    flags = ["--output", output, *members, "--max-new-tokens", 30]
    return {
        "run": ["run", "--test-set", test_set, *flags],
        "eval": ["eval", "--task", "nq", "--data", test_set, *flags],
    }, output


@pytest.mark.parametrize("name", ["run", "eval"])
def test_e6_a_second_process_with_the_same_output_is_refused_at_once(
    start, adafuse, endless, name, fakes, monkeypatch
):
    flags, output = endless
    process = start(*flags[name])
    wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= 2)
    first = output.read_bytes().splitlines()[0]
    for other in (["--overwrite", "--max-words", 1], ["--overwrite"], []):
        refused = adafuse(*flags[name], *other)
        assert refused.exit_code == 2
        assert f"{output} is in use: process {process.pid} on " in refused.stderr
        assert " since 20" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert not fakes  # nothing was loaded
    assert output.read_bytes().splitlines()[0] == first


@pytest.mark.parametrize("name", ["run", "eval"])
def test_e6_a_killed_process_leaves_no_lock(start, adafuse, endless, name, fakes):
    flags, output = endless
    process = start(*flags[name])
    wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= 2)
    process.kill()
    process.wait()
    done = output.read_bytes().count(b"\n")
    result = adafuse(*flags[name])
    assert result.exit_code == 0, result.output
    assert "resuming" in result.stderr
    assert 2 <= done < output.read_bytes().count(b"\n") == 1000


def test_e12_a_full_disk_is_one_line_with_the_name_of_the_file(start, endless):
    flags, output = endless
    limit = 6000

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = start(*flags["run"], "--rounds", preexec_fn=small_files)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.decode().splitlines()[-1] == f"error: {output}: File too large"


def test_e12_a_full_standard_output_is_one_line(start, members, tmp_path):
    with Path("/dev/full").open("wb") as full:
        process = start("generate", "the mill", *members, "--json", stdout=full)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.decode() == "error: standard output: No space left on device\n"


@pytest.mark.parametrize("kind", ["fifo", "stdout", "device"])
def test_e12_an_output_that_is_not_a_file_is_refused(start, endless, tmp_path, kind):
    flags, _ = endless
    path = {"fifo": tmp_path / "pipe", "stdout": "/dev/stdout", "device": "/dev/null"}[kind]
    if kind == "fifo":
        os.mkfifo(path)
    process = start(*["run", *flags["run"][1:], "--output", path])
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"{path} is not a regular file" in errors.decode()
    assert len(errors.splitlines()) == 1


def test_s11_a_shell_completes_commands_and_flags(start):
    def complete(words):
        environment = {
            **os.environ,
            "_ADAFUSE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        code = "from adafuse_llm.cli import main; main()"
        call = [sys.executable, "-c", code]
        return subprocess.run(
            call, env=environment, capture_output=True, text=True, check=False
        ).stdout.split()

    assert complete("adafuse ge") == ["generate"]
    assert {"--html", "--model", "--max-words"} <= set(complete("adafuse generate --"))


def test_threads_are_one_for_small_members(tmp_path):
    """The command sets the threads of its own process, so it runs in one."""
    code = (
        "import torch; from typer.testing import CliRunner; "
        "from adafuse_llm.cli import create_app; torch.set_num_threads(3); "
        "result = CliRunner().invoke(create_app(), {flags}); "
        "assert result.exit_code == 0, result.output; print(torch.get_num_threads())"
    )

    def threads(*flags, code=code, **environment):
        inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        call = ["generate", "x", "--max-new-tokens", "1", *flags]
        return subprocess.run(
            [sys.executable, "-c", code.replace("{flags}", repr(call))],
            env={**inherited, **environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert threads() == "1\n"
    assert threads("--threads", "2") == "2\n"
    assert threads(OMP_NUM_THREADS="3") == "3\n"
    large = f"from adafuse_llm.cli import common; common.SMALL = 1000; {code}"
    assert threads(code=large) == "3\n"
