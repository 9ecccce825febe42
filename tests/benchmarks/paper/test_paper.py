"""The command from beginning to end, on the embedded members."""

import pytest

from adafuse_llm import AdaFuseEngine, InvalidInputError, MemberOutOfMemoryError
from adafuse_llm.evaluation.exact_match import verbatim
from benchmarks.paper.__main__ import main
from benchmarks.paper.suites import SUITES, load_suite, parts_of
from benchmarks.paper.tables import Report
from benchmarks.paper.tasks import load_task, question_form


@pytest.mark.slow
def test_the_tables_have_the_scores_and_a_resumed_run_decodes_only_what_is_missing(
    tmp_path, monkeypatch, capsys
):
    path, out, real = tmp_path / "small.yaml", tmp_path / "out", AdaFuseEngine.generate
    path.write_text(
        "parts: [table-1, more]\nquestions: {table: 2, sweep: 1}\n"
        "without: [DeePEn, GaC, 'GaC, gated', UniTE, SweetSpan]\n"
        "rows: [{name: two words, options: {max_words: 2, margin_threshold: 0}}, "
        "{name: counts twice, options: {weights: [2, 1, 1]}}]\n"
    )
    suite = ["--suite", str(path), "--output", str(out)]

    def generate(self, **options):
        if self.strategy.name == "vote":
            raise MemberOutOfMemoryError("wren", "no memory")
        return real(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(AdaFuseEngine, "generate", generate)
        assert main(suite) == 2
    assert "no memory" in capsys.readouterr().err
    assert main(suite) == 0
    printed = capsys.readouterr().out
    assert printed == (out / "suite.md").read_text()
    first, more = Report.model_validate_json((out / "suite.json").read_text()).tables
    assert {test.theirs for test in first.tests} >= {"majority vote", "likelihood reranker"}
    assert {test.ours for test in more.tests} == {"two words", "counts twice"}
    task = load_task("embedded")
    questions = task.questions(None)[:2]
    with AdaFuseEngine.from_embedded() as engine:
        texts = [engine.generate(**each.request, max_new_tokens=64).text for each in questions]
    right = [verbatim(task.read(t), q.accepted) for t, q in zip(texts, questions, strict=True)]
    (line,) = [line for line in first.lines if line.name == "AdaFuse, B = 3"]
    assert line.score.value == 50 * sum(right)
    assert f"| {line.name} | {line.score.shown()} |" in printed
    before = {path: path.read_bytes() for path in (out / "embedded").glob("*.jsonl")}
    monkeypatch.setattr(AdaFuseEngine, "generate", None)
    assert main(suite) == 0
    assert before == {path: path.read_bytes() for path in (out / "embedded").glob("*.jsonl")}
    assert main([*suite, "--max-requests", "2"]) == 2
    assert "belongs to another run: max_requests 16, not 2" in capsys.readouterr().err


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


STEP = "Question: a\nLet's think step by step\nso\nThe answer is 1"


@pytest.mark.parametrize(
    ("header", "form"),
    [
        ("Do.\n\nQuestion: a\nAnswer: b\n", "Question: {question}\nAnswer:"),
        ("Question:\na\nAnswer:\nb\n", "Question:\n{question}\nAnswer:\n"),
        (STEP, "Question: {question}\nLet's think step by step\n"),
    ],
)
def test_a_question_is_put_as_the_examples_put_theirs(header, form):
    assert question_form(header, "") == form
