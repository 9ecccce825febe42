"""Test sets with bad lines, and files of results that are resumed."""

import pytest

from adafuse_llm import InvalidInputError
from adafuse_llm.evaluation.files import Results, read_lines

GOOD = b'{"question": "who is ada?", "answer": ["ada", "Ada"]}'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{not json", "not JSON"),
        (b"[]", 'not an object with a text "question"'),
        (b'{"question": " ", "answer": ""}', 'not an object with a text "question"'),
        (b'{"question": "no answer"}', 'no "answer"'),
        (b'{"question": "\xff", "answer": ""}', "not JSON"),
        (b'{"question": "\\ud800", "answer": ""}', "not JSON"),
        (b'{"question": "x", "answer": NaN}', "not JSON"),
    ],
)
def test_a_bad_line_is_named_by_its_number(bad, message):
    assert [line.number for line in read_lines(b"\n\n".join([GOOD, GOOD]) + b"\r\n")] == [1, 3]
    with pytest.raises(InvalidInputError, match=f"line 3 of the test set: .*{message}"):
        read_lines(b"\n\n".join([GOOD, bad]))


def test_a_test_set_in_utf_16_is_refused_as_a_whole():
    with pytest.raises(InvalidInputError, match=r"Save it as UTF-8\."):
        read_lines(GOOD.decode().encode("utf-16"))


def test_only_complete_lines_are_resumed_and_later_ones_replace_earlier_ones(tmp_path):
    results = Results(tmp_path / "out.jsonl")
    results.begin({"seed": 1}, afresh=True)
    for number, text in ((2, "lost"), (1, "é"), (2, "found"), (3, "cut off")):
        results.append({"line": number, "text": text})
    results.path.write_bytes(results.path.read_bytes()[:-1])
    known = [{"line": 1, "text": "é"}, {"line": 2, "text": "found"}]
    assert results.done({"seed": 1}, range(4)) == known
    results.begin({"seed": 1}, afresh=False)
    results.append({"line": 3})
    assert results.done({"seed": 1}, range(4)) == [*known, {"line": 3}]


def test_the_results_of_another_run_are_refused_and_stay(tmp_path):
    results = Results(tmp_path / "out.jsonl")
    results.begin({"seed": 1}, afresh=True)
    results.append({"line": 1})
    with pytest.raises(InvalidInputError, match=r"another run: seed 1, not 2\. Pass --overwrite"):
        results.done({"seed": 2}, range(4))
    for content in (b"not results\n", b"[]\n", b'{"line": 99}\n'):
        results.path.write_bytes(content)
        with pytest.raises(InvalidInputError, match="not written by this command"):
            results.done({"seed": 1}, range(4))
        assert results.path.read_bytes() == content
