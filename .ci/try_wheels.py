"""Check the wheels and sdists in a folder, then use and test the wheels in an empty environment.

Usage: python .ci/try_wheels.py DIST
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = {
    "adafuse_llm": "adafuse_llm/",
    "langchain_adafuse": "langchain_adafuse/",
    "llama_index_llms_adafuse": "llama_index/llms/adafuse/",
}
"""The folder of each distribution. A wheel holds this folder and its metadata."""

FORBIDDEN = {"benchmarks", "suite", "tests", "training"}
"""Names of folders, and of files without their suffix, that no wheel holds at any depth."""

DEMO = ["ask", "What is the entry price of the Jalith Museum?", "-o", "max_words=1"]

CALLS = {
    "langchain_adafuse": """
from langchain_adafuse import ChatAdaFuse
print(ChatAdaFuse.from_embedded().invoke("What is 12 + 7?").content)
""",
    "llama_index_llms_adafuse": """
from llama_index.core.llms import ChatMessage
from llama_index.llms.adafuse import AdaFuseLLM
llm = AdaFuseLLM.from_embedded()
print(llm.chat([ChatMessage(role="user", content="What is 12 + 7?")]).message.content)
""",
}


def main() -> None:
    """Check the three distributions, then install their wheels outside the clone and use them."""
    dist = Path(sys.argv[1])
    wheels = {name: _only(dist, f"{name}-*.whl") for name in PACKAGES}
    for name, wheel in wheels.items():
        check_wheel(wheel, PACKAGES[name])
        check_sdist(_only(dist, f"{name}-*.tar.gz"), PACKAGES[name])
    with tempfile.TemporaryDirectory(prefix="adafuse-wheels-") as folder:
        try_wheels(wheels, Path(folder))
        for name in CALLS:
            run_tests(_only(dist, f"{name}-*.tar.gz"), Path(folder))


def check_wheel(wheel: Path, package: str) -> None:
    """Exit with a message unless the wheel holds its package, its metadata and nothing else."""
    files = zipfile.ZipFile(wheel).namelist()
    strangers = [
        file
        for file in files
        if not file.startswith((package, f"{'-'.join(wheel.stem.split('-')[:2])}.dist-info/"))
        or FORBIDDEN & {Path(part).stem for part in Path(file).parts}
    ]
    if strangers:
        sys.exit(f"{wheel.name} must not hold {', '.join(strangers)}")
    for needed in (f"{package}__init__.py", f"{package}py.typed", "LICENSE"):
        if not any(file.endswith(needed) for file in files):
            sys.exit(f"{wheel.name} must hold {needed}")


def check_sdist(sdist: Path, package: str) -> None:
    """Exit with a message unless the sdist holds its package, the tests of an integration, and no
    other folder.

    The tests of the core are not in it: they read the documentation, notebooks and training code,
    and run from a clone.
    """
    with tarfile.open(sdist) as archive:
        paths = [Path(name).parts[1:] for name in archive.getnames()]
    folders = {path[0] for path in paths if len(path) > 1}
    wanted = {package.split("/", maxsplit=1)[0]} | (
        {"tests"} if package != "adafuse_llm/" else set()
    )
    if folders != wanted:
        sys.exit(f"{sdist.name} must hold the folders {sorted(wanted)}; got {sorted(folders)}")


def try_wheels(wheels: dict[str, Path], folder: Path) -> None:
    """Install the wheels into an empty environment in `folder`; run the demo and the calls."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    (folder / "work").mkdir()
    version = run(folder, "python", "--version").strip()
    print(f"installing the wheels into an empty environment of {version}", flush=True)
    install(
        folder,
        f"{wheels['adafuse_llm'].resolve()}[cli]",
        *(str(wheel.resolve()) for name, wheel in wheels.items() if name != "adafuse_llm"),
    )

    where = run(folder, "python", "-c", "import adafuse_llm; print(adafuse_llm.__file__)")
    if not Path(where).is_relative_to(folder.resolve()):
        sys.exit(f"the environment must import the installed package; it imports {where}")
    answer = run(folder, "adafuse", *DEMO)
    if not answer.startswith("16.86 crowns"):
        sys.exit(f"the demo must answer '16.86 crowns'; got {answer!r}")
    print("demo: 16.86 crowns")
    for name, code in CALLS.items():
        answer = run(folder, "python", "-c", code).strip()
        if "19" not in answer:
            sys.exit(f"{name} must answer that 12 + 7 is 19; got {answer!r}")
        print(f"{name}: {answer}")


def run_tests(sdist: Path, folder: Path) -> None:
    """Run the tests of an integration outside the clone, in the environment of `try_wheels`.

    Only the tests and their settings are unpacked, so that they import the installed package.
    """
    with tarfile.open(sdist) as archive:
        needed = ("tests", "pyproject.toml")
        files = [file for file in archive if Path(file.name).parts[1] in needed]
        archive.extractall(folder / "work", files, filter="data")
    root = sdist.name.removesuffix(".tar.gz")
    print(f"running the tests in {sdist.name}", flush=True)
    install(folder, "--group", f"{folder / 'work' / root / 'pyproject.toml'}:test")
    print(run(folder, "pytest", "-q", root))


def install(folder: Path, *what: str) -> None:
    """Install packages into the environment with the pip of this one, which knows groups."""
    constraints = ("--constraint", str(ROOT / "constraints.txt"))
    command = ("-m", "pip", "--python", str(folder / "env"), "install", "--quiet", *constraints)
    subprocess.run([sys.executable, *command, *what], check=True)


def run(folder: Path, name: str, *arguments: str) -> str:
    """Run a program of the environment in an empty folder, offline; return what it prints."""
    program = folder / "env" / ("Scripts" if os.name == "nt" else "bin") / name
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(program), *arguments],
        cwd=folder / "work",
        env={**environment, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{name} {' '.join(arguments)} failed:\n{done.stdout}")
    return done.stdout


def _only(dist: Path, pattern: str) -> Path:
    found = list(dist.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{dist} must hold exactly one file {pattern}; got {len(found)}")
    return found[0]


if __name__ == "__main__":
    main()
