"""The held-out questions that ship are those that the generator draws."""

from __future__ import annotations

import gzip
from itertools import islice
from pathlib import Path

import pytest

from adafuse_llm.embedded import HELDOUT, HELDOUT_KINDS, HELDOUT_LONG, heldout_questions
from training import freeze
from training.freeze import (
    LONG_QUESTIONS,
    QUESTIONS,
    as_lines,
    draw_long_questions,
    draw_questions,
)


def test_the_shipped_questions_are_those_of_the_generator() -> None:
    drawn = list(islice(draw_questions(), QUESTIONS))
    assert gzip.decompress(HELDOUT.read_bytes()) == as_lines(drawn)
    assert heldout_questions() == tuple(drawn)
    lines = b""
    for kind in HELDOUT_KINDS[1:]:
        long = list(islice(draw_long_questions(kind), LONG_QUESTIONS))
        lines += as_lines(long, kind=kind)
        assert heldout_questions(kind=kind) == tuple(long)
    assert gzip.decompress(HELDOUT_LONG.read_bytes()) == lines


def test_the_file_is_the_same_whenever_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    for name, time in (("one.gz", 1.0e9), ("two.gz", 2.0e9)):
        monkeypatch.setattr(freeze, "HELDOUT", tmp_path / name)
        monkeypatch.setattr(freeze, "HELDOUT_LONG", tmp_path / f"long-{name}")
        monkeypatch.setattr("time.time", lambda time=time: time)
        freeze.main()
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
    assert gzip.decompress(written[0]) == gzip.decompress(HELDOUT.read_bytes())


@pytest.mark.quick
def test_another_seed_draws_others() -> None:
    shipped = heldout_questions(12)
    other = list(islice(draw_questions(seed=2), 12))
    assert not set(other) & set(shipped)
    assert [each.skill for each in other] == [each.skill for each in shipped]
    more = next(draw_questions(n_passages=5))
    assert len(more.passages) == 5
