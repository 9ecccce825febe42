"""Names of members that are described by a path, a hub id or a `MemberSpec`."""

from __future__ import annotations

import pytest

from adafuse_llm import MemberSpec
from adafuse_llm.loading.specs import member_names


def names(*members: str | MemberSpec) -> list[str]:
    return member_names([m if isinstance(m, MemberSpec) else MemberSpec(path=m) for m in members])


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
    ],
)
def test_names_are_the_last_parts_of_paths_as_many_as_it_takes(
    paths: list[str], expected: list[str]
) -> None:
    assert names(*paths) == expected


def test_given_names_are_kept_and_others_make_way() -> None:
    assert names(MemberSpec(path="a/model", name="model"), "b/model") == ["model", "b/model"]
    assert names("b/model", MemberSpec(path="a/x", name="model")) == ["b/model", "model"]
    assert len(set(names(MemberSpec(path="m", name="m#2"), "m", "m"))) == 3
