"""`adafuse run`: one result per line, in order, whatever happens in between."""

import json
import math
import signal
import threading
import time

import pytest

from adafuse_llm import AdaFuseEngine, ContextWindowError, MemberError, MemberOutOfMemoryError
from adafuse_llm.evaluation.files import question_form

PROMPT = "Answer briefly.\n\nQuestion: who?\nAnswer: ada\n\nQuestion: who is bo?\nAnswer:"


@pytest.fixture
def job(tmp_path, members):
    """A test set of four lines, and the flags that run it on the tiny models."""
    items = [{"question": f"who is {name}?", "answer": name} for name in ("ada", "bo", "cy", "di")]
    test_set, prompts = tmp_path / "set.jsonl", tmp_path / "prompts.txt"
    test_set.write_text("".join(json.dumps(item) + "\n" for item in items))
    prompts.write_text("Answer briefly.\n\nQuestion: who?\nAnswer: ada\n")
    return [
        "run", "--test-set", test_set, "--prompts", prompts, *members, "--max-new-tokens", 6,
    ]  # fmt: skip


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def intercept(monkeypatch):
    """Call a function with the arguments of every request before the engine answers it."""

    def call(function):
        real = AdaFuseEngine.generate

        def generate(self, *arguments, **options):
            function(*arguments, **options)
            return real(self, *arguments, **options)

        monkeypatch.setattr(AdaFuseEngine, "generate", generate)

    return call


@pytest.mark.parametrize("chat", [False, True])
def test_results_are_those_of_the_engine_in_the_order_of_the_lines(
    adafuse, job, tmp_path, models, chat
):
    output = tmp_path / "deep" / "out.jsonl"
    result = adafuse(*job, "--output", output, *["--chat"] * chat)
    assert result.exit_code == 0, result.output
    assert (result.stdout, result.stderr) == (
        "", "4 lines: 4 answered, 0 failed; strategy mixture\n",
    )  # fmt: skip
    assert [(each["line"], each["label"]) for each in records(output)] == [
        (1, "ada"), (2, "bo"), (3, "cy"), (4, "di"),
    ]  # fmt: skip
    request = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    with AdaFuseEngine.from_pretrained(models) as engine:
        whole = engine.generate(**request, max_new_tokens=6, stop="\nQuestion:")
    assert records(output)[1] == {
        "line": 2,
        "question": "who is bo?",
        "pred": whole.text.strip(),
        "label": "bo",
        "finish_reason": whole.finish_reason,
        "strategy": "mixture",
    }


def test_several_lines_are_answered_at_the_same_time(adafuse, fakes, tmp_path, intercept):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"question": "x", "answer": "y"}\n' * 9)
    together = threading.Barrier(3)
    intercept(lambda *_a, **_o: together.wait(timeout=60))  # fails unless three lines run at once
    job = ["run", "--test-set", path, "--output", output, "--max-requests", 3]
    assert adafuse(*job).exit_code == 0
    assert [each["line"] for each in records(output)] == list(range(1, 10))


@pytest.mark.parametrize("cut", [1, 30, -1])
def test_a_resumed_run_equals_one_that_ran_through(adafuse, job, tmp_path, monkeypatch, cut):
    output = tmp_path / "out.jsonl"
    adafuse(*job, "--output", output)
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) // 2 + cut] if cut > 0 else whole[:cut])
    assert adafuse(*job, "--output", output).exit_code == 0
    assert output.read_bytes() == whole
    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", None)  # nothing is loaded any more
    again = adafuse(*job, "--output", output)
    assert again.exit_code == 0
    assert "resuming: 4 of 4 lines are done" in again.stderr


def test_ctrl_c_loses_no_complete_answer(adafuse, fakes, tmp_path, intercept):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(f'{{"question": "{n}", "answer": ""}}\n' for n in range(1, 41)))
    others = threading.Event()

    def wait(prompt, cancel, **_options):
        if "Question: 3\n" in prompt:  # a slow line, behind which others complete
            others.wait(60)
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
            while not cancel.is_set():
                time.sleep(0.01)
        elif "Question: 6\n" in prompt:
            others.set()

    intercept(wait)
    job = ["run", "--test-set", path, "--output", output, "--max-requests", 2]
    interrupted = adafuse(*job)
    assert interrupted.exit_code == 130
    assert "interrupted: run the same command again to resume" in interrupted.stderr
    kept = output.read_bytes().splitlines()
    assert [json.loads(line)["line"] for line in kept][:4] == [1, 2, 4, 5]
    assert len(kept) < 40


def test_another_run_is_not_resumed_and_nothing_of_it_is_touched(adafuse, job, tmp_path):
    output = tmp_path / "out.jsonl"
    adafuse(*job, "--output", output)
    before = output.read_bytes()

    def refused(*flags):
        result = adafuse(*job, "--output", output, *flags)
        assert result.exit_code == 2
        assert "--overwrite" in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert output.read_bytes() == before
        return result.stderr

    assert "max_words 3, not 2" in refused("-o", "max_words=2")
    assert "rounds False, not True" in refused("--rounds")
    assert "chat None, not True" in refused("--chat")
    assert adafuse(*job, "--output", output, "--overwrite", "--model", tmp_path).exit_code == 2
    assert output.read_bytes() == before  # the models could not be loaded
    job[4].write_text("Other.\n")
    assert "another run: prompts" in refused()
    job[2].write_text(job[2].read_text() + "\n")
    assert "another run: test set" in refused()
    assert adafuse(*job, "--output", output, "--overwrite", "--rounds").exit_code == 0
    assert set(records(output)[0]["usage"]["forward_passes"]) == {"otter", "badger"}
    for content in (b"not results\n", b'{"line": 99}\n', b"[1]\n"):
        before = content
        output.write_bytes(content)
        refused("--rounds")
    assert adafuse(*job, "--output", job[2], "--overwrite").exit_code == 2
    assert len(job[2].read_text().split("\n")) > 4  # the test set is still there


