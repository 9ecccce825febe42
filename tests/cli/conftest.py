"""Tiny random models, and the command run in this process or in one of its own."""

import json
import os
import signal
import subprocess
import sys

import pytest

from adafuse_llm import AdaFuseEngine
from tests.support.commands import adafuse as run_here
from tests.support.commands import fakes
from tests.support.paths import ROOT

__all__ = ["fakes"]  # a fixture

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of two models; only the first one has a chat template."""
    from tests.support.models import Recipe, model, tokenizer

    folder = tmp_path_factory.mktemp("models")
    for name, arch, template in (("otter", "llama", TEMPLATE), ("badger", "gpt2", None)):
        model(Recipe(arch, window=8192, layers=1)).save_pretrained(folder / name)
        tokenizer("bytelevel", template).save_pretrained(folder / name)
    return [str(folder / "otter"), str(folder / "badger")]


@pytest.fixture(autouse=True)
def interrupts():
    """Let Ctrl-C interrupt tests, also in jobs in the background, where shells switch it off."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def adafuse():
    return run_here


@pytest.fixture
def spy(monkeypatch):
    """Call a function with the options of every request before the engine obeys it."""

    def call(method, function):
        real = getattr(AdaFuseEngine, method)

        def asked(self, *arguments, **options):
            function(options)
            return real(self, *arguments, **options)

        monkeypatch.setattr(AdaFuseEngine, method, asked)

    return call


@pytest.fixture
def questions(tmp_path):
    """Write a test set with the given items, and return its path."""

    def write(*items):
        path = tmp_path / "set.jsonl"
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
        return path

    return write


@pytest.fixture
def start():
    """Start Python code as a process of its own; whatever is left is killed."""
    processes = []

    def call(code, *arguments, **options):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
            # jobs in the background of a shell ignore Ctrl-C, and so do their children
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )
        processes.append(process)
        return process

    yield call
    for process in processes:
        process.kill()
        process.communicate()
