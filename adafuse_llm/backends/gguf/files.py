"""Find the GGUF file of a member in a folder or in the local cache of the Hugging Face hub.

Nothing here downloads a file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from adafuse_llm.backends.gguf.header import MAGIC, part_names
from adafuse_llm.errors import LoadError, short_list

SUFFIX: Final = ".gguf"

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth")
"""Endings of the weight files of transformers models."""


def is_gguf(source: str, file: str | None = None, revision: str | None = None) -> bool:
    """Return whether a member is a GGUF model, which llama.cpp loads.

    A folder or hub repository with ``config.json`` and files of `WEIGHTS` is a transformers model,
    unless `file` is set. If a repository is not in the local cache, "gguf" in its name decides.
    """
    path = Path(source).expanduser()
    if file is not None or source.lower().endswith(SUFFIX):
        return True
    # recognize a file without the ending, such as those of Ollama, by its first bytes
    if os.path.isfile(path):  # noqa: PTH113  # unlike pathlib's, it takes a name of any length
        try:
            with path.open("rb") as opened:
                return opened.read(len(MAGIC)) == MAGIC
        except OSError:
            return True  # reading the header says why
    # look into a folder, or a repository in the cache
    folder = stored_folder(source, revision)
    if folder is None:
        return "gguf" in source.lower()
    if (folder / "config.json").is_file() and any(
        path.name.endswith(WEIGHTS) for path in folder.iterdir()
    ):
        return False
    return bool(gguf_names(folder))


def stored_folder(source: str, revision: str | None = None) -> Path | None:
    """Return the folder `source`, or the cached folder of a hub id; None if there is neither."""
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return path
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None


def gguf_names(folder: Path) -> list[str]:
    """Return the GGUF files in a folder and its direct subfolders, relative to the folder."""
    paths = (*folder.glob("*"), *folder.glob("*/*"))
    return sorted(
        path.relative_to(folder).as_posix() for path in paths if path.suffix.lower() == SUFFIX
    )


def choose(names: Sequence[str], file: str | None) -> str:
    """Return the only model in `names` that fits `file` (None: any), or raise a `LoadError`."""
    names = [name for name in names if name.lower().endswith(SUFFIX)]
    if file in names:
        return str(file)
    # leave out files that hold no model, and all parts of a model but the first one
    no_models = [n for n in names if "mmproj" in n.lower() or n.lower().endswith("imatrix.gguf")]
    wholes = [n for n in names if n not in no_models and n == part_names(n)[0]]
    pattern = "*" if file is None else file
    fitting = [
        name for name in wholes if any(fnmatchcase(n, pattern) for n in (name, Path(name).name))
    ]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        wanted = "" if file is None else f" that fits file={file!r}"
        raise LoadError(
            f"it has no GGUF file{wanted}; it has: {short_list(wholes or names)}. Pass a GGUF "
            "file, or a folder or hub id with such files, or leave out file."
        )
    raise LoadError(
        f"it has {len(fitting)} GGUF files{'' if file is None else f' that fit {file!r}'}: "
        f"{short_list(fitting)}. Pass the path of one of them. For a hub repository, pass "
        f"GGUFMember(path=..., file={fitting[0]!r}), or a pattern that fits only one; in a "
        "configuration file, set path and file of the model."
    )
