"""`adafuse run`: one result per line, in order, whatever happens in between."""

import json
import math
import signal
import threading

import pytest

from adafuse_llm import AdaFuseEngine, ContextWindowError, MemberOutOfMemoryError
from adafuse_llm.evaluation.files import question_form

PROMPT = "Answer briefly.\n\nQuestion: who?\nAnswer: ada\n\nQuestion: who is bo?\nAnswer:"


@pytest.fixture
def output(tmp_path):
    return tmp_path / "deep" / "out.jsonl"


@pytest.fixture
def job(tmp_path, output, questions, fakes):
    """A test set of four lines, and the flags that run it."""
    names = ("ada", "bo", "cy", "di")
    test_set = questions(*({"question": f"who is {each}?", "answer": each} for each in names))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Answer briefly.\n\nQuestion: who?\nAnswer: ada\n")
    return ["run", "--test-set", test_set, "--prompts", prompts, "--output", output]


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.quick
@pytest.mark.parametrize("chat", [False, True])
def test_each_line_has_a_result_in_the_order_of_the_lines(adafuse, job, output, spy, chat):
    asked = []
    spy("generate", lambda asks: asked.append(asks.get("prompt") or asks["messages"]))
    result = adafuse(*job, *["--chat"] * chat)
    assert result == (0, "", "4 lines: 4 answered, 0 failed; strategy adafuse\n")
    assert ([{"role": "user", "content": PROMPT}] if chat else PROMPT) in asked
    labels = [(each["line"], each["label"]) for each in records(output)]
    assert labels == [(1, "ada"), (2, "bo"), (3, "cy"), (4, "di")]
    record = records(output)[1]
    assert record.pop("logprob") < 0
    assert record == {
        "line": 2,
        "question": "who is bo?",
        "pred": "Ada Brook did",
        "label": "bo",
        "finish_reason": "stop",
        "strategy": "adafuse",
    }


def test_several_lines_are_answered_at_the_same_time(adafuse, fakes, output, questions, spy):
    together = threading.Barrier(3)
    spy("generate", lambda _: together.wait(timeout=60))  # fails unless three lines run at once
    job = ["run", "--test-set", questions(*[{"question": "x", "answer": "y"}] * 9)]
    assert adafuse(*job, "--output", output, "--max-requests", 3).exit_code == 0
    assert [each["line"] for each in records(output)] == list(range(1, 10))


@pytest.mark.quick
@pytest.mark.parametrize("cut", [1, 30, -1])
def test_a_resumed_run_equals_one_that_ran_through(adafuse, job, output, monkeypatch, cut):
    adafuse(*job)
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) // 2 + cut] if cut > 0 else whole[:cut])
    assert adafuse(*job).exit_code == 0
    assert output.read_bytes() == whole
    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", None)  # nothing is loaded any more
    again = adafuse(*job)
    assert again.exit_code == 0
    assert "resuming: 4 of 4 lines are done" in again.stderr


def test_ctrl_c_loses_no_complete_answer(adafuse, fakes, output, questions, spy):
    others = threading.Event()

    def wait(options):
        if "Question: 3\n" in options["prompt"]:  # a slow line, behind which others complete
            others.wait(60)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            options["cancel"].wait(60)
        elif "Question: 6\n" in options["prompt"]:
            others.set()

    spy("generate", wait)
    test_set = questions(*({"question": str(n), "answer": ""} for n in range(1, 41)))
    result = adafuse("run", "--test-set", test_set, "--output", output, "--max-requests", 2)
    assert result.exit_code == 130
    assert "run the same command again to resume" in result.stderr
    kept = [each["line"] for each in records(output)]
    assert kept[:4] == [1, 2, 4, 5]
    assert len(kept) < 40


def test_another_run_is_not_resumed_and_nothing_of_it_is_touched(adafuse, job, output, fakes):
    adafuse(*job)
    before = output.read_bytes()

    def refused(*flags):
        result = adafuse(*job, *flags)
        assert result.exit_code == 2
        assert "--overwrite" in result.stderr
        assert output.read_bytes() == before
        return result.stderr

    assert "max_words 3, not 2" in refused("-o", "max_words=2")
    assert "rounds False, not True" in refused("--rounds")
    prompts, test_set = job[4], job[2]
    prompts.write_text("Other.\n")
    assert "another run: prompts" in refused()
    assert adafuse(*job, "--overwrite", "--rounds", "--stop", "").exit_code == 0
    assert [call["config"].stop for call in fakes] == [("\nQuestion:",), ()]
    assert set(records(output)[0]["usage"]["forward_passes"]) == {"wren", "heron"}
    for before in (b"not results\n", b'{"line": 99}\n'):
        output.write_bytes(before)
        refused("--rounds", "--stop", "")
    assert adafuse(*job[:-1], test_set, "--overwrite").exit_code == 2
    assert len(test_set.read_text().split("\n")) > 4  # the test set is still there


