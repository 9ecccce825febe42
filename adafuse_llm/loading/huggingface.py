"""Load Hugging Face models."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adafuse_llm.embedded import MEMBERS
from adafuse_llm.errors import (
    InvalidOptionError,
    LoadError,
    UnsupportedModelError,
    short_repr,
)
from adafuse_llm.loading.checkpoint import check_files, check_weights
from adafuse_llm.loading.problems import check_hub_id, describe, hub_problem, label_of
from adafuse_llm.loading.specs import MemberSpec

if TYPE_CHECKING:
    from adafuse_llm.backends.huggingface import HuggingFaceBackend
    from adafuse_llm.backends.huggingface.text import HuggingFaceText


@dataclass(frozen=True)
class HuggingFacePlan:
    """A member whose configuration is checked, and whose weights can be loaded.

    Attributes:
        spec: the member.
        name: the member's name.
        setting: dtype, device map, revision and whether to trust remote code.
    """

    spec: MemberSpec
    name: str
    setting: Mapping[str, Any]


def plan_huggingface(
    specs: Sequence[MemberSpec], names: Sequence[str], defaults: Mapping[str, Any]
) -> list[HuggingFacePlan]:
    """Check the configurations of Hugging Face models before any weights are loaded.

    Args:
        specs: the members.
        names: the members' names.
        defaults: dtype, device map, revision and whether to trust remote code, for members that do
            not set them.

    Returns:
        A plan for each member, in order.

    Raises:
        LoadError: a member cannot be loaded.
        UnsupportedModelError: a model cannot be a member of an ensemble.
        InvalidOptionError: a dtype is not valid.
    """
    settings = [
        {
            key: default if (own := getattr(spec, key)) is None else own
            for key, default in defaults.items()
        }
        for spec in specs
    ]
    for setting in settings:
        check_dtype(setting["dtype"])
    for spec, name, setting in zip(specs, names, settings, strict=True):
        _check_config(spec, name, setting)
    return list(map(HuggingFacePlan, specs, names, settings))


def check_dtype(dtype: Any) -> None:
    """Check that a value is ``"auto"``, a dtype of torch or the name of one.

    Raises:
        InvalidOptionError: it is none of these.
    """
    import torch

    value = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not isinstance(value, torch.dtype):
        raise InvalidOptionError(
            "option 'dtype' must be 'auto' or a torch dtype such as 'float32', 'bfloat16' or "
            f"'float16'; got {short_repr(dtype)}"
        )


def _check_config(spec: MemberSpec, name: str, setting: Mapping[str, Any]) -> None:
    """Run the checks that need the model's configuration and not the weights."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    label = label_of(spec, name)
    _check_path(spec.path, label)
    try:
        config = AutoConfig.from_pretrained(
            spec.path,
            revision=setting["revision"],
            trust_remote_code=setting["trust_remote_code"],
        )
    except Exception as error:
        raise _load_error(spec, name, error) from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{label} is an encoder-decoder model ({config.model_type}); "
            "members must be causal (decoder-only) language models"
        )
    remote = bool(getattr(config, "auto_map", None)) and setting["trust_remote_code"]
    registered = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING  # by AutoModelForCausalLM.register
    if not (config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or registered or remote):
        raise UnsupportedModelError(
            f"{label} has type {config.model_type!r}, which is not a "
            "causal language model in transformers"
        )
    _check_quantization(spec, name, config)
    check_files(spec.path, setting["revision"], config, label, allow_pickle=spec.allow_pickle)


def _check_path(path: str, label: str) -> None:
    """Check that a path is a model folder, or can be a hub id. Do not ask the hub."""
    try:
        exists = Path(path).exists()
    except OSError:  # such as a name that is too long for the file system
        exists = False
    if exists and (Path(path).parent / "config.json").is_file() and Path(path).is_file():
        raise LoadError(
            f"{label} is a file in a model folder. Pass the folder: {str(Path(path).parent)!r}"
        )
    if exists and not (Path(path) / "config.json").is_file():
        raise LoadError(
            f"{label} is not a model folder (it has neither config.json nor GGUF files). Pass a "
            "folder written by save_pretrained, a GGUF file or a hub id."
        )
    if not exists and path in MEMBERS:
        raise LoadError(
            f"{label} is an embedded member and not a hub id. Pass no models to load all embedded "
            "members (in Python: AdaFuseEngine.from_embedded()). The option 'use' selects some of "
            "them. adafuse_llm.embedded.member_paths() returns their folders."
        )
    if not exists:
        check_hub_id(path, label)


