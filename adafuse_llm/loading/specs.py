"""Descriptions of members to load. This module imports neither torch nor transformers."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adafuse_llm.backends.gguf.header import CACHE_TYPES
from adafuse_llm.config import MAX_WEIGHT
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, nearest, short_repr
from adafuse_llm.loading.server_urls import (
    APIS,
    ServerAddress,
    check_url,
    is_address,
    parse_address,
)

if TYPE_CHECKING:
    import torch


MAX_PATH = 4096
"""Maximum length of a path. No file system has longer ones."""


GGUF_ENDING = re.compile(r"(?<=.)(-00001-of-\d{5})?\.gguf$", re.IGNORECASE)
"""What names of members leave out."""

QUANTIZED_CACHES = ("q8_0", "q4_0")
"""Types of caches that llama.cpp reads with flash attention only."""

GGUF_ONLY = (
    *("file", "context", "gpu_layers", "flash_attention", "cache_type", "repeatable"),
    "end_tokens",
)
"""Settings that are for GGUF members only."""

TRANSFORMERS_ONLY = {
    "dtype": "The file determines the types of its weights; choose another file.",
    "device": "gpu_layers says how many layers run on GPUs: 0 for none; by default, all do.",
    "device_map": "gpu_layers says how many layers run on GPUs: 0 for none; by default, all do.",
    "trust_remote_code": "A GGUF file contains no code.",
    "quantization_config": "The file is quantized already, or not; choose another file.",
    "allow_pickle": "A GGUF file contains no code.",
}
"""Settings that are not for GGUF members, and what to do instead."""

SERVER_ONLY = ("model", "api", "tokenizer", "api_key_env")
"""Settings that are for members on servers only, in addition to ``url``."""

FOR_SERVERS = ("path", "url", *SERVER_ONLY, "name", "weight", "revision")
"""Settings that members on servers can have."""

ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class MemberSpec:
    """A description of a member to load, with its settings.

    A member is a transformers model, a GGUF model, which llama.cpp runs, or a model that an
    inference server runs (``url``). Some settings are for one of these kinds only.

    If ``dtype``, ``device_map``, ``revision`` or ``trust_remote_code`` is None, the loading call's
    argument of the same name applies.

    Args:
        path: local folder or hub id of a transformers model, or a GGUF file, or a folder or hub id
            with GGUF files; or the address of a model on a server, such as
            ``"vllm+http://host:8000/name"``, which sets ``url``, ``model`` and ``api``.
        name: name in results. The default is the last part of the path, plus as many preceding
            parts as are needed to make the name unique. ``file`` belongs to the path, unless it is
            a pattern.
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
        allow_pickle: whether to accept weights in pickle format, which can run code when loaded.
        threads: number of CPU threads for a GGUF member's passes, at most the number of CPU cores.
            Transformers models share the threads of torch.
        file: GGUF file in the folder or hub repository, as a name or a pattern such as
            ``"*Q4_K_M.gguf"``. It is needed if there are several, or if transformers could load
            the folder, too.
        context: number of tokens that a GGUF member's cache holds, for all requests together.
        gpu_layers: number of layers of a GGUF member that run on GPUs. By default, all layers do if
            llama.cpp was built for a GPU.
        flash_attention: whether a GGUF member uses flash attention. By default, llama.cpp decides.
        cache_type: type of the keys and values in a GGUF member's cache: ``"f32"``, ``"f16"`` (the
            default), ``"bf16"``, ``"q8_0"`` or ``"q4_0"``.
        repeatable: whether a GGUF member's numbers for a token depend only on the tokens before it,
            and not on other requests, on drafts or on reused prefixes. It needs flash attention,
            and all layers on the CPU.
        end_tokens: spellings of tokens that end a response of a GGUF member, such as
            ``("<|eom_id|>",)``, in addition to those that the file names and the one with which its
            chat template ends a reply.
        weight: weight w of the member in the fused score, from 0 to 1e12.
        url: address of a server that runs the member, such as ``"http://host:8000/v1"``.
        model: name of the model on the server. The default is the only model of the server.
        api: kind of the server: ``"vllm"``, ``"sglang"`` or ``"llama-server"``. By default, it is
            detected.
        tokenizer: folder or hub id of the tokenizer of the model on the server, or the GGUF file of
            a model that llama-server runs. The default is what the server says that it has loaded.
        api_key_env: name of the environment variable with the key for the server.

    Raises:
        InvalidInputError: ``path`` is not a path.
        InvalidOptionError: another argument is out of range, or does not fit the kind of the
            member.
    """

    path: str = field(default="", kw_only=False)
    name: str | None = None
    dtype: str | torch.dtype | None = None
    device: str | None = None
    device_map: str | Mapping[str, Any] | None = None
    revision: str | None = None
    trust_remote_code: bool | None = None
    quantization_config: Any = None
    prefix_cache_bytes: int | None = None
    allow_pickle: bool = False
    threads: int | None = None
    file: str | None = None
    context: int | None = None
    gpu_layers: int | None = None
    flash_attention: bool | None = None
    cache_type: str | None = None
    repeatable: bool | None = None
    end_tokens: Sequence[str] | None = None
    weight: float = 1.0
    url: str | None = None
    model: str | None = None
    api: str | None = None
    tokenizer: str | None = None
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.path, os.PathLike):
            object.__setattr__(self, "path", str(self.path))
        _check_server(self)
        if not isinstance(self.path, str) or not 0 < len(self.path.strip()) <= MAX_PATH:
            raise InvalidInputError(
                f"path must be a folder, a GGUF file or a hub id; got {short_repr(self.path)}"
            )
        if self.device is not None and self.device_map is not None:
            raise InvalidOptionError(
                f"member {self.path!r}: pass device (one device for the whole member) or "
                "device_map, not both"
            )
        _check_gguf(self)
        cached = 0 if self.prefix_cache_bytes is None else self.prefix_cache_bytes
        if not isinstance(cached, int) or cached < 0:
            raise InvalidOptionError(
                f"member {self.path!r}: prefix_cache_bytes must be an integer of 0 or more; "
                f"got {short_repr(cached)}"
            )
        if not isinstance(self.weight, (int, float)) or not 0 <= self.weight <= MAX_WEIGHT:
            raise InvalidOptionError(
                f"member {self.path!r}: weight must be a number from 0 to {MAX_WEIGHT:g}; "
                f"got {short_repr(self.weight)}"
            )
        given = self.quantization_config
        if isinstance(given, type) or not (
            given is None or isinstance(given, Mapping) or hasattr(given, "to_dict")
        ):
            raise InvalidOptionError(
                f"member {self.path!r}: quantization_config must be a configuration object of "
                "transformers, such as BitsAndBytesConfig(load_in_4bit=True) or "
                "TorchAoConfig(...), or a mapping as in config.json; got "
                f"{short_repr(self.quantization_config)}"
            )


def _check_server(spec: MemberSpec) -> None:
    """Check the settings of a member on a server, and read its address."""
    if spec.url is None and not (isinstance(spec.path, str) and is_address(spec.path)):
        if given := [name for name in SERVER_ONLY if getattr(spec, name) is not None]:
            raise InvalidOptionError(
                f"member {spec.path!r}: {given[0]} is for members on servers only; pass url, too"
            )
        return
    for name in ("url", *SERVER_ONLY):
        value = getattr(spec, name)
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise InvalidOptionError(
                f"{name} of a member on a server must be a text; got {short_repr(value)}"
            )
    for name, value in _address_of(spec).items():
        object.__setattr__(spec, name, value)
    _check_server_settings(spec)


def _address_of(spec: MemberSpec) -> dict[str, str | None]:
    """Return the settings that the address of a member on a server determines."""
    if spec.url is None:
        read = parse_address(spec.path)
        found = {"model": read.model, "api": read.api, **read.options}
        given = {name: getattr(spec, name) for name in SERVER_ONLY}
        settings = {name: given[name] or found.get(name) for name in SERVER_ONLY}
        url = read.url
    elif spec.path and not is_address(spec.path):
        raise InvalidOptionError(
            f"member {spec.path!r}: pass path (files) or url (a server), not both"
        )
    else:
        url, settings = check_url(spec.url), {"model": spec.model, "api": spec.api}
    path = ServerAddress(url, settings["model"], settings["api"], {}).path
    return {**settings, "url": url, "path": path}


def _check_server_settings(spec: MemberSpec) -> None:
    if spec.api not in (None, *APIS):
        raise InvalidOptionError(
            f"member {spec.path!r}: api must be one of {', '.join(map(repr, APIS))}; got "
            f"{short_repr(spec.api)}.{nearest(str(spec.api), APIS)}"
        )
    if spec.api_key_env is not None and not ENVIRONMENT_NAME.fullmatch(spec.api_key_env):
        raise InvalidOptionError(
            f"member {spec.path!r}: api_key_env must be the name of an environment variable, not "
            "the key itself"
        )
    for each in fields(spec):
        if each.name not in FOR_SERVERS and getattr(spec, each.name) != each.default:
            raise InvalidOptionError(
                f"member {spec.path!r}: {each.name} is not for members on servers. The server's "
                f"own settings apply. Allowed are: {', '.join(FOR_SERVERS[1:])}."
            )


def check_kind(spec: MemberSpec, *, is_gguf: bool) -> None:
    """Check that all settings of a member are for its kind.

    Raises:
        InvalidOptionError: a setting is for the other kind.
    """
    if is_gguf:
        for name, advice in TRANSFORMERS_ONLY.items():
            if (value := getattr(spec, name)) is not None and value is not False:
                raise InvalidOptionError(
                    f"member {spec.path!r}: {name} is not for GGUF members. {advice}"
                )
        return
    for name in GGUF_ONLY:
        if getattr(spec, name) is not None:
            raise InvalidOptionError(
                f"member {spec.path!r}: {name} is for GGUF members only, and this is a "
                "transformers model. For a GGUF file in its folder, pass file='NAME.gguf', too."
            )
    if spec.threads is not None:
        raise InvalidOptionError(
            f"member {spec.path!r}: threads is for GGUF members only, because other members share "
            "the threads of torch. torch.set_num_threads(...) sets their number."
        )


def _check_gguf(spec: MemberSpec) -> None:
    """Check the settings of GGUF members, as far as no file is needed for it."""

    def require(name: str, allowed: str, *, valid: bool) -> None:
        if not valid:
            raise InvalidOptionError(
                f"member {spec.path!r}: {name} must be {allowed}; got "
                f"{short_repr(getattr(spec, name))}"
            )

    for name, least in (("threads", 1), ("context", 1), ("gpu_layers", 0)):
        value = getattr(spec, name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
        require(name, f"an integer of {least} or more", valid=value is None or is_count)
    cores = os.cpu_count() or 1
    require(
        "threads",
        f"from 1 to {cores}, the number of CPU cores",
        valid=spec.threads is None or spec.threads <= cores,
    )
    require(
        "flash_attention", "True, False or None", valid=spec.flash_attention in (None, True, False)
    )
    require("repeatable", "True, False or None", valid=spec.repeatable in (None, True, False))
    if spec.repeatable and spec.flash_attention is False:
        raise InvalidOptionError(
            f"member {spec.path!r}: repeatable=True needs flash attention. Remove "
            "flash_attention=False, or leave out repeatable."
        )
    allowed = ", ".join(map(repr, CACHE_TYPES))
    require("cache_type", f"one of {allowed}", valid=spec.cache_type in (None, *CACHE_TYPES))
    ends = spec.end_tokens
    is_texts = isinstance(ends, (list, tuple)) and all(isinstance(e, str) and e for e in ends)
    require(
        "end_tokens", "a list of tokens as the file spells them", valid=ends is None or is_texts
    )
    if spec.cache_type in QUANTIZED_CACHES and spec.flash_attention is False:
        raise InvalidOptionError(
            f"member {spec.path!r}: cache_type={spec.cache_type!r} needs flash attention. Pass "
            "flash_attention=True, or a cache type such as 'f16'."
        )
    if spec.file is not None:
        _check_file(spec)
    if spec.file is not None or spec.path.lower().endswith(".gguf"):
        check_kind(spec, is_gguf=True)


def _check_file(spec: MemberSpec) -> None:
    file = spec.file
    if not isinstance(file, str) or not 0 < len(file) <= MAX_PATH or ".." in Path(file).parts:
        raise InvalidOptionError(
            f"member {spec.path!r}: file must be the name of a GGUF file in the folder or hub "
            f"repository, or a pattern such as '*Q4_K_M.gguf'; got {short_repr(file)}"
        )
    if spec.path.lower().endswith(".gguf"):
        raise InvalidOptionError(
            f"member {spec.path!r}: path is a GGUF file already. Leave out file, or pass the "
            "folder as path."
        )


def as_specs(members: object) -> tuple[MemberSpec, ...]:
    """Return a `MemberSpec` for each member of a list (`as_spec`).

    Raises:
        InvalidInputError: `members` is not a list, is empty, or contains something else.
        InvalidOptionError: a field is unknown or out of range.
    """
    if isinstance(members, (str, Mapping)) or not isinstance(members, Iterable):
        raise InvalidInputError(
            f"members must be a list; got {short_repr(members)}. Pass members=[...] with a folder, "
            "GGUF file, hub id or MemberSpec for each member"
        )
    if not (specs := tuple(map(as_spec, members))):
        raise InvalidInputError(
            "members is empty: pass at least one folder, GGUF file, hub id or MemberSpec. "
            "from_embedded() uses the small models that ship with adafuse-llm"
        )
    return specs


def as_spec(member: str | MemberSpec | os.PathLike[str] | Mapping[str, Any]) -> MemberSpec:
    """Return a `MemberSpec` for a path, a hub id, a `MemberSpec` or a mapping of its fields.

    Raises:
        InvalidInputError: `member` is none of these.
        InvalidOptionError: a field is unknown or out of range.
    """
    if isinstance(member, (str, os.PathLike)):
        spec = MemberSpec(str(member))
    elif isinstance(member, Mapping):
        spec = _from_fields(member)
    elif isinstance(member, MemberSpec):
        spec = member
    else:
        raise InvalidInputError(
            f"a member must be a path, a hub id or a MemberSpec; got {short_repr(member)}"
        )
    if spec.path[:1] == "~" and spec.url is None:
        return replace(spec, path=str(Path(spec.path).expanduser()))
    return spec


def _from_fields(values: Mapping[str, Any]) -> MemberSpec:
    allowed = [each.name for each in fields(MemberSpec)]
    for name in values:
        if name not in allowed:
            raise InvalidOptionError(
                f"a member has no setting {short_repr(name)}.{nearest(str(name), allowed)} "
                f"The settings are: {', '.join(allowed)}."
            )
    if "path" not in values and "url" not in values:
        raise InvalidInputError(
            "a member needs a path (a folder, a GGUF file or a hub id), or the url of a server"
        )
    return MemberSpec(**values)


def member_names(specs: Sequence[MemberSpec]) -> list[str]:
    """Return a unique name for each member.

    A member with an explicit name keeps it. Any other name is the last part of the member's path,
    without ``.gguf``, plus as many preceding parts as are needed to make the name unique. A file in
    a folder or hub repository is the last part of the path, unless it is a pattern. If a path
    occurs more than once, a number distinguishes the names (``gpt2``, ``gpt2#2``).

    Raises:
        InvalidInputError: two explicit names are the same.
    """
    given = Counter(spec.name for spec in specs if spec.name is not None)
    if repeated := [name for name, times in given.items() if times > 1]:
        raise InvalidInputError(
            f"members need different names; {repeated[0]!r} occurs {given[repeated[0]]} times"
        )
    unnamed = {_source(spec) for spec in specs if spec.name is None}
    parts = {
        path: [p for p in Path(path).parts if p not in ("/", ".")] or [path] for path in unnamed
    }
    parts = {path: [*each[:-1], GGUF_ENDING.sub("", each[-1])] for path, each in parts.items()}
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
        name = base = spec.name if spec.name is not None else short[_source(spec)]
        number = 2
        while spec.name is None and (name in names or name in given):
            name, number = f"{base}#{number}", number + 1
        names.append(name)
    return names


def _source(spec: MemberSpec) -> str:
    """Return the path of a member, with the name of its file if that is known."""
    is_name = spec.file is not None and not set("*?[") & set(spec.file)
    return f"{spec.path}/{spec.file}" if is_name else spec.path
