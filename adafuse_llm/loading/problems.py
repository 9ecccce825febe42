"""What errors of loading say about the hub, and about errors of other libraries."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_REASON = 300
"""Maximum number of characters of another library's error message."""

OLLAMA_NAME = re.compile(r"[\w./-]+:[\w.-]+")
"""Matches names of models in Ollama, such as ``qwen3:8b``. Hub ids have no colon."""


def not_a_hub_id(path: str) -> str | None:
    """Return why a path that is not on this machine is no hub id; None if it can be one."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(path)
    except HFValidationError:
        if OLLAMA_NAME.fullmatch(path):
            return (
                f"{path!r} looks like the name of a model in Ollama, which stores models as GGUF "
                "files. Pass the path of the file, which this command prints in the line FROM: "
                f"ollama show --modelfile {path}"
            )
        return "the folder does not exist. A hub id has the form NAME or OWNER/NAME."
    return None


def reason_of(path: str, error: Exception) -> str:
    """Return why a model could not be loaded or downloaded, in one line.

    Args:
        path: the folder or hub id.
        error: an error of transformers or of the hub.
    """
    from huggingface_hub import constants, errors

    kinds = tuple(type(cause) for cause in _causes(error))

    def has(*classes: type[BaseException]) -> bool:
        return any(issubclass(kind, classes) for kind in kinds)

    if has(errors.GatedRepoError):
        return (
            f"its owner must grant access. Request it on https://huggingface.co/{path}, and log in "
            "with: hf auth login"
        )
    if has(errors.RepositoryNotFoundError):
        return (
            "there is no such folder, and the Hugging Face hub has no such model. For a private "
            "model, log in with: hf auth login"
        )
    if has(errors.RevisionNotFoundError):
        return "the Hugging Face hub does not have this revision of the model"
    if not has(errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        return describe(error)
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
