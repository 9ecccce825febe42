"""The command from beginning to end, on the embedded members."""

from __future__ import annotations

import json

import pytest

from adafuse_llm import AdaFuseEngine, InvalidInputError, MemberOutOfMemoryError
from adafuse_llm.evaluation.metrics import verbatim
from benchmarks.paper.__main__ import main
from benchmarks.paper.suites import SUITES, load_suite, parts_of
from benchmarks.paper.tables import Report
from benchmarks.paper.tasks import load_task


@pytest.fixture
def suite(tmp_path):
    """A small suite, and the arguments that run it."""
    path = tmp_path / "small.yaml"
    path.write_text(
        "parts: [table-1, more]\nquestions: {table: 2, sweep: 1}\n"
        "without: [DeePEn, GaC, 'GaC, gated', UniTE, SweetSpan]\n"
        "rows: [{name: two words, strategy: fixed-2}, {name: counts twice, "
        "options: {weights: [2, 1, 1]}}]\n"
    )
    return ["--suite", str(path), "--output", str(tmp_path / "out")]


def test_the_tables_have_the_scores_of_the_answers_and_a_resumed_run_decodes_nothing(
    suite, tmp_path, monkeypatch, capsys
):
    assert main(suite) == 0
    printed = capsys.readouterr().out
    out = tmp_path / "out"
    assert printed == (out / "suite.md").read_text()
    report = Report.model_validate_json((out / "suite.json").read_text())
    first, more = report.tables
    questions = load_task("embedded").questions(None)[:2]
    with AdaFuseEngine.from_embedded() as engine:
        texts = [engine.generate(**each.request, max_new_tokens=64).text for each in questions]
    (line,) = [line for line in first.lines if line.name == "AdaFuse, B = 3"]
    read = load_task("embedded").read
    right = [verbatim(read(t), q.accepted) for t, q in zip(texts, questions, strict=True)]
    assert line.score.value == 50 * sum(right)
    assert f"| {line.name} | {line.score.shown()} |" in printed
    assert {test.theirs for test in first.tests} >= {"majority vote", "likelihood reranker"}
    assert {test.ours for test in more.tests} == {"two words", "counts twice"}
    before = {path: path.read_bytes() for path in (out / "embedded").glob("*.jsonl")}
    assert len(before) == 9
    monkeypatch.setattr(AdaFuseEngine, "generate", None)
    assert main(suite) == 0
    assert before == {path: path.read_bytes() for path in (out / "embedded").glob("*.jsonl")}
    assert main([*suite, "--max-requests", "2"]) == 2
    assert "belongs to another run: max_requests 16, not 2" in capsys.readouterr().err


def test_a_lost_answer_forbids_tests_until_it_is_decoded_again(suite, tmp_path, monkeypatch):
    real = AdaFuseEngine.generate

    def generate(self, **options):
        if self.strategy.name == "vote":
            raise MemberOutOfMemoryError("wren", "no memory")
        return real(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(AdaFuseEngine, "generate", generate)
        assert main(suite) == 1
    table = json.loads((tmp_path / "out" / "suite.json").read_text())["tables"][0]
    assert "majority vote" not in {test["theirs"] for test in table["tests"]}
    assert main(suite) == 0
    table = json.loads((tmp_path / "out" / "suite.json").read_text())["tables"][0]
    assert "majority vote" in {test["theirs"] for test in table["tests"]}


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_has_parts_and_known_tasks(name):
    suite = load_suite(name)
    parts = parts_of(suite, suite.real or ("wren", "heron", "finch"))
    assert all(part.rows for part in parts)
    assert all(load_task(task).metrics for task in suite.tasks)


def test_test_sets_are_read_with_their_prompts(tmp_path):
    (tmp_path / "nq.jsonl").write_text('{"question": "who is bo?", "answer": ["bo", "Bo"]}\n')
    (tmp_path / "nq.prompt.txt").write_text("Be brief.\n\nQuestion: a\nAnswer: b\n")
    (question,) = load_task("nq").questions(tmp_path)
    assert question.request["prompt"].endswith("b\n\nQuestion: who is bo?\nAnswer:")
    assert question.accepted == ("bo", "Bo")
    with pytest.raises(InvalidInputError, match=r"needs gsm8k\.jsonl"):
        load_task("gsm8k").questions(tmp_path)
    assert load_task("gsm8k").same("so 7. The answer is 18.0") == "18"
    assert load_task("nq").same("Bo!\nQuestion:") == "bo"
