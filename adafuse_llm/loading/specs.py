"""Descriptions of members to load. This module imports neither torch nor transformers."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adafuse_llm.errors import InvalidInputError, InvalidOptionError
from adafuse_llm.loading.quantization import is_quantization

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MemberSpec:
    """A description of a member to load, with its settings.

    If ``dtype``, ``device_map``, ``revision`` or ``trust_remote_code`` is None, the loading call's
    argument of the same name applies.

    Args:
        path: local folder or hub id.
        name: name in results. The default is the last part of the path, plus as many preceding
            parts as are needed to make the name unique.
        dtype: dtype of the weights, such as ``"bfloat16"`` or ``"auto"``.
        device: one device for the whole member, such as ``"cuda:1"``.
        device_map: accelerate's device map, which spreads the member over several devices.
        revision: revision of a hub model.
        trust_remote_code: whether to run Python code that comes with the model.
        quantization_config: quantization for ``AutoModelForCausalLM.from_pretrained``, as an object
            such as ``BitsAndBytesConfig`` or as a mapping with the contents that ``config.json``
            would have. A quantized checkpoint does not need it.
        prefix_cache_bytes: maximum size, in bytes, of the key/value rows that the member keeps from
            finished requests. Later requests that begin with the same tokens reuse these rows. With
            0, the member keeps no rows. The default is 256 MiB.
        static_cache: whether to run decoding passes in fixed sizes. On a GPU, these passes run as
            CUDA graphs. ``HuggingFaceBackend`` lists the requirements.
        compile: whether to compile the passes of fixed size with ``torch.compile``.
        allow_pickle: whether to accept weights in pickle format, which can run code when loaded.
        weight: weight w of the member in the fused score.
    """

    path: str
    name: str | None = None
    dtype: str | torch.dtype | None = None
    device: str | None = None
    device_map: str | Mapping[str, Any] | None = None
    revision: str | None = None
    trust_remote_code: bool | None = None
    quantization_config: Any = None
    prefix_cache_bytes: int | None = None
    static_cache: bool = False
    compile: bool = False
    allow_pickle: bool = False
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.device is not None and self.device_map is not None:
            raise InvalidOptionError(
                f"member {self.path!r}: pass device (one device for the whole member) or "
                "device_map, not both"
            )
        if self.prefix_cache_bytes is not None and self.prefix_cache_bytes < 0:
            raise InvalidOptionError(
                f"member {self.path!r}: prefix_cache_bytes must be 0 or more; "
                f"got {self.prefix_cache_bytes}"
            )
        if self.compile and not self.static_cache:
            raise InvalidOptionError(
                f"member {self.path!r}: compile=True needs a static cache; pass "
                "static_cache=True, too"
            )
        if not math.isfinite(self.weight) or self.weight < 0:
            raise InvalidOptionError(
                f"member {self.path!r}: weight must be finite and not negative; got {self.weight}"
            )
        if self.quantization_config is not None and not is_quantization(self.quantization_config):
            raise InvalidOptionError(
                f"member {self.path!r}: quantization_config must be a configuration object of "
                "transformers, such as BitsAndBytesConfig(load_in_4bit=True) or "
                "TorchAoConfig(...), or a mapping as in config.json; got "
                f"{self.quantization_config!r}"
            )


def as_spec(member: str | MemberSpec | os.PathLike[str]) -> MemberSpec:
    """Return a `MemberSpec` for a path, a hub id or a `MemberSpec`.

    Raises:
        InvalidInputError: `member` is none of these.
    """
    if isinstance(member, (str, os.PathLike)) and str(member).strip():
        member = MemberSpec(path=str(member))
    if isinstance(member, MemberSpec):
        path = str(member.path)
        return replace(member, path=str(Path(path).expanduser())) if path[:1] == "~" else member
    raise InvalidInputError(f"a member must be a path, a hub id or a MemberSpec; got {member!r}")


def member_names(specs: Sequence[MemberSpec]) -> list[str]:
    """Return a unique name for each member.

    A member with an explicit name keeps it. Any other name is the last part of the member's path,
    plus as many preceding parts as are needed to make the name unique. If a path occurs more than
    once, a number distinguishes the names (``gpt2``, ``gpt2#2``).

    Raises:
        InvalidInputError: two explicit names are the same.
    """
    given = Counter(spec.name for spec in specs if spec.name is not None)
    if repeated := [name for name, times in given.items() if times > 1]:
        raise InvalidInputError(
            f"members need different names; {repeated[0]!r} occurs {given[repeated[0]]} times"
        )
    unnamed = {spec.path for spec in specs if spec.name is None}
    parts = {
        path: [p for p in Path(path).parts if p not in ("/", ".")] or [path] for path in unnamed
    }
    sizes = dict.fromkeys(unnamed, 1)
    while True:
        short = {path: "/".join(parts[path][-sizes[path] :]) for path in unnamed}
        uses = Counter([*short.values(), *given])
        longer = [p for p in unnamed if uses[short[p]] > 1 and sizes[p] < len(parts[p])]
        if not longer:
            break
        for path in longer:
            sizes[path] += 1
    names: list[str] = []
    for spec in specs:
        name = base = spec.name if spec.name is not None else short[spec.path]
        number = 2
        while spec.name is None and (name in names or name in given):
            name, number = f"{base}#{number}", number + 1
        names.append(name)
    return names
