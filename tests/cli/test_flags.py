"""Flags, options and configuration files: how they reach the engine, and what errors say."""

import gc
import io
import json

import pytest

from adafuse_llm import AdaFuseConfig, RuntimeConfig, __version__
from adafuse_llm.cli import COMMANDS
from adafuse_llm.cli.terminal import print_json
from adafuse_llm.report.styles import printable

pytestmark = pytest.mark.quick


def test_the_configuration_reaches_the_engine(adafuse, fakes):
    result = adafuse(
        "generate", "x:", "-o", "margin_threshold=0.5", "-o", "max-words=2", "--stop", r"\nQ\\n",
        "--stop", "end", "-o", "weights={wren: 2, heron: 0.5}", "--use", "heron", "--use", "wren",
        "--strategy", "adafuse", "--max-new-tokens", 7, "-o", """logit_bias={" a=b": -2.5, c: 1}""",
        "--dtype", "float64", "-o", "revision=v1", "-o", "max_requests=3",
        "--device-map", "auto", "--trust-remote-code", "--model", "a", "--model", "b",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    call = fakes[0]
    assert call["config"] == AdaFuseConfig(
        margin_threshold=0.5,
        max_words=2,
        max_new_tokens=7,
        logit_bias={" a=b": -2.5, "c": 1.0},
        stop=("\nQ\\n", "end"),
        weights={"wren": 2.0, "heron": 0.5},
        use=("heron", "wren"),
    )
    assert call["strategy"] == "adafuse"
    assert call["runtime"].max_requests == 3
    assert [spec.path for spec in call["paths"]] == ["a", "b"]
    assert (call["dtype"], call["revision"], call["device_map"]) == ("float64", "v1", "auto")
    assert call["trust_remote_code"] is True


def test_what_is_typed_comes_before_the_file(adafuse, tmp_path, fakes):
    path = tmp_path / "config.yaml"
    path.write_text(
        'models: [org/wren, org/heron]\ndtype: float64\nmax_words: 2\nstop: ["\\n"]\n'
        "weights: {wren: 1, heron: 3}\nruntime: {max_requests: 3, drafting: false}\n"
    )
    flags = ["-o", "max_words=3", "--dtype", "auto", "--stop", "!", "-o", "max_requests=4"]
    flags += ["--model", "a", "--model", "b", "-o", "weights=[1, 1]"]
    for each in ([], flags):
        assert adafuse("generate", "x:", "--config", path, *each).exit_code == 0
    of_file, typed = fakes
    assert [[spec.path for spec in call["paths"]] for call in fakes] == [
        ["org/wren", "org/heron"],
        ["a", "b"],
    ]
    assert (of_file["dtype"], typed["dtype"]) == ("float64", "auto")
    weights = {"wren": 1.0, "heron": 3.0}
    assert of_file["config"] == AdaFuseConfig(max_words=2, stop=("\n",), weights=weights)
    assert typed["config"] == AdaFuseConfig(max_words=3, stop=("!",), weights=(1, 1))
    assert of_file["runtime"] == RuntimeConfig(max_requests=3, drafting=False)
    assert typed["runtime"] == RuntimeConfig(max_requests=4, drafting=False)


def test_gguf_members_have_the_threads_of_the_command(adafuse, fakes, tmp_path):
    config = tmp_path / "ensemble.yaml"
    config.write_text("models: [a, b.gguf, {path: c.gguf, threads: 2}]\n")
    assert adafuse("generate", "x:", "--config", config, "--threads", 1).exit_code == 0
    assert [getattr(spec, "threads", None) for spec in fakes[0]["paths"]] == [None, 1, 2]


@pytest.mark.parametrize(
    ("name", "option", "word"),
    [
        ("ask", "n=2", "one response"),
        ("chat", "n=2", "one response"),
        ("generate", "n=2", "one response"),
        ("tune", "temperature=1", "sampling"),
        ("tune", "logprobs=true", "log-probabilities"),
        ("generate", "continue_final_message=true", "--prefill"),
    ],
)
def test_options_that_a_command_cannot_use_are_refused(
    adafuse, fakes, tmp_path, questions, name, option, word
):
    data = questions({"question": "Who?", "answer": "Ada"})
    rest = {
        "tune": [data, "--output", tmp_path / "out.yaml"],
        "chat": [],
    }.get(name, ["Who?"])
    config = tmp_path / "ensemble.yaml"
    config.write_text(option.replace("=", ": "))
    for given in (["-o", option], ["--config", config]):
        result = adafuse(name, *rest, *given)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
        assert word in result.stderr
        assert option.split("=")[0] in result.stderr
    assert not any(tmp_path.glob("out*"))


def test_the_form_of_the_response_replaces_that_of_the_file(adafuse, fakes, tmp_path):
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["x"]}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    config = tmp_path / "ensemble.yaml"
    config.write_text('{"regex": "a", "max_words": 2}')
    for flags, form in (
        (["--json-schema", tmp_path / "schema.json"], {"json_schema": schema}),
        (["-o", 'grammar=start: "é" | "b"'], {"grammar": 'start: "é" | "b"'}),
        (["--choice", "yes, sir", "--choice", "no"], {"choices": ("yes, sir", "no")}),
    ):
        adafuse("generate", "x:", "--config", config, *flags)
        assert fakes[-1]["config"] == AdaFuseConfig(**form, max_words=2)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["-o", "max_words=0"], "'max_words'"),
        (["-o", "=3"], "NAME=VALUE"),
        (["-o", "max_word=2"], "'max_words'"),
        (["-o", "seed=2", "-o", "seed=1"], "'seed'"),
        (["--temperature", "warm"], "'temperature'"),
        (["--threads", "0"], "--threads"),
        (["--temperatur", "2"], "'--temperature'"),
        (["--max-words", "2"], "-o max_words=VALUE"),
        (["-o", "regex=a", "--choice", "b"], "regex and choices"),
        (["--strategy", "mixtur"], "'mixture'"),
        (["--json-schema", "/no/such/file"], "/no/such/file"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_errors_are_one_line_that_names_what_is_wrong(adafuse, fakes, monkeypatch, flags, word):
    if "--model" in flags:
        monkeypatch.undo()
    result = adafuse("generate", "x:", *flags)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert word in result.stderr


def test_unexpected_errors_are_one_line_unless_debug(adafuse, fakes, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("boom\nbang")

    monkeypatch.setattr("adafuse_llm.AdaFuseEngine.stream", broken)
    result = adafuse("generate", "x:")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: RuntimeError: boom bang")
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" in adafuse("generate", "x:", "--debug").stderr


def test_the_engine_is_closed_and_the_collector_goes_on_whatever_happens(adafuse, fakes):
    frozen = gc.get_freeze_count()
    for prompt in ("x:", ""):
        gc.disable()  # as commands do at their start
        adafuse("generate", prompt)
        assert gc.isenabled()
    assert gc.get_freeze_count() > frozen
    assert [call["engine"].closed for call in fakes] == [True, True]


def test_json_has_no_control_characters(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    text = "a\x00\x1b[2J\x7f\x80\x9b2J\x9fé好🙂"
    print_json({"text": text})
    assert stream.getvalue() == printable(stream.getvalue())
    assert json.loads(stream.getvalue()) == {"text": text}


def test_help_and_version(adafuse):
    assert adafuse("--version").output == f"adafuse {__version__}\n"
    assert all(name in adafuse().stdout for name in COMMANDS)
    assert "'genrate'" in adafuse("genrate").stderr
    for name in COMMANDS:
        shown = adafuse(name, "--help")
        assert shown.exit_code == 0
        assert "-o NAME=VALUE" in shown.stdout
        assert ("--model PATH_OR_ID" in shown.stdout) == (name != "info")


@pytest.mark.parametrize(
    ("flags", "variable", "expected"),
    [([], None, [1]), (["--threads", 3], "7", [3]), ([], "7", [])],
)
def test_embedded_members_use_one_thread(adafuse, monkeypatch, flags, variable, expected):
    chosen: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    measuring = "adafuse_llm.backends.huggingface.backend.measured_token_cost"
    monkeypatch.setattr(measuring, lambda *_: 0.1)  # it also sets the number, and puts it back
    assert adafuse("generate", "x", "--max-new-tokens", 1, *flags).exit_code == 0
    assert chosen == expected
