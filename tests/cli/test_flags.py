"""The flags: derived from the configuration, parsed, passed on, reported."""

import io
import json
import logging
import re
from importlib.util import find_spec

import pytest

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    InvalidOptionError,
    MemberSpec,
    __version__,
)
from adafuse_llm.cli import ask, generate
from adafuse_llm.cli.terminal import ACTORS, one_line, print_json
from adafuse_llm.cli.values import parse_stops, parse_weights
from adafuse_llm.report.styles import printable

pytestmark = pytest.mark.quick


REFUSED = {"ask": ask.REFUSED, "generate": generate.REFUSED}


@pytest.mark.parametrize("name", ["ask", "generate", "run"])
def test_every_option_of_the_configuration_is_a_flag(adafuse, name):
    shown = adafuse(name, "--help", env={"COLUMNS": "200"}).output
    for option in AdaFuseConfig.model_fields:
        flag = {"choices": "choice"}.get(option, option.replace("_", "-"))
        assert bool(re.search(rf"--{flag}\s", shown)) == (option not in REFUSED.get(name, ()))


def test_the_configuration_reaches_the_engine(adafuse, fakes):
    result = adafuse(
        "generate", "x:", "--margin-threshold", "0.5", "--max-words", 2, "--stop", r"\nQ\\n",
        "--stop", "end", "--weights", "wren=2,heron=0.5", "--use", "heron, wren",
        "--strategy", "adafuse",
        "--dtype", "float64", "--revision", "v1",
        "--device-map", "auto", "--trust-remote-code", "--model", "a", "--model", "b",
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
    assert call["paths"] == ["a", "b"]
    assert call["dtype"] == "float64"
    assert call["revision"] == "v1"
    assert call["device_map"] == "auto"
    assert call["trust_remote_code"] is True


def test_biases_are_numbers_by_text(adafuse, fakes):
    result = adafuse("generate", "x:", "--logit-bias", " a=b=-2.5", "--logit-bias", "c=1")
    assert result.exit_code == 0, result.output
    assert fakes[0]["config"] == AdaFuseConfig(logit_bias={" a=b": -2.5, "c": 1.0})
    result = adafuse("generate", "x:", "--logit-bias", "c")
    assert result.exit_code == 2
    assert "option 'logit_bias' must be TEXT=NUMBER; got 'c'" in result.stderr


def test_members_in_processes_have_the_threads_of_the_command(adafuse, fakes, tmp_path):
    config = tmp_path / "ensemble.yaml"
    config.write_text("models: [a, {path: b, threads: 2}]\n")
    for flags in ((), ("--processes",), ("--processes", "--threads", 1)):
        assert adafuse("generate", "x:", "--config", config, *flags).exit_code == 0
    plain, apart, threads = (call["paths"] for call in fakes)
    assert plain[0] == "a"
    assert [spec.process for spec in apart] == [True, True]
    assert [spec.threads for spec in apart] == [None, 2]
    assert [spec.threads for spec in threads] == [1, 2]


def test_members_in_a_cluster_keep_their_own_options(adafuse, fakes, tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    config = tmp_path / "ensemble.yaml"
    config.write_text("models: [a, {path: /far/b, threads: 2, ray: {num_gpus: 1}}]\n")
    for flags in ((), ("--threads", 2), ("--ray", "h:1"), ("--ray", "h:1", "--threads", 64)):
        result = adafuse("generate", "x:", "--config", config, *flags)
        assert result.exit_code == 0, result.output
    plain, mixed, far, threads = (call["paths"] for call in fakes)
    assert plain[0] == mixed[0] == "a"
    assert plain[1] == mixed[1] == MemberSpec("/far/b", threads=2, ray={"num_gpus": 1})
    assert [spec.ray for spec in far] == [{"address": "h:1"}, {"num_gpus": 1, "address": "h:1"}]
    assert [spec.threads for spec in far] == [None, 2]
    assert [spec.threads for spec in threads] == [64, 2]  # this machine's cores are no limit
    assert adafuse("generate", "x:", "--config", config, "--threads", 64).exit_code == 2


@pytest.mark.parametrize(
    ("text", "flags", "places"),
    [
        ("processes: true", ["--ray", "auto"], (False, {"address": "auto"})),
        ("ray: auto", ["--ray", "h:1"], (False, {"address": "h:1"})),
        ("ray: auto", ["--processes"], (True, None)),
        ("ray: auto", [], (False, {"address": "auto"})),
    ],
)
def test_the_flag_for_the_place_of_members_overrides_the_file(
    adafuse, fakes, tmp_path, text, flags, places
):
    config = tmp_path / "ensemble.yaml"
    config.write_text(f"models: [a, b]\n{text}\n")
    assert adafuse("generate", "x:", "--config", config, *flags).exit_code == 0
    assert [(spec.process, spec.ray) for spec in fakes[0]["paths"]] == [places, places]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ray", "auto", "--processes"], "so set only one of the two; got 'auto'"),
        (["--ray", "ray://h:1"], "option 'ray': it must be HOST:PORT of the head node"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_one_error(adafuse, fakes, flags, says):
    result = adafuse("generate", "x:", *flags)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not fakes


@pytest.mark.parametrize("terminal", [True, False])
def test_the_status_line_shows_how_far_members_in_actors_are(
    adafuse, fakes, monkeypatch, capsys, terminal
):
    logger = logging.getLogger(ACTORS)
    load, shown = AdaFuseEngine.from_pretrained, []

    def loading(*arguments, **options):
        logger.info("member %r (actor 1 on 10.0.0.2) loads its weights (45%%), 12 s", "a")
        return load(*arguments, **options)

    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", loading)
    monkeypatch.setattr("rich.status.Status.update", lambda _, text: shown.append(text))
    env = {"FORCE_COLOR": "1"} if terminal else {}
    result = adafuse("generate", "x:", "--model", "/far/a", "--ray", "auto", env=env)
    assert result.exit_code == 0, result.output
    line = "member 'a' (actor 1 on 10.0.0.2) loads its weights (45%), 12 s"
    assert shown == ([line] if terminal else [])
    assert (logger.level, logger.propagate, logger.handlers) == (logging.NOTSET, True, [])
    assert line not in result.output + capsys.readouterr().err
    assert find_spec(ACTORS) is not None


def test_sampling_and_template_options_reach_the_engine(adafuse, fakes, tmp_path):
    variables = {"enable_thinking": False}
    config = tmp_path / "ensemble.yaml"
    config.write_text("temperature: 0.7\nseed: 5\nchat_template_kwargs: {x: 1}\ntop_k: 0\n")
    typed = (
        "--temperature", "0.5", "--top-p", "0.9", "--top-logprobs", 2, "--logprobs",
        "--chat-template-kwargs", json.dumps(variables),
    )  # fmt: skip
    for flags in ((), typed):
        result = adafuse("ask", "Who?", "--config", config, *flags)
        assert result.exit_code in (0, 2), result.output  # the fakes have no chat templates
    first, second = (call["config"] for call in fakes)
    assert first == AdaFuseConfig(temperature=0.7, seed=5, chat_template_kwargs={"x": 1})
    assert second == AdaFuseConfig(
        temperature=0.5, top_p=0.9, seed=5, logprobs=True, top_logprobs=2,
        chat_template_kwargs=variables,
    )  # fmt: skip


@pytest.mark.parametrize("value", ["{", "[1]", "enable_thinking=false"])
def test_template_variables_that_are_no_json_object_are_one_error(adafuse, fakes, value):
    result = adafuse("generate", "x:", "--chat-template-kwargs", value)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --chat-template-kwargs is not ")
    assert len(result.stderr.splitlines()) == 1
    assert not fakes


@pytest.mark.parametrize(
    ("name", "flags", "reason"),
    [
        ("ask", ["--n", 2], "adafuse generate --n draws several"),
        ("tune", ["--n", 2], "compares settings without sampling"),
        ("tune", ["--temperature", 1], "compares settings without sampling"),
        ("tune", ["--logprobs"], "records no log-probabilities"),
        ("generate", ["--continue-final-message"], "--prefill TEXT"),
        ("run", ["--top-logprobs", 2], "also pass --rounds"),
        ("run", ["--continue-final-message"], "it needs messages"),
        ("generate", ["--n", 2], "temperature"),
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
    option = flags[0].removeprefix("--").replace("-", "_")
    config.write_text(f"{option}: {json.dumps(flags[1] if len(flags) > 1 else True)}\n")
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


def test_a_response_has_one_form(adafuse, fakes, forms):
    result = adafuse("generate", "x:", *forms["regex"][0], *forms["json_schema"][0])
    assert result.exit_code == 2
    assert "got json_schema and regex" in result.stderr
    assert not fakes


@pytest.mark.parametrize(
    ("flag", "content", "message"),
    [
        ("json-schema", None, "No such file or directory"),
        ("json-schema", b"{", "is not JSON: Expecting property name"),
        ("json-schema", b"\xff{}", "is not JSON: 'utf-8' codec"),
        ("json-schema", b"[" * 100_000, "is not JSON: maximum recursion"),
        ("json-schema", b"[1]", 'must contain an object, such as {"type": "object"}; got [1]'),
        ("grammar", None, "No such file or directory"),
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


def test_without_flags_the_configuration_is_the_default(adafuse, fakes):
    adafuse("generate", "x:")
    assert fakes[0]["config"] == AdaFuseConfig()
    assert len(fakes[0]["paths"]) == 3


def test_a_strategy_reaches_the_engine_and_refuses_what_it_does_not_use(adafuse, fakes):
    assert adafuse("generate", "x:", "--strategy", "unite").exit_code == 0
    assert fakes[0]["strategy"] == "unite"
    refused = adafuse("generate", "x:", "--strategy", "unite", "--max-words", 2)
    assert refused.exit_code == 2
    assert "option 'max_words': strategy 'unite' does not use it" in refused.output
    unknown = adafuse("generate", "x:", "--strategy", "unit")
    assert unknown.exit_code == 2
    assert "Did you mean 'unite'?" in unknown.output


def test_weights_by_name_or_in_order():
    assert parse_weights([]) is None
    assert parse_weights(["1,2", "0.5"]) == (1.0, 2.0, 0.5)
    assert parse_weights(["a=1", "b=c=2"]) == {"a": 1.0, "b=c": 2.0}


@pytest.mark.parametrize("values", [["a=x"], ["x"], ["a=1", "2"], [""]])
def test_other_weights_are_an_error(values):
    with pytest.raises(InvalidOptionError, match="--weights takes"):
        parse_weights(values)


def test_stops_as_typed():
    assert parse_stops([r"\nQ:", "", r"a\\n", r"\t\x"]) == ("\nQ:", "a\\n", "\t\\x")


def test_what_is_shown_cannot_steer_a_terminal():
    assert printable("a\x1b[2J\x9bé好🙂\n") == "a\ufffd[2J\ufffdé好🙂\n"
    assert one_line("a\n b\r\n\x07") == "a b \ufffd"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-words", "0"], "option 'max_words': "),
        (["--margin-threshold", "2"], "option 'margin_threshold': "),
        (["--weights", "1,2,3"], "must have one value per member (2); got 3"),
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
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
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


def test_unknown_flags_are_refused_with_the_nearest(adafuse):
    result = adafuse("generate", "x", "--max-word", "2")
    assert result.exit_code == 2
    assert "--max-words" in result.stderr


def test_version(adafuse):
    assert adafuse("--version").output == f"adafuse {__version__}\n"


def test_interruption_while_loading(adafuse, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("adafuse_llm.AdaFuseEngine.from_pretrained", interrupted)
    result = adafuse("generate", "x")
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


def test_json_is_never_followed_by_text(adafuse, fakes):
    for line in adafuse("generate", "x:", "--json", env={"FORCE_COLOR": "1"}).stdout.splitlines():
        json.loads(line)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_e12_json_has_no_control_characters(monkeypatch, encoding):
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
def test_s6_the_help_shows_values_by_name_and_no_python_types(adafuse, name):
    shown = adafuse(*([name] if name else []), "--help", env={"COLUMNS": "200"}).output
    assert not re.findall(r"<\w[^>\n]*>", shown)
    lines = {line.split()[1]: line.split() for line in shown.splitlines() if " --" in line[:8]}
    if name == "ask":
        assert lines["--docs"][2] == "PATH"
        assert lines["--passages"][2] == "N"
        assert lines["--json"][2] == "Print"
        assert lines["--html"][2] == "FILE"
        assert lines["--dtype"][2] == "NAME"
        assert lines["--margin-threshold"][2] == "NUMBER"


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


@pytest.mark.parametrize("threads", [0, 9])
def test_threads_are_at_least_one_and_at_most_the_cores(adafuse, fakes, monkeypatch, threads):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    result = adafuse("generate", "x", "--threads", threads)
    assert result.exit_code == 2
    assert not fakes
