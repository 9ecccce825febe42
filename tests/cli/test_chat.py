"""`adafuse chat`: answers, the conversation so far, commands, errors."""

import pytest

from adafuse_llm import ContextWindowError

pytestmark = pytest.mark.quick


@pytest.fixture
def asked(spy):
    calls = []

    def record(options):
        calls.append([(each["role"], each["content"]) for each in options["messages"]])

    spy("stream", record)
    return calls


def test_a_pipe_gets_only_the_answers(adafuse, fakes, asked):
    result = adafuse("chat", "--system", "Be brief.", input="Who did?\n\nAnd then?\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Ada Brook did\nAda Brook did\n"
    start = [("system", "Be brief."), ("user", "Who did?")]
    assert asked == [start, [*start, ("assistant", "Ada Brook did"), ("user", "And then?")]]


def test_questions_come_with_passages_of_documents_and_history_without(
    adafuse, fakes, asked, tmp_path
):
    (tmp_path / "mill.md").write_text("# Mill\n\nAda Brook founded it.")
    result = adafuse("chat", "--docs", tmp_path, input="Who founded the mill?\nAnd then?\n")
    assert result.exit_code == 0, result.output
    (first,), (before, _, second) = asked
    assert "[1] # Mill\n\nAda Brook founded it." in first[1]
    assert before[1] == "Who founded the mill?"
    assert "Ada Brook founded it." in second[1]  # found by the question before
    assert second[1].endswith("Question: And then?")


def test_commands_explain_the_last_answer(adafuse, fakes, asked):
    lines = "Who?", "/why", "/alone", "/help", "/new", "Who?", "/quit", "Who?"
    result = adafuse("chat", input="\n".join(lines))
    assert result.exit_code == 0, result.output
    for shown in ('over " Stone"', "3 rounds", "■ heron  Ada Stone", "begin a new"):
        assert shown in result.stdout
    assert asked == [[("user", "Who?")], [("user", "Who?")]]


@pytest.mark.parametrize("line", ["/why", "/wy", "/wy 3"])
def test_a_wrong_command_is_an_error_and_the_conversation_goes_on(adafuse, fakes, asked, line):
    result = adafuse("chat", input=f"{line}\n/etc/hosts?\n")
    assert "/why" in result.stderr.partition("error: ")[2]
    assert (asked, result.exit_code) == ([[("user", "/etc/hosts?")]], 0)


def test_an_answer_that_ends_before_its_first_text_leaves_nothing(adafuse, fakes, asked, spy):
    spy("stream", lambda options: len(asked) == 1 and options["cancel"].set())
    result = adafuse("chat", input="Who?\nWhy?\nAnd?\n")
    assert result.exit_code == 0, result.output
    assert [content for _, content in asked[-1]] == ["Who?", "Ada Brook did", "And?"]


def test_a_message_that_fails_is_not_kept(adafuse, fakes, asked, spy):
    def fail(options):
        if options["messages"][-1]["content"] == "long":
            raise ContextWindowError("too long")

    spy("stream", fail)
    result = adafuse("chat", input="Who?\nlong\nAnd?\n")
    assert result.stderr.count("error: too long") == 1
    assert asked[-1] == [("user", "Who?"), ("assistant", "Ada Brook did"), ("user", "And?")]
