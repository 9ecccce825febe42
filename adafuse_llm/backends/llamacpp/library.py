"""The library llama.cpp: load it, collect its messages, and load files with it."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from adafuse_llm.backends.llamacpp import declarations
from adafuse_llm.backends.llamacpp.declarations import PACKAGE
from adafuse_llm.errors import LoadError, MissingDependencyError, install_command

logger = logging.getLogger(__name__)

ERROR_LEVEL = 4
"""The level of errors in the messages of llama.cpp (``GGML_LOG_LEVEL_ERROR``)."""

PACKAGES = (PACKAGE.name, "llama-cpp-python")
"""The packages with llama.cpp. Members use the first one that is installed. pip compiles the
second."""


def find_library() -> tuple[str, str]:
    """Return the name and the version of the package whose llama.cpp members use.

    Raises:
        MissingDependencyError: no such package is installed.
    """
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            return name, version(name)
    raise MissingDependencyError(
        f"GGUF members need gguf and {PACKAGE.name}: {install_command('gguf')}"
    )


@functools.cache
def load_library() -> Any:
    """Load and initialize llama.cpp, and return an object with its C functions.

    The messages of llama.cpp go to the logger of this module, at the level DEBUG.

    Raises:
        MissingDependencyError: llama.cpp is not installed, or cannot be used.
    """
    is_ours = find_library()[0] == PACKAGE.name
    library: Any = declarations.load() if is_ours else import_module("llama_cpp.llama_cpp")
    callback = library.llama_log_callback(_MESSAGES.receive)
    library.llama_log_set(callback, ctypes.c_void_p(0))
    _MESSAGES.callback = callback  # llama.cpp calls it until the process ends
    library.llama_backend_init()
    return library


@contextmanager
def collect_errors() -> Iterator[list[str]]:
    """Collect the errors that llama.cpp reports in this thread."""
    before, errors = getattr(_MESSAGES.thread, "errors", None), list[str]()
    _MESSAGES.thread.errors = errors
    try:
        yield errors
    finally:
        _MESSAGES.thread.errors = before


class LoadedFile:
    """A GGUF file that llama.cpp has loaded.

    Args:
        path: path of the file.
        params: the ``llama_model_params``.
        label: text that names the member in errors.

    Attributes:
        path: the argument of the same name.
        pointer: the ``llama_model_p``. It is valid until `close`.

    Raises:
        LoadError: llama.cpp cannot load the file.
        MissingDependencyError: llama.cpp is not installed.
    """

    def __init__(self, path: Path, params: Any, label: str) -> None:
        library = load_library()
        with collect_errors() as errors:
            pointer = library.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            reason = errors[0] if errors else "it gives no reason"
            raise LoadError(
                f"{label} cannot be loaded: llama.cpp ({' '.join(find_library())}) rejects the "
                f"file {path.name!r} ({reason}). Pass a GGUF file that this version of llama.cpp "
                "supports, for example another one of the Hugging Face hub, or the transformers "
                "model."
            )
        self.path, self.pointer = path, int(pointer)
        self._free = weakref.finalize(self, library.llama_model_free, self.pointer)

    def close(self) -> None:
        """Free the model. More calls have no effect."""
        self._free()


class _Messages:
    """The messages of llama.cpp, which may come from any thread and in parts of a line.

    Attributes:
        callback: what llama.cpp calls.
        thread: in each thread, the start of an unfinished line, and the collected errors.
    """

    def __init__(self) -> None:
        self.callback: Any = None
        self.thread = threading.local()

    def receive(self, level: int, text: bytes | None, _data: Any) -> None:
        line = getattr(self.thread, "line", "") + (text or b"").decode("utf-8", errors="replace")
        self.thread.line = "" if line.endswith("\n") else line
        if not line.endswith("\n"):
            return
        logger.debug("%s", line.rstrip())
        errors = getattr(self.thread, "errors", None)
        if level == ERROR_LEVEL and errors is not None:
            errors.append(line.strip())


_MESSAGES = _Messages()
