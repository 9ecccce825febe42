"""Answers of a suite are stored without the test set's texts, and restored with them."""

import json
import lzma

import pytest

from adafuse_llm.evaluation.runner import Record
from benchmarks.real.answers import restore, store


@pytest.mark.quick
def test_restored_answers_are_the_stored_ones(tmp_path):
    before, after, file = tmp_path / "before", tmp_path / "after", tmp_path / "answers.json.xz"
    question = {"question": "Who wrote it", "answer": ["Anna Berg"]}
    (tmp_path / "nq.jsonl").write_text(json.dumps(question) + "\n")
    record = Record(
        line=1,
        question="Who wrote it",
        pred="Anna",
        answer="Anna",
        label=("Anna Berg",),
        metrics={"exact_match": 0.0},
        finish_reason="stop",
    )
    (before / "nq").mkdir(parents=True)
    (before / "nq" / "single.jsonl").write_text(record.model_dump_json() + "\n")
    (before / "nq" / "single.jsonl.lock").write_text("")
    (before / "notes.json").write_text("{}\n")
    store(before, file)
    assert b"Anna Berg" not in lzma.decompress(file.read_bytes())
    restore(file, after, tmp_path)
    (line,) = (after / "nq" / "single.jsonl").read_text().splitlines()
    assert Record(**json.loads(line)) == record
    assert (after / "notes.json").read_text() == "{}\n"
    assert not (after / "nq" / "single.jsonl.lock").exists()
    with pytest.raises(SystemExit, match="task nq needs --data"):
        restore(file, after, None)
