"""Descriptions of members to load. This module imports neither torch nor transformers.

There are three kinds of members, and each has a class of settings. `as_spec` finds the class for a
plain string or a mapping of settings.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import Field, field_validator

from adafuse_llm.backends.gguf.files import is_gguf
from adafuse_llm.config import MAX_WEIGHT, Options
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, short_repr

if TYPE_CHECKING:
    import torch

    Dtype: TypeAlias = str | torch.dtype
else:  # pydantic would need torch to resolve the type
    Dtype = Any

GGUF_ENDING = re.compile(r"(?<=.)(-00001-of-\d{5})?\.gguf$", re.IGNORECASE)
"""Matches the end of a GGUF file's name. The member's name leaves this end out."""

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]

Api = Literal["vllm", "sglang", "llama-server"]

IN_QUERY = ("tokenizer", "api_key_env")
"""Settings that can be query parameters in the address of a server."""


class _Member(Options):
    """The settings that all kinds of members share.

    Raises:
        InvalidOptionError: a setting is unknown, out of range, or of another kind of member.
    """

    needs: ClassVar[str] = "path"

    name: str | None = Field(default=None, min_length=1)
    """Name in results. Default: the last part of the path, with as many parts before it as a unique
    name needs."""
    weight: float = Field(default=1.0, ge=0, le=MAX_WEIGHT)
    """Weight where scores or probabilities are fused (`AdaFuseConfig.weights`)."""
    revision: str | None = None
    """Revision of a hub model, or of a tokenizer on the hub."""

    if not TYPE_CHECKING:

        def __init__(self, given: Any = None, /, **settings: Any) -> None:
            if given is not None:
                settings.setdefault(self.needs, given)
            if (source := settings.get(self.needs)) is None:
                raise InvalidInputError(
                    "a member needs a path (a folder, a GGUF file or a hub id), or the url of a "
                    "server"
                )
            try:
                super().__init__(**settings)
            except InvalidOptionError as error:
                label = f"member {short_repr(source)} ({type(self).__name__})"
                raise InvalidOptionError(f"{label}: {error}") from None

    @property
    def label(self) -> str:
        path = getattr(self, "path", "")
        name = self.name or path
        return f"member {name!r}" if name == path else f"member {name!r} ({path})"


class _Files(_Member):
    """The settings of a member that this process loads from files."""

    path: str = Field(min_length=1, max_length=4096, kw_only=False)
    """Folder, hub id or GGUF file. A folder or hub repository can also contain GGUF files."""
    prefix_cache_bytes: int | None = Field(default=None, ge=0)
    """Maximum bytes of the keys and values that the member keeps from finished requests, for
    later requests that begin with the same tokens. Default: 256 MiB."""

    @field_validator("path", mode="before")
    @classmethod
    def _of_the_user(cls, path: Any) -> Any:
        is_path = isinstance(path, str | os.PathLike)
        return os.path.expanduser(path) if is_path else path  # noqa: PTH111  # keeps a hub id


class TransformersMember(_Files):
    """A transformers model.

    If `revision`, `dtype`, `device_map` or `trust_remote_code` is None, the argument of the loading
    call counts.
    """

    dtype: Dtype | None = None
    """Dtype of the weights, such as "bfloat16" or "auto"."""
    device_map: str | int | Mapping[str, Any] | None = None
    """A device such as "cuda:1"; "auto"; or another device map of accelerate."""
    trust_remote_code: bool | None = None
    """Whether to run Python code that comes with the model."""
    quantization_config: Any = None
    """Quantization of the weights: a configuration object of transformers, such as
    `BitsAndBytesConfig`, or a mapping as in `config.json`. Quantized checkpoints do not need it."""


class GGUFMember(_Files):
    """A GGUF model, which llama.cpp runs."""

    file: str | None = Field(default=None, min_length=1, max_length=4096)
    """GGUF file in the folder or hub repository, as a name or a pattern such as `*Q4_K_M.gguf`.
    Required if there are several."""
    context: int | None = Field(default=None, ge=1)
    """Tokens that the cache holds for all requests together. Default: by free memory."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads. Default: one per physical core that this process may use."""
    gpu_layers: int | None = Field(default=None, ge=0)
    """Number of layers on GPUs. Default: all, if llama.cpp was built for a GPU."""
    flash_attention: bool | None = None
    """Whether to use flash attention. Default: llama.cpp decides."""
    cache_type: CacheType | None = None
    """Type of the keys and values in the cache. Default: f16."""
    repeatable: bool | None = None
    """Whether a token's probability depends only on the tokens before it, and not on other
    requests, drafts or reused prefixes. It needs flash attention, and all layers on the CPU."""