def _check_quantization(spec: MemberSpec, name: str, config: Any) -> None:
    """Raise an error if the quantization method is unknown, which transformers only logs."""
    stored = getattr(config, "quantization_config", None)
    quantization = spec.quantization_config if stored is None else stored
    if quantization is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    data = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    try:
        known = AutoHfQuantizer.supports_quant_method(data)
    except ValueError:  # it names no method
        known = False
    if not known:
        raise LoadError(
            f"{label_of(spec, name)} cannot be loaded: its quantization_config must have a "
            f"quant_method that transformers supports; got {short_repr(data.get('quant_method'))}"
        )


def load_huggingface_text(plan: HuggingFacePlan) -> HuggingFaceText:
    """Load the tokenizer of a member.

    Raises:
        LoadError: the member has no usable tokenizer.
    """
    from transformers import AutoTokenizer

    from adafuse_llm.backends.huggingface.text import HuggingFaceText

    label = label_of(plan.spec, plan.name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(plan.spec.path, **_source(plan.setting))
    except Exception as error:
        raise LoadError(f"{label} has no usable tokenizer ({describe(error)})") from error
    reason = "it produces no tokens from a text"
    try:
        text = HuggingFaceText(tokenizer)
        if text.codec.encode_continuation((), "a b")[0]:
            return text
    except Exception as error:  # a tokenizer may raise any exception
        reason = describe(error)
    raise LoadError(
        f"{label} has no usable tokenizer ({reason}). Put the tokenizer's "
        "files in the same folder as the weights. A SentencePiece tokenizer.model needs the "
        "packages sentencepiece and protobuf."
    )


def load_huggingface(plan: HuggingFacePlan) -> HuggingFaceBackend:
    """Load a Hugging Face model as a member.

    Raises:
        LoadError: the member cannot be loaded.
        UnsupportedModelError: the model cannot be a member of an ensemble.
    """
    from transformers import AutoModelForCausalLM

    from adafuse_llm.backends.huggingface import HuggingFaceBackend

    spec, name, setting = plan.spec, plan.name, plan.setting
    tokenizer = load_huggingface_text(plan).tokenizer
    options: dict[str, Any] = {**_source(setting), "dtype": setting["dtype"]}
    if spec.device is not None:
        options["device_map"] = {"": spec.device}
    elif setting["device_map"] is not None:
        options["device_map"] = setting["device_map"]
    if spec.quantization_config is not None:
        options["quantization_config"] = copy.deepcopy(spec.quantization_config)
    try:
        with _no_progress_bar():
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                spec.path,
                use_safetensors=None if spec.allow_pickle else True,
                ignore_mismatched_sizes=True,  # the error of check_weights names the tensors
                output_loading_info=True,
                **options,
            )
    except Exception as error:
        raise _load_error(spec, name, error) from error
    check_weights(model, loading_info, label_of(spec, name))
    backend_options: dict[str, Any] = {}
    if spec.prefix_cache_bytes is not None:
        backend_options["prefix_cache_bytes"] = spec.prefix_cache_bytes
    return HuggingFaceBackend(model.eval(), tokenizer, name, **backend_options)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide the bar that transformers shows for each model in this thread. Downloads keep theirs."""
    from transformers.utils import logging

    thread = threading.get_ident()

    def hook(factory: Any, args: Any, kwargs: Any) -> Any:
        own = logging.EmptyTqdm if threading.get_ident() == thread else factory
        return previous(own, args, kwargs) if previous else own(*args, **kwargs)

    previous = logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


def _source(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that say which files of a model to load."""
    return {name: setting[name] for name in ("revision", "trust_remote_code")}


def _load_error(spec: MemberSpec, name: str, error: Exception) -> LoadError:
    text = str(error)
    if "trust_remote_code" in text:
        advice = "it needs its own Python code; pass trust_remote_code=True if you trust that code"
    elif (problem := hub_problem(spec.path, error)) is not None:
        advice = problem
    elif "safetensors" in text and not any(Path(spec.path).glob("*.safetensors*")):
        advice = (
            "it has no safetensors weights. Weights in pickle format can run code when loaded; "
            "pass MemberSpec(path=..., allow_pickle=True) if you trust them"
        )
    else:
        advice = describe(error)
    return LoadError(f"{label_of(spec, name)} cannot be loaded: {advice}")
