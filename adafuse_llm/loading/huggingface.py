"""Load transformers models."""

from __future__ import annotations

import copy
import os
import re
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from adafuse_llm.errors import InvalidOptionError, LoadError, UnsupportedModelError, short_repr
from adafuse_llm.loading.problems import describe, not_a_hub_id, reason_of
from adafuse_llm.loading.specs import TransformersMember

if TYPE_CHECKING:
    from adafuse_llm.backends.huggingface import HuggingFaceBackend
    from adafuse_llm.backends.huggingface.vocabulary import HuggingFaceVocabulary

COMPUTED: Final = re.compile(r"(^|\.)(inv_freq|position_ids)$")
"""Matches tensors that a model computes when it is created. Only old checkpoints store them."""

LFS_POINTER: Final = b"version https://git-lfs"
"""Start of the small file that a git clone has in place of a large one."""

_loading = threading.Lock()
"""Held while transformers loads: it changes torch's dtype and initialization in all threads."""


def check_huggingface(spec: TransformersMember) -> None:
    """Check settings and files without loading weights. The errors are those of `load_members`."""
    import torch
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import find_adapter_config_file

    dtype = spec.dtype
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not isinstance(named, torch.dtype):
        raise InvalidOptionError(
            f"{spec.label}: dtype must be 'auto' or a dtype of torch such as 'float32', 'bfloat16' "
            f"or 'float16'; got {short_repr(dtype)}"
        )
    _check_path(spec)
    # read the model's configuration, and check the model's type
    try:
        config = AutoConfig.from_pretrained(spec.path, **_source(spec))
        adapter = find_adapter_config_file(spec.path, revision=spec.revision)
    except Exception as error:
        raise _load_error(spec, error) from error
    remote = bool(getattr(config, "auto_map", None)) and spec.trust_remote_code
    is_causal = remote or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if getattr(config, "is_encoder_decoder", False) or not is_causal:
        raise UnsupportedModelError(
            f"{spec.label} has type {config.model_type!r}, and members must be causal "
            "(decoder-only) language models of transformers"
        )
    if adapter is not None and find_spec("peft") is None:
        raise LoadError(
            f"{spec.label} has an adapter (adapter_config.json), which needs the package peft. "
            "Run: pip install peft. Or merge the adapter into the model with peft's "
            "merge_and_unload()."
        )
    _check_quantization(spec, getattr(config, "quantization_config", None))


def _check_path(spec: TransformersMember) -> None:
    """Check, without the hub, that a path is a model folder or can be a hub id."""
    path = Path(spec.path)
    exists = os.path.exists(path)  # noqa: PTH110  # unlike pathlib's, it takes a name of any length
    if not exists:
        if (reason := not_a_hub_id(spec.path)) is not None:
            raise LoadError(f"{spec.label} cannot be loaded: {reason}")
    elif not (path / "config.json").is_file():
        raise LoadError(
            f"{spec.label} is not a model folder (it has neither config.json nor GGUF files). Pass "
            "a folder written by save_pretrained, a GGUF file or a hub id. An adapter must first "
            "be merged into its model, with peft's merge_and_unload()."
        )
    for file in sorted(path.glob("*.*")):
        if file.suffix in (".json", ".model", ".safetensors") and file.is_file():
            with file.open("rb") as opened:
                if opened.read(len(LFS_POINTER)) == LFS_POINTER:
                    raise LoadError(
                        f"{spec.label} cannot be loaded: {file.name} is a pointer of Git LFS. Run "
                        "'git lfs pull', or download the file."
                    )


def _check_quantization(spec: TransformersMember, stored: Any) -> None:
    from transformers.quantizers.auto import AutoHfQuantizer

    for config in (spec.quantization_config, stored):
        if config is None:
            continue
        try:
            data = config if isinstance(config, Mapping) else config.to_dict()
            is_known = AutoHfQuantizer.supports_quant_method(data)
        except (AttributeError, TypeError, ValueError):  # without a method, or no configuration
            is_known = False
        if not is_known:  # transformers would only log this, and take packed weights for plain ones
            raise LoadError(
                f"{spec.label} cannot be loaded: quantization_config must be a configuration "
                "object of transformers, such as BitsAndBytesConfig(load_in_4bit=True), or a "
                f"mapping with a quant_method that transformers supports; got {short_repr(config)}"
            )


def load_vocabulary(
    source: str, label: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> HuggingFaceVocabulary:
    """Load a tokenizer from a folder or hub id. Errors call the member `label`."""
    from transformers import AutoTokenizer

    from adafuse_llm.backends.huggingface.vocabulary import HuggingFaceVocabulary

    try:
        vocabulary = HuggingFaceVocabulary(
            AutoTokenizer.from_pretrained(
                source, revision=revision, trust_remote_code=trust_remote_code
            )
        )
        if not vocabulary.codec.encode_continuation((), "a b")[0]:
            raise ValueError("it produces no tokens from a text")
    except Exception as error:  # a tokenizer may raise any exception
        raise LoadError(
            f"{label} has no usable tokenizer ({describe(error)}). Put the tokenizer's files in "
            "the same folder as the weights. A SentencePiece tokenizer.model needs the packages "
            "sentencepiece and protobuf."
        ) from error
    return vocabulary


def load_huggingface(spec: TransformersMember) -> HuggingFaceBackend:
    """Load a transformers model as a member. The errors are those of `load_members`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from adafuse_llm.backends.huggingface import HuggingFaceBackend

    tokenizer = load_vocabulary(spec.path, spec.label, **_source(spec)).tokenizer
    given = spec.quantization_config  # None would replace the checkpoint's own
    quantization = {} if given is None else {"quantization_config": copy.deepcopy(given)}
    with _loading:
        # hide the progress bar of loading, but not those of downloads
        bar = logging.set_tqdm_hook(lambda _bar, args, kwargs: logging.EmptyTqdm(*args, **kwargs))
        try:
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                spec.path,
                **_source(spec),
                dtype=spec.dtype,
                device_map=spec.device_map,
                **quantization,
                ignore_mismatched_sizes=True,  # the error of _check_weights names the tensors
                output_loading_info=True,
            )
        except Exception as error:
            raise _load_error(spec, error) from error
        finally:
            logging.set_tqdm_hook(bar)
    _check_weights(loading_info, spec.label)
    options = spec.model_dump(include={"prefix_cache_bytes"}, exclude_none=True)
    return HuggingFaceBackend(model.eval(), tokenizer, str(spec.name), **options)


def _check_weights(loading_info: Mapping[str, Any], label: str) -> None:
    """Refuse missing or misshapen tensors, which transformers fills with random numbers."""
    missing = [name for name in loading_info["missing_keys"] if not COMPUTED.search(name)]
    mismatched = [
        f"{name} {list(stored)} instead of {list(expected)}"
        for name, stored, expected in loading_info["mismatched_keys"]
    ]
    if missing or mismatched:
        problem = "have the wrong shape" if mismatched else "are missing"
        names = mismatched or missing
        raise LoadError(
            f"{label} cannot be loaded, because its weights do not fit its config.json: tensors "
            f"{problem} ({len(names)}, such as {min(names)}). Download or save the model again."
        )


def _source(spec: TransformersMember) -> dict[str, Any]:
    return {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}


def _load_error(spec: TransformersMember, error: Exception) -> LoadError:
    reason = reason_of(error)
    if "trust_remote_code" in str(error):
        reason = "it needs its own Python code; pass trust_remote_code=True if you trust that code"
    return LoadError(f"{spec.label} cannot be loaded: {reason}")