class ServerMember(_Member):
    """A model that an inference server runs: vLLM, SGLang or llama-server."""

    needs: ClassVar[str] = "url"

    url: str = Field(kw_only=False)
    """Address of the server, such as `http://host:8000/v1`. It can also contain the model and other
    settings: `vllm+http://host:8000/v1/NAME?tokenizer=FOLDER`."""
    model: str | None = Field(default=None, min_length=1)
    """Name of the model on the server. Default: the only model of the server."""
    api: Api | None = None
    """Kind of the server. Default: detected."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """Folder or hub id of the tokenizer, or the GGUF file of a model on llama-server. Default:
    that of the server's model."""
    api_key_env: str | None = None
    """Name of the environment variable with the key for the server."""

    if not TYPE_CHECKING:

        def __init__(self, url: Any = None, /, **settings: Any) -> None:
            url = settings.pop("url", None) if url is None else url
            if url is not None:
                for name, value in _read_address(url).items():
                    if settings.get(name) not in (None, value):
                        raise InvalidOptionError(
                            f"the address of the server has the {name} {value!r}, and {name} is "
                            f"{settings[name]!r}. Leave out one of them. A path of the server "
                            "itself ends with /v1."
                        )
                    settings[name] = value
            key = settings.get("api_key_env")
            if key is not None and not re.fullmatch(r"[A-Za-z_]\w*", str(key), re.ASCII):
                raise InvalidOptionError(
                    "api_key_env must be the name of an environment variable, not the key itself"
                )
            super().__init__(**settings)

    @property
    def path(self) -> str:
        """The address with the model, from which the member gets its name."""
        api = f"{self.api}+" if self.api else ""
        return api + (f"{self.url}/{self.model}" if self.model else self.url.removesuffix("/v1"))


MemberSpec: TypeAlias = TransformersMember | GGUFMember | ServerMember
"""A description of a member to load, with its settings."""


SETTINGS = tuple(dict.fromkeys(name for kind in get_args(MemberSpec) for name in kind.model_fields))
"""Names of the settings of all kinds of members."""


def as_specs(members: object, revision: str | None = None) -> tuple[MemberSpec, ...]:
    """Return the description (`as_spec`) of each member in a list, which must not be empty."""
    if isinstance(members, (str, Mapping)) or not isinstance(members, Iterable):
        raise InvalidInputError(
            f"members must be a list; got {short_repr(members)}. Pass members=[...] with a folder, "
            "GGUF file, hub id or address of a server for each member"
        )
    if not (specs := tuple(as_spec(member, revision) for member in members)):
        raise InvalidInputError(
            "members is empty: pass at least one folder, GGUF file, hub id or address of a server. "
            "from_embedded() uses the small models that ship with adafuse-llm"
        )
    return specs


