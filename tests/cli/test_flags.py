"""The flags: derived from the configuration, parsed, passed on, reported."""

import gc
import io
import json
import re

import pytest

from adafuse_llm import (
    AdaFuseConfig,
    __version__,
)
from adafuse_llm.cli.terminal import print_json
from adafuse_llm.report.styles import printable

pytestmark = pytest.mark.quick


def test_the_configuration_reaches_the_engine(adafuse, fakes):
    result = adafuse(
        "generate", "x:", "-o", "margin_threshold=0.5", "-o", "max-words=2", "--stop", r"\nQ\\n",
        "--stop", "end", "--weights", "wren=2,heron=0.5", "--use", "heron, wren",
        "--strategy", "adafuse",
        "--dtype", "float64", "-o", "revision=v1", "-o", "max_requests=3",
        "-o", "device_map=auto", "--trust-remote-code", "--model", "a", "--model", "b",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    call = fakes[0]
    assert call["config"] == AdaFuseConfig(
        margin_threshold=0.5,
        max_words=2,
        stop=("\nQ\\n", "end"),
        weights={"wren": 2.0, "heron": 0.5},
        use=("heron", "wren"),
    )
    assert call["strategy"] == "adafuse"
    assert call["runtime"].max_requests == 3
    assert [spec.path for spec in call["paths"]] == ["a", "b"]
    assert call["dtype"] == "float64"
    assert call["revision"] == "v1"
    assert call["device_map"] == "auto"
    assert call["trust_remote_code"] is True


def test_the_value_of_an_option_is_read_as_in_a_file_unless_it_must_be_text(adafuse, fakes):
    given = """-o|logit_bias={" a=b": -2.5, c: 1}|-o|stop=[]|-o|regex=[a]"""
    adafuse("generate", "x:", *given.split("|"))
    assert fakes[0]["config"] == AdaFuseConfig(
        logit_bias={" a=b": -2.5, "c": 1.0}, stop=(), regex="[a]"
    )


def test_gguf_members_have_the_threads_of_the_command(adafuse, fakes, tmp_path):
    config = tmp_path / "ensemble.yaml"
    config.write_text("models: [a, b.gguf, {path: c.gguf, threads: 2}]\n")
    for flags in ((), ("--threads", 1)):
        assert adafuse("generate", "x:", "--config", config, *flags).exit_code == 0
    assert [[getattr(spec, "threads", None) for spec in call["paths"]] for call in fakes] == [
        [None, None, 2],
        [None, 1, 2],
    ]


@pytest.mark.parametrize(
    ("name", "flags", "reason"),
    [
        ("ask", ["-o", "n=2"], "adafuse generate --n draws several"),
        ("tune", ["-o", "n=2"], "compares settings without sampling"),
        ("tune", ["-o", "temperature=1"], "compares settings without sampling"),
        ("tune", ["-o", "logprobs=true"], "records no log-probabilities"),
        ("generate", ["-o", "continue_final_message=true"], "--prefill TEXT"),
        ("run", ["-o", "top_logprobs=2"], "also pass --rounds"),
        ("run", ["-o", "continue_final_message=true"], "it needs messages"),
        ("generate", ["-o", "n=2"], "temperature"),
    ],
)
def test_options_that_a_command_cannot_use_are_refused(
    adafuse, fakes, tmp_path, name, flags, reason
):
    data = tmp_path / "set.jsonl"
    data.write_text('{"question": "Who?", "answer": "Ada"}\n')
    rest = {
        "run": ["--test-set", data, "--output", tmp_path / "out.jsonl"],
        "tune": [data, "--output", tmp_path / "out.yaml"],
    }.get(name, ["Who?"])
    config = tmp_path / "ensemble.yaml"
    option, value = flags[1].split("=")
    config.write_text(f"{option}: {value}\n")
    for given in (flags, ["--config", config]):
        result = adafuse(name, *rest, *given)
        assert result.exit_code == 2
        assert reason in result.stderr
        assert option in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not any(tmp_path.glob("out*"))


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["x"]}}}


