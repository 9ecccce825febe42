"""Connect to members that inference servers run."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from adafuse_llm.errors import (
    LoadError,
    MemberError,
    MissingDependencyError,
    UnsupportedModelError,
    install_command,
)
from adafuse_llm.loading.gguf import load_gguf_vocabulary
from adafuse_llm.loading.huggingface import load_vocabulary
from adafuse_llm.loading.specs import GGUFMember, ServerMember
from adafuse_llm.tree.adjustment import changes_of

if TYPE_CHECKING:
    from adafuse_llm.backends.servers.api import ServerApi, ServerFacts
    from adafuse_llm.backends.servers.backend import ServerBackend
    from adafuse_llm.backends.servers.connection import Connection

logger = logging.getLogger(__name__)

PROBES = (
    "The ferry leaves at nine.\n  Two spaces, 14.50",
    " Caf\u00e9 \U0001f642 \u4e2d\u6587 and so on",
    'if x:\n\tprint("yes")\r\n',
)
"""Texts that the server and this process must split into the same tokens."""

KINDS = (
    ("/props", "default_generation_settings", "llama-server"),
    ("/get_model_info", "model_path", "sglang"),
    ("/version", "version", "vllm"),
    ("/api/version", "version", "Ollama"),
    ("/ready", "status", "adafuse"),
)
"""For each kind of server: a path, an entry that only its answer has there, and its name."""

INSTEAD = "Load the files of its models as members instead"


def load_server(spec: ServerMember) -> ServerBackend:
    """Connect to a server, and return its model as a member. Errors never show the key."""
    try:
        from adafuse_llm.backends.servers.backend import ServerBackend
        from adafuse_llm.backends.servers.connection import Connection
    except ImportError as error:
        raise MissingDependencyError(
            f"members on servers need {error.name}: {install_command('client')}"
        ) from error
    name, url = str(spec.name), spec.url.removesuffix("/v1")
    server = Connection(name, url, _key(spec), spec.api_key_env)
    try:
        api, facts = _ask(server, spec)
        vocabulary, ends, config = _load_vocabulary(spec, facts)
        _check_tokens(vocabulary, server, api, facts, spec.label)
        if facts.parameters is None and config is not None:
            facts = replace(facts, parameters=_parameters(config))
        return ServerBackend(name, vocabulary, end_ids=ends, server=server, api=api, facts=facts)
    except BaseException as error:
        server.close()
        if isinstance(error, MemberError):
            raise LoadError(f"{spec.label} cannot be loaded: {error.reason}") from error
        raise


def _key(spec: ServerMember) -> str | None:
    if spec.api_key_env is None:
        return None
    key = os.environ.get(spec.api_key_env, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        problem = "contains characters that no key has" if key else "is not set"
        raise LoadError(
            f"{spec.label} cannot be loaded: the environment variable {spec.api_key_env!r}, which "
            f"api_key_env names, {problem}"
        )
    return key


def _ask(server: Connection, spec: ServerMember) -> tuple[ServerApi, ServerFacts]:
    from adafuse_llm.backends.servers.backend import UNEXPECTED
    from adafuse_llm.backends.servers.llama_server import LlamaServerApi
    from adafuse_llm.backends.servers.sglang import SglangApi
    from adafuse_llm.backends.servers.vllm import VllmApi

    apis: dict[str, ServerApi] = {
        "llama-server": LlamaServerApi(),
        "sglang": SglangApi(),
        "vllm": VllmApi(),
    }
    # recognize the kind of the server
    actual = next((kind for path, entry, kind in KINDS if entry in (server.find(path) or {})), None)
    kind = spec.api or actual
    if kind not in apis:
        raise server.error(
            f"it is {kind or 'of another kind'}, neither vLLM, SGLang nor llama-server. {INSTEAD}"
        )
    if actual not in (None, kind):
        hint = f"Leave out api={kind!r}" if actual in apis else INSTEAD
        raise server.error(f"it is {actual}, not {kind}. {hint}")
    try:
        return apis[kind], apis[kind].facts(server, spec.model)
    except UNEXPECTED as error:
        raise server.error(f"its answers are not those of {kind}") from error


def _load_vocabulary(spec: ServerMember, facts: ServerFacts) -> tuple[Any, frozenset[int], Any]:
    """Return a vocabulary, the ids that end a response, and the model's config or None."""
    source = spec.tokenizer or facts.source or facts.model
    try:
        if source.lower().endswith(".gguf"):
            stored = load_gguf_vocabulary(GGUFMember(source, name=spec.name))
            return stored, stored.tokenizer.end_ids, None
        vocabulary = load_vocabulary(source, spec.label, revision=spec.revision)
    except LoadError as error:
        if spec.tokenizer:
            raise
        hint = "Pass the folder, hub id or GGUF file of the model's tokenizer: tokenizer=..."
        raise type(error)(f"{str(error).rstrip('.')}. {hint}") from error
    return vocabulary, *_read_configs(spec, source, vocabulary.tokenizer)


def _read_configs(
    spec: ServerMember, source: str, tokenizer: Any
) -> tuple[frozenset[int], Any | None]:
    """Return the ids that end a response, and the config or None. Warn of ignored settings."""
    from transformers import AutoConfig, GenerationConfig

    from adafuse_llm.backends.huggingface.checkpoint import (
        eos_ids,
        ignored_settings,
        own_adjustment,
    )

    generation, config = None, None
    with suppress(OSError, ValueError):  # a folder may have a tokenizer only
        generation = GenerationConfig.from_pretrained(source, revision=spec.revision)
    with suppress(OSError, ValueError):
        config = AutoConfig.from_pretrained(source, revision=spec.revision)
    # find the settings that the server does not follow
    ends = frozenset(eos_ids([tokenizer, generation, config]))
    asked = SimpleNamespace(generation_config=generation)
    settings = changes_of(own_adjustment(asked, ends)) | ignored_settings(asked)
    if settings:
        logger.warning(
            "member %r: its generation config sets %s, which members on servers do not follow. "
            "Its responses can differ from those of the same checkpoint in this program",
            spec.name,
            ", ".join(f"{key}={value!r}" for key, value in settings.items()),
        )
    return ends, config


def _parameters(config: Any) -> int | None:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return int(AutoModelForCausalLM.from_config(config).num_parameters())
    except (ValueError, ImportError, AttributeError):
        return None


def _check_tokens(
    vocabulary: Any, server: Connection, api: ServerApi, facts: ServerFacts, label: str
) -> None:
    for probe in PROBES:
        own = [int(t) for t in vocabulary.tokenizer.encode(probe, add_special_tokens=False)]
        other = api.tokenize(server, facts.model, probe)
        if other is None:
            logger.warning(
                "%s: the server does not tell its tokens, so they are not checked", label
            )
            return
        if own != other:
            raise UnsupportedModelError(
                f"{label} cannot be loaded: the server encodes {probe!r} as {other}, and the "
                f"tokenizer as {own}. Pass the folder or hub id of the tokenizer of the model on "
                "the server: tokenizer=..."
            )
