"""Stop sequences."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adafuse_llm.text.stops import TURNS, Transcript

pytestmark = pytest.mark.quick


def test_a_possible_beginning_of_a_stop_sequence_is_held_back_and_released() -> None:
    transcript = Transcript(["END"])
    assert transcript.push("one E") == "one "
    assert transcript.push("N") == ""
    assert transcript.push("V") == "ENV"
    assert not transcript.stopped
    assert transcript.text == "one ENV"


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


def test_a_repeated_call_ends_a_response_with_calls() -> None:
    bare = ['{"name": "add", "arguments": {}}', '{"name": "now", "arguments": {}}']
    for add, now in (bare, [f"<tool_call>{each}</tool_call>" for each in bare]):
        for calls, text in ((True, f"{add}\n{now}\n{add}"), (False, f"{add}\n{now}\n{add}\n{now}")):
            transcript = Transcript(calls=calls)
            for span in (add, "\n", f"{now}\n", f"{add}\n", now):
                if not transcript.stopped:
                    transcript.push(span)
            assert transcript.text.rstrip() == text
            assert transcript.stopped == ("stop" if calls else None)


def test_calls_in_reasoning_and_in_prose_do_not_end_a_response() -> None:
    call = '{"name": "add", "arguments": {}}'
    marked = f"<tool_call>{call}</tool_call>"
    for prefix, text in (
        ("", f"<think>Perhaps\n{call}\nor\n{call}\n"),
        ("<think>", f"{marked}{marked}</think>{marked}"),
        ("", f"So:\n{call}\n{call}\n"),
    ):
        transcript = Transcript(calls=True, prefix=prefix)
        transcript.push(text)
        assert (transcript.text, transcript.stopped) == (text, None)


LETTERS = st.text(st.sampled_from("ab \n"), max_size=5)
STOPS = st.lists(st.text(st.sampled_from("ab \n"), min_size=1, max_size=4), max_size=3)


@settings(max_examples=400)
@given(spans=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_a_transcript_shows_the_text_up_to_the_stop_and_nothing_of_it(
    spans: list[str], stops: list[str]
) -> None:
    transcript = Transcript(stops)
    shown = ""
    whole = ""
    for span in spans:
        whole += span
        shown += transcript.push(span)
        ends = [whole.index(stop) for stop in stops if stop in whole]
        assert bool(transcript.stopped) == bool(ends)
        assert transcript.text == (whole[: min(ends)] if ends else whole)
        assert transcript.text.startswith(shown)
        if ends:
            break
        # whatever is shown could not have become part of a stop sequence
        assert not any(
            shown.endswith(stop[:size]) and whole == shown
            for stop in stops
            for size in range(1, len(stop))
        )
    shown += transcript.flush()
    assert shown == transcript.text
    assert not any(stop in shown for stop in stops)
