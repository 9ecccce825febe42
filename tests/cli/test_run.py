"""`adafuse run`: one result per line, in order, whatever happens in between."""

import json
import math
import re

import pytest

from adafuse_llm import (
    AdaFuseEngine,
    ContextWindowError,
    MemberError,
    MemberOutOfMemoryError,
)
from adafuse_llm.evaluation.files import question_form, read_lines
from tests.support.paths import BENCHMARKS


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


def test_one_result_per_line(adafuse, job, tmp_path, models):
    output = tmp_path / "deep" / "out.jsonl"
    result = adafuse(*job, "--output", output)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert result.stderr == "4 lines: 4 answered, 0 failed\n"
    found = records(output)
    assert [record["label"] for record in found] == ["ada", "bo", "cy", "di"]
    assert [record["line"] for record in found] == [1, 2, 3, 4]
    prompt = "Answer briefly.\n\nQuestion: who?\nAnswer: ada\n\nQuestion: who is bo?\nAnswer:"
    with AdaFuseEngine.from_pretrained(models) as engine:
        whole = engine.generate(prompt, max_new_tokens=6, stop="\nQuestion:")
    assert found[1] == {
        "line": 2,
        "question": "who is bo?",
        "pred": whole.text.strip(),
        "label": "bo",
        "finish_reason": whole.finish_reason,
    }


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cut", [0, 1, 30, -1, -20])
def test_resuming_equals_running_through(adafuse, job, tmp_path, cut):
    output = tmp_path / "out.jsonl"
    adafuse(*job, "--output", output)
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) // 2 + cut] if cut > 0 else whole[: cut or None])
    result = adafuse(*job, "--output", output)
    assert result.exit_code == 0, result.output
    assert output.read_bytes() == whole


def test_nothing_is_loaded_when_all_is_done(adafuse, job, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    adafuse(*job, "--output", output)
    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", None)
    result = adafuse(*job, "--output", output)
    assert result.exit_code == 0
    assert "resuming: 4 of 4 lines are done" in result.stderr


def test_another_run_is_not_resumed(adafuse, job, tmp_path):
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

    assert "max_words 3, not 2" in refused("--max-words", 2)
    assert "rounds False, not True" in refused("--rounds")
    job[2].write_text(job[2].read_text() + "\n")
    assert "different test set" in refused()
    job[4].write_text("Other.\n")
    result = adafuse(*job, "--output", output, "--overwrite", "--rounds")
    assert result.exit_code == 0
    assert records(output)[0]["rounds"][0]["winner"] >= 0
    assert set(records(output)[0]["usage"]["forward_passes"]) == {"otter", "badger"}


def test_overwriting_waits_until_the_models_are_loaded(adafuse, job, tmp_path):
    output = tmp_path / "out.jsonl"
    adafuse(*job, "--output", output)
    before = output.read_bytes()
    result = adafuse(*job, "--output", output, "--overwrite", "--model", tmp_path)
    assert result.exit_code == 2
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"some": "file"}\n', "was not written by this command"),
        (b"not results\n", "has lines that are not results"),
        (b'{"line": 2}\n', "has different lines than this run"),
        (b"[1]\n", "has lines that are not results"),
    ],
)
def test_other_files_are_not_touched(adafuse, job, tmp_path, content, message):
    output = tmp_path / "out.jsonl"
    if "not written" not in message:
        adafuse(*job, "--output", output)
    output.write_bytes(content)
    result = adafuse(*job, "--output", output)
    assert result.exit_code == 2
    assert message in result.stderr
    assert output.read_bytes() == content


