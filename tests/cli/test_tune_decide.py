"""`adafuse tune --decide`: the fit of typed questions, its file, its page, and what it refuses."""

import json
import re
import signal

import pytest
import yaml

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.evaluation.files import Results

LINES = [
    {"state": f"Ticket {n}", "question": "Odd?", "answer": ("no", "yes")[n % 2]} for n in range(120)
]


def wren(text):
    """Know whether a number is odd, unless it ends in 9. Heron always prefers the letter A."""
    option = "yes" if re.search(r"Ticket \d*[1357]\n", text) else "no"
    return {f" {each}": 0.8 if f"\n{each}. {option}" in text else 0.2 for each in "AB"}


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    loaded = []

    def load(paths, *, config, **_):
        heron = FakeBackend("heron", lambda _text: {" A": 0.9, " B": 0.1}, [" A", " B"])
        loaded.append(AdaFuseEngine([FakeBackend("wren", wren, [" A", " B"]), heron], config))
        return loaded[-1]

    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", load)
    return loaded


@pytest.fixture
def job(questions, tmp_path):
    return ["tune", "--decide", questions(*LINES), "--output", tmp_path / "tuned.yaml"]


def test_a_fit_is_shown_and_written_and_used(adafuse, job, tmp_path):
    text = dict.fromkeys(("logprob", "agreement", "length", "intercept"), 1)
    both = {"calibration": {**text, "strategy": "adafuse", "members": {"wren": 1, "heron": 1}}}
    (tmp_path / "old.yaml").write_text(json.dumps({**both, "decisions": {"weights": {"oak": 1}}}))
    job += ["--config", tmp_path / "old.yaml", "--report", tmp_path / "page.html"]
    shown = " ".join(adafuse(*job, "--most-wrong", 25).stdout.split())
    for words in (
        r"wren 90.0 \[\S+, \S+\] 1.00 0.0 \[",
        r"heron \S+ \[\S+, \S+\] 0.00 100.0 \[",
        r" 100 0\.\d+ 90.0 \[\S+, \S+\] █{36} Area under the ROC curve of yes: [89]",
        r"alone is wrong on \d+\.\d \[.* At most 25 % of .* They are 100 % of",
    ):
        assert re.search(words, shown), words
    assert "█" * 36 in (tmp_path / "page.html").read_text("utf-8")
    written = yaml.safe_load((tmp_path / "tuned.yaml").read_text())
    assert written["decisions"]["weights"] == {"wren": 1, "heron": 0}
    assert written["calibration"]["members"] == {"wren": 1, "heron": 1}
    decided = adafuse("decide", "Odd?", "--config", tmp_path / "tuned.yaml", input="Ticket 7")
    assert re.search(r"yes, with confidence [89]\d\.\d %\n$", decided.stdout)
    fit = json.loads(adafuse(*job, "--json", "--most-wrong", 0.1).stdout)
    assert (fit["calibration"]["threshold"], fit["coverage"]) == (None, 0)
    assert fit["flips"]["heron"]["value"] == 100


def test_an_interrupted_fit_asks_only_what_is_left(adafuse, job, engines, monkeypatch):
    real, kept = Results.append, []

    def append(self, record):
        real(self, record)
        kept.append(record)
        if len(kept) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Results, "append", append)
    early = adafuse(*job)
    assert (early.exit_code, "again to resume" in early.stderr) == (130, True)
    assert [adafuse(*job).exit_code for _ in range(2)] == [0, 0]
    assert len(kept) == 120
    assert engines[-1].backends[0].passes == 0


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({"answer": "maybe"}, [], "line 120 .* must be one of yes, no; got 'maybe'"),
        ({"state": ""}, [], 'line 120 .* its "state" must be text'),
        ({}, ["--limit", 49], "needs 50 labeled questions .* got 49"),
        ({}, ["--use", "oak"], "oak"),
    ],
)
def test_what_cannot_be_fitted_is_one_error_before_anything_is_loaded(
    adafuse, job, questions, engines, change, flags, message
):
    questions(*LINES[:-1], {**LINES[0], **change})
    done = adafuse(*job, *flags)
    assert (done.exit_code, len(done.stderr.splitlines()), engines) == (2, 1, [])
    assert re.search(message, done.stderr)