@pytest.fixture
def forms(tmp_path):
    """The flags of each option for the form of a response, with the value of the option."""
    schema, grammar = tmp_path / "schema.json", tmp_path / "g.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: "é" | "b"\n', encoding="utf-8")
    return {
        "json_schema": (["--json-schema", schema], SCHEMA),
        "regex": (["--regex", "[0-9]+"], "[0-9]+"),
        "grammar": (["--grammar", grammar], 'start: "é" | "b"\n'),
        "choices": (["--choice", "yes, sir", "--choice", "no"], ("yes, sir", "no")),
    }


@pytest.mark.parametrize("name", ["json_schema", "regex", "grammar", "choices"])
def test_the_form_of_the_response_reaches_the_engine(adafuse, fakes, forms, name, tmp_path):
    flags, value = forms[name]
    adafuse("generate", "x:", *flags)
    assert fakes[0]["config"] == AdaFuseConfig(**{name: value})
    config = tmp_path / "ensemble.yaml"
    for other, (_, given) in forms.items():  # a flag replaces what the file says of the form
        config.write_text(json.dumps({other: given, "max_words": 2}))
        adafuse("generate", "x:", "--config", config, *flags)
        assert fakes[-1]["config"] == AdaFuseConfig(**{name: value, "max_words": 2})