def test_what_failed_of_the_run_is_asked_again(adafuse, job, tmp_path, monkeypatch):
    output, asked = tmp_path / "out.jsonl", []
    real = AdaFuseEngine.generate

    def generate(self, prompt, **options):
        asked.append(prompt)
        if "is bo?" in prompt and len(asked) < 5:
            raise MemberOutOfMemoryError("otter", "no memory")
        if "is cy?" in prompt:
            raise ContextWindowError("too long")
        return real(self, prompt, **options)

    monkeypatch.setattr(AdaFuseEngine, "generate", generate)
    assert adafuse(*job, "--output", output).exit_code == 1
    again = adafuse(*job, "--output", output)
    assert again.exit_code == 1
    assert len(asked) == 5
    assert "resuming: 3 of 4 lines are done" in again.stderr
    assert "4 lines: 3 answered, 1 failed" in again.stderr
    found = records(output)
    assert [record["line"] for record in found] == [1, 2, 3, 4]
    assert ["error" in record for record in found] == [False, False, True, False]


def test_prompts_are_sent_as_messages_on_request(adafuse, job, tmp_path, models):
    output = tmp_path / "out.jsonl"
    assert adafuse(*job, "--output", output, "--chat").exit_code == 0
    prompt = "Answer briefly.\n\nQuestion: who?\nAnswer: ada\n\nQuestion: who is bo?\nAnswer:"
    with AdaFuseEngine.from_pretrained(models) as engine:
        whole = engine.generate(
            messages=[{"role": "user", "content": prompt}], max_new_tokens=6, stop="\nQuestion:"
        )
    assert records(output)[1]["pred"] == whole.text.strip()
    refused = adafuse(*job, "--output", output)
    assert refused.exit_code == 2
    assert "chat True, not None" in refused.stderr


def test_the_output_cannot_be_the_input(adafuse, job):
    result = adafuse(*job, "--output", job[2], "--overwrite")
    assert result.exit_code == 2
    assert len(records(job[2])) == 4


def test_bad_lines_are_reported_and_do_not_stop_the_run(adafuse, job, tmp_path):
    good = json.dumps({"question": "who is ada?", "answer": ["ada", "Ada"]}).encode()
    bad = [
        b"{not json",
        b"[]",
        b'{"question": 3, "answer": ""}',
        b'{"question": " ", "answer": ""}',
        b'{"question": "no answer"}',
        b'{"question": "\xff", "answer": ""}',
        b'{"question": "\\ud800", "answer": ""}',
        b"[" * 100_000,
        json.dumps({"question": "too long " * 9000, "answer": ""}).encode(),
    ]
    job[2].write_bytes(b"\n\n".join([good, *bad, good]) + b"\r\n")
    output = tmp_path / "out.jsonl"
    result = adafuse(*job, "--output", output)
    assert result.exit_code == 1
    found = records(output)
    assert [record["line"] for record in found] == list(range(1, 23, 2))
    assert [record["finish_reason"] == "error" for record in found] == [
        False, *[True] * len(bad), False,
    ]  # fmt: skip
    assert found[0] == found[-1] | {"line": 1}
    for record in found[1:-1]:
        assert f"line {record['line']}: {record['error']}\n" in result.stderr
    assert "ContextWindowError" in found[-2]["error"]
    assert result.stderr.endswith("11 lines: 2 answered, 9 failed\n")
    again = adafuse(*job, "--output", output)
    assert again.exit_code == 1


@pytest.mark.quick
def test_a_member_that_fails_on_one_line_does_not_stop_the_run(adafuse, job, tmp_path, monkeypatch):
    real = AdaFuseEngine.generate

    def generate(self, prompt, **options):
        if "who is bo?" in prompt:
            raise MemberError("otter", "its logits are NaN")
        return real(self, prompt, **options)

    monkeypatch.setattr(AdaFuseEngine, "generate", generate)
    output = tmp_path / "out.jsonl"
    result = adafuse(*job, "--output", output)
    assert result.exit_code == 1
    assert "line 2: MemberError: member 'otter' failed" in result.stderr
    assert [record["finish_reason"] == "error" for record in records(output)] == [0, 1, 0, 0]


