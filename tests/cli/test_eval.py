"""`adafuse eval`: a benchmark answered, scored, compared, resumed."""

import io
import json
import re
import time

import pytest
from rich.console import Console

from adafuse_llm import AdaFuseEngine, ContextWindowError, MemberError, MemberOutOfMemoryError
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.cli import terminal


@pytest.fixture
def data(tmp_path):
    """Four questions; wren alone says "Ada Brook", heron alone "Ada Stone"."""
    path = tmp_path / "set.jsonl"
    items = [
        {"question": f"Who founded mill {n}?", "answer": ["Ada Brook did", "Ada"]} for n in range(3)
    ]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


@pytest.fixture
def job(data, tmp_path, fakes):
    return ["eval", "--task", "nq", "--data", data, "--output", tmp_path / "out.jsonl"]


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.quick
def test_a_benchmark_is_answered_and_scored(adafuse, job, tmp_path, fakes):
    result = adafuse(*job, "--json")
    assert result.exit_code == 0, result.output
    (told,) = json.loads(result.stdout)["evaluations"]
    assert (told["task"], told["system"], told["answers"], told["failed"]) == (
        "nq",
        "ensemble",
        3,
        0,
    )
    assert told["scores"]["exact_match"]["value"] == 100
    assert list(told["scores"]) == ["exact_match", "f1", "lenient_match"]
    assert told["tokens_processed"].keys() == {"wren", "heron"}
    first, *_ = records(tmp_path / "out.jsonl")
    assert first["answer"] == first["pred"] == "Ada Brook did"
    assert first["label"] == ["Ada Brook did", "Ada"]
    assert first["metrics"] == {"exact_match": 100, "f1": 100, "lenient_match": 100}
    assert "rounds" not in first
    config = fakes[0]["config"]
    assert (config.stop, config.max_new_tokens) == (("\nQuestion:",), 32)  # the task's


@pytest.mark.quick
def test_what_is_typed_comes_before_what_the_task_says(adafuse, job, fakes):
    result = adafuse(*job, "--max-new-tokens", 7, "--stop", "", "--max-requests", 3, "--rounds")
    assert result.exit_code == 0, result.output
    assert (fakes[0]["config"].max_new_tokens, fakes[0]["config"].stop) == (7, ())
    assert fakes[0]["runtime"].max_requests == 3


def test_rounds_are_recorded_on_request(adafuse, job, tmp_path):
    adafuse(*job, "--rounds")
    assert records(tmp_path / "out.jsonl")[0]["rounds"][0]["candidates"]
    shown = adafuse("report", tmp_path / "out.jsonl")
    assert "words per round" in shown.stdout


@pytest.mark.quick
def test_the_summary_is_a_table(adafuse, job):
    result = adafuse(*job)
    assert "nq: 3 questions" in result.stdout
    assert "100.0 [29.2, 100.0]" in result.stdout
    assert "Cost of an answer" in result.stdout


def test_resuming_equals_running_through(adafuse, job, tmp_path, fakes):
    output = tmp_path / "out.jsonl"
    adafuse(*job)
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) // 2])
    result = adafuse(*job)
    assert result.exit_code == 0, result.output
    assert "resuming, 1 of 3 are done" in result.stderr
    untimed = [
        [{k: v for k, v in each.items() if k not in ("seconds", "latency")} for each in found]
        for found in (records(output), [json.loads(line) for line in whole.splitlines()])
    ]
    assert untimed[0] == untimed[1]
    assert len(fakes) == 2
    again = adafuse(*job)
    assert "nq: 3 questions" in again.stdout
    assert len(fakes) == 2  # nothing is loaded when all is done


def test_a_higher_limit_goes_on_and_another_option_does_not(adafuse, job, tmp_path):
    adafuse(*job, "--limit", 1)
    assert len(records(tmp_path / "out.jsonl")) == 1
    assert adafuse(*job, "--limit", 3).exit_code == 0
    assert len(records(tmp_path / "out.jsonl")) == 3
    refused = adafuse(*job, "--max-words", 2)
    assert refused.exit_code == 2
    assert "max_words 3, not 2" in refused.stderr
    assert adafuse(*job, "--max-words", 2, "--overwrite").exit_code == 0


