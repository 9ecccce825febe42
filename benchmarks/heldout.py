"""Held-out questions with long answers for the embedded members, in 4 kinds of 300 questions.

parts      questions of two to four parts, answered in a sentence for each part
summary    requests for everything that the passages say about a subject
reasoning  word problems of three to five steps
plain      questions of all these kinds, to be asked without a chat template
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from adafuse_llm.documents import Passage
from adafuse_llm.embedded import HeldoutQuestion

KINDS = ("parts", "summary", "reasoning", "plain")

FILE = Path(__file__).with_name("heldout_long.jsonl.gz")


def long_questions(kind: str) -> tuple[HeldoutQuestion, ...]:
    """Return the questions of a kind. Their names and problems are not in the training data."""
    lines = map(json.loads, gzip.decompress(FILE.read_bytes()).decode().splitlines())
    chosen = [line for line in lines if line.pop("kind") == kind]
    for line in chosen:
        line["passages"] = tuple(Passage(**passage) for passage in line["passages"])
    return tuple(HeldoutQuestion(**line) for line in chosen)