@pytest.mark.parametrize(
    ("flag", "content", "message"),
    [
        ("json-schema", None, "No such file or directory"),
        ("json-schema", b"{", "is not JSON: Expecting property name"),
        ("json-schema", b"[" * 100_000, "is not JSON: maximum recursion"),
        ("grammar", b"\xff", "is not UTF-8 text"),
    ],
)
def test_a_file_of_a_form_that_cannot_be_read_is_one_error(
    adafuse, fakes, tmp_path, flag, content, message
):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    result = adafuse("generate", "x:", f"--{flag}", path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --{flag}: ")
    assert str(path) in result.stderr
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not fakes


def test_a_strategy_reaches_the_engine_and_refuses_what_it_does_not_use(adafuse, fakes):
    assert adafuse("generate", "x:", "--strategy", "fixed-2").exit_code == 0
    assert fakes[0]["strategy"] == "fixed-2"
    own = "benchmarks.peers.sweetspan:SweetSpan"
    assert adafuse("generate", "x:", "--strategy", own).exit_code == 0
    refused = adafuse("generate", "x:", "--strategy", "fixed-2", "-o", "max_words=2")
    assert refused.exit_code == 2
    assert "option 'max_words': strategy 'fixed-2' does not use it" in refused.output
    unknown = adafuse("generate", "x:", "--strategy", "mixtur")
    assert unknown.exit_code == 2
    assert "Did you mean 'mixture'?" in unknown.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-o", "max_words=0"], "option 'max_words': "),
        (["-o", "max_words"], "NAME=VALUE"),
        (["-o", "max_word=2"], "Did you mean 'max_words'"),
        (["-o", "seed=2", "--seed", "1"], "'seed' is given twice"),
        (["-o", "seed=2", "-o", "seed=1"], "'seed' is given twice"),
        (["--weights", "1,2,3"], "must have one value per member (2); got 3"),
        (["--weights", "a=x"], "--weights"),
        (["--threads", "0"], "threads"),
        (["--temperatur", "2"], "--temperature"),
        (["--regex", "a", "--choice", "b"], "got regex and choices"),
        (
            ["--model", "/no/such/model"],
            "error: member 'model' (/no/such/model) cannot be loaded: the folder does",
        ),
    ],
)
def test_errors_are_one_line(adafuse, fakes, monkeypatch, flags, message):
    if "--model" in flags:
        monkeypatch.undo()
    result = adafuse("generate", "x:", *flags)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_unexpected_errors_are_one_line_with_a_hint(adafuse, fakes, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("boom\nbang")

    monkeypatch.setattr("adafuse_llm.AdaFuseEngine.stream", broken)
    result = adafuse("generate", "x:")
    assert result.exit_code == 1
    assert (
        result.stderr
        == "error: RuntimeError: boom bang (unexpected; --debug shows the traceback)\n"
    )
    result = adafuse("generate", "x:", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert 'raise RuntimeError("boom\\nbang")' in result.stderr


def test_the_engine_is_closed_whatever_happens(adafuse, fakes):
    adafuse("generate", "x:")
    adafuse("generate", "")
    for call in fakes:
        with pytest.raises(Exception, match="closed"):
            call["engine"].generate("x:")


def test_version(adafuse):
    assert adafuse("--version").output == f"adafuse {__version__}\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_has_no_control_characters(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", stream)
    text = "a\x00\x1b[2J\x7f\x80\x9b2J\x9fé好🙂"
    print_json({"text": text})
    written = stream.buffer.getvalue().decode(encoding)
    assert written == printable(written)
    assert json.loads(written) == {"text": text}
    assert ("é好🙂" in written) == (encoding == "utf-8")


COMMANDS = ("ask", "generate", "run", "tune", "info")


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_the_help_shows_values_by_name_and_no_python_types(adafuse, name):
    shown = adafuse(*([name] if name else []), "--help", env={"COLUMNS": "200"}).output
    assert not re.findall(r"<\w[^>\n]*>", shown)
    lines = {line.split()[1]: line.split() for line in shown.splitlines() if " --" in line[:8]}
    if name == "ask":
        assert lines["--docs"][2] == "PATH"
        assert lines["--passages"][2] == "N"
        assert lines["--json"][2] == "Print"
        assert lines["--html"][2] == "FILE"
        assert lines["--dtype"][2] == "NAME"
        assert lines["--temperature"][2] == "NUMBER"


def test_ctrl_c_prints_the_same_in_all_commands(adafuse, fakes, tmp_path, monkeypatch):
    from contextlib import contextmanager
    from threading import Event

    cancel = Event()
    cancel.set()

    @contextmanager
    def interrupted():
        yield cancel

    for name in ("ask", "generate", "run"):
        monkeypatch.setattr(f"adafuse_llm.cli.{name}.cancel_on_interrupt", interrupted)
    data = tmp_path / "set.jsonl"
    data.write_text('{"question": "Who?", "answer": "Ada"}\n')
    calls = [
        ["generate", "x:"],
        ["generate", "x:", "--json"],
        ["ask", "Who?"],
        ["run", "--test-set", data, "--output", tmp_path / "run.jsonl"],
    ]
    for call in calls:
        result = adafuse(*call)
        assert result.exit_code == 130
        again = ": run the same command again to resume" if "--output" in call else ""
        assert result.stderr.strip("\n") == f"interrupted{again}"  # old typer adds lines


@pytest.mark.parametrize(
    ("flags", "environment", "small", "expected"),
    [
        ([], {}, 10**8, [1]),
        ([], {}, 1000, [1, 7]),
        (["--threads", 3], {}, 1000, [3]),
        (["--threads", 3], {"OMP_NUM_THREADS": "7"}, 10**8, [3]),
        ([], {"OMP_NUM_THREADS": "7"}, 10**8, []),
    ],
)
def test_small_members_use_one_thread(
    adafuse, members, monkeypatch, flags, environment, small, expected
):
    chosen: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    monkeypatch.setattr("adafuse_llm.cli.common.SMALL", small)
    result = adafuse("generate", "x", *members, "--max-new-tokens", 1, *flags)
    assert result.exit_code == 0, result.output
    assert chosen == expected


def test_the_collector_that_commands_pause_goes_on_when_members_are_loaded(adafuse, fakes):
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        assert adafuse("generate", "Founder:").exit_code == 0
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_run_ends_an_answer_before_the_next_question_unless_a_flag_says_otherwise(
    adafuse, fakes, tmp_path
):
    data = tmp_path / "set.jsonl"
    data.write_text('{"question": "Who?", "answer": "Ada"}\n')
    job = ["run", "--test-set", data, "--output", tmp_path / "out.jsonl", "--overwrite"]
    adafuse(*job)
    adafuse(*job, "--stop", "")
    assert [call["config"].stop for call in fakes] == [("\nQuestion:",), ()]
    refused = adafuse(*job, "-o", "max_requests=2")  # the command has a flag of this name
    assert refused.exit_code == 2
    assert "max_requests" in refused.stderr
