"""`adafuse decide`: bars, kinds of questions, a calibration, and what it refuses."""

import json
import re

import pytest

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from tests.support.commands import adafuse

pytestmark = pytest.mark.quick

ASKED = ("decide", "Which team?", "--choice", "billing", "--choice", "bugs")


def member(name, share):
    """A member that likes the options bugs, yes and angry."""

    def rule(text):
        liked = re.findall(r"^([AB])\. (?:bugs|yes|angry)", text, re.MULTILINE)
        return {f" {letter}": share if letter in liked else 1 - share for letter in "AB"}

    return FakeBackend(name, rule, [" A", " B"])


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    engines = []

    def load(paths, *, config, **_):
        engines.append(AdaFuseEngine([member("wren", 0.75), member("heron", 0.25)], config))
        return engines[-1]

    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", load)
    return engines


def test_bars_show_how_likely_each_member_finds_each_option(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("{max_words: 2, decisions: {weights: {wren: 1, heron: 0}, threshold: 0.8}}")
    done = adafuse(*ASKED, "--config", file, input="It fails.")
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    shown = [(" ".join(line[:-3]), line[-2], line[-3].count("█")) for line in lines[1:4]]
    assert shown == [
        ("billing together", "25.0", 7),
        ("● wren", "25.0", 7),
        ("■ heron", "75.0", 22),
    ]
    assert "bugs, with confidence 75.0 %\nIt is below the threshold" in done.stdout


def test_an_answer_can_be_a_level_or_json(tmp_path):
    file = tmp_path / "state.txt"
    file.write_text("It fails.")
    flags = ("--level", "calm", "--level", "angry", "--use", "wren", "--state", file)
    done = adafuse("decide", "How angry?", *flags)
    assert "angry, with confidence 75.0 %; expected level 0.75, from 0 to 1" in done.stdout
    shown = json.loads(adafuse("decide", "How angry?", *flags, "--json").stdout)
    assert (shown["answer"], shown["probabilities"]["calm"]) == ("angry", pytest.approx(0.25))


def test_what_cannot_be_used_is_refused_before_anything_is_loaded(loaded):
    for flag, value in (("--level", "a"), ("-o", "max_words=2"), ("--state", "none.txt")):
        done = adafuse(*ASKED, flag, value, input="It fails.")
        assert (done.exit_code, value.partition("=")[0] in done.stderr) == (2, True)
    assert not loaded