def as_spec(
    member: str | os.PathLike[str] | Mapping[str, Any] | MemberSpec, revision: str | None = None
) -> MemberSpec:
    """Return the description of a member: a folder, GGUF file, hub id, server address or settings.

    For a hub id, the cached files of `revision` decide between transformers and GGUF.

    Raises:
        InvalidInputError: `member` is none of these, or has neither path nor url.
        InvalidOptionError: a setting is unknown, out of range, or does not fit the member's kind.
    """
    if isinstance(member, TransformersMember | GGUFMember | ServerMember):
        return member
    if isinstance(member, Mapping):
        settings = {str(name): value for name, value in member.items()}
    elif isinstance(member, (str, os.PathLike)):
        settings = {"path": os.fspath(member)}
    else:
        raise InvalidInputError(
            f"a member must be a folder, a GGUF file, a hub id, the address of a server, or a "
            f"description such as GGUFMember(...); got {short_repr(member)}"
        )
    # find the kind of the member in its address or files
    path = settings.get("path")
    if isinstance(path, str) and "://" in path and "url" not in settings:
        settings["url"] = settings.pop("path")
    if "url" in settings:
        return ServerMember(**settings)
    revision = settings.get("revision") or revision
    is_path = isinstance(path, (str, os.PathLike))
    if "file" in settings or (is_path and is_gguf(str(path), revision=revision)):
        return GGUFMember(**settings)
    return TransformersMember(**settings)


def member_names(specs: Sequence[MemberSpec]) -> list[str]:
    """Return a unique name for each member: the `name` in its settings, or the end of its path.

    Raises:
        InvalidInputError: two explicit names are the same.
    """
    given = Counter(spec.name for spec in specs if spec.name is not None)
    if repeated := [name for name, times in given.items() if times > 1]:
        raise InvalidInputError(
            f"members need different names; {repeated[0]!r} occurs {given[repeated[0]]} times"
        )
    # take the shortest end of a path that no other member has, or add a number (gpt2, gpt2#2)
    ends = [_ends(spec) for spec in specs]
    names: list[str] = []
    for spec, own in zip(specs, ends, strict=True):
        others = {end for theirs in ends if theirs != own for end in theirs} | given.keys()
        base = next((end for end in own if end not in others), own[-1])
        name, number = base, 2
        while name in names or name in given:
            name, number = f"{base}#{number}", number + 1
        names.append(spec.name or name)
    return names


def _ends(spec: MemberSpec) -> list[str]:
    # the setting `file` is the last part of the path, unless it is a pattern
    path, file = spec.path, getattr(spec, "file", None)
    if file is not None and not set("*?[") & set(file):
        path = f"{path}/{file}"
    parts = [part for part in Path(path).parts if part not in ("/", ".")] or [path]
    parts[-1] = GGUF_ENDING.sub("", parts[-1])
    # the last part, the last two parts, and so on
    return ["/".join(parts[-number:]) for number in range(1, len(parts) + 1)]


def _read_address(text: object) -> dict[str, str]:
    # split vllm+http://host:8000/v1/model?tokenizer=folder; no error may show a password
    scheme, _, rest = text.partition("://") if isinstance(text, str) else ("", "", "")
    api, plus, protocol = scheme.rpartition("+")
    try:
        parts = urlsplit(f"{protocol}://{rest}")
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if "@" in rest.partition("/")[0]:
        raise InvalidOptionError(
            "the address of a server must not have a name or password. Put the key into an "
            "environment variable, and pass its name: api_key_env"
        )
    is_plain = rest.isascii() and rest.isprintable() and " " not in rest
    known = protocol in ("http", "https") and (api in get_args(Api) or not plus)
    if not (is_address and is_plain and known) or parts.fragment:
        raise InvalidOptionError(
            "url must be the address of a server, such as 'http://127.0.0.1:8000' or "
            f"'vllm+http://127.0.0.1:8000/NAME'; got {short_repr(text)}"
        )
    # /v1 separates the server from the model; without it, all after the host is the model
    base, separator, model = f"{parts.path.rstrip('/')}/".partition("/v1/")
    if not separator:
        base, model = "", parts.path
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := settings.keys() - set(IN_QUERY):
        raise InvalidOptionError(
            f"the address of a server has no setting {short_repr(min(unknown))}; its settings are: "
            f"{', '.join(IN_QUERY)}"
        )
    settings |= {"url": f"{protocol}://{parts.netloc}{base}/v1"}
    settings |= {"model": unquote(model.strip("/")), "api": api}
    return {name: value for name, value in settings.items() if value}