def test_lines_that_fail_do_not_stop_the_run_and_lost_ones_are_asked_again(
    adafuse, job, tmp_path, intercept
):
    output, asked = tmp_path / "out.jsonl", []

    def fail(prompt, **_options):
        asked.append(prompt)
        if "is bo?" in prompt and len(asked) < 5:
            raise MemberOutOfMemoryError("otter", "no memory")
        if "is cy?" in prompt:
            raise ContextWindowError("too long")

    intercept(fail)
    first = adafuse(*job, "--output", output)
    assert first.exit_code == 1
    assert "line 3: ContextWindowError: too long" in first.stderr
    assert [each["finish_reason"] == "error" for each in records(output)] == [0, 1, 1, 0]
    again = adafuse(*job, "--output", output)
    assert again.exit_code == 1
    assert len(asked) == 5
    assert "resuming: 3 of 4 lines are done" in again.stderr
    assert "4 lines: 3 answered, 1 failed" in again.stderr
    assert [each["finish_reason"] == "error" for each in records(output)] == [0, 0, 1, 0]


def test_bad_lines_are_reported_by_number(adafuse, job, tmp_path):
    good = json.dumps({"question": "who is ada?", "answer": ["ada", "Ada"]}).encode()
    bad = [
        b"{not json",
        b"[]",
        b'{"question": " ", "answer": ""}',
        b'{"question": "no answer"}',
        b'{"question": "\xff", "answer": ""}',
        b'{"question": "\\ud800", "answer": ""}',
        b'{"question": "x", "answer": NaN}',
        json.dumps({"question": "too long " * 9000, "answer": ""}).encode(),
    ]
    job[2].write_bytes(b"\n\n".join([good, *bad, good]) + b"\r\n")
    output = tmp_path / "out.jsonl"
    result = adafuse(*job, "--output", output)
    assert result.exit_code == 1
    found = records(output)
    assert [record["line"] for record in found] == list(range(1, 21, 2))
    assert found[0] == found[-1] | {"line": 1}
    for record in found[1:-1]:
        assert f"line {record['line']}: {record['error']}\n" in result.stderr
    assert "ContextWindowError" in found[-2]["error"]
    assert result.stderr.endswith("10 lines: 2 answered, 8 failed; strategy mixture\n")


@pytest.mark.parametrize(
    ("header", "form"),
    [
        ("", "Question: {question}\nAnswer:"),
        ("Do.\n\nQuestion: a\nAnswer: b\n", "Question: {question}\nAnswer:"),
        ("Question:\na\nAnswer:\nb\n", "Question:\n{question}\nAnswer:\n"),
        (
            "Question: a\nLet's think step by step\nso\nThe answer is 1",
            "Question: {question}\nLet's think step by step\n",
        ),
    ],
)
def test_a_question_is_put_as_the_examples_put_theirs(header, form):
    assert question_form(header) == form


def test_drawn_answers_have_seeds_and_a_resumed_run_draws_the_same(adafuse, fakes, tmp_path):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"question": "Who founded the mill?", "answer": "Ada"}\n' * 24)
    job = ["run", "--test-set", path, "--output", output, "--temperature", 2, "--n", 2]
    assert adafuse(*job).exit_code == 0
    whole, found = output.read_bytes(), records(output)
    seeds = [each["seed"] for each in found] + [each["alternatives"][0]["seed"] for each in found]
    assert len(set(seeds)) == 48
    assert len({each["pred"] for each in found}) > 1  # the questions are equal, and the seeds not
    base = json.loads((tmp_path / "out.jsonl.run.json").read_text())["seed"]
    output.write_bytes(whole[: len(whole) // 2])
    assert adafuse(*job).exit_code == 0
    assert output.read_bytes() == whole
    assert adafuse(*job, "--seed", base, "--max-requests", 3).exit_code == 0
    assert f"seed {base}, not {base + 1}" in adafuse(*job, "--seed", base + 1).stderr


def test_lines_can_have_messages_and_rounds_have_log_probabilities(
    adafuse, fakes, tmp_path, intercept
):
    asked = []
    intercept(lambda messages, **_options: asked.append(messages))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    lines = [{"messages": messages, "answer": "Ada Brook did"}, {"messages": "Who?", "answer": ""}]
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = ["run", "--test-set", path, "--output", output, "--rounds", "-o", "top_logprobs=1"]
    assert adafuse(*job).exit_code == 1
    assert asked == [messages]
    first, other = records(output)
    assert (first["question"], first["pred"], first["label"]) == ("Who?", *["Ada Brook did"] * 2)
    tokens = [token for each in first["rounds"] for token in each["logprobs"]["wren"]]
    assert tokens[1]["logprob"] == pytest.approx(math.log(0.8))
    assert other["error"] == 'its "messages" must be a list of objects'
    refused = adafuse(*job, "--template", "Q: {question}", "--overwrite")
    assert "--template" in refused.stderr


def test_a_member_error_names_the_member(adafuse, fakes, tmp_path, intercept):
    def fail(*_arguments, **_options):
        raise MemberError("wren", "its logits are NaN")

    intercept(fail)
    path = tmp_path / "in.jsonl"
    path.write_text('{"question": "x", "answer": "y"}\n')
    result = adafuse("run", "--test-set", path, "--output", tmp_path / "out.jsonl")
    assert result.exit_code == 1
    assert "line 1: MemberError: member 'wren' failed" in result.stderr
