"""Checks of what a backend says about itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

from adafuse_llm.backends.base import (
    FollowsGrammars,
    LimitsCache,
    LimitsDrafting,
    RestrictsTokens,
    RunsElsewhere,
    SupportsClose,
    SupportsPlacement,
)
from adafuse_llm.backends.conformance.harness import Harness
from adafuse_llm.backends.conformance.violations import expect
from adafuse_llm.text.codec import TextCodec

MEMBERS: Mapping[type, Sequence[str]] = {
    SupportsPlacement: ("device", "cache_bytes", "free_bytes"),
    LimitsCache: ("cache_limit", "device", "cache_bytes", "free_bytes"),
    RestrictsTokens: ("token_texts",),
    FollowsGrammars: ("follows_grammars", "grammar_tokenizer", "token_texts"),
}
"""The members of each extension that has several, first those that only the extension has."""

COMMON = frozenset({"device", "vocabulary", "token_texts", "cache_bytes", "free_bytes"})
"""Names that a backend may have without an intention to implement the extension."""

LENGTHS = (1, 2, 16, 100, 1000, 10_000)
"""Numbers of tokens for which caches and drafts are checked."""


def facts(harness: Harness) -> None:
    """Check the attributes that all backends have."""
    backend: Any = harness.backend
    names = ("name", "codec", "end_ids", "context_window", "evaluate", "release")
    missing = [name for name in names if not hasattr(backend, name)]
    expect(not missing, f"The backend has no {', '.join(missing)}.")
    expect(
        isinstance(backend.name, str) and backend.name,
        f"name is {backend.name!r}; expected a text that is not empty.",
    )
    expect(
        isinstance(backend.codec, TextCodec),
        f"codec is a {type(backend.codec).__name__} without all methods of TextCodec.",
    )
    ends, window = backend.end_ids, backend.context_window
    expect(
        isinstance(ends, frozenset) and all(type(token) is int and token >= 0 for token in ends),
        f"end_ids is {ends!r}; expected a frozenset of token ids.",
    )
    expect(
        window is None or (type(window) is int and window > 0),
        f"context_window is {window!r}; expected a number of tokens, or None for no limit.",
    )
    for name in ("name", "end_ids", "context_window"):
        expect(
            getattr(backend, name) == getattr(backend, name),
            f"{name} differs between two reads.",
        )


def extensions(harness: Harness) -> None:
    """Check that no extension is implemented in part."""
    backend = harness.backend
    for protocol, names in MEMBERS.items():
        has = [name for name in names if hasattr(backend, name)]
        lacks = [name for name in names if name not in has]
        intended = [name for name in has if name not in COMMON]
        if protocol is SupportsPlacement:
            intended = [name for name in has if name != "device"]
        expect(
            not (intended and lacks),
            f"The backend has {', '.join(has)}, but not {', '.join(lacks)}, so an engine does not "
            f"use it as {protocol.__name__}.",
        )
    if isinstance(backend, RunsElsewhere):
        expect(
            isinstance(backend.host, str) and backend.host,
            f"host is {backend.host!r}; expected a text that is not empty.",
        )


def placement(harness: Harness) -> None:
    """Check the facts about memory."""
    backend = cast("SupportsPlacement", harness.backend)
    expect(
        isinstance(backend.device, str) and backend.device,
        f"device is {backend.device!r}; expected a text such as 'cpu' or 'cuda:0'.",
    )
    sizes = [backend.cache_bytes(length) for length in LENGTHS]
    expect(
        all(type(size) is int and size >= 0 for size in sizes),
        f"cache_bytes returned {sizes} for {list(LENGTHS)} tokens; expected integers of at least "
        "0.",
    )
    expect(
        all(less <= more for less, more in pairwise(sizes)),
        f"cache_bytes returned {sizes} for {list(LENGTHS)} tokens; expected at least as many bytes "
        "for more tokens.",
    )
    free = backend.free_bytes()
    expect(
        type(free) is int and free >= 0,
        f"free_bytes returned {free!r}; expected an integer of at least 0.",
    )
    if isinstance(backend, LimitsCache):
        limit = backend.cache_limit
        expect(
            type(limit) is int and limit >= backend.cache_bytes(1),
            f"cache_limit is {limit!r}, but a request of one token needs "
            f"{backend.cache_bytes(1)} bytes.",
        )


def drafts(harness: Harness) -> None:
    """Check the limits of drafts."""
    backend = cast("LimitsDrafting", harness.backend)
    for length in LENGTHS:
        limit = backend.draft_limit(length)
        expect(
            type(limit) is int and limit >= length,
            f"draft_limit({length}) returned {limit!r}; expected an integer of at least {length}.",
        )


def grammars(harness: Harness) -> None:
    """Check the tokenizer for grammars."""
    backend = cast("FollowsGrammars", harness.backend)
    expect(
        type(backend.follows_grammars) is bool,
        f"follows_grammars is {backend.follows_grammars!r}; expected True or False.",
    )
    if backend.follows_grammars and importlib.util.find_spec("llguidance"):
        size = backend.grammar_tokenizer().vocab_size
        highest = max(harness.words)
        expect(
            size > highest,
            f"grammar_tokenizer() has {size} tokens, but the codec uses token {highest}.",
        )


def close(harness: Harness) -> None:
    """Close the backend twice."""
    backend = cast("SupportsClose", harness.backend)
    tree = harness.begin()
    harness.check_nodes(tree, [tree.root])
    harness.end()
    backend.close()
    backend.close()
