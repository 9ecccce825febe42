"""Stop sequences."""

from __future__ import annotations

import pytest

from adafuse_llm.text.stops import Transcript

pytestmark = pytest.mark.quick


def test_a_possible_beginning_of_a_stop_sequence_is_held_back_and_released() -> None:
    transcript = Transcript(["END"])
    assert transcript.push("one E") == "one "
    assert transcript.push("N") == ""
    assert transcript.push("V") == "ENV"
    assert not transcript.stopped
    assert transcript.text == "one ENV"


def test_a_stop_sequence_split_across_spans_cuts_the_text() -> None:
    transcript = Transcript(["END"])
    shown = [transcript.push(span) for span in ("one ", "E", "N", "D two")]
    assert shown == ["one ", "", "", ""]
    assert transcript.stopped
    assert transcript.text == "one "
    assert transcript.flush() == ""


def test_the_earliest_of_several_stop_sequences_counts() -> None:
    transcript = Transcript(["cd", "bcde"])
    transcript.push("abcdef")
    assert transcript.text == "a"


def test_what_was_held_back_is_released_at_the_end() -> None:
    transcript = Transcript(["\n\n"])
    assert transcript.push("done\n") == "done"
    assert transcript.flush() == "\n"
    assert transcript.flush() == ""
