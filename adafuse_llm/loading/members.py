"""Load members of all kinds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from adafuse_llm.backends.base import Backend
from adafuse_llm.loading.gguf import find_file, load_gguf
from adafuse_llm.loading.huggingface import check_huggingface, load_huggingface
from adafuse_llm.loading.servers import load_server
from adafuse_llm.loading.specs import GGUFMember, MemberSpec, ServerMember, as_specs, member_names

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def load_members(
    members: Sequence[str | MemberSpec | Mapping[str, Any]],
    *,
    dtype: str | torch.dtype = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> tuple[list[Backend], dict[str, float] | None]:
    """Load members: check all options and files, then ask servers, and then load weights.

    `dtype`, `device_map`, `trust_remote_code` and `revision` are for members that have such a
    setting and do not set it. The errors are those of `AdaFuseEngine.from_pretrained`.

    Returns:
        The members in order; and their weights by name, or None if all weights are 1.
    """
    from adafuse_llm.loading.checks import check_member

    given = as_specs(members, revision)
    defaults = {
        "dtype": dtype,
        "device_map": device_map,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
    }
    specs = [
        _complete(spec, {"name": name, **defaults})
        for spec, name in zip(given, member_names(given), strict=True)
    ]
    loaders = [_loader(spec) for spec in specs]
    # servers first, because an answer takes less time than weights
    loaded: dict[int, Backend] = {}
    with ExitStack() as on_error:
        for i in sorted(range(len(specs)), key=lambda i: not isinstance(specs[i], ServerMember)):
            start = time.monotonic()
            loaded[i] = loaders[i]()
            on_error.callback(loaded[i].close)
            check_member(loaded[i], specs[i].label)
            logger.info("member %r is loaded in %.1f s", specs[i].name, time.monotonic() - start)
        on_error.pop_all()
    weights = {str(spec.name): spec.weight for spec in specs}
    ordered = [loaded[i] for i in range(len(specs))]
    return ordered, weights if set(weights.values()) != {1.0} else None


def _complete(spec: MemberSpec, defaults: Mapping[str, Any]) -> MemberSpec:
    missing = [name for name in defaults if getattr(spec, name, ...) is None]
    return spec.model_copy(update={name: defaults[name] for name in missing})


def _loader(spec: MemberSpec) -> Callable[[], Backend]:
    if isinstance(spec, ServerMember):
        return partial(load_server, spec)
    if isinstance(spec, GGUFMember):
        return partial(load_gguf, spec, find_file(spec))
    check_huggingface(spec)
    return partial(load_huggingface, spec)