def test_empty_test_sets_and_missing_files(adafuse, job, tmp_path):
    job[2].write_text("\n \n")
    result = adafuse(*job, "--output", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "test set is empty" in result.stderr
    job[2].unlink()
    assert adafuse(*job, "--output", tmp_path / "out.jsonl").exit_code == 2


def test_prompts_must_be_text(adafuse, job, tmp_path):
    job[4].write_bytes(b"\xff\xfe\xfa")
    result = adafuse(*job, "--output", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "is not UTF-8 text" in result.stderr


def test_the_template_must_hold_the_question(adafuse, job, tmp_path):
    result = adafuse(*job, "--output", tmp_path / "out.jsonl", "--template", "Q:")
    assert result.exit_code == 2
    assert "--template must contain {question}" in result.stderr


@pytest.mark.parametrize(
    ("header", "form"),
    [
        ("", "Question: {question}\nAnswer:"),
        ("Translate the following.\n", "Question: {question}\nAnswer:"),
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


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the paper's test sets are not there")
@pytest.mark.parametrize("name", ["gsm8k", "nq", "squad", "triviaqa", "flores_de_en"])
def test_the_papers_test_sets_are_read(name):
    lines = read_lines((BENCHMARKS / f"{name}.jsonl").read_bytes())
    assert len(lines) > 1000
    assert all(line.problem is None for line in lines)
    assert "{question}" in question_form((BENCHMARKS / f"{name}.prompt.txt").read_text())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", '["a", NaN]'])
def test_e12_a_label_that_is_no_number_is_refused(adafuse, fakes, tmp_path, number):
    test_set, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    test_set.write_text(f'{{"question": "x", "answer": {number}}}\n')
    result = adafuse("run", "--test-set", test_set, "--output", output)
    assert result.exit_code == 1
    assert "line 1: not JSON" in result.stderr
    (found,) = [
        json.loads(line, parse_constant=pytest.fail) for line in output.read_text().splitlines()
    ]
    assert found["label"] is None


def test_a_link_to_the_output_stays_a_link(adafuse, fakes, tmp_path):
    test_set, output, real = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "real.jsonl"))
    test_set.write_text('{"question": "x", "answer": "y"}\n' * 3)
    output.symlink_to(real)
    assert adafuse("run", "--test-set", test_set, "--output", output).exit_code == 0
    lines = real.read_bytes().splitlines(keepends=True)
    real.write_bytes(lines[1].replace(b'"line": 2', b'"line": 1'))
    assert adafuse("run", "--test-set", test_set, "--output", real).exit_code == 0
    assert output.is_symlink()
    assert len(records(output)) == 3


def test_answers_have_the_form_that_a_flag_sets_and_the_run_records_it(adafuse, job, tmp_path):
    pytest.importorskip("llguidance", reason="needs the extra [grammar]")
    output, schema = tmp_path / "out.jsonl", tmp_path / "schema.json"
    properties = {"ok": {"type": "boolean"}, "id": {"enum": [1, 2]}}
    whole = {
        "type": "object",
        "properties": properties,
        "required": ["ok", "id"],
        "additionalProperties": False,
    }
    schema.write_text(json.dumps(whole))
    job = [*job[:-1], 30, "--output", output, "--json-schema", schema]
    result = adafuse(*job, "--rounds")
    assert result.exit_code == 0, result.output
    for record in records(output):
        answer = json.loads(record["pred"])
        assert list(answer) == ["ok", "id"]
        assert answer["id"] in (1, 2)
        assert any(each["forced"] for each in record["rounds"])
    recorded = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    assert recorded["json_schema"] == whole
    assert list(recorded["json_schema"]["properties"]) == ["ok", "id"]
    assert (recorded["regex"], recorded["grammar"], recorded["choices"]) == (None, None, None)
    whole["properties"] = dict(reversed(properties.items()))  # answers would have another order
    schema.write_text(json.dumps(whole))
    refused = adafuse(*job, "--rounds")
    assert refused.exit_code == 2
    assert "belongs to another run: different json_schema." in refused.stderr


def test_answers_that_cannot_have_a_form_are_one_error_each(adafuse, job, tmp_path):
    pytest.importorskip("llguidance", reason="needs the extra [grammar]")
    result = adafuse(*job, "--output", tmp_path / "out.jsonl", "--regex", "(?=a)b")
    assert result.exit_code != 0
    assert "option 'regex': it cannot be enforced" in result.stderr


@pytest.mark.quick
def test_drawn_answers_have_seeds_and_a_resumed_run_draws_the_same(adafuse, fakes, tmp_path):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    item = {"question": "Who founded the mill?", "answer": "Ada"}
    path.write_text(f"{json.dumps(item)}\n" * 24)
    job = ["run", "--test-set", path, "--output", output, "--temperature", 2, "--n", 2]
    assert adafuse(*job).exit_code == 0
    whole = output.read_bytes()
    found = records(output)
    seeds = [each["seed"] for each in found] + [each["alternatives"][0]["seed"] for each in found]
    assert len(set(seeds)) == 48
    assert len({each["pred"] for each in found}) > 1  # the questions are equal, and the seeds not
    assert all(
        each["alternatives"][0].keys() == {"pred", "finish_reason", "seed"} for each in found
    )
    base = json.loads((tmp_path / "out.jsonl.run.json").read_text())["seed"]
    output.write_bytes(whole[: len(whole) // 2])
    assert adafuse(*job).exit_code == 0
    assert output.read_bytes() == whole
    again = [*job[:-4], tmp_path / "again.jsonl", *job[-4:], "--seed", base]
    again.pop(4)
    assert adafuse(*again).exit_code == 0
    assert (tmp_path / "again.jsonl").read_bytes() == whole
    refused = adafuse(*job, "--seed", base + 1)
    assert refused.exit_code == 2
    assert f"seed {base}, not {base + 1}" in refused.stderr


@pytest.mark.quick
def test_log_probabilities_are_in_the_rounds(adafuse, fakes, tmp_path):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"question": "Who founded the mill?", "answer": "Ada"}\n')
    job = ["run", "--test-set", path, "--output", output, "--rounds", "--top-logprobs", 1]
    assert adafuse(*job).exit_code == 0
    (record,) = records(output)
    tokens = [token for each in record["rounds"] for token in each["logprobs"]["wren"]]
    assert "".join(token["text"] for token in tokens) == "Ada Brook did"
    assert tokens[1]["logprob"] == pytest.approx(math.log(0.8))
    assert all(len(token["top"]) == 1 for token in tokens)


@pytest.mark.quick
def test_lines_can_have_messages(adafuse, fakes, tmp_path, monkeypatch):
    asked = []
    real = AdaFuseEngine.generate

    def generate(self, **options):
        asked.append(options["messages"])
        return real(self, **options)

    monkeypatch.setattr(AdaFuseEngine, "generate", generate)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    lines = [
        {"messages": messages, "answer": "Ada Brook did"},
        {"messages": messages, "question": "Who?", "answer": "Ada"},
        {"messages": "Who?", "answer": "Ada"},
        {"messages": messages},
    ]
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = ["run", "--test-set", path, "--output", output]
    assert adafuse(*job).exit_code == 1
    assert asked == [messages]
    first, *others = records(output)
    assert (first["question"], first["pred"], first["label"]) == ("Who?", *["Ada Brook did"] * 2)
    assert [re.sub('"', "", each["error"]) for each in others] == [
        "it has both question and messages: leave one out",
        "its messages must be a list of objects",
        "it has no answer",
    ]
    refused = adafuse(*job, "--template", "Q: {question}", "--overwrite")
    assert refused.exit_code == 2
    assert "--template is for questions, and line 1 of the test set has messages" in refused.stderr
