"""Read facts about a quantization: its method, its required packages and its bits per weight.

A quantization configuration is either an object of transformers (such as ``BitsAndBytesConfig``) or
the mapping with which ``config.json`` stores such an object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, Final

PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "auto-round": ("auto-round",),
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("gptqmodel", "optimum"),
    "hqq": ("hqq",),
    "quanto": ("optimum-quanto",),
    "torchao": ("torchao",),
}
"""Packages that each method needs. Other methods need no packages, or transformers checks for these
packages."""

FIXED_BITS: Final[Mapping[str, int]] = {
    "awq": 4,
    "bitnet": 2,
    "eetq": 8,
    "fbgemm_fp8": 8,
    "fp8": 8,
    "mxfp4": 4,
    "mxfp8": 8,
    "nvfp4": 4,
}
"""Bits per weight, for methods whose configuration may omit this number."""


def is_quantization(value: Any) -> bool:
    """Return whether `value` has the form of a quantization configuration."""
    return isinstance(value, Mapping) or (
        not isinstance(value, type) and hasattr(value, "quant_method")
    )


def as_mapping(quantization: Any) -> Mapping[str, Any]:
    """Return a quantization configuration as ``config.json`` stores it."""
    data: Mapping[str, Any] = (
        quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    )
    return data


def method(quantization: Any) -> str | None:
    """Return the method's name, such as ``"bitsandbytes"``; None if the configuration has none."""
    data = as_mapping(quantization)
    if data.get("load_in_4bit") or data.get("load_in_8bit"):
        return "bitsandbytes"
    name = data.get("quant_method")
    return None if name is None else str(getattr(name, "value", name))


def missing_packages(quantization: Any) -> list[str]:
    """Return the packages that the quantization needs but that are not installed."""
    return [name for name in PACKAGES.get(method(quantization) or "", ()) if not _installed(name)]


def bits_per_weight(quantization: Any) -> int | None:
    """Return the number of bits that a quantized weight takes in memory.

    The result is None if the configuration does not specify the number, or if loading dequantizes
    the weights.
    """
    data = as_mapping(quantization)
    name = method(quantization) or ""
    if data.get("dequantize"):
        return None
    if name in _BITS:
        return _BITS[name](data)
    return _number(data.get("bits")) or FIXED_BITS.get(name)


def kept_modules(quantization: Any) -> tuple[str, ...]:
    """Return parts of module names. Modules with such a part in their name are not quantized."""
    data = as_mapping(quantization)
    keys = ("modules_to_not_convert", "llm_int8_skip_modules")
    return tuple(name for key in keys for name in data.get(key) or ())


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _bitsandbytes(data: Mapping[str, Any]) -> int:
    return 8 if data.get("load_in_8bit") else 4


def _torchao(data: Mapping[str, Any]) -> int | None:
    """Read the bits per weight from the name of torchao's configuration class.

    For example, ``Int8DynamicActivationInt4WeightConfig`` has 4 bits. A class with an ``x`` in
    place of the number stores each weight in 8 bits, even if the weight has fewer.
    """
    kind = data.get("quant_type")
    name = kind if isinstance(kind, str) else _dig(kind, "default", "_type")
    bits = re.search(r"(\d+|x)_?weight", str(name), re.IGNORECASE)
    if bits is None:
        return None
    return int(bits[1]) if bits[1].isdigit() else 8


def _quanto(data: Mapping[str, Any]) -> int | None:
    bits = re.search(r"\d+", str(data.get("weights")))  # "int8", "float8"
    return int(bits[0]) if bits else None


def _hqq(data: Mapping[str, Any]) -> int | None:
    return _number(_dig(data, "quant_config", "weight_quant_params", "nbits"))


def _compressed_tensors(data: Mapping[str, Any]) -> int | None:
    groups = (data.get("config_groups") or {}).values()
    sizes = [_number(_dig(group, "weights", "num_bits")) for group in groups]
    return max((size for size in sizes if size is not None), default=None)


_BITS: Final[Mapping[str, Callable[[Mapping[str, Any]], int | None]]] = {
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "hqq": _hqq,
    "quanto": _quanto,
    "torchao": _torchao,
}


def _dig(data: Any, *keys: str) -> Any:
    """Return the value at a path of keys, or None if a key is missing."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None
