"""Texts for errors of loading: about the hub, and about errors of other libraries."""

from __future__ import annotations

import re

MAX_REASON = 300
"""Maximum number of characters that `describe` keeps of an error's message."""

OLLAMA_NAME = re.compile(r"[\w./-]+:[\w.-]+")
"""Matches names of models in Ollama, such as ``qwen3:8b``. Hub ids have no colon."""


def not_a_hub_id(path: str) -> str | None:
    """Return why a path that does not exist here is no hub id either; None if it can be one."""
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


def reason_of(error: Exception) -> str:
    """Describe an error of transformers or of the hub in one line."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled | ConnectionError):
            return (
                "there is no such folder, the cache of the Hugging Face hub lacks files of such a "
                "model, and the hub cannot be reached, or HF_HUB_OFFLINE is set. Pass a folder, or "
                "check the name and the connection."
            )
        cause = cause.__cause__ or cause.__context__
    return describe(error)


def describe(error: BaseException) -> str:
    """Return an error's type and the beginning of its message, in one line."""
    text = " ".join(str(error).split())
    end = "..." if len(text) > MAX_REASON else ""
    return f"{type(error).__name__}: {text[:MAX_REASON]}{end}"
