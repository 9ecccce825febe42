"""Declarations of the functions and structures of certain builds of llama.cpp.

llama.cpp changes its structures often, and its library cannot be asked for its build. So `load`
requires an exact version of a package. CONTRIBUTING.md describes the move to another build.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_size_t, c_uint32
from ctypes import c_void_p as pointer
from importlib.metadata import distribution
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from adafuse_llm.errors import MissingDependencyError


class Package(NamedTuple):
    """A package, its only supported version, and the path of llama.cpp's library in it."""

    name: str
    version: str
    library: str


BUILDS: Final = {
    "win32": Package("llama-cpp-py-sync", "0.11548", "llama_cpp_py_sync/llama.dll"),
    "other": Package("xllamacpp", "2026.10.11549", "xllamacpp/xllamacpp.abi3.so"),
}
"""The packages that the extra ``gguf`` installs, by platform, with the builds b11548 and b11549 of
llama.cpp. On Windows, the library of xllamacpp exports no functions of llama.cpp."""

PACKAGE: Final = BUILDS["win32" if sys.platform == "win32" else "other"]


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


class ModelParams(ctypes.Structure):
    """``llama_model_params``: how to load a model."""

    _fields_ = _fields(
        (pointer, "devices tensor_buft_overrides"),
        (c_int32, "n_gpu_layers"),
        (c_int, "split_mode load_mode lazy_mode"),
        (c_int32, "main_gpu"),
        (pointer, "tensor_split progress_callback progress_callback_user_data kv_overrides"),
        (c_bool, "vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp"),
    )


class ContextParams(ctypes.Structure):
    """``llama_context_params``: how to create a cache."""

    _fields_ = _fields(
        (c_uint32, "n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq"),
        (c_int32, "n_threads n_threads_batch"),
        (c_int, "ctx_type rope_scaling_type pooling_type attention_type flash_attn_type"),
        (c_float, "rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor"),
        (c_float, "yarn_beta_fast yarn_beta_slow"),
        (c_uint32, "yarn_orig_ctx"),
        (c_float, "defrag_thold"),
        (pointer, "cb_eval cb_eval_user_data"),
        (c_int, "type_k type_v"),
        (c_size_t, "moe_cache_size"),
        (pointer, "abort_callback abort_callback_data"),
        (c_bool, "embeddings offload_kqv no_perf op_offload swa_full kv_unified"),
        (pointer, "samplers"),
        (c_size_t, "n_samplers"),
        (pointer, "ctx_other"),
    )


class Batch(ctypes.Structure):
    """``llama_batch``: tokens that run in one call."""

    _fields_ = _fields(
        (c_int32, "n_tokens"),
        (POINTER(c_int32), "token"),
        (POINTER(c_float), "embd"),
        (POINTER(c_int32), "pos n_seq_id"),
        (POINTER(POINTER(c_int32)), "seq_id"),
        (POINTER(c_int8), "logits"),
    )


LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, pointer)
"""``ggml_log_callback``: takes a level, a text and the caller's data."""

FUNCTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "llama_backend_init": (None,),
    "llama_log_set": (None, LogCallback, pointer),
    "llama_supports_gpu_offload": (c_bool,),
    # models
    "llama_model_default_params": (ModelParams,),
    "llama_model_load_from_file": (pointer, c_char_p, ModelParams),
    "llama_model_free": (None, pointer),
    "llama_model_get_vocab": (pointer, pointer),
    "llama_model_n_params": (ctypes.c_uint64, pointer),
    "llama_model_has_encoder": (c_bool, pointer),
    "llama_model_is_diffusion": (c_bool, pointer),
    "llama_model_is_hybrid": (c_bool, pointer),
    "llama_model_is_recurrent": (c_bool, pointer),
    # vocabularies
    "llama_vocab_type": (c_int, pointer),
    "llama_vocab_n_tokens": (c_int32, pointer),
    "llama_vocab_get_attr": (c_int, pointer, c_int32),
    "llama_tokenize": (c_int32, pointer, c_char_p, c_int32, pointer, c_int32, c_bool, c_bool),
    "llama_token_to_piece": (c_int32, pointer, c_int32, c_char_p, c_int32, c_int32, c_bool),
    # caches
    "llama_context_default_params": (ContextParams,),
    "llama_init_from_model": (pointer, pointer, ContextParams),
    "llama_free": (None, pointer),
    "llama_n_ctx": (c_uint32, pointer),
    "llama_n_batch": (c_uint32, pointer),
    "llama_get_memory": (pointer, pointer),
    "llama_memory_clear": (None, pointer, c_bool),
    "llama_set_n_threads": (None, pointer, c_int32, c_int32),
    "llama_memory_seq_cp": (None, pointer, c_int32, c_int32, c_int32, c_int32),
    "llama_memory_seq_rm": (c_bool, pointer, c_int32, c_int32, c_int32),
    # passes
    "llama_batch_init": (Batch, c_int32, c_int32, c_int32),
    "llama_decode": (c_int32, pointer, Batch),
    "llama_get_logits": (POINTER(c_float), pointer),
}
"""By name of a function: the type of its result, and those of its arguments."""


def load() -> SimpleNamespace:
    """Load the library of `PACKAGE`, which must be installed. The result has all `FUNCTIONS`.

    Raises:
        MissingDependencyError: the package has another version, or the library cannot be used.
    """
    name, version, file = PACKAGE
    installed = distribution(name)
    library = SimpleNamespace(llama_batch=Batch, llama_log_callback=LogCallback)
    problem = f"another version of it is installed ({installed.version})"
    if installed.version.partition("+")[0] == version:
        path = str(installed.locate_file(file))
        try:
            try:
                native = ctypes.CDLL(path)
            except OSError:
                import torch  # noqa: F401  # has the OpenMP library, which some systems lack

                native = ctypes.CDLL(path)
            # declare the types of results and arguments
            for function_name, (result, *arguments) in FUNCTIONS.items():
                function = getattr(native, function_name)
                function.restype, function.argtypes = result, arguments
                setattr(library, function_name, function)
            return library
        except (OSError, AttributeError) as error:
            problem = f"its library cannot be used ({error})"
    raise MissingDependencyError(
        f"GGUF members need {name} {version}, and {problem}. Run: pip install {name}=={version}"
    )
