"""`adafuse tune`: a search, a test, and a file that every entry point takes."""

import json
import signal

import pytest
import yaml

from adafuse_llm.evaluation import tuning
from adafuse_llm.loading.config_file import read_config


@pytest.fixture
def job(questions, tmp_path, fakes):
    """Twenty questions; wren alone says "Ada Brook", heron alone "Ada Stone"."""
    data = questions(
        *({"question": f"Who founded mill {n}?", "answer": "Ada Brook did"} for n in range(20))
    )
    return ["tune", data, "--output", tmp_path / "tuned.yaml", "--trials", 3]


@pytest.mark.quick
def test_a_setting_is_found_tested_and_written(adafuse, job, tmp_path, fakes):
    result = adafuse(*job, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["searched"], told["held_out"], told["pays"]) == (10, 10, False)
    assert told["alone"]["wren"]["score"] == 100
    assert told["alone"]["heron"]["score"] == 0
    assert told["written"] == {"use": ["wren"]}
    assert "10 questions to search on, 10 held out" in (tmp_path / "tuned.yaml").read_text()
    assert read_config(tmp_path / "tuned.yaml").options == {"use": ("wren",)}
    assert [call["config"].stop for call in fakes] == [("\nQuestion:",)]


def test_models_that_do_not_take_part_are_not_in_the_file(adafuse, job, tmp_path, monkeypatch):
    (tmp_path / "wren").mkdir()
    monkeypatch.chdir(tmp_path)
    models = ["--model", "wren", "--model", "org/heron", "--dtype", "float64"]
    result = adafuse(*job, *models, "-o", "max_words=2")
    assert result.exit_code == 0, result.output
    said = yaml.safe_load((tmp_path / "tuned.yaml").read_text())
    folder = str(tmp_path / "wren")
    assert said == {"strategy": "single", "models": [folder], "dtype": "float64"}


def test_the_ensemble_is_kept_on_request(adafuse, job, tmp_path):
    models = ["--model", "org/wren", "--model", "org/heron", "-o", "weights={wren: 1, heron: 2}"]
    result = adafuse(*job, *models, "--keep-ensemble")
    assert result.exit_code == 0, result.output
    assert "describes the ensemble." in result.stdout
    found = read_config(tmp_path / "tuned.yaml")
    assert found.models == ("org/wren", "org/heron")
    assert found.config.weights == (1.0, 2.0)
    assert found.config.use is None


def test_enough_questions_calibrate_the_confidence(adafuse, job, questions, tmp_path):
    assert "No confidence: a calibration needs 50" in adafuse(*job).stdout
    answers = ["Ada Brook did", *["no"] * 4] * 12
    data = questions(
        *({"question": f"Who founded mill {n}?", "answer": a} for n, a in enumerate(answers))
    )
    result = adafuse("tune", data, *job[2:], "--overwrite", "--keep-ensemble")
    assert result.exit_code == 0, result.output
    assert "cross-validated on 60 questions" in result.stdout
    assert "chance" in result.stdout  # all answers are the same
    assert "Every member alone is wrong on" in result.stdout
    written = read_config(tmp_path / "tuned.yaml").config
    assert written.calibration is not None
    assert {*written.calibration.members} == {*(written.use or ())}
    prompt = "Question: Who founded mill 1?\nAnswer:"
    use = ["generate", prompt, "--json", "--config", tmp_path / "tuned.yaml"]
    told = json.loads(adafuse(*use).stdout.splitlines()[-1])["generation"]
    assert told["confidence"] == pytest.approx(0.2, abs=0.02)
    refused = adafuse(*use, "--use", "wren")
    assert (refused.exit_code, "'calibration'" in refused.stderr) == (2, True)


def test_the_calibration_of_a_file_is_left_out(adafuse, job, tmp_path):
    old = {"strategy": "mixture", "members": {"wren": 1, "heron": 1}, "logprob": 1, "agreement": 1}
    old |= {"length": 1, "intercept": 1}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump({"calibration": old}))
    result = adafuse(*job, "--config", tmp_path / "old.yaml")
    assert (result.exit_code, len(result.stderr.splitlines())) == (0, 1), result.output
    assert read_config(tmp_path / "tuned.yaml").config.calibration is None


def test_an_interrupted_search_goes_on_and_another_does_not(adafuse, job, tmp_path, monkeypatch):
    real = tuning.in_order  # type: ignore[attr-defined]
    calls = []

    def in_order(*arguments):
        calls.append(1)
        if len(calls) == 4:  # at the second setting
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(tuning, "in_order", in_order)
    early = adafuse(*job)
    assert early.exit_code == 130, early.output
    assert "interrupted: run the same command again to resume" in early.stderr
    assert not (tmp_path / "tuned.yaml").exists()
    assert adafuse(*job).exit_code == 0
    assert len(calls) < 4 + 7
    monkeypatch.setattr(tuning, "in_order", lambda *_a, **_k: pytest.fail("decoded again"))
    assert "describes wren alone" in adafuse(*job).stdout
    assert "'exact_match', not 'contains'" in adafuse(*job, "--metric", "contains").stderr
    assert adafuse(*job, "--chat").exit_code == 2


def test_a_question_stands_in_the_prompt_and_alone_in_a_chat(adafuse, job, tmp_path, spy, fakes):
    asked = []
    spy("generate", lambda options: asked.append(options["messages"]))
    (tmp_path / "prompt.txt").write_text("Be brief.\n{question}\n")
    flags = ["--prompt", tmp_path / "prompt.txt"]
    assert adafuse(*job, *flags, "--chat", "--max-requests", 3).exit_code == 0
    assert fakes[0]["runtime"].max_requests == 3
    assert [{"role": "user", "content": "Be brief.\nWho founded mill 7?"}] in asked
    assert adafuse(*job, "--chat", "--overwrite").exit_code == 0
    assert [{"role": "user", "content": "Who founded mill 7?"}] in asked
    (tmp_path / "prompt.txt").write_text("Be brief.")
    assert "prompt.txt needs {question}" in adafuse(*job, *flags).stderr


def test_a_file_of_somebody_else_is_not_overwritten(adafuse, job, tmp_path):
    (tmp_path / "tuned.yaml").write_text("max_words: 1\n")
    refused = adafuse(*job)
    assert (refused.exit_code, "--overwrite" in refused.stderr) == (2, True)
    assert adafuse(*job, "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--limit", 19], "20 different questions or more; got 19"),
        (["--use", "wren"], "two members"),
        (["--strategy", "single"], "'single'"),
        (["--metric", "number_"], "'number'"),
        (["--most-wrong", 3], "--most-wrong has no effect without --decide"),
        (["--decide"], "--trials has no effect with --decide"),
    ],
)
def test_what_cannot_be_searched_is_one_error_before_anything_is_loaded(
    adafuse, job, fakes, flags, word, tmp_path
):
    result = adafuse(*job, *flags)
    assert (result.exit_code, len(result.stderr.splitlines()), fakes) == (2, 1, [])
    assert word in result.stderr
    assert not (tmp_path / "tuned.yaml").exists()
