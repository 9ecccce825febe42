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


def test_only_complete_lines_are_resumed(tmp_path):
    results = Results(tmp_path / "out.jsonl")
    for seed in (1, 2):
        with results.resumed({"seed": seed}):
            assert not results.path.exists()  # until there is a result
    with results.resumed({"seed": 1}) as known:
        assert known == []
        for text in ("é", "cut off"):
            results.append({"text": text})
    results.path.write_bytes(results.path.read_bytes()[:-1])
    with results.resumed({"seed": 1}) as known:
        assert known == [{"text": "é"}]
        results.append({"text": "b"})
    with results.resumed({"seed": 1}) as known:
        assert known == [{"text": "é"}, {"text": "b"}]
    with results.resumed({"seed": 2}, afresh=True) as known:
        assert known == []
        assert results.path.stat().st_size  # the old results stay until there is a new one


def test_the_results_of_another_run_are_refused_and_stay(tmp_path):
    results = Results(tmp_path / "out.jsonl")
    for content, message in (
        (b'{"seed": 1}\n{}\n', r"another run: seed 1, not 2\. Delete it"),
        (b"not results\n{}\n", "not written by this command"),
        (b"[]\n[]\n", "not written by this command"),
        (b'{"mine": 1}\n', "another run"),
        (b"mine", "not written by this command"),
    ):
        results.path.write_bytes(content)
        with pytest.raises(InvalidInputError, match=message), results.resumed({"seed": 2}):
            pass
        assert results.path.read_bytes() == content
