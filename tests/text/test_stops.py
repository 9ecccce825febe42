"""Stop sequences."""

from __future__ import annotations

import pytest

from adafuse_llm.text.stops import TURNS, Transcript

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


@pytest.mark.parametrize("gap", ["\n", "\n\n", " \n\n"])
def test_a_next_turn_ends_the_response_without_the_whitespace_before_it(gap: str) -> None:
    transcript = Transcript(turns=TURNS)
    spans = ["Paris", ".", gap, "User", ": And"]
    shown = [transcript.push(span) for span in spans]
    assert shown == ["Paris", ".", "", "", ""]
    assert (transcript.text, transcript.stopped) == ("Paris.", "stop")
    assert transcript.flush() == ""


@pytest.mark.parametrize(
    ("stops", "text", "reason"),
    [([], "Paris.", "stop"), (["\nAssistant:"], "Paris. ", "stop_sequence")],
)
def test_a_stop_sequence_that_is_a_turn_cuts_nothing_before_it(
    stops: list[str], text: str, reason: str
) -> None:
    transcript = Transcript(stops, turns=TURNS)
    transcript.push("Paris. \nAssistant:")
    assert (transcript.text, transcript.stopped) == (text, reason)


def test_a_stop_sequence_has_no_effect_before_a_response_is_complete() -> None:
    transcript = Transcript(["1"], can_end=lambda text: text.endswith("}"))
    assert transcript.push('{"a": 1') == '{"a": 1'
    assert transcript.push("}1") == "}"
    assert (transcript.text, transcript.stopped) == ('{"a": 1}', "stop_sequence")
    assert [Transcript(["END"]).push(text) for text in ("E", "END x")] == ["", ""]


def test_a_response_that_mentions_a_turn_goes_on() -> None:
    transcript = Transcript(turns=TURNS)
    spans = ["Ask the User:", "\nUsers", " know.\n", "Assistants", ": yes"]
    assert "".join(map(transcript.push, spans)) + transcript.flush() == "".join(spans)
    assert transcript.stopped is None


def test_the_earlier_of_a_stop_sequence_and_a_turn_counts() -> None:
    stop_first = Transcript(["."], turns=TURNS)
    stop_first.push("Paris. \nUser:")
    assert (stop_first.text, stop_first.stopped) == ("Paris", "stop_sequence")
    turn_first = Transcript([" And"], turns=TURNS)
    turn_first.push("Paris. \nUser: And")
    assert (turn_first.text, turn_first.stopped) == ("Paris.", "stop")
