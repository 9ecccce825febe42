"""Descriptions of members: their kind, their names, and settings that cannot be used."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from adafuse_llm import GGUFMember, InvalidInputError, InvalidOptionError, MemberSpec, ServerMember
from adafuse_llm import TransformersMember as Transformers
from adafuse_llm.embedded import member_paths
from adafuse_llm.loading.specs import as_spec, as_specs, member_names
from tests.support.gguf_files import embedded_gguf

pytestmark = pytest.mark.quick


def names(*members: str | MemberSpec) -> list[str]:
    return member_names(as_specs(members))


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["gpt2"], ["gpt2"]),
        (["org/model"], ["model"]),
        (["/a/b/model/"], ["model"]),
        (["a/model", "b/model"], ["a/model", "b/model"]),
        (["x/a/model", "y/a/model", "z/other"], ["x/a/model", "y/a/model", "other"]),
        (["gpt2", "gpt2", "gpt2"], ["gpt2", "gpt2#2", "gpt2#3"]),
        (["model", "a/model"], ["model", "a/model"]),
        (["a/m-Q8_0.gguf", "b/m-00001-of-00003.gguf"], ["m-Q8_0", "m"]),
        (["a/m.gguf", "b/m"], ["a/m", "b/m"]),
        (["vllm+http://h:8000/org/m", "http://h:8000"], ["m", "h:8000"]),
    ],
)
def test_names_are_the_last_parts_of_paths_as_many_as_it_takes(
    paths: list[str], expected: list[str]
) -> None:
    assert names(*paths) == expected


def test_given_names_are_kept_and_others_make_way() -> None:
    assert names(Transformers("a/model", name="model"), "b/model") == ["model", "b/model"]
    assert names("b/model", Transformers("a/x", name="model")) == ["b/model", "model"]
    assert len(set(names(Transformers("m", name="m#2"), "m", "m"))) == 3


def test_files_of_one_folder_have_the_names_of_the_files() -> None:
    files = ("wren-q8_0.gguf", "sub/heron-00001-of-00002.gguf")
    assert names(*(GGUFMember("/a/gguf", file=file) for file in files)) == ["wren-q8_0", "heron"]
    assert names(GGUFMember("org/some-GGUF", file="*Q4*")) == ["some-GGUF"]


def test_a_string_or_a_mapping_is_of_the_kind_that_its_files_and_keys_say(tmp_path: Path) -> None:
    (tmp_path / "blob").symlink_to(embedded_gguf("wren", "q8_0"))
    kinds = {
        str(member_paths()[0]): Transformers,
        "org/model": Transformers,
        "org/model-GGUF": GGUFMember,
        str(tmp_path / "blob"): GGUFMember,
        "http://host:8000": ServerMember,
    }
    for path, kind in kinds.items():
        assert type(as_spec(path)) is type(as_spec({"path": path})) is kind
    assert as_spec(tmp_path) == Transformers(str(tmp_path))
    assert as_spec({"path": "org/m", "file": "*Q4*"}) == GGUFMember("org/m", file="*Q4*")
    assert as_spec({"url": "http://h", "weight": 2}) == ServerMember("http://h", weight=2)


@pytest.mark.parametrize(
    "spec",
    [
        Transformers("a", quantization_config={"bits": 4}, weight=2),
        GGUFMember("a/b", file="c.gguf", cache_type="q8_0"),
        ServerMember("vllm+http://h/team/v1/name?tokenizer=t"),
    ],
)
def test_a_description_survives_copies_pickles_and_its_own_settings(spec: MemberSpec) -> None:
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == as_spec(dict(spec)) == spec


def test_the_home_folder_is_that_of_the_user() -> None:
    home = str(Path("~/one").expanduser())
    assert as_spec("~/one").path == GGUFMember("~/one").path == home


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"path": 5}, "'path'.*got 5"),
        ({}, "needs a path"),
        ({"path": "x", "pth": 1}, "unknown option 'pth'.*Did you mean 'path'"),
        ({"path": "x", "weight": "a"}, "member 'x'.*'weight'.*got 'a'"),
        ({"path": "x", "prefix_cache_bytes": -1}, "'prefix_cache_bytes'.*got -1"),
        ({"path": "x.gguf", "threads": 0}, "'threads'.*got 0"),
        ({"path": "x.gguf", "cache_type": "q5_0"}, "'f32', 'f16', 'bf16'"),
        ({"path": "x.gguf", "dtype": "float16"}, r"\(GGUFMember\): unknown option 'dtype'"),
        ({"path": "x", "context": 5}, r"\(TransformersMember\): unknown option 'context'"),
        ({"path": "x", "url": "http://h"}, r"\(ServerMember\): unknown option 'path'"),
        ({"url": "ftp://h"}, "url must be the address of a server"),
        ({"url": "http://name:secret@h"}, "must not have a name or password"),
        ({"url": "http://h/x?key=1"}, "no setting 'key'"),
        ({"url": "http://h", "api": "vlm"}, "'vllm', 'sglang' or 'llama-server'"),
        ({"url": "http://h", "api_key_env": "sk-secret"}, "not the key itself"),
        ({"url": "http://h/team", "model": "m"}, "the model 'team'.*ends with /v1"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises((InvalidInputError, InvalidOptionError), match=says) as caught:
        as_spec(values)
    assert len(str(caught.value)) < 500
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("vllm+http://host:8000/name", ("http://host:8000/v1", "name", "vllm", None)),
        ("http://host:8000", ("http://host:8000/v1", None, None, None)),
        ("http://host:8000/v1/", ("http://host:8000/v1", None, None, None)),
        ("sglang+https://host/v1/a/b", ("https://host/v1", "a/b", "sglang", None)),
        (
            "llama-server+http://host/team/x/v1/m.gguf?tokenizer=/some/folder",
            ("http://host/team/x/v1", "m.gguf", "llama-server", "/some/folder"),
        ),
    ],
)
def test_an_address_has_the_settings_of_a_member(text: str, settings: tuple[Any, ...]) -> None:
    spec = ServerMember(text)
    assert (spec.url, spec.model, spec.api, spec.tokenizer) == settings
    url, model, api, tokenizer = settings
    assert ServerMember(url, model=model, api=api, tokenizer=tokenizer) == spec
