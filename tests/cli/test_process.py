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
from adafuse_llm.cli import COMMANDS
from adafuse_llm.errors import install_command
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and terminals of POSIX")


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_a_command_imports_only_its_own_modules_and_pauses_the_collector():
    code = (
        "import gc, sys; from adafuse_llm.cli import main\n"
        "sys.argv = ['adafuse', 'ask', '--help']\n"
        "try: main()\n"
        "except SystemExit: print(gc.isenabled(), *sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    is_collecting, *modules = done.stdout.splitlines()[-1].split()
    assert is_collecting == "False"
    assert "adafuse_llm.cli.ask" in modules
    others = {f"adafuse_llm.cli.{name}" for name in COMMANDS.keys() - {"ask"}}
    libraries = {"adafuse_llm.evaluation.metrics", "bm25s", "numpy", "torch", "transformers"}
    assert not (others | libraries) & {*modules}


@pytest.mark.quick
def test_a_missing_extra_is_named():
    missing = "rich"
    code = f"import sys; sys.modules[{missing!r}] = None; from adafuse_llm.cli import main; main()"
    command = [sys.executable, "-c", code, "info"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: the command line needs {missing}: ")
    assert done.stderr.endswith(f"{install_command('cli')}\n")


def without_mixture(errors: bytes) -> bytes:
    """The error stream without the warning that only one of the two members has a template."""
    first, _, rest = errors.partition(b"\n")
    assert first.startswith(b"only some members have a chat template: 'otter', but not 'badger'")
    return rest


def test_ctrl_c_ends_a_stream_with_the_text_so_far(start, members):
    process = start("generate", "the mill", *members, "--json", "--max-new-tokens", 8000)
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert without_mixture(errors) == b"interrupted\n"
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
    assert without_mixture(process.stderr.read()) == b""


@pytest.mark.slow
def test_an_interrupted_run_resumes(start, adafuse, members, tmp_path):
    items = [{"question": f"{number}?", "answer": ""} for number in range(10)]
    test_set = tmp_path / "set.jsonl"
    test_set.write_text("".join(json.dumps(item) + "\n" for item in items))
    flags = ["run", "--test-set", test_set, *members, "--max-new-tokens", 16]
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
    assert [json.loads(line)["line"] for line in output.read_text().splitlines()] == [*range(1, 11)]


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
    while shown.count(b"\n") < 3 or shown.endswith(b"\n"):  # the answer is below the members
        shown += os.read(leader, 4096)
    process.send_signal(signal.SIGINT)
    while chunk := _read(leader):
        shown += chunk
    os.close(leader)
    assert process.wait(timeout=60) == 130
    assert without_mixture(process.stderr.read()) == b"interrupted\n"
    text = shown.decode()
    assert text.index("Who founded the mill?") < text.index("● otter") < text.index("Sources")
    assert "interrupted" in text


def _read(descriptor):
    try:
        return os.read(descriptor, 4096)
    except OSError:  # how Linux says that the other side is closed
        return b""


HOLD = """
import sys
from pathlib import Path
from adafuse_llm.evaluation.files import Results
with Results(Path(sys.argv[1])).lock():
    print("locked", flush=True)
    sys.stdin.read()
"""
"""A program that locks an output, as `run` does, until its input ends."""


@pytest.fixture
def hold():
    """Start a process that locks an output."""
    processes = []

    def call(output):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, output],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        return process

    yield call
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def jobs(tmp_path):
    """The flags of a command that writes results, and its output."""
    test_set, output = tmp_path / "set.jsonl", tmp_path / "out.jsonl"
    items = [{"question": f"{number}?", "answer": "Ada"} for number in range(4)]
    test_set.write_text("".join(json.dumps(item) + "\n" for item in items))
    return ["run", "--test-set", test_set, "--output", output], output


def test_a_second_process_with_the_same_output_is_refused_at_once(adafuse, fakes, hold, jobs):
    flags, output = jobs
    first = hold(output)
    for other in ([], ["--overwrite", "-o", "max_words=1"]):
        refused = adafuse(*flags, *other)
        assert refused.exit_code == 2
        assert f"{output} is in use: another process" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert not fakes  # nothing was loaded
    assert not output.exists()
    first.communicate(b"")
    assert adafuse(*flags).exit_code == 0


def test_a_full_disk_is_one_line_with_the_name_of_the_file(adafuse, fakes, jobs):
    flags, output = jobs
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, before[1]))
    try:
        result = adafuse(*flags, "--rounds")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.exit_code == 2
    assert result.stderr == f"error: {output}: File too large\n"


def test_a_full_standard_output_is_one_line(start):
    for json_flag in ([], ["--json"]):
        with Path("/dev/full").open("wb") as full:
            _, errors = start("info", *json_flag, stdout=full).communicate(timeout=120)
        assert errors.decode() == "error: standard output: No space left on device\n"


def test_an_output_that_is_not_a_file_is_refused(adafuse, fakes, jobs, tmp_path):
    flags, _ = jobs
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        result = adafuse(*flags, "--output", path)
        assert result.exit_code == 2
        assert str(path) in result.stderr
        assert len(result.stderr.splitlines()) == 1
