"""`adafuse serve`: flags and files, keys, and the server as a process with its signals."""

import json
import logging
import re
import signal
import sys

import httpx
import pytest

from adafuse_llm import RuntimeConfig
from adafuse_llm.cli import serve
from adafuse_llm.errors import install_command
from adafuse_llm.serving import server
from adafuse_llm.serving_config import VARIABLE, read_keys
from tests.support.serving import COMMAND

STREAM = {"model": "adafuse", "prompt": "the mill", "max_tokens": 8000, "stream": True}


@pytest.fixture(autouse=True)
def log_levels():
    """Reset the levels of the loggers, which the command sets for the whole process."""
    loggers = [logging.getLogger(name) for name in ("adafuse_llm", "uvicorn")]
    levels = [each.level for each in loggers]
    yield
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


@pytest.fixture
def runs(monkeypatch, fakes):
    """Replace the server by a list of what the command wants to run. Members are fakes."""
    seen = []

    def run(app, service, listener, load, *, config, on_ready):
        seen.append({"app": app, "config": config, "port": listener.getsockname()[1]})
        with load() as engine:
            on_ready(engine)
        return 0

    monkeypatch.setattr(server, "run", run)
    monkeypatch.delenv(VARIABLE, raising=False)
    return seen


@pytest.mark.quick
def test_flags_override_the_file_which_overrides_the_defaults(adafuse, runs, fakes, tmp_path):
    config = tmp_path / "ensemble.yaml"
    config.write_text(
        "max_words: 2\nruntime: {max_requests: 3, drafting: false}\n"
        "serving: {port: 0, served_model_name: town, max_choices: 5, allowed_hosts: [a.example]}\n"
    )
    flags = (
        "-o", "max_choices=7", "-o", "cors_origins=[https://a.example, http://b:1]",
        "-o", "page=false", "--max-requests", 4, "-o", "margin_threshold=0.5",
        "--log-level", "error",
    )  # fmt: skip
    result = adafuse("serve", "--config", config, *flags)
    assert result.exit_code == 0, result.output
    used = runs[0]["config"]
    assert (used.served_model_name, used.max_choices, used.page) == ("town", 7, False)
    assert used.allowed_hosts == ("a.example", "localhost", "127.0.0.1", "[::1]")
    assert used.cors_origins == ("https://a.example", "http://b:1")
    assert fakes[0]["runtime"] == RuntimeConfig(max_requests=4, drafting=False, max_waiting=256)
    assert (fakes[0]["config"].max_words, fakes[0]["config"].margin_threshold) == (2, 0.5)
    url = f"http://127.0.0.1:{runs[0]['port']}"
    assert result.stdout.startswith(f"adafuse serves wren, heron at {url} (")
    assert "member 'wren' cannot follow" in result.stderr


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [
        ("0.0.0.0", "", True),
        ("0.0.0.0", "k1,k2", False),
        ("127.0.0.2", "", False),
        ("localhost", "", False),
    ],
)
def test_an_open_server_is_a_warning(adafuse, runs, monkeypatch, host, keys, warns):
    if keys:
        monkeypatch.setenv(VARIABLE, keys)
    result = adafuse("serve", "--host", host, "--port", 0, "--log-level", "error")
    assert result.exit_code == 0, result.output
    assert ("everyone who can reach this address" in result.stderr) == warns
    hosts = runs[0]["config"].allowed_hosts
    assert hosts == (() if host == "0.0.0.0" else (*dict.fromkeys((*serve.LOOPBACK, host)),))


def test_keys_come_from_a_file_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# for the wiki\nk1\n\n  k2\n")
    assert read_keys(str(file), {VARIABLE: "k3, k4,"}) == ["k1", "k2", "k3", "k4"]
    assert read_keys(None, {}) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [("# none\n", "has no keys"), ("k1\nsecret two\n", "API keys"), (None, "No such file")],
)
def test_keys_that_cannot_be_used_are_an_error_that_does_not_show_them(
    adafuse, runs, tmp_path, content, says
):
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    done = adafuse("serve", "--api-key-file", file)
    assert done.exit_code == 2
    assert says in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", 70000], "'port'"),
        (["-o", "cors_origins=b"], "'cors_origins'"),
        (["-o", "n=2", "--temperature", 1], "'n'"),
        (["--served-model-name", "wren"], "'wren'"),
    ],
)
def test_what_cannot_be_served_is_one_error(adafuse, fakes, flags, says):
    result = adafuse("serve", "--port", 0, "--log-level", "error", *flags)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_missing_extra_is_named(adafuse, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("adafuse_llm.serving.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    result = adafuse("serve")
    assert result.exit_code == 2
    assert install_command("cli,serve") in result.stderr


def test_a_server_from_its_start_to_its_end(start, models, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("k1\nk2\n")
    flags = ["--port", 0, "--api-key-file", keys, "-o", "drain_seconds=0.2"]
    process = start(COMMAND, "serve", "--model", models[0], "--model", models[1], *flags)
    (url,) = re.findall(r"listening at (\S+);", process.stderr.readline().decode())
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer k2"}, timeout=60) as http:
        assert http.get("/health").status_code == 200
        early = http.post("/v1/completions", json=STREAM)
        assert (early.status_code, "retry-after" in early.headers) == (503, True)
        assert http.get("/ready").status_code == 503
        ready = process.stdout.readline().decode()
        assert ready.startswith(f"adafuse serves otter, badger at {url} (")
        assert http.get("/ready").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 400
        with http.stream("POST", "/v1/completions", json=STREAM) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    last = json.loads(rest[-2].removeprefix("data: "))
    assert last["adafuse"]["finish_reason"] == "cancelled"
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert b"path=/v1/completions status=200" in log
    assert b"path=/v1/models status=401" in log
    assert log.count(b"WARNING") == 2  # one of the members has no template; a foreign host
    for secret in (b"k1", b"k2", b"the mill", b"Traceback", b"ERROR"):
        assert secret not in log, log