def test_lines_that_fail_do_not_stop_the_run_and_lost_ones_are_asked_again(
    adafuse, job, output, spy
):
    asked = []

    def fail(options):
        prompt = options["prompt"]
        asked.append(prompt)
        if "is bo?" in prompt and len(asked) < 5:
            raise MemberOutOfMemoryError("otter", "no memory")
        if "is cy?" in prompt:
            raise ContextWindowError("too long")

    spy("generate", fail)
    first = adafuse(*job)
    assert first.exit_code == 1
    assert "line 3: ContextWindowError: too long" in first.stderr
    assert [each["finish_reason"] == "error" for each in records(output)] == [0, 1, 1, 0]
    again = adafuse(*job)
    assert (again.exit_code, len(asked)) == (1, 5)
    assert "resuming: 3 of 4 lines are done" in again.stderr
    assert "4 lines: 3 answered, 1 failed" in again.stderr
    assert [each["finish_reason"] == "error" for each in records(output)] == [0, 0, 1, 0]


def test_bad_lines_are_reported_by_number(adafuse, job, output):
    good = b'{"question": "who is ada?", "answer": ["ada", "Ada"]}'
    bad = (
        *(b"{not json", b"[]", b'{"question": " ", "answer": ""}', b'{"question": "no answer"}'),
        b'{"question": "\xff", "answer": ""}',
        b'{"question": "\\ud800", "answer": ""}',
        b'{"question": "x", "answer": NaN}',
    )
    job[2].write_bytes(b"\n\n".join([good, *bad, good]) + b"\r\n")
    result = adafuse(*job)
    first, *others, last = records(output)
    assert first == last | {"line": 1}
    assert [each["line"] for each in others] == list(range(3, 16, 2))
    for each in others:
        assert f"line {each['line']}: {each['error']}\n" in result.stderr


def test_a_test_set_in_utf_16_is_refused_as_a_whole(adafuse, job, output):
    job[2].write_text('{"question": "who is ada?", "answer": "ada"}\n' * 2, encoding="utf-16")
    result = adafuse(*job)
    assert (result.exit_code, output.exists()) == (2, False)
    assert "Save it as UTF-8." in result.stderr


STEP = "Question: a\nLet's think step by step\nso\nThe answer is 1"


@pytest.mark.parametrize(
    ("header", "form"),
    [
        ("Do.\n\nQuestion: a\nAnswer: b\n", "Question: {question}\nAnswer:"),
        ("Question:\na\nAnswer:\nb\n", "Question:\n{question}\nAnswer:\n"),
        (STEP, "Question: {question}\nLet's think step by step\n"),
    ],
)
def test_a_question_is_put_as_the_examples_put_theirs(header, form):
    assert question_form(header) == form


def test_drawn_answers_have_seeds_and_a_resumed_run_with_a_seed_draws_the_same(
    adafuse, fakes, output, questions
):
    test_set = questions(*[{"question": "Who founded the mill?", "answer": "Ada"}] * 24)
    job = ["run", "--test-set", test_set, "--output", output, "--temperature", 2, "--n", 2]
    assert adafuse(*job).exit_code == 0
    assert len({each["seed"] for each in records(output)}) == 24
    job += ["--seed", 5, "--overwrite"]
    assert adafuse(*job).exit_code == 0
    job.remove("--overwrite")
    whole, found = output.read_bytes(), records(output)
    seeds = {seed for each in found for seed in (each["seed"], each["alternatives"][0]["seed"])}
    assert len(seeds) == 48
    assert len({each["pred"] for each in found}) > 1  # the questions are equal, and the seeds not
    output.write_bytes(whole[: len(whole) // 2])
    assert adafuse(*job).exit_code == 0
    assert output.read_bytes() == whole
    job[job.index(5)] = 6
    assert "seed 5, not 6" in adafuse(*job).stderr


def test_lines_can_have_messages_and_rounds_have_log_probabilities(
    adafuse, fakes, output, questions, spy
):
    asked = []
    spy("generate", lambda options: asked.append(options["messages"]))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    test_set = questions(
        {"messages": messages, "answer": "Ada"}, {"messages": "Who?", "answer": ""}
    )
    job = ["run", "--test-set", test_set, "--output", output, "--rounds", "-o", "top_logprobs=1"]
    assert adafuse(*job).exit_code == 1
    assert asked == [messages]
    first, other = records(output)
    assert (first["question"], first["pred"], first["label"]) == ("Who?", "Ada Brook did", "Ada")
    tokens = [token for each in first["rounds"] for token in each["logprobs"]["wren"]]
    assert tokens[1]["logprob"] == pytest.approx(math.log(0.8))
    assert '"messages"' in other["error"]
    refused = adafuse(*job, "--template", "Q: {question}", "--overwrite")
    assert "--template" in refused.stderr


def test_the_escapes_of_a_template_leave_other_backslashes(adafuse, fakes, output, questions, spy):
    asked = []
    spy("generate", lambda options: asked.append(options["prompt"]))
    template = r"Is $a \\neq \frac{b}{2}$?\n{question}"
    job = ["run", "--test-set", questions({"question": "Why?", "answer": ""}), "--output", output]
    assert adafuse(*job, "--template", template).exit_code == 0
    assert asked == ["Is $a \\neq \\frac{b}{2}$?\nWhy?"]
