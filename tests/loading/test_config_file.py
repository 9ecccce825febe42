"""Configuration files: what is refused, and how."""

import json
from pathlib import Path

import pytest

from adafuse_llm import (
    AdaFuseEngine,
    GGUFMember,
    InvalidInputError,
    ServerMember,
    TransformersMember,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.loading import members
from adafuse_llm.loading.config_file import read_config

pytestmark = pytest.mark.quick


def written(folder: Path, text: str) -> Path:
    file = folder / "ensemble.yaml"
    file.write_text(text)
    return file


def test_models_can_be_mappings_of_the_settings_of_members(tmp_path: Path) -> None:
    text = "models: [a/one, {path: a/two.gguf, threads: 2}, {url: 'http://h', model: m}]"
    assert read_config(written(tmp_path, text)).members == [
        TransformersMember("a/one"),
        GGUFMember("a/two.gguf", threads=2),
        ServerMember("http://h", model="m"),
    ]


def test_an_engine_has_the_settings_of_its_file(tmp_path: Path) -> None:
    text = "models: a/m\nstrategy: mixture\nmax_new_tokens: 5\nruntime: {max_requests: 3}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            members, "load_members", lambda *_, **__: ([FakeBackend("m", lambda _: {})], None)
        )
        engine = AdaFuseEngine.from_config(written(tmp_path, text))
    chosen = engine.strategy.name, engine.config.max_new_tokens, engine.runtime.max_requests
    assert chosen == ("mixture", 5, 3)


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "yes"}}}


def test_a_json_schema_is_a_mapping_or_a_file_next_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "forms").mkdir()
    (tmp_path / "forms" / "answer.json").write_text(json.dumps(SCHEMA))
    for value in (json.dumps(SCHEMA), "forms/answer.json", str(tmp_path / "forms/answer.json")):
        read = read_config(written(tmp_path, f"max_words: 2\njson_schema: {value}")).config
        assert read.json_schema == SCHEMA
        assert json.dumps(read.json_schema) == json.dumps(SCHEMA)  # in the same order
    assert read_config(written(tmp_path, "json_schema:")).config.json_schema is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_words: [" + "[" * 50_000, "is not YAML"),
        ("revision: 2024-13-45", "is not YAML: month must be in 1..12"),
        ("5", "must contain names and values"),
        ("models: [a]\nmodels: [b]", "has 'models' 2 times. Keep one"),
        (f"? {'x' * 10_000}\n: 1", "unknown option 'xxx"),
        ("models: [{threads: 2}]", "a member needs a path"),
        ("models: [{path: a, trust_remote_code: true}]", "cannot set 'trust_remote_code'"),
        ("json_schema: no.json", "JSON schema .*no.json: No such file"),
        ("json_schema: list.json", r"must contain an object, .* got \[1\]"),
        ("json_schema: {const: 2024-01-02}", "not a valid JSON value"),
        ("json_schema: {}\nregex: a", "got json_schema and regex"),
        ("runtime: {max_request: 3}", "unknown option 'max_request'. Did you"),
        ("runtime: {max_requests: 0}", "option 'max_requests'"),
        ("serving: {cors_origins: [x]}", "option 'cors_origins'"),
        ("serving: {8000: port}", "unknown option '8000'"),
        ("serving: [port]", "option 'serving': input should be a valid dictionary"),
        ("max_requests: 3", "'max_requests'.*section 'runtime'"),
    ],
)
def test_a_file_that_cannot_be_used_has_a_short_error_that_names_it(
    tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "list.json").write_text("[1]")
    file = written(tmp_path, text)
    with pytest.raises(InvalidInputError, match=says) as caught:
        read_config(file)
    assert str(caught.value).startswith(f"configuration file {file}")
    assert len(str(caught.value)) < 800


def test_sections_set_how_the_engine_and_the_server_run(tmp_path: Path) -> None:
    text = "runtime: {max_requests: 3}\nserving:\n  port: 9000\n  allowed_hosts: a.example\n"
    file = read_config(written(tmp_path, text))
    assert (file.runtime.max_requests, file.runtime.drafting) == (3, True)
    assert (file.serving.port, file.serving.allowed_hosts) == (9000, ("a.example",))
    assert file.serving.model_fields_set == {"port", "allowed_hosts"}
    empty = read_config(written(tmp_path, "max_words: 2\nserving:\n"))
    assert not empty.serving.model_fields_set | empty.runtime.model_fields_set