def test_r3_d1_answers_in_sentences_are_a_warning_if_exact_match_misses_them(
    adafuse, job, tmp_path, fakes
):
    rows = [{"question": "Who founded the mill?", "answer": "Brook"}] * 3
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = adafuse(*job)
    assert "warning: ensemble: 3 of 3 answers contain an accepted answer" in result.stderr
    assert "pass --metric contains" in result.stderr
    assert "warning" not in adafuse(*job, "--metric", "contains", "--overwrite").stderr


def test_members_alone_are_compared_with_the_ensemble(adafuse, job, data, tmp_path, fakes):
    result = adafuse(*job, "--alone", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    names = [each["system"] for each in told["evaluations"]]
    assert names == ["ensemble", "wren alone", "heron alone"]
    assert [each["scores"]["exact_match"]["value"] for each in told["evaluations"]] == [100, 100, 0]
    exact = told["comparisons"]["heron alone"][0]
    assert (exact["metric"], exact["ours"], exact["theirs"]) == ("exact_match", 100, 0)
    assert exact["p_value"] == pytest.approx(2 / 2**3)
    assert exact["test"] == "McNemar's exact test"
    assert {each["answer"] for each in records(tmp_path / "out.heron.jsonl")} == {"Ada Stone"}
    assert records(tmp_path / "out.wren.jsonl")[0]["usage"]["forward_passes"].keys() == {"wren"}
    assert len(fakes) == 1
    table = adafuse(*job, "--alone").stdout
    assert "ensemble against heron alone" in table
    assert "The difference from heron alone (exact_match) is not significant (p = 0.250)." in table
    assert len(fakes) == 1


NAMES = (
    "Qwen2.5-7B-Instruct",
    "Llama-3.1-8B-Instruct",
    "Mistral-7B-Instruct-v0.3",
    "gemma-2-9b-it",
    "DeepSeek-R1-Distill-Llama-8B",
)


def test_s7_tables_of_five_members_fit_80_columns(adafuse, job, tmp_path, monkeypatch):
    def load(paths, *, config, strategy="adafuse", **options):
        backends = [FakeBackend(name, lambda _: {" Ada": 0.9, END: 0.1}) for name in NAMES]
        return AdaFuseEngine(backends, config, strategy=strategy)

    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", load)
    result = adafuse(*job, "--alone", env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    words = [line.split() for line in lines]
    for metric in ("exact_match", "f1", "lenient_match"):
        first = next(at for at, line in enumerate(words) if line[:2] == [metric, "ensemble"])
        for system, line in zip(("ensemble", *NAMES), words[first : first + 6], strict=True):
            assert system in line
            assert re.search(r"\d+\.\d \[\d+\.\d, \d+\.\d\]$", " ".join(line))
    costs = words[words.index(["system", "seconds", "tokens", "passes", "failed"]) + 1 :][:6]
    assert all(re.fullmatch(r"[\d.]+( [\d.]+){3}", " ".join(line[-4:])) for line in costs)
    compared = words.index(["metric", "ours", "theirs", "difference", "p"])
    assert re.fullmatch(
        r"exact_match( \d+\.\d){2} [+-]\d+\.\d \[[+-]\d+\.\d, [+-]\d+\.\d\] \d\.\d{3}",
        " ".join(words[compared + 1]),
    )


def test_s7_progress_bars_have_labels_and_fit_80_columns(monkeypatch):
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    monkeypatch.setattr(terminal, "stderr_console", lambda: console)
    with terminal.progress_bar() as progress:
        task = progress.add_task("Mistral-7B-Instruct-v0.3 alone", total=3000)
        progress.advance(task, 1500)
        (shown,) = console.render_lines(progress.get_renderable(), pad=False)
    text = "".join(part.text for part in shown)
    assert text.startswith("Mistral-7B-")
    assert "1500/3000" in text
    assert re.search(r"left \S+:\S+$", text.rstrip())
    assert len(text) <= 80


def test_strategies_are_compared(adafuse, job, tmp_path, fakes):
    adafuse(*job)
    refused = adafuse(*job, "--strategy", "fixed-1")
    assert refused.exit_code == 2
    assert "strategy 'auto', not 'fixed-1'" in refused.stderr
    other = [*job[:-1], tmp_path / "fixed.jsonl", "--strategy", "fixed-1"]
    result = adafuse(*other, "--compare", tmp_path / "out.jsonl", "--alone", "--json")
    assert result.exit_code == 0, result.output
    assert fakes[-1]["strategy"] == "fixed-1"
    told = json.loads(result.stdout)
    assert list(told["comparisons"]) == ["wren alone", "heron alone", str(tmp_path / "out.jsonl")]
    assert records(tmp_path / "fixed.jsonl")[0]["answer"] == "Ada Brook did"


def test_two_results_are_compared(adafuse, job, tmp_path):
    adafuse(*job)
    other = [*job[:-1], tmp_path / "heron.jsonl", "--use", "heron"]
    result = adafuse(*other, "--compare", tmp_path / "out.jsonl", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["comparisons"][str(tmp_path / "out.jsonl")][0]
    assert (found["ours"], found["theirs"]) == (0, 100)


@pytest.mark.quick
def test_embedded_questions_need_no_data(adafuse, fakes, tmp_path):
    output = tmp_path / "out.jsonl"
    result = adafuse("eval", "--task", "embedded", "--limit", 6, "--output", output)
    assert result.exit_code == 0, result.output
    assert [each["group"] for each in records(output)][-1] == "not_stated"
    assert "verbatim by group" in result.stdout


def test_a_question_that_fails_counts_and_is_told(adafuse, job, tmp_path, monkeypatch):
    real = AdaFuseEngine.generate

    def generate(self, prompt, **options):
        if "mill 1" in prompt:
            raise MemberError("wren", "its logits are NaN")
        return real(self, prompt, **options)

    monkeypatch.setattr(AdaFuseEngine, "generate", generate)
    result = adafuse(*job, "--json")
    assert result.exit_code == 1
    assert "line 2: MemberError: member 'wren' failed" in " ".join(result.stderr.split())
    (told,) = json.loads(result.stdout)["evaluations"]
    assert told["failed"] == 1
    assert told["scores"]["exact_match"]["value"] == pytest.approx(200 / 3)


def test_what_failed_of_the_run_is_asked_again_and_nothing_is_said_before(
    adafuse, job, tmp_path, monkeypatch
):
    whole, other = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert adafuse(*job[:-1], whole, "--use", "heron").exit_code == 0
    real, asked = AdaFuseEngine.generate, []

    def generate(self, prompt, **options):
        asked.append(prompt)
        if "mill 0" in prompt and len(asked) < 4:
            raise MemberOutOfMemoryError("wren", "no memory")
        if "mill 1" in prompt:
            raise ContextWindowError("too long")
        return real(self, prompt, **options)

    monkeypatch.setattr(AdaFuseEngine, "generate", generate)
    first = adafuse(*job, "--compare", whole)
    assert first.exit_code == 1
    assert f"Not compared with {whole}: 1 answer failed." in " ".join(first.stdout.split())
    assert "McNemar" not in first.stdout
    told = json.loads(adafuse(*job[:-1], other, "--compare", whole, "--json").stdout)
    assert len(asked) == 4  # the line that was too long is not asked again
    assert [each["line"] for each in records(other)] == [1, 2, 3]
    assert ["error" in each for each in records(other)] == [False, True, False]
    assert told["evaluations"][0]["failed"] == 1
    assert told["evaluations"][0]["lost"] == 0
    assert told["comparisons"][str(whole)][0]["questions"] == 3


def test_seconds_and_answers_of_other_settings_are_not_taken_over(adafuse, job):
    adafuse(*job)
    for flags in (["--max-requests", 2], ["--device-map", "auto"], ["--chat"]):
        refused = adafuse(*job, *flags)
        assert refused.exit_code == 2
        assert "belongs to another run" in refused.stderr


def test_prompts_are_sent_as_messages_on_request(adafuse, job, monkeypatch):
    real, asked = AdaFuseEngine.generate, []

    def generate(self, prompt=None, **options):
        asked.append(options["messages"])
        return real(self, prompt, **options)

    monkeypatch.setattr(AdaFuseEngine, "generate", generate)
    assert adafuse(*job, "--chat", "--limit", 1).exit_code == 0
    content = "Question: Who founded mill 0?\nAnswer:"
    assert asked == [[{"role": "user", "content": content}]]


def test_ctrl_c_while_members_load_ends_the_command(adafuse, job, interrupted_while_loading):
    result = adafuse(*job)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "trivia"], "Did you mean 'triviaqa'"),
        (["--metric", "bleu"], "Did you mean 'spbleu'"),
        (["--template", "Q:"], "must contain {question}"),
        (["--task", "embedded"], "omit --data"),
        (["--task", "gsm8k"], "holds no number"),
        (["--max-words", "0"], "max_words"),
    ],
)
def test_what_cannot_be_run_is_one_error_before_anything_is_loaded(
    adafuse, job, fakes, flags, message, tmp_path
):
    result = adafuse(*job, *flags)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not fakes
    assert not (tmp_path / "out.jsonl").exists()


