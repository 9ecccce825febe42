"""Load the library llama.cpp, collect its messages, and load files with it."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from adafuse_llm.backends.llamacpp import declarations
from adafuse_llm.backends.llamacpp.declarations import PACKAGE
from adafuse_llm.errors import (
    LoadError,
    MissingDependencyError,
    UnsupportedModelError,
    install_command,
)

logger = logging.getLogger(__name__)

ERROR_LEVEL = 4
"""The level of errors in the messages of llama.cpp (``GGML_LOG_LEVEL_ERROR``)."""

PACKAGES = (PACKAGE.name, "llama-cpp-python")
"""Packages with llama.cpp. The first one that is installed counts. pip compiles the second."""

_collected = threading.local()
_callbacks: list[Any] = []


def find_library() -> tuple[str, str]:
    """Return the name and version of the installed package, or raise a MissingDependencyError."""
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            return name, version(name)
    raise MissingDependencyError(
        f"GGUF members need gguf and {PACKAGE.name}: {install_command('gguf')}"
    )


@functools.cache
def load_library() -> Any:
    """Load and initialize llama.cpp, log its messages, and return its C functions.

    Raises:
        MissingDependencyError: llama.cpp is not installed, or cannot be used.
    """
    # llama-cpp-python comes with its own declarations of the functions
    is_ours = find_library()[0] == PACKAGE.name
    library: Any = declarations.load() if is_ours else import_module("llama_cpp.llama_cpp")
    _callbacks.append(library.llama_log_callback(_receive))  # in use until the process ends
    library.llama_log_set(_callbacks[-1], ctypes.c_void_p(0))
    library.llama_backend_init()
    return library


def _receive(level: int, text: bytes | None, _data: Any) -> None:
    line = (text or b"").decode("utf-8", errors="replace").strip()
    logger.debug("%s", line)
    if level == ERROR_LEVEL and hasattr(_collected, "errors"):
        _collected.errors.append(line)


@contextmanager
def collect_errors() -> Iterator[list[str]]:
    """Yield a list, which collects the errors that llama.cpp reports in this thread."""
    _collected.errors = errors = list[str]()
    try:
        yield errors
    finally:
        del _collected.errors


@dataclass(frozen=True)
class Settings:
    """The settings of a model that decide which native code runs.

    Attributes:
        reorder: whether llama.cpp may store weights in the order that its fastest kernels need.
            Some of these kernels round differently for one token than for several.
        gpu_layers: number of layers on GPUs; None for all if llama.cpp was built for a GPU.
        flash_attention: whether to use flash attention; None to let llama.cpp decide.
        cache_type: type of keys and values, such as ``"f16"``.
        vocabulary_only: whether to load no weights.
    """

    reorder: bool = False
    gpu_layers: int | None = None
    flash_attention: bool | None = None
    cache_type: str = "f16"
    vocabulary_only: bool = False


class Model:
    """A model that llama.cpp has loaded. `path`: its GGUF file, or the first file of a split model.

    Attributes:
        label: name of the member in errors.
        pointer: the ``llama_model_p``, which is valid until `close`.
        parameters: number of weights.
        vocabulary_size: number of tokens in the vocabulary, and of logits.
        on_gpu: whether layers run on a GPU.

    Raises:
        LoadError: llama.cpp cannot load the file.
        UnsupportedModelError: the model cannot be a member.
    """

    def __init__(self, path: Path, label: str, settings: Settings) -> None:
        library = load_library()
        params = library.llama_model_default_params()
        params.n_gpu_layers = -1 if settings.gpu_layers is None else settings.gpu_layers
        params.use_extra_bufts = settings.reorder
        params.vocab_only = settings.vocabulary_only
        # load the file; llama.cpp logs the reason if it fails
        with collect_errors() as errors:
            pointer = library.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            reason = errors[0] if errors else "it gives no reason"
            raise LoadError(
                f"{label} cannot be loaded: llama.cpp ({' '.join(find_library())}) rejects the "
                f"file {path.name!r} ({reason}). Download it again, or pass a GGUF file that this "
                "version of llama.cpp supports, for example another one of the Hugging Face hub, "
                "or the transformers model."
            )
        self.path, self.label, self.settings, self.pointer = path, label, settings, int(pointer)
        self._free = weakref.finalize(self, library.llama_model_free, self.pointer)
        self.on_gpu = bool(library.llama_supports_gpu_offload()) and params.n_gpu_layers != 0
        self.parameters = int(library.llama_model_n_params(self.pointer))
        self.vocabulary_size = int(
            library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.pointer))
        )
        # refuse kinds of models that cannot be members
        recurrent = "has recurrent layers, whose state llama.cpp cannot cut back"
        for is_kind, reason in (
            (library.llama_model_has_encoder, "is an encoder or an encoder-decoder model"),
            (library.llama_model_is_diffusion, "is a diffusion model"),
            (library.llama_model_is_recurrent, recurrent),
            (library.llama_model_is_hybrid, recurrent),
        ):
            if not settings.vocabulary_only and is_kind(self.pointer):
                raise UnsupportedModelError(
                    f"{label} {reason}. GGUF members must be causal language models with attention "
                    "in all layers. Use the transformers model instead, if it is causal."
                )

    def close(self) -> None:
        self._free()
