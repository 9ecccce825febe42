"""`adafuse decide`: bars, kinds of questions, a calibration, and what it refuses."""

import json

import pytest

from adafuse_llm import AdaFuseEngine, Choice
from tests.support.commands import adafuse
from tests.support.deciding import deciding_engine

pytestmark = pytest.mark.quick

ASKED = ("decide", "Which team?", "--choice", "billing", "--choice", "technical")
TEXT = "A technical fault."


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    engines = []

    def load(_paths, *, config, **_):
        engines.append(deciding_engine(config))
        return engines[-1]

    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", load)
    return engines


def test_bars_show_how_likely_each_member_finds_each_option(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("{max_words: 2, decisions: {weights: {oak: 1, elm: 0}, threshold: 0.9}}")
    done = adafuse(*ASKED, "--config", file, input=TEXT)
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    shown = [(" ".join(line[:-3]), line[-2], line[-3].count("█")) for line in lines[4:7]]
    together = ("technical together", "83.3", 25)
    assert shown == [together, ("● oak", "83.3", 25), ("■ elm", "90.9", 27)]
    assert "technical, with confidence 83.3 %\nIt is below the threshold" in done.stdout

    # orders and weights of the command apply instead of the calibration
    team = {"team": Choice("Which team?", ["billing", "technical"])}
    for flag, options in (("--orders=1", {"orders": 1}), ("-oweights=[1, 2]", {"weights": [1, 2]})):
        shown = json.loads(
            adafuse(*ASKED, flag, "--config", file, "--json", input=f"{TEXT}\n").stdout
        )
        expected = deciding_engine().decide(TEXT, team, **options)
        answer = expected.model_dump(mode="json", exclude={"answers"})
        answer |= expected["team"].model_dump(mode="json")
        assert shown == {"question": "Which team?", "answer": "technical", **answer}


def test_an_answer_can_be_a_level(tmp_path):
    (tmp_path / "state.txt").write_text("They are angry.")
    flags = ("--level", "quiet", "--level", "angry", "--state", tmp_path / "state.txt")
    done = adafuse("decide", "How angry?", *flags, "--use", "oak")
    assert "angry, with confidence 83.3 %; expected level 0.83, from 0 to 1" in done.stdout


def test_what_cannot_be_used_is_refused_before_anything_is_loaded(loaded):
    for flags, named in (
        (("--level", "a"), "--level"),
        (("--strategy", "single"), "--strategy. ("),
        (("-o", "max_words=2"), "max_words"),
        (("--state", "none.txt"), "none.txt"),
        (("--state", "/dev/null"), "not be empty"),
    ):
        done = adafuse(*ASKED, *flags, input=TEXT)
        assert (done.exit_code, named in done.stderr, loaded) == (2, True, [])
