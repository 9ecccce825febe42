"""Names of members that are described by a path, a hub id or a `MemberSpec`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from adafuse_llm import InvalidInputError, InvalidOptionError, MemberSpec
from adafuse_llm.loading.specs import as_spec, member_names


def names(*members: str | MemberSpec) -> list[str]:
    return member_names([m if isinstance(m, MemberSpec) else MemberSpec(path=m) for m in members])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["gpt2"], ["gpt2"]),
        (["org/model"], ["model"]),
        (["/a/b/model/"], ["model"]),
        (["a/model", "b/model"], ["a/model", "b/model"]),
        (["x/a/model", "y/a/model", "z/other"], ["x/a/model", "y/a/model", "other"]),
        (["gpt2", "gpt2"], ["gpt2", "gpt2#2"]),
        (["gpt2", "gpt2", "gpt2"], ["gpt2", "gpt2#2", "gpt2#3"]),
        (["model", "a/model"], ["model", "a/model"]),
        (["a/m-Q8_0.gguf", "b/m-00001-of-00003.gguf"], ["m-Q8_0", "m"]),
        (["a/m.gguf", "b/m"], ["a/m", "b/m"]),
        ([".gguf"], [".gguf"]),
    ],
)
def test_names_are_the_last_parts_of_paths_as_many_as_it_takes(
    paths: list[str], expected: list[str]
) -> None:
    assert names(*paths) == expected


@pytest.mark.quick
def test_given_names_are_kept_and_others_make_way() -> None:
    assert names(MemberSpec(path="a/model", name="model"), "b/model") == ["model", "b/model"]
    assert names("b/model", MemberSpec(path="a/x", name="model")) == ["b/model", "model"]
    assert len(set(names(MemberSpec(path="m", name="m#2"), "m", "m"))) == 3


@pytest.mark.quick
def test_files_of_one_folder_have_the_names_of_the_files() -> None:
    files = ("wren-q8_0.gguf", "sub/heron-00001-of-00002.gguf")
    assert names(*(MemberSpec("/a/gguf", file=file) for file in files)) == ["wren-q8_0", "heron"]
    assert names(MemberSpec("a/x", file="m.gguf"), "b/m") == ["x/m", "b/m"]
    assert names(MemberSpec("org/some-GGUF", file="*Q4*")) == ["some-GGUF"]


@pytest.mark.quick
def test_a_path_can_be_a_positional_argument() -> None:
    assert MemberSpec("a/model", name="x") == MemberSpec(path="a/model", name="x")
    assert MemberSpec(Path("a/model")).path == "a/model"  # type: ignore[arg-type]
    assert as_spec({"path": "a/model", "weight": 2}) == MemberSpec("a/model", weight=2)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"path": 5}, "path must be a folder, a GGUF file or a hub id; got 5"),
        ({}, "needs a path"),
        ({"path": "x", "pth": 1}, "no setting 'pth'.*Did you mean 'path'"),
        ({"path": "x", "weight": "a"}, "weight must be a number from 0 to 1e.12; got 'a'"),
        ({"path": "x", "prefix_cache_bytes": -1}, "prefix_cache_bytes must be an integer"),
        ({"path": "x", "quantization_config": "x" * 10_000}, "quantization_config must be"),
        ({"path": "x", "threads": 0}, "threads must be an integer of 1 or more; got 0"),
        (
            {"path": "x", "threads": 10_000},
            rf"threads must be from 1 to {os.cpu_count()}, the number of CPU cores; got 10000",
        ),
        ({"path": "x", "cache_type": "q5_0"}, "cache_type must be one of 'f32', 'f16', 'bf16'"),
        ({"path": "x", "cache_type": "q4_0", "flash_attention": False}, "needs flash attention"),
        ({"path": "x", "end_tokens": "</s>"}, "end_tokens must be a list of tokens"),
        ({"path": "x", "repeatable": True, "flash_attention": False}, "repeatable=True needs"),
        ({"path": "x", "file": "../y.gguf"}, "file must be the name of a GGUF file"),
        ({"path": "x.gguf", "file": "x.gguf"}, "path is a GGUF file already"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises((InvalidInputError, InvalidOptionError), match=says) as caught:
        as_spec(values)
    assert len(str(caught.value)) < 500


@pytest.mark.quick
def test_the_home_folder_is_that_of_the_user() -> None:
    assert as_spec("~/one").path == str(Path("~/one").expanduser())
