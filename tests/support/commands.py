"""Commands run in this process: how to call them, and the fixtures that they share."""

import io
import os
from typing import NamedTuple
from unittest import mock

import pytest

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.cli import run


class Result(NamedTuple):
    """What a command printed, and its exit code."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def adafuse(*arguments, input="", env=None):  # noqa: A002
    """Run `adafuse` in this process with arguments of any type."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2)]
    stdin = io.TextIOWrapper(io.BytesIO(input.encode()), "utf-8")
    with (
        mock.patch.multiple("sys", stdin=stdin, stdout=streams[0], stderr=streams[1]),
        mock.patch.dict(os.environ, env or {}),
    ):
        try:
            code = run([*map(str, arguments)])
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        for stream in streams:
            stream.flush()
    return Result(code or 0, *(stream.buffer.getvalue().decode() for stream in streams))


def rule(*continuations):
    """A distribution: the first continuation that fits the text so far is the likeliest."""

    def distribution(text):
        for written, following in continuations:
            if text.endswith(written):
                return following
        return {END: 1.0}

    return distribution


@pytest.fixture
def fakes(monkeypatch):
    """Members without models: wren prefers " Brook", heron " Stone", both are sure of " did"."""
    vocabulary = ["Ada", " Brook", " Stone", " did"]
    start = {"Ada": 0.8, "The": 0.2}
    wren, heron = (
        rule(
            (":", start), ("Ada", {" Brook": brook, " Stone": 1 - brook}), ("Brook", {" did": 1.0})
        )
        for brook in (0.8, 0.4)
    )
    loaded = []

    def load(paths, *, config, strategy="adafuse", **options):
        loaded.append({"paths": paths, "config": config, "strategy": strategy, **options})
        backends = [FakeBackend("wren", wren, vocabulary), FakeBackend("heron", heron, vocabulary)]
        engine = AdaFuseEngine(backends, config, strategy=strategy)
        loaded[-1]["engine"] = engine
        return engine

    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", load)
    return loaded
