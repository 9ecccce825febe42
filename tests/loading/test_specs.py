"""Names of members that are described by a path, a hub id or a `MemberSpec`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from adafuse_llm import InvalidInputError, InvalidOptionError, MemberSpec
from adafuse_llm.loading.ray_options import RayOptions
from adafuse_llm.loading.specs import as_spec, in_cluster, in_process, member_names


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
        ({"path": "x" * 10_000}, "path must be a folder, a GGUF file or a hub id"),
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
        ({"path": "x", "context": -1}, "context must be an integer of 1 or more"),
        ({"path": "x", "gpu_layers": "all"}, "gpu_layers must be an integer of 0 or more"),
        ({"path": "x", "process": "yes"}, "process must be True or False; got 'yes'"),
        ({"path": "x", "flash_attention": "on"}, "flash_attention must be True, False or None"),
        ({"path": "x", "cache_type": "q5_0"}, "cache_type must be one of 'f32', 'f16', 'bf16'"),
        ({"path": "x", "cache_type": "q4_0", "flash_attention": False}, "needs flash attention"),
        ({"path": "x", "end_tokens": "</s>"}, "end_tokens must be a list of tokens"),
        ({"path": "x", "repeatable": "no"}, "repeatable must be True, False or None"),
        ({"path": "x", "repeatable": True, "flash_attention": False}, "repeatable=True needs"),
        ({"path": "x", "file": "../y.gguf"}, "file must be the name of a GGUF file"),
        ({"path": "x.gguf", "file": "x.gguf"}, "path is a GGUF file already"),
        ({"path": "x.gguf", "dtype": "auto"}, "dtype is not for GGUF members"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises((InvalidInputError, InvalidOptionError), match=says) as caught:
        as_spec(values)
    assert len(str(caught.value)) < 500


@pytest.mark.quick
@pytest.mark.parametrize(
    ("ray", "says"),
    [
        (True, "ray must be a mapping, such as {'num_gpus': 1}, or {} for the defaults; got True"),
        ("auto", "ray must be a mapping"),
        ({"num_gpu": 1}, "ray: unknown option 'num_gpu'. Did you mean 'num_gpus'?"),
        ({1: 2}, "ray: unknown option '1'"),
        ({"num_gpus": "two"}, "ray: option 'num_gpus': input should be a valid number"),
        ({"num_gpus": -1}, "ray: option 'num_gpus': input should be greater than or equal to 0"),
        ({"num_gpus": 1.5}, "ray: option 'num_gpus': above 1, it must be a whole number; got 1.5"),
        ({"memory": 0}, "ray: option 'memory': input should be greater than 0"),
        ({"resources": ["a"]}, "ray: option 'resources': input should be a valid dictionary"),
        ({"resources": {"a": 0}}, "ray: option 'resources': every amount must be above 0"),
        ({"resources": {"CPU": 2}}, "it cannot contain CPU; pass num_cpus, num_gpus or memory"),
        ({"load_timeout": 0}, "ray: option 'load_timeout': input should be greater than 0"),
        ({"call_timeout": 1e6}, "input should be less than or equal to 86400"),
        ({"address": "ray://a:1"}, "so ray:// is not possible; got 'ray://a:1'"),
        ({"address": "head"}, "it must be HOST:PORT of the head node, such as 10.0.0.1:6379"),
        ({"address": ""}, "it must be HOST:PORT of the head node"),
        ({"address": "::1:6379"}, "it must be HOST:PORT of the head node"),
        ({"address": 6379}, "ray: option 'address': input should be a valid string"),
    ],
)
def test_an_option_of_ray_that_cannot_be_used_is_named(ray: Any, says: str) -> None:
    with pytest.raises(InvalidOptionError, match=re.escape(says)) as caught:
        as_spec({"path": "a/one", "ray": ray})
    assert str(caught.value).startswith("member 'a/one': ray")
    assert len(str(caught.value)) < 500


@pytest.mark.quick
@pytest.mark.parametrize(
    "address", ["auto", "10.0.0.1:6379", "head.example:6379", "[fd00::1]:6379"]
)
def test_addresses_of_clusters(address: str) -> None:
    assert as_spec({"path": "a", "ray": {"address": address}}).ray == {"address": address}


@pytest.mark.quick
def test_a_member_in_an_actor_is_not_of_this_machine() -> None:
    with pytest.raises(InvalidOptionError, match=r"member 'a': pass process=True .* not both"):
        as_spec({"path": "a", "process": True, "ray": {}})
    assert as_spec({"path": "a", "threads": 10_000, "ray": {}}).threads == 10_000
    assert as_spec({"path": "~/one", "ray": {}}).path == "~/one"
    assert as_spec("~/one").path == str(Path("~/one").expanduser())


@pytest.mark.quick
def test_a_member_in_a_cluster_keeps_its_options_of_ray() -> None:
    spec = in_cluster({"path": "~/one", "weight": 2, "ray": {"num_gpus": 1}}, "head:6379")
    assert spec == MemberSpec("~/one", weight=2, ray={"num_gpus": 1, "address": "head:6379"})
    assert in_process(spec) is spec
    assert in_cluster(MemberSpec("a", process=True), "auto") == MemberSpec(
        "a", ray={"address": "auto"}
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "threads", "has_gpus", "bundle"),
    [
        ({}, None, False, {"CPU": 1}),
        ({}, 8, True, {"CPU": 8, "GPU": 1}),
        ({"num_gpus": 0}, None, True, {"CPU": 1}),
        ({"num_cpus": 2, "num_gpus": 0.5}, 8, True, {"CPU": 2, "GPU": 0.5}),
        ({"num_cpus": 0}, None, False, {"CPU": 0.001}),
        ({"num_cpus": 0, "memory": 5, "resources": {"a": 0.1}}, 4, False, {"memory": 5, "a": 0.1}),
    ],
)
def test_what_an_actor_reserves(
    options: dict[str, Any], threads: int | None, has_gpus: bool, bundle: dict[str, float]
) -> None:
    assert RayOptions(**options).bundle(threads, has_gpus=has_gpus) == bundle
