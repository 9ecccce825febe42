"""Find and load GGUF models, which llama.cpp runs."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from adafuse_llm.backends.gguf.files import choose, gguf_names, stored_folder
from adafuse_llm.backends.gguf.header import GGUFFacts, part_names, read_facts
from adafuse_llm.backends.llamacpp.library import load_library
from adafuse_llm.errors import LoadError
from adafuse_llm.loading.problems import not_a_hub_id, reason_of
from adafuse_llm.loading.specs import GGUFMember

if TYPE_CHECKING:
    from adafuse_llm.backends.llamacpp.backend import LlamaCppBackend
    from adafuse_llm.backends.llamacpp.vocabulary import LlamaTokenizer, LlamaVocabulary

logger = logging.getLogger(__name__)


def find_file(spec: GGUFMember) -> GGUFFacts:
    """Find the file of a member, and return the facts in its header.

    Raises:
        LoadError: no file fits, several files fit, or a file is unusable.
        MissingDependencyError: llama.cpp is not installed.
    """
    library, label = load_library(), spec.label
    try:
        path = _path(spec)
        label = f"member {spec.name!r}"  # errors of the header name the file
        facts = read_facts(path)
    except LoadError as error:
        raise type(error)(f"{label} cannot be loaded: {error}") from error
    if spec.gpu_layers and not library.llama_supports_gpu_offload():
        logger.warning(
            "%s runs on the CPU, and gpu_layers=%d has no effect: llama.cpp was built without "
            "support for GPUs",
            spec.label,
            spec.gpu_layers,
        )
    return facts


def load_gguf(spec: GGUFMember, facts: GGUFFacts) -> LlamaCppBackend:
    """Load a GGUF model as a member. The errors are those of `load_members`."""
    from adafuse_llm.backends.llamacpp.backend import LlamaCppBackend

    others = {"path", "file", "name", "weight", "revision"}
    options = spec.model_dump(exclude=others, exclude_none=True)
    member = LlamaCppBackend(facts.files[0], str(spec.name), **options)
    _warn(spec, member.tokenizer)
    if not member.end_ids:
        logger.warning(
            "%s: the header names no end token, so answers end only at stop=[...] or a limit",
            spec.label,
        )
    return member


def load_gguf_vocabulary(spec: GGUFMember) -> LlamaVocabulary:
    """Load the tokens of a GGUF model, without its weights."""
    from adafuse_llm.backends.llamacpp.library import Settings
    from adafuse_llm.backends.llamacpp.trial import load, try_file

    facts = find_file(spec)
    settings = Settings(vocabulary_only=True)
    try_file(facts, spec.label, settings)
    _, vocabulary = load(facts, spec.label, settings)
    _warn(spec, vocabulary.tokenizer)
    return vocabulary


def _warn(spec: GGUFMember, tokenizer: LlamaTokenizer) -> None:
    for warning in tokenizer.warnings:
        logger.warning("%s: %s", spec.label, warning)


def _path(spec: GGUFMember) -> Path:
    path = Path(spec.path)
    # unlike pathlib's, these functions take names of any length
    if os.path.isdir(path):  # noqa: PTH112
        return path / choose(gguf_names(path), spec.file)
    if os.path.isfile(path):  # noqa: PTH113
        if spec.file is not None:
            raise LoadError("path is a file already. Leave out file, or pass the folder as path.")
        return path
    if spec.path.lower().endswith(".gguf"):
        raise LoadError(
            "the file does not exist. For a file of a hub repository, pass "
            "GGUFMember(path='OWNER/NAME', file='NAME.gguf')."
        )
    return _from_hub(spec)


def _from_hub(spec: GGUFMember) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    # list all files or, if the hub does not answer, those in the cache
    if (reason := not_a_hub_id(spec.path)) is not None:
        raise LoadError(reason)
    try:
        names = HfApi().list_repo_files(spec.path, revision=spec.revision)
    except Exception as error:
        folder = stored_folder(spec.path, spec.revision)
        if folder is None or not (names := gguf_names(folder)):
            raise LoadError(reason_of(error)) from error
    # download what the member needs, unless the cache has it
    parts = part_names(choose(names, spec.file))
    try:
        paths = [hf_hub_download(spec.path, part, revision=spec.revision) for part in parts]
    except Exception as error:
        raise LoadError(reason_of(error)) from error
    return Path(paths[0])
