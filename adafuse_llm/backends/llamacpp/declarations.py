"""The functions and structures of llama.cpp that GGUF members use, as one build declares them.

llama.cpp changes its structures often, and its library does not tell its build. So `load` takes the
library from an exact version of a package, and then checks canaries: default values must stand at
their places. CONTRIBUTING.md says how to move to another build.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_size_t, c_uint32
from ctypes import c_void_p as pointer
from importlib.metadata import distribution
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from adafuse_llm.errors import MissingDependencyError


class Package(NamedTuple):
    """A package that holds llama.cpp as a library.

    Attributes:
        name: name of the package.
        version: the version of the package whose llama.cpp this module declares.
        library: the library in the package.
    """

    name: str
    version: str
    library: str


BUILDS: Final = {
    "win32": Package("llama-cpp-py-sync", "0.11548", "llama_cpp_py_sync/llama.dll"),
    "other": Package("xllamacpp", "2026.10.11549", "xllamacpp/xllamacpp.abi3.so"),
}
"""The packages that the extra ``gguf`` installs, by platform: the builds b11548 and b11549. The
library of xllamacpp for Windows exports no functions of llama.cpp."""

PACKAGE: Final = BUILDS["win32" if sys.platform == "win32" else "other"]


class ModelParams(ctypes.Structure):
    """``llama_model_params``: how to load a model."""

    _fields_ = [
        ("devices", pointer),
        ("tensor_buft_overrides", pointer),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", pointer),
        ("progress_callback", pointer),
        ("progress_callback_user_data", pointer),
        ("kv_overrides", pointer),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    ]


class ContextParams(ctypes.Structure):
    """``llama_context_params``: how to create a cache."""

    _fields_ = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", pointer),
        ("cb_eval_user_data", pointer),
        ("type_k", c_int),
        ("type_v", c_int),
        ("moe_cache_size", c_size_t),
        ("abort_callback", pointer),
        ("abort_callback_data", pointer),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", pointer),
        ("n_samplers", c_size_t),
        ("ctx_other", pointer),
    ]


class Batch(ctypes.Structure):
    """``llama_batch``: tokens that run in one call."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, pointer)
"""``ggml_log_callback``: level, text, and data of the caller."""

FUNCTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "llama_backend_init": (None,),
    "llama_log_set": (None, LogCallback, pointer),
    "llama_supports_gpu_offload": (c_bool,),
    # models
    "llama_model_default_params": (ModelParams,),
    "llama_model_load_from_file": (pointer, c_char_p, ModelParams),
    "llama_model_free": (None, pointer),
    "llama_model_get_vocab": (pointer, pointer),
    "llama_model_has_encoder": (c_bool, pointer),
    "llama_model_is_diffusion": (c_bool, pointer),
    "llama_model_is_hybrid": (c_bool, pointer),
    "llama_model_is_recurrent": (c_bool, pointer),
    # vocabularies
    "llama_vocab_type": (c_int, pointer),
    "llama_vocab_n_tokens": (c_int32, pointer),
    "llama_vocab_get_text": (c_char_p, pointer, c_int32),
    "llama_vocab_get_attr": (c_int, pointer, c_int32),
    "llama_tokenize": (
        *(c_int32, pointer, c_char_p, c_int32),
        *(POINTER(c_int32), c_int32, c_bool, c_bool),
    ),
    "llama_token_to_piece": (c_int32, pointer, c_int32, c_char_p, c_int32, c_int32, c_bool),
    # caches
    "llama_context_default_params": (ContextParams,),
    "llama_init_from_model": (pointer, pointer, ContextParams),
    "llama_free": (None, pointer),
    "llama_n_ctx": (c_uint32, pointer),
    "llama_n_batch": (c_uint32, pointer),
    "llama_get_memory": (pointer, pointer),
    "llama_memory_clear": (None, pointer, c_bool),
    "llama_memory_seq_cp": (None, pointer, c_int32, c_int32, c_int32, c_int32),
    "llama_memory_seq_rm": (c_bool, pointer, c_int32, c_int32, c_int32),
    "llama_state_seq_get_size": (c_size_t, pointer, c_int32),
    # passes
    "llama_batch_init": (Batch, c_int32, c_int32, c_int32),
    "llama_batch_free": (None, Batch),
    "llama_decode": (c_int32, pointer, Batch),
    "llama_get_logits": (POINTER(c_float), pointer),
}
"""The result and the arguments of each function."""

DEFAULTS: Final[Mapping[str, ctypes.Structure]] = {
    "llama_model_default_params": ModelParams(
        n_gpu_layers=-1, split_mode=1, load_mode=-1, lazy_mode=1, use_extra_bufts=True
    ),
    "llama_context_default_params": ContextParams(
        n_ctx=512,
        n_batch=2048,
        n_ubatch=512,
        n_seq_max=1,
        n_outputs_max_per_seq=1,
        n_threads=4,
        n_threads_batch=4,
        rope_scaling_type=-1,
        pooling_type=-1,
        attention_type=-1,
        flash_attn_type=-1,
        yarn_ext_factor=-1,
        yarn_attn_factor=-1,
        yarn_beta_fast=-1,
        yarn_beta_slow=-1,
        defrag_thold=-1,
        type_k=1,
        type_v=1,
        offload_kqv=True,
        no_perf=True,
        op_offload=True,
        swa_full=True,
    ),
}
"""What these functions must return. All other fields are 0 or null pointers."""


def load() -> SimpleNamespace:
    """Load the library of `PACKAGE`, which must be installed.

    Returns:
        The functions of `FUNCTIONS`, and the classes ``llama_batch`` and ``llama_log_callback``.

    Raises:
        MissingDependencyError: the package has another version, or the library cannot be used.
    """
    installed = distribution(PACKAGE.name)
    if installed.version.partition("+")[0] != PACKAGE.version:
        raise _refusal(f"another version of it is installed ({installed.version})")
    path = str(installed.locate_file(PACKAGE.library))
    try:
        native = _open(path)
    except OSError as error:
        raise _refusal(f"its library cannot be loaded ({error})") from error
    library = SimpleNamespace(llama_batch=Batch, llama_log_callback=LogCallback)
    for name, (result, *arguments) in FUNCTIONS.items():
        try:
            function = getattr(native, name)
        except AttributeError as error:
            raise _refusal(f"its library has no function {name}") from error
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)
    for wrong in _differences(library):
        raise _refusal(f"in its library, {wrong}")
    return library


def _open(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError:
        import torch  # noqa: F401  # has the OpenMP library, which some systems lack

        return ctypes.CDLL(path)


def _differences(library: SimpleNamespace) -> Iterator[str]:
    """Yield the default values that do not stand at their places."""
    for name, expected in DEFAULTS.items():
        params = getattr(library, name)()
        for field, *_ in type(params)._fields_:
            if (value := getattr(params, field)) != getattr(expected, field):
                yield f"{name}().{field} is {value}"
    batch = library.llama_batch_init(1, 0, 1)
    is_set = [bool(getattr(batch, field)) for field, *_ in Batch._fields_]
    if is_set != [False, True, False, True, True, True, True]:
        yield "llama_batch_init() sets other fields"
    library.llama_batch_free(batch)


def _refusal(problem: str) -> MissingDependencyError:
    name, version, _ = PACKAGE
    return MissingDependencyError(
        f"GGUF members need {name} {version}, and {problem}. Run: pip install {name}=={version}"
    )
