"""What errors of loading say about members, and about errors of other libraries."""

from __future__ import annotations

import re
from collections.abc import Iterator

from adafuse_llm.errors import LoadError
from adafuse_llm.loading.specs import MemberSpec

MAX_REASON = 300
"""Maximum number of characters of another library's error message."""


OLLAMA_NAME = re.compile(r"[\w./-]+:[\w.-]+")
"""Matches names of models in Ollama, such as ``qwen3:8b``. Hub ids have no colon."""


def label_of(spec: MemberSpec, name: str) -> str:
    """Return the text that names a member in errors."""
    return f"member {name!r}" if name == spec.path else f"member {name!r} ({spec.path})"


def check_hub_id(path: str, label: str) -> None:
    """Check that a path that is not on this machine can be a hub id. Do not ask the hub.

    Raises:
        LoadError: it cannot.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(path)
    except HFValidationError:
        if OLLAMA_NAME.fullmatch(path):
            raise LoadError(
                f"{label} cannot be loaded: {path!r} looks like the name of a model in Ollama, "
                "which stores models as GGUF files. Pass the path of the file, which this command "
                f"prints in the line FROM: ollama show --modelfile {path}"
            ) from None
        raise LoadError(
            f"{label} cannot be loaded: the folder does not exist. "
            "A hub id has the form NAME or OWNER/NAME."
        ) from None


def hub_problem(path: str, error: Exception) -> str | None:
    """Explain an error of the hub, or of its cache; return None for any other error."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in _causes(error))

    if has(GatedRepoError):
        return (
            f"its owner must grant access. Request it on https://huggingface.co/{path}, and log in "
            "with: hf auth login"
        )
    if has(RepositoryNotFoundError):
        return (
            "there is no such folder, and the Hugging Face hub has no such model. For a private "
            "model, log in with: hf auth login"
        )
    if has(RevisionNotFoundError):
        return "the Hugging Face hub does not have this revision of the model"
    if not has(LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError):
        return None
    missing = (
        "there is no such folder, and the cache of the Hugging Face hub does not have all files of "
        "such a model"
    )
    if constants.HF_HUB_OFFLINE:
        return (
            f"{missing}. HF_HUB_OFFLINE is set, so nothing is downloaded. Pass a folder, or unset "
            "HF_HUB_OFFLINE to download the model."
        )
    return (
        f"{missing}, and the hub cannot be reached. Check the name and the connection, or pass a "
        "folder. Without a connection, set HF_HUB_OFFLINE=1, so that loading does not wait for the "
        "hub."
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def describe(error: Exception) -> str:
    """Return the type and the beginning of the message of an error, in one line."""
    text = " ".join(str(error).split())
    end = "..." if len(text) > MAX_REASON else ""
    return f"{type(error).__name__}: {text[:MAX_REASON]}{end}"
