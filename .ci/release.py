"""The steps of a release that need no index.

Usage:
    python .ci/release.py prepare X          set version X, and cut the changelog
    python .ci/release.py check [vX]         compare the versions, with that of a tag, too
    python .ci/release.py build DIST         build the sdists and wheels, and check their metadata
    python .ci/release.py rehearse PYTHON... do all of it in a clone, and try the wheels
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INTEGRATIONS = ("integrations/langchain-adafuse", "integrations/llama-index-llms-adafuse")
PLACES = {
    "adafuse_llm/__init__.py": ['__version__ = "{}"'],
    **{f"{name}/pyproject.toml": ['version = "{}"', '"adafuse-llm~={}"'] for name in INTEGRATIONS},
    "CITATION.cff": ["version: {}"],
}
"""What names the version, by file. Each line is in its file once; the first one is the source."""

VERSION = r"(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)"
UNRELEASED = "## [Unreleased]\n\n"
NOT_YET = (
    "Nothing has been released yet. Names may change without notice until the first release.\n\n"
)
"""What the changelog says above its list before the first release."""

TESTS = ("tests/test_packaging.py", "tests/test_public_api.py", "tests/docs/test_links.py")
"""Tests that read versions, the changelog, and the last tag."""


def named_versions() -> dict[str, list[str]]:
    """Return the version in each line of `PLACES`, by file."""
    found = {}
    for file, lines in PLACES.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        patterns = (re.escape(line).replace(r"\{\}", VERSION) for line in lines)
        versions = [re.findall(f"^ *{each}", text, re.MULTILINE) for each in patterns]
        if any(len(each) != 1 for each in versions):
            sys.exit(f"{file} must have each of these lines once: {', '.join(lines)}")
        found[file] = [each[0] for each in versions]
    return found


def prepare(version: str) -> None:
    """Write a version into all files that name it, and give the list of changes its heading."""
    if not re.fullmatch(VERSION, version):
        sys.exit(f"a version is like 0.2.0 or 0.2.0rc1; got {version!r}")
    for file, versions in named_versions().items():
        path = ROOT / file
        text = path.read_text(encoding="utf-8")
        for line, old in zip(PLACES[file], versions, strict=True):
            text = text.replace(line.format(old), line.format(version))
        path.write_text(text, encoding="utf-8")
    path = ROOT / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8").replace(NOT_YET, "")
    before, heading, after = text.partition(UNRELEASED)
    if not heading or after.startswith("## "):
        sys.exit("CHANGELOG.md must have a section [Unreleased] that lists changes")
    if f"## [{version}]" in text:
        sys.exit(f"CHANGELOG.md has a section for {version}, so it is released; choose a later one")
    date = dt.datetime.now(tz=dt.timezone.utc).date()
    path.write_text(f"{before}{heading}## [{version}] - {date}\n\n{after}", encoding="utf-8")


def check(tag: str | None = None) -> str:
    """Return the only version. With a tag, compare it, and print this version's changes."""
    versions = named_versions()
    version = versions["adafuse_llm/__init__.py"][0]
    if wrong := [file for file, named in versions.items() if {*named} != {version}]:
        sys.exit(f"adafuse_llm/__init__.py has version {version}, but not {', '.join(wrong)}")
    if tag is not None:
        if tag != f"v{version}":
            sys.exit(f"the tag must be v{version}, the version of the packages; got {tag}")
        print(changes_of(version))
    return version


def changes_of(version: str) -> str:
    """The section of a version in the changelog."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if section is None or not section[1].strip():
        sys.exit(f"CHANGELOG.md must have a section '## [{version}] - DATE' that lists changes")
    return section[1].strip()


def build(dist: Path) -> None:
    """Build the sdists, and the wheels from them; check their metadata."""
    dist.mkdir(parents=True, exist_ok=True)
    for old in (*dist.glob("*.whl"), *dist.glob("*.tar.gz")):
        old.unlink()
    for project in (".", *INTEGRATIONS):
        run("-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT / project), quiet=True)
    run("-m", "twine", "check", "--strict", *map(str, sorted(dist.iterdir())))


def rehearse(pythons: list[str]) -> None:
    """Release the last commit in a clone, under the next version, and publish nothing."""
    if git("status", "--porcelain"):
        print("uncommitted changes are not part of the rehearsal")
    version = check()
    if f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        start, _, patch = re.sub(r"(a|b|rc)\d+$", "", version).rpartition(".")
        version = f"{start}.{int(patch) + 1}"
    with tempfile.TemporaryDirectory(prefix="adafuse-release-") as folder:
        clone = Path(folder) / "clone"
        git("clone", "--quiet", str(ROOT), str(clone))
        paths = os.pathsep.join(map(str, (clone, *(clone / each for each in INTEGRATIONS))))
        script, dist = str(clone / ".ci" / "release.py"), str(clone / "dist")
        run(script, "prepare", version)
        author = ("-c", "user.name=release", "-c", "user.email=release@localhost")
        git(*author, "commit", "--quiet", "--all", "--message", f"Version {version}", at=clone)
        git(*author, "tag", "--no-sign", f"v{version}", at=clone)
        run(script, "check", f"v{version}", quiet=True)
        run("-m", "pytest", "-q", "--no-header", *TESTS, at=clone, PYTHONPATH=paths)
        run(script, "build", dist)
        for python in pythons:
            run(str(clone / ".ci" / "try_wheels.py"), dist, "--tests", "--python", python)
        print(f"\nA push of the tag v{version} would publish:")
        for file in sorted(Path(dist).iterdir()):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            print(f"  {file.name}  {file.stat().st_size:,} bytes  sha256 {digest}")


def run(*arguments: str, at: Path = ROOT, quiet: bool = False, **environment: str) -> None:
    """Run this Python; exit if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=at,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL if quiet else None,
        check=False,
    )
    if done.returncode:
        sys.exit(f"failed: python {' '.join(arguments)}")


def git(*arguments: str, at: Path = ROOT) -> str:
    """Run git; return what it prints."""
    done = subprocess.run(
        ["git", *arguments],  # noqa: S607
        cwd=at,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["prepare", version]:
            prepare(version)
        case ["check", *tag]:
            check(*tag)
        case ["build", dist]:
            build(Path(dist).resolve())
        case ["rehearse", *pythons]:
            rehearse(pythons or [sys.executable])
        case _:
            sys.exit(__doc__)
