"""Load GGUF models, which llama.cpp runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adafuse_llm.backends.gguf.files import (
    choose,
    gguf_names,
    has_magic,
    is_gguf,
    listed,
    ollama_files,
    part_names,
    stored_folder,
)
from adafuse_llm.backends.gguf.header import GGUFFacts, read_facts, read_tokens
from adafuse_llm.backends.llamacpp.library import load_library
from adafuse_llm.errors import LoadError
from adafuse_llm.loading.problems import check_hub_id, describe, hub_problem, label_of
from adafuse_llm.loading.specs import MemberSpec

if TYPE_CHECKING:
    from adafuse_llm.backends.huggingface.text import HuggingFaceText
    from adafuse_llm.backends.llamacpp.backend import LlamaCppBackend
    from adafuse_llm.backends.llamacpp.vocabulary import LlamaText

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
"""Files of a Hugging Face tokenizer. One of them must be in the folder of the GGUF file."""


@dataclass(frozen=True)
class GGUFPlan:
    """A GGUF member whose files are here and whose weights can be loaded.

    Attributes:
        spec: the member.
        name: the member's name.
        path: the GGUF file, or the first file of a model in several parts.
        facts: what the header of the file says.
    """

    spec: MemberSpec
    name: str
    path: Path
    facts: GGUFFacts


def is_gguf_member(spec: MemberSpec, revision: str | None = None) -> bool:
    """Return whether a member is loaded from a GGUF file.

    Args:
        spec: the member.
        revision: revision of hub models, for a member that does not set one.
    """
    return is_gguf(spec.path, spec.file, spec.revision or revision)


def plan_gguf(spec: MemberSpec, name: str, revision: str | None = None) -> GGUFPlan:
    """Find the files of a GGUF member and read their headers.

    This function downloads files of a hub repository that are not in the local cache, but only
    those that the member needs. It loads no weights. It logs a warning if ``gpu_layers`` has no
    effect.

    Args:
        spec: the member.
        name: the member's name.
        revision: revision of hub models, for a member that does not set one.

    Raises:
        LoadError: no file or more than one fits, or a file cannot be used.
        UnsupportedModelError: the file does not hold a causal language model.
        MissingDependencyError: llama.cpp is not installed.
    """
    library = load_library()
    path = _find_file(spec, name, spec.revision or revision)
    try:
        plan = GGUFPlan(spec, name, path, read_facts(path))
    except LoadError as error:
        raise type(error)(f"member {name!r} cannot be loaded: {error}") from error
    if spec.gpu_layers and not library.llama_supports_gpu_offload():
        logger.warning(
            "member %r runs on the CPU, and gpu_layers=%d has no effect: llama.cpp was built "
            "without support for GPUs",
            name,
            spec.gpu_layers,
        )
    return plan


def load_gguf(plan: GGUFPlan) -> LlamaCppBackend:
    """Load a GGUF model as a member. Warn of what its header lacks.

    Raises:
        LoadError: llama.cpp cannot load the file.
        UnsupportedModelError: the model cannot be a member of an ensemble.
    """
    from adafuse_llm.backends.llamacpp.backend import LlamaCppBackend

    spec = plan.spec
    member = LlamaCppBackend(
        plan.path,
        plan.name,
        context=spec.context,
        threads=spec.threads,
        gpu_layers=spec.gpu_layers,
        flash_attention=spec.flash_attention,
        cache_type=spec.cache_type,
        prefix_cache_bytes=spec.prefix_cache_bytes,
        repeatable=bool(spec.repeatable),
        end_tokens=spec.end_tokens or (),
    )
    if plan.facts.tokenizer == "gpt2" and plan.facts.pre_tokenizer is None:
        _warn(
            plan,
            "does not say how texts are split into words (tokenizer.ggml.pre)",
            "its tokens can be wrong; use a newer file",
        )
    if plan.facts.context_window is None:
        _warn(plan, "has no usable context window", f"it holds {member.context_window:,} tokens")
    if not member.end_ids:
        _warn(plan, "names no end token", "pass MemberSpec(end_tokens=...), or answers never end")
    return member


def load_gguf_text(plan: GGUFPlan) -> LlamaText | HuggingFaceText:
    """Load the codec of a GGUF member, without its weights.

    Raises:
        LoadError: llama.cpp cannot read the vocabulary.
        UnsupportedModelError: the vocabulary cannot be that of a member.
    """
    from adafuse_llm.backends.huggingface.text import HuggingFaceText
    from adafuse_llm.backends.llamacpp.trial import Settings, try_file
    from adafuse_llm.backends.llamacpp.vocabulary import LlamaText

    tokenizer = find_tokenizer(plan)
    try_file(plan.facts, label_of(plan.spec, plan.name), Settings(vocabulary_only=True))
    return LlamaText.from_file(plan.path) if tokenizer is None else HuggingFaceText(tokenizer)


def find_tokenizer(plan: GGUFPlan) -> Any:
    """Return the Hugging Face tokenizer in the folder of a GGUF file; None if it does not match.

    It matches if it has the same tokens as the file. A tokenizer that does not match is ignored
    with a warning. The chat template of the file applies if the tokenizer has none.
    """
    path, facts = plan.path, plan.facts
    if not any((path.parent / each).is_file() for each in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent)
        reason = _difference(tokenizer, read_tokens(path))
    except Exception as error:  # a tokenizer may raise any exception
        tokenizer, reason = None, describe(error)
    if reason is None:
        tokenizer.chat_template = tokenizer.chat_template or facts.chat_template
        return tokenizer
    logger.warning(
        "member %r uses the vocabulary of %s and ignores the tokenizer in the same folder: %s",
        plan.name,
        path.name,
        reason,
    )
    return None


def _warn(plan: GGUFPlan, lack: str, consequence: str) -> None:
    logger.warning(
        "member %r: the header of %s %s, so %s", plan.name, plan.path.name, lack, consequence
    )


def _difference(tokenizer: Any, tokens: Sequence[str]) -> str | None:
    """Return how a tokenizer differs from the vocabulary of a file; None if it does not.

    A file may have more tokens, which fill up its last rows. Some files spell spaces as spaces.
    """
    if len(tokenizer) > len(tokens):
        return f"it has {len(tokenizer):,} tokens, and the file has {len(tokens):,}"
    own = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    for number, (one, other) in enumerate(zip(own, tokens, strict=False)):
        if one is not None and one.replace("\u2581", " ") != other.replace("\u2581", " "):
            return f"its token {number} is {one!r}, and the file's is {other!r}"
    return None


def _find_file(spec: MemberSpec, name: str, revision: str | None) -> Path:
    """Return the path of the GGUF file; download the file if it is not here."""
    label = label_of(spec, name)
    path = Path(spec.path)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError:  # such as a name that is too long for the file system
        is_file = is_folder = False
    if is_file or is_folder:
        return _local_file(path, spec.file, label)
    if spec.path.lower().endswith(".gguf"):
        raise LoadError(
            f"{label} cannot be loaded: the file does not exist. For a file of a hub repository, "
            "pass MemberSpec(path='OWNER/NAME', file='NAME.gguf')."
        )
    check_hub_id(spec.path, label)
    try:
        return _from_hub(spec.path, spec.file, revision, label)
    except LoadError:
        raise
    except Exception as error:
        reason = hub_problem(spec.path, error) or describe(error)
        raise LoadError(f"{label} cannot be loaded: {reason}") from error


def _local_file(path: Path, file: str | None, label: str) -> Path:
    """Return the GGUF file that a path names, or that stands in a folder."""
    names = gguf_names(path) if path.is_dir() else []
    is_usable = names or (path.is_file() and has_magic(path))
    if not is_usable and (models := ollama_files(path)):
        files = listed([f"{found} ({model})" for model, found in models.items()])
        raise LoadError(
            f"{label} belongs to Ollama, whose GGUF files have no names, but is not one of them. "
            f"Pass the file of a model: {files}."
        )
    return path / choose(names, file, label) if path.is_dir() else path


def _from_hub(repository: str, file: str | None, revision: str | None, label: str) -> Path:
    """Return the GGUF file of a hub repository; download the parts that are not here."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        names = HfApi().list_repo_files(repository, revision=revision)
    except Exception:  # without a connection, the files in the cache are all there is
        folder = stored_folder(repository, revision)
        if folder is None or not (names := gguf_names(folder)):
            raise
    parts = part_names(choose(names, file, label))
    paths = [hf_hub_download(repository, part, revision=revision) for part in parts]
    return Path(paths[0])
