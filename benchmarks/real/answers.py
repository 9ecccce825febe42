"""Store the answers of a suite without the texts of the test sets, and restore them.

A run of ``python -m benchmarks.paper --suite real`` takes hours. These commands keep its answers in
a small file, from which the run goes on, or prints its tables without decoding::

    python -m benchmarks.real.answers store FOLDER FILE.json.xz
    python -m benchmarks.real.answers restore FILE.json.xz FOLDER --data DATA

The questions and accepted answers of the test sets are left out. Restoring reads them from DATA,
the folder of ``TASK.jsonl`` that the run had.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adafuse_llm.evaluation.tasks import Question, embedded_questions, load_task

OF_TEST_SET = ("question", "label")
"""Fields of a record that are texts of the test set."""


def store(folder: Path, file: Path) -> None:
    """Store the answers of a folder in a file."""
    texts = {}
    for path in sorted(each for each in folder.rglob("*.json*") if each.suffix != ".lock"):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            records = [json.loads(line) for line in text.splitlines()]
            text = "".join(
                json.dumps({k: v for k, v in record.items() if k not in OF_TEST_SET}) + "\n"
                for record in records
            )
        texts[str(path.relative_to(folder))] = text
    file.write_bytes(lzma.compress(json.dumps(texts).encode()))


def restore(file: Path, folder: Path, data: Path | None) -> None:
    """Restore the answers of a file into a folder."""
    for name, text in json.loads(lzma.decompress(file.read_bytes())).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.splitlines()
        if path.suffix == ".jsonl":
            questions = _questions(path.parent.name, data)
            lines = [json.dumps(_whole(json.loads(line), questions)) for line in lines]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _questions(task: str, data: Path | None) -> dict[int, Question]:
    known = load_task(task)
    if known.kind is not None:
        questions = embedded_questions(None, known.kind)
    elif data is None:
        raise SystemExit(f"task {task} needs --data, the folder with {task}.jsonl")
    else:
        questions = known.questions((data / f"{task}.jsonl").read_bytes())
    return {each.number: each for each in questions}


def _whole(record: Mapping[str, Any], questions: Mapping[int, Question]) -> dict[str, Any]:
    question = questions[record["line"]]
    return {**record, "question": question.text, "label": question.accepted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    storing = commands.add_parser("store")
    storing.add_argument("folder", type=Path)
    storing.add_argument("file", type=Path)
    restoring = commands.add_parser("restore")
    restoring.add_argument("file", type=Path)
    restoring.add_argument("folder", type=Path)
    restoring.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "store":
        store(arguments.folder, arguments.file)
    else:
        restore(arguments.file, arguments.folder, arguments.data)


if __name__ == "__main__":
    main()
