"""Stop sequences."""

from __future__ import annotations

import pytest

from adafuse_llm.text.stops import Transcript

pytestmark = pytest.mark.quick


def test_a_possible_beginning_of_a_stop_sequence_is_held_back_and_released() -> None:
    transcript = Transcript(["END"])
    assert transcript.push("one E") == ("one E", "one ")
    assert transcript.push("N") == ("N", "")
    assert transcript.push("V") == ("V", "ENV")
    assert not transcript.stopped
    assert transcript.text == "one ENV"


def test_a_stop_sequence_split_across_spans_cuts_the_text() -> None:
    transcript = Transcript(["END"])
    shown = [transcript.push(span)[1] for span in ("one ", "E", "N", "D two")]
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
    assert transcript.push("done\n")[1] == "done"
    assert transcript.flush() == "\n"
    assert transcript.flush() == ""


def test_spaces_are_dropped_from_the_start_only_and_only_as_many() -> None:
    transcript = Transcript(drop_spaces=2)
    assert transcript.push("   a")[0] == " a"
    assert transcript.push("  b")[0] == "  b"
    transcript = Transcript(drop_spaces=2)
    assert [transcript.push(span)[0] for span in (" ", " ", " ", "a")] == ["", "", " ", "a"]
    transcript = Transcript(drop_spaces=2)
    assert transcript.push("\n a")[0] == "\n a"
