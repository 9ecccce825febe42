"""Load members of all kinds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from adafuse_llm.backends.base import Backend
from adafuse_llm.errors import InvalidInputError, UnsupportedModelError, short_list
from adafuse_llm.loading.gguf import find_file, load_gguf
from adafuse_llm.loading.huggingface import check_huggingface, load_huggingface
from adafuse_llm.loading.problems import describe
from adafuse_llm.loading.servers import load_server
from adafuse_llm.loading.specs import GGUFMember, MemberSpec, ServerMember, as_specs, member_names
from adafuse_llm.text.codec import change_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PLAIN: Final = "\nTwo  spaces, 3.5 lines."
"""A text that every tokenizer must preserve."""

MESSAGES: Final = tuple(
    {"role": role, "content": text} for role, text in (("system", "Be brief."), ("user", "Hello!"))
)
"""A conversation that every chat template must accept, at least merged into one user turn."""


def load_members(
    members: Sequence[str | MemberSpec | Mapping[str, Any]],
    *,
    dtype: str | torch.dtype = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> tuple[list[Backend], dict[str, float] | None]:
    """Load members: check all settings and files, then connect to servers, and then load weights.

    `dtype`, `device_map`, `trust_remote_code` and `revision` are defaults for members whose kind
    has such a setting.

    Returns:
        The members in order; and their weights by name, or None if all weights are 1.

    Raises:
        LoadError: a member cannot be loaded, or cannot be part of an ensemble.
        InvalidInputError: a setting is not valid.
        MissingDependencyError: a package is not installed.
    """
    # fill in the settings that a member does not set
    given = as_specs(members, revision)
    defaults = {
        "dtype": dtype,
        "device_map": device_map,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
    }
    specs: list[MemberSpec] = []
    for spec, name in zip(given, member_names(given), strict=True):
        known = {"name": name, **defaults}
        lacking = {key: known[key] for key in known if getattr(spec, key, ...) is None}
        specs.append(spec.model_copy(update=lacking))
    # check all that needs no weights
    loaders = [_loader(spec) for spec in specs]
    # connect to servers first, because this is faster than loading weights
    loaded: dict[int, Backend] = {}
    with ExitStack() as on_error:
        for i in sorted(range(len(specs)), key=lambda i: not isinstance(specs[i], ServerMember)):
            start = time.monotonic()
            loaded[i] = loaders[i]()
            on_error.callback(loaded[i].close)
            if (problem := next(_problems(loaded[i]), None)) is not None:
                raise UnsupportedModelError(f"{specs[i].label} cannot be used: {problem}")
            logger.info("member %r is loaded in %.1f s", specs[i].name, time.monotonic() - start)
        on_error.pop_all()
    weights = {str(spec.name): spec.weight for spec in specs}
    ordered = [loaded[i] for i in range(len(specs))]
    return ordered, weights if set(weights.values()) != {1.0} else None


def _loader(spec: MemberSpec) -> Callable[[], Backend]:
    if isinstance(spec, ServerMember):
        return partial(load_server, spec)
    if isinstance(spec, GGUFMember):
        return partial(load_gguf, spec, find_file(spec))
    check_huggingface(spec)
    return partial(load_huggingface, spec)


def _problems(backend: Backend) -> Iterator[str]:
    from adafuse_llm.backends.huggingface import HuggingFaceBackend

    if change := change_of(backend.codec, PLAIN):
        yield f"its tokenizer loses plain text ({change}), so it cannot score the others' words"
    # try the chat template on a short conversation
    ids: list[int] = []
    try:
        ids = backend.codec.encode_messages(MESSAGES)
    except InvalidInputError as error:
        cause = describe(error.__cause__ or error).rstrip(".")
        yield f"its chat template fails ({cause}). Mend or delete the template in the model's files"
    if not isinstance(backend, HuggingFaceBackend):
        return
    # find tokens without a row in the model; special ones matter only if the template uses them
    rows, tokenizer = backend.vocabulary_size, backend.tokenizer
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    known = sorted((i, token) for token, i in tokenizer.get_vocab().items())
    beyond = [token for i, token in known if i >= rows and (i not in special or i in ids)]
    if beyond:
        yield (
            f"its tokenizer has tokens for which the model has no row: {short_list(beyond)}. Pass "
            "the tokenizer of the model, or train the model with these tokens "
            "(resize_token_embeddings)"
        )
