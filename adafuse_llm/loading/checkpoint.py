"""Check which files the weights of a member are in, and whether all weights were loaded."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path, PureWindowsPath
from typing import Any, Final

from adafuse_llm.errors import LoadError, short_repr

INDEX: Final = ".index.json"
"""Ending of a file that maps the tensors of a checkpoint to the files that hold them."""

COMPUTED: Final = re.compile(r"(^|\.)(inv_freq|position_ids)$")
"""Tensors that a model computes when it is created. Only old checkpoints store them."""

MAX_NAMED: Final = 5
"""Maximum number of tensors that an error names."""

PICKLE_ADVICE: Final = (
    "Weights in pickle format can run code when loaded. Convert them to safetensors, or pass "
    "MemberSpec(path=..., allow_pickle=True) if you trust them."
)


def check_files(
    path: str, revision: str | None, config: Any, label: str, *, allow_pickle: bool
) -> None:
    """Check which files the weights of a checkpoint are in. Load no weights.

    Args:
        path: local folder or hub id.
        revision: revision of a hub model.
        config: the model's configuration.
        label: text that names the member in errors.
        allow_pickle: whether the files may be in pickle format.

    Raises:
        LoadError: a file is in pickle format although `allow_pickle` is False, or a file is outside
            the folder, or the model has an adapter and the package peft is not installed.
    """
    folder = Path(path) if Path(path).exists() else None
    chosen = getattr(config, "transformers_weights", None)  # config.json may name the file
    if chosen is not None:
        _check_names([chosen], folder, f"{label}: config.json", allow_pickle=allow_pickle)
    indexes = ["model.safetensors.index.json"]
    if allow_pickle:
        indexes.append("pytorch_model.bin.index.json")
    if chosen is not None and chosen.endswith(INDEX):
        indexes.append(chosen)
    if _find(path, revision, "adapter_config.json") is not None:
        indexes.append("adapter_model.safetensors.index.json")
        _check_adapter(path, revision, label, allow_pickle=allow_pickle)
    for name in indexes:
        if (file := _find(path, revision, name)) is not None:
            names = _files_of(file, f"{label}: {name}")
            _check_names(names, folder, f"{label}: {name}", allow_pickle=allow_pickle)
    if folder is not None and not allow_pickle:
        suffixes = {file.suffix for file in folder.iterdir()}
        if ".safetensors" not in suffixes and suffixes & {".bin", ".pt", ".pth"}:
            raise LoadError(f"{label} has weights in pickle format only. {PICKLE_ADVICE}")


def check_weights(model: Any, loading_info: Mapping[str, Any], label: str) -> None:
    """Check that the weights of a checkpoint are the weights that its configuration describes.

    Args:
        model: the loaded model.
        loading_info: what ``from_pretrained(..., output_loading_info=True)`` returned.
        label: text that names the member in errors.

    Raises:
        LoadError: the checkpoint lacks tensors, has tensors of the wrong shape, or has more layers
            than the configuration. transformers would fill these tensors with random numbers, or
            leave these layers out.
    """
    problems = []
    if missing := [name for name in loading_info["missing_keys"] if not COMPUTED.search(name)]:
        problems.append(f"{_tensors(missing)} missing")
    if mismatched := [
        f"{name} {list(stored)} instead of {list(expected)}"
        for name, stored, expected in loading_info["mismatched_keys"]
    ]:
        problems.append(f"{_tensors(mismatched)} of the wrong shape")
    if loading_info["unexpected_keys"]:
        base = f"{model.base_model_prefix}."  # checkpoints of base models leave it out
        known = [name for full in model.state_dict() for name in (full, full.removeprefix(base))]
        if layers := _more_layers(loading_info["unexpected_keys"], known):
            problems.append(f"{_tensors(layers)} of layers that config.json does not have")
    if problems:
        raise LoadError(
            f"{label} cannot be loaded, because its weights do not fit its config.json: "
            f"{'; '.join(problems)}. Download or save the model again."
        )


def _find(path: str, revision: str | None, name: str) -> Path | None:
    """Return a file of a folder or of a hub model, or None if there is no such file."""
    from transformers.utils import cached_file

    try:
        file = cached_file(path, name, revision=revision)
    except OSError:
        return None
    return None if file is None else Path(file)


def _files_of(index: Path, label: str) -> list[str]:
    """Return the names of the files that an index names."""
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted(set(files))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{label} is not an index of weights") from error


def _check_names(
    names: Iterable[str], folder: Path | None, label: str, *, allow_pickle: bool
) -> None:
    """Check names of files with weights, which are relative to the folder of the model."""
    for name in names:
        if not isinstance(name, str):
            raise LoadError(f"{label} names {short_repr(name)}, which is not a file name")
        parts = PureWindowsPath(name)  # reads the separators of all systems
        if parts.anchor or ".." in parts.parts or (folder and not _is_inside(name, folder)):
            raise LoadError(
                f"{label} names the file {short_repr(name)}, which is outside the model's folder. "
                "Put all files of the model into its folder."
            )
        if not allow_pickle and not name.endswith((".safetensors", f".safetensors{INDEX}")):
            raise LoadError(
                f"{label} names the file {short_repr(name)}, which is in pickle format. "
                f"{PICKLE_ADVICE}"
            )


def _is_inside(name: str, folder: Path) -> bool:
    """Return whether a file is inside a folder after links are followed.

    The folders of the hub's cache have links to the folder ``blobs`` of the same model.
    """
    root = folder.resolve()
    if root.parent.name == "snapshots":
        root = root.parent.parent
    return (folder / name).resolve().is_relative_to(root)


def _check_adapter(path: str, revision: str | None, label: str, *, allow_pickle: bool) -> None:
    if find_spec("peft") is None:
        raise LoadError(
            f"{label} has an adapter (adapter_config.json), which needs the package peft. Run: pip "
            "install peft. Or merge the adapter into the model with merge_and_unload() of peft."
        )
    if not allow_pickle and _find(path, revision, "adapter_model.safetensors") is None:
        raise LoadError(f"{label} has an adapter without safetensors weights. {PICKLE_ADVICE}")


def _more_layers(unexpected: Collection[str], known: Iterable[str]) -> list[str]:
    """Return the unexpected tensors of whole layers that differ only by number from other layers.

    Other unexpected tensors do no harm: a part for images, a head for rewards, or a layer for
    speculative decoding, which has tensors of its own kind.
    """
    kinds = {_without_numbers(name) for name in known}
    layers: dict[str, list[str]] = defaultdict(list)
    for name in unexpected:
        if number := re.match(r".*?\.\d+\.", name):
            layers[number[0]].append(name)
    return [
        name
        for names in layers.values()
        if all(_without_numbers(name) in kinds for name in names)
        for name in names
    ]


def _without_numbers(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _tensors(names: Collection[str]) -> str:
    """Return the number of tensors and the first names, such as ``2 tensors (a, b)``."""
    shown = sorted(names)[:MAX_NAMED]
    more = ", ..." if len(names) > len(shown) else ""
    number = "1 tensor" if len(names) == 1 else f"{len(names):,} tensors"
    return f"{number} ({', '.join(shown)}{more})"
