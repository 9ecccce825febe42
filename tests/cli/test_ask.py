"""`adafuse ask`: answer, rounds, sources, summary."""

import json

import pytest

from adafuse_llm.cli.ask import EMBEDDED
from adafuse_llm.embedded import member_paths

pytestmark = pytest.mark.quick


@pytest.fixture
def docs(tmp_path):
    (tmp_path / "mill.md").write_text("# The mill\n\nAda Brook founded the mill in 1874.\n")
    (tmp_path / "hall.txt").write_text("The town hall stands at the harbour.\n")
    return tmp_path


def test_a_pipe_gets_answer_rounds_sources_and_summary(adafuse, fakes, docs):
    result = adafuse("ask", "Who founded the mill?", "--docs", docs)
    assert "\x1b" not in result.stdout
    assert EMBEDDED in result.stderr
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == "Ada Brook did"
    assert [line.split()[0] for line in lines[3:6]] == ["0", "1", "2"]
    assert 'over " Stone"' in lines[4]
    assert lines[lines.index("Sources") + 1].startswith("[1] mill.md (")
    assert lines[-2].startswith("3 rounds · 1.0 words per round · all agreed in 1 of 3 ")
    assert " · strategy adafuse · " in " ".join(lines[-2:])
    assert "No passage" not in result.stdout
    other = adafuse("ask", "Zebra?", "--docs", docs, "--model", "org/one")
    assert (other.stderr, "No passage" in other.stdout) == ("", True)


def test_json_is_one_object(adafuse, fakes, docs):
    result = adafuse("ask", "Who founded the mill?", "--docs", docs, "--json", "--passages", 1)
    answer = json.loads(result.stdout)
    assert answer["answer"] == "Ada Brook did"
    assert answer["members"] == ["wren", "heron"]
    assert [source["source"] for source in answer["sources"]] == ["mill.md"]
    assert "".join(round_["text"] for round_ in answer["rounds"]) == "Ada Brook did"
    assert (answer["finish_reason"], answer["strategy"]) == ("stop", "adafuse")


def test_documents_are_checked_before_anything_is_loaded(adafuse, fakes, tmp_path):
    result = adafuse("ask", "Who?", "--docs", tmp_path / "none.md")
    assert result.exit_code == 2
    assert "none.md" in result.stderr
    assert not fakes


def test_the_embedded_members_and_the_handbook_are_the_default(adafuse):
    result = adafuse("ask", "Who is the director of the Silesse Mill?", "--max-new-tokens", 16)
    for part in (*(path.name for path in member_paths()), "Poris Wentano", "[1] silesse-mill.md"):
        assert part in result.stdout


def test_too_many_passages_are_named_as_the_remedy(adafuse, tmp_path):
    (tmp_path / "long.md").write_text("mill \U0001f642 \n\n" * 3000)
    result = adafuse("ask", "mill?", "--docs", tmp_path, "--passages", 50)
    assert result.exit_code == 2
    assert "Lower --passages" in result.stderr