def test_without_a_task_nothing_is_run(adafuse, tmp_path, fakes):
    result = adafuse("eval", "--output", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "Missing option '--task'" in result.stderr
    assert not fakes


@pytest.mark.parametrize("flag", ["--data", "--output"])
def test_a_folder_is_no_file(adafuse, job, fakes, flag, tmp_path):
    result = adafuse(*job, flag, tmp_path)
    assert result.exit_code == 2
    assert "is a directory" in " ".join(result.stderr.replace("│", " ").split())
    assert not fakes


def test_results_of_other_kinds_are_not_compared(adafuse, job, data):
    result = adafuse(*job, "--compare", data)
    assert result.exit_code == 2
    assert "is not a result of adafuse eval" in result.stderr


def test_the_output_cannot_be_an_input(adafuse, job, data):
    before = data.read_bytes()
    assert adafuse(*job[:-1], data, "--overwrite").exit_code == 2
    assert data.read_bytes() == before


def test_an_interrupted_run_is_resumed(start, adafuse, members, tmp_path):
    data, output = tmp_path / "set.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(f'{{"question": "question {n}?", "answer": "x"}}\n' for n in range(16)))
    job = [
        "eval", "--task", "nq", "--data", data, "--output", output, *members, "--max-requests", 1,
        "--max-new-tokens", 10,
    ]  # fmt: skip
    process = start(*job)
    while not (output.exists() and output.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(2)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert b"interrupted: run the same command again to resume" in stderr
    done = output.read_bytes()
    assert 2 <= done.count(b"\n") < 16
    result = adafuse(*job)
    assert result.exit_code == 0, result.output
    assert output.read_bytes().startswith(done)
    assert [each["line"] for each in records(output)] == list(range(1, 17))
    assert "nq: 16 questions" in result.stdout


@pytest.mark.quick
def test_members_alone_choose_among_the_same_texts(adafuse, job, tmp_path, fakes):
    flags = ["--choice", "Ada Brook did", "--choice", "Ada Stone"]
    result = adafuse(*job, "--alone", "--rounds", *flags)
    assert result.exit_code == 0, result.output
    for name in ("out", "out.wren", "out.heron"):
        found = records(tmp_path / f"{name}.jsonl")
        assert {record["pred"] for record in found} <= {"Ada Brook did", "Ada Stone"}
        (only,) = found[0]["rounds"]
        assert [each["text"] for each in only["candidates"]] == ["Ada Brook did", "Ada Stone"]
        identity = json.loads((tmp_path / f"{name}.jsonl.run.json").read_text())
        assert identity["choices"] == ["Ada Brook did", "Ada Stone"]


@pytest.mark.quick
def test_drawn_answers_have_a_seed_per_question(adafuse, job, data, tmp_path):
    data.write_text('{"question": "Who founded the mill?", "answer": "Ada"}\n' * 8)
    job = [*job, "--temperature", 2]
    assert adafuse(*job).exit_code == 0
    output = tmp_path / "out.jsonl"
    whole = records(output)
    assert len({each["seed"] for each in whole}) == 8
    assert len({each["pred"] for each in whole}) > 1
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:3]))
    assert adafuse(*job).exit_code == 0
    for field in ("seed", "pred"):
        assert [each[field] for each in records(output)] == [each[field] for each in whole]
