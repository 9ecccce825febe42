"""What needs a process of its own: imports, pipes, terminals, locks."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from adafuse_llm.cli import COMMANDS
from adafuse_llm.errors import install_command

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and terminals of POSIX")

MAIN = "import sys; {before}; from adafuse_llm.cli import main; main()"


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
    libraries = {"adafuse_llm.evaluation.exact_match", "bm25s", "numpy", "torch", "transformers"}
    assert not (others | libraries) & {*modules}


@pytest.mark.quick
def test_a_missing_extra_is_named(start):
    process = start(MAIN.format(before="sys.modules['rich'] = None"), "info")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.decode().startswith("error: the command line needs rich: ")
    assert errors.decode().endswith(f"{install_command('cli')}\n")


PRINTS = """
import sys
from adafuse_llm.cli.common import Command
def forever(setup, flags):
    while True:
        print("word")
sys.exit(Command(forever, lambda parser: None).run([]))
"""
"""A command that prints without end."""


@pytest.mark.quick
def test_a_closed_pipe_is_silent_and_a_full_disk_is_one_line(start):
    closed = start(PRINTS)
    closed.stdout.read(1)
    closed.stdout.close()
    with Path("/dev/full").open("wb") as file:
        full = start(PRINTS, stdout=file)
    assert (closed.wait(timeout=60), closed.stderr.read()) == (1, b"")
    message = b"error: No space left on device\n"
    assert (full.wait(timeout=60), full.stderr.read()) == (2, message)


ECHO = """
import sys
from adafuse_llm import cli
{before}
cli.run = lambda _: print("●▽ é", input())
cli.main()
"""
"""A command that prints marks, another character, and its input."""


@pytest.mark.quick
def test_characters_that_an_encoding_lacks_are_replaced_and_a_closed_stdout_is_silent(start):
    ascii_only = "[each.reconfigure(encoding='ascii') for each in (sys.stdin, sys.stdout)]"
    for before, shown in ((ascii_only, b"?? ? ??\n"), ("sys.stdout = None", b"")):
        process = start(ECHO.format(before=before), stdin=subprocess.PIPE)
        assert process.communicate("ü\n".encode(), timeout=60) == (shown, b"")
        assert process.returncode == 0


HOLD = """
import sys
from pathlib import Path
from adafuse_llm.evaluation.files import Results
with Results(Path(sys.argv[1])).resumed({}):
    print("locked", flush=True)
    sys.stdin.read()
"""
"""A program that locks results, as `tune` does, until its input ends."""


@pytest.fixture
def job(questions, tmp_path):
    data = questions(*({"question": f"{n}?", "answer": "Ada"} for n in range(20)))
    return ["tune", data, "--trials", 1, "--output", tmp_path / "tuned.yaml"]


@pytest.fixture
def trials(tmp_path):
    return tmp_path / "tuned.yaml.trials.jsonl"


def test_a_second_process_with_the_same_output_is_refused_at_once(
    adafuse, fakes, start, job, trials
):
    first = start(HOLD, trials, stdin=subprocess.PIPE)
    assert first.stdout.readline() == b"locked\n"
    for other in ([], ["--overwrite", "--chat"]):
        refused = adafuse(*job, *other)
        assert refused.exit_code == 2
        assert f"{trials} is in use" in refused.stderr
    assert not fakes  # nothing was loaded
    first.communicate(b"")
    assert adafuse(*job).exit_code == 0


def test_an_output_that_cannot_be_written_is_one_line(adafuse, fakes, job):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, before[1]))
    try:
        result = adafuse(*job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.exit_code == 2
    assert result.stderr == "error: File too large\n"
