"""Commands run in this process: how to call them, and the fixtures that they share."""

import signal

import pytest
from typer.testing import CliRunner

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END


def runner(app):
    """Return a function that calls a Typer application with arguments of any type."""
    cli = CliRunner()

    def call(*arguments, **options):
        return cli.invoke(app, [str(argument) for argument in arguments], **options)

    return call


@pytest.fixture
def interrupted_while_loading(monkeypatch):
    """Ctrl-C comes while members are loaded."""

    def load(*_arguments, **_options):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")

    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", load)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
