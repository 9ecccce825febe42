"""The host of a member: it owns the backend, and a tree for each request."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from adafuse_llm.adjustment import NOTHING
from adafuse_llm.backends import base
from adafuse_llm.backends.base import (
    AdjustsTokens,
    Backend,
    DrawsTokens,
    LimitsCache,
    LimitsDrafting,
    NodeQuery,
    SupportsPlacement,
    TellsSize,
)
from adafuse_llm.backends.checks import check_results
from adafuse_llm.backends.remote.protocol import (
    DONE,
    Delta,
    Facts,
    Message,
    adjusted_tree,
    decoded_draw,
    encoded_error,
    encoded_result,
)
from adafuse_llm.tree import Node, TokenTree

logger = logging.getLogger(__name__)

PROTOCOLS = (
    "SupportsPlacement",
    "LimitsCache",
    "LimitsDrafting",
    "RestrictsTokens",
    "FollowsGrammars",
    "DrawsTokens",
    "AdjustsTokens",
)
METHODS = ("clear_prefix_cache",)
"""Protocols and methods that a backend may have in addition to those of `Backend`."""

MANY_TOKENS = 1_000
"""Number of tokens for which a cache must be as large as `MANY_TOKENS` times that for one."""


class Host:
    """A backend that answers the messages of `adafuse_llm.backends.remote.protocol`.

    One thread handles messages. Another thread can handle questions at the same time.

    Args:
        backend: the backend.
        device: name of the device, if the backend's own name is that of another device elsewhere.
    """

    def __init__(self, backend: Backend, *, device: str | None = None) -> None:
        self._backend = backend
        self._device = device
        self._requests: dict[int, _HostedRequest] = {}
        self._handlers: Mapping[str, Callable[..., Any]] = {
            "evaluate": self._evaluate,
            "prepare_draws": self._prepare_draws,
            "clear_prefix_cache": self._clear_prefix_cache,
            "free_bytes": self._free_bytes,
            "cache_bytes": self._cache_bytes,
            "draft_limits": self._draft_limits,
        }

    @property
    def open_requests(self) -> int:
        """Number of requests that the host holds."""
        return len(self._requests)

    def greeting(self) -> Message:
        """Return the first message to the client."""
        facts = facts_of(self._backend)
        if self._device is not None and facts.device is not None:
            facts = replace(facts, device=self._device)
        return DONE, facts.encoded()

    def handle(self, message: Message) -> Message:
        """Return the reply to a message or a question."""
        name, *arguments = message
        try:
            return DONE, self._handlers[name](*arguments)
        except BaseException as error:  # some libraries raise BaseException; the host must not end
            reply = encoded_error(self._backend.name, error)
            traceback.clear_frames(error.__traceback__)  # the frames keep tensors of the pass alive
            return reply

    def _evaluate(self, closed: Iterable[int], deltas: Iterable[Sequence[Any]]) -> tuple[Any, ...]:
        for number in closed:
            self._close(number)
        queries = [self._apply(Delta(*values)) for values in deltas]
        results = self._backend.evaluate(queries)
        try:
            return tuple(map(encoded_result, results))
        except Exception:
            check_results(self._backend.name, queries, results)  # its error says what is wrong
            raise

    def _close(self, number: int) -> None:
        request = self._requests.pop(number, None)
        if request is None:  # it failed before the host could open it
            return
        try:
            self._backend.release(request.tree)
        except BaseException:  # the request has ended, so other requests must not fail
            logger.exception("member %r failed to release a request", self._backend.name)

    def _apply(self, delta: Delta) -> NodeQuery:
        """Apply a delta to the tree of its request, and return its query."""
        if delta.base is not None:
            tree = adjusted_tree(delta.base, delta.adjustment)
            self._requests[delta.request] = _HostedRequest(tree)
        request = self._requests[delta.request]
        request.follow(delta)
        return request.query(delta)

    def _prepare_draws(self) -> None:
        assert isinstance(self._backend, DrawsTokens)
        self._backend.prepare_draws()

    def _clear_prefix_cache(self) -> None:
        self._backend.clear_prefix_cache()  # type: ignore[attr-defined]  # one of METHODS

    def _free_bytes(self) -> int:
        assert isinstance(self._backend, SupportsPlacement)
        return self._backend.free_bytes()

    def _cache_bytes(self, tokens: int) -> int:
        assert isinstance(self._backend, SupportsPlacement)
        return self._backend.cache_bytes(tokens)

    def _draft_limits(self, length: int, count: int) -> tuple[int, ...]:
        assert isinstance(self._backend, LimitsDrafting)
        return tuple(map(self._backend.draft_limit, range(length, length + count)))


class _HostedRequest:
    """The tree of a request, and its nodes by number.

    Args:
        tree: the tree of the committed tokens.
    """

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree
        self.nodes: dict[int, Node] = {0: tree.root}
        self._next = 1

    def follow(self, delta: Delta) -> None:
        """Apply the changes of a delta to the tree."""
        if delta.alive is not None:
            self._prune(delta.alive)
        if delta.committed:
            self._commit(delta.committed)
        for parent, token in delta.new:
            self._number(self.tree.child(self.nodes[parent], token))

    def query(self, delta: Delta) -> NodeQuery:
        """Return the query of a delta whose changes are applied."""
        for number, allowed, draw in delta.evaluate:
            self.nodes[number].allowed = allowed
            self.nodes[number].draw = decoded_draw(draw)
        evaluate = tuple(self.nodes[number] for number, _, _ in delta.evaluate)
        score = tuple(self.nodes[number] for number in delta.score)
        return NodeQuery(self.tree, evaluate, score, delta.top, delta.word_ends)

    def _number(self, node: Node) -> None:
        self.nodes[self._next] = node
        self._next += 1

    def _prune(self, alive: Sequence[int]) -> None:
        self.nodes = {number: self.nodes[number] for number in alive}
        kept = set(self.nodes.values())
        for node in kept:
            node.children = {t: child for t, child in node.children.items() if child in kept}
        self.tree.cuts += 1

    def _commit(self, tokens: Sequence[int]) -> None:
        self.tree.commit(self.tree.grow(tokens))
        below = set(self.tree.nodes())
        self.nodes = {number: node for number, node in self.nodes.items() if node in below}
        if self.tree.root not in self.nodes.values():
            self._number(self.tree.root)


def facts_of(backend: Backend) -> Facts:
    """Return the facts about a backend."""
    placed = backend if isinstance(backend, SupportsPlacement) else None
    one = None if placed is None else placed.cache_bytes(1)
    is_linear = (
        placed is not None
        and one is not None
        and placed.cache_bytes(0) == 0
        and placed.cache_bytes(MANY_TOKENS) == MANY_TOKENS * one
    )
    return Facts(
        end_ids=tuple(sorted(backend.end_ids)),
        context_window=backend.context_window,
        vocabulary_size=getattr(backend, "vocabulary_size", None),
        device=None if placed is None else placed.device,
        token_bytes=one if is_linear else None,
        cache_limit=backend.cache_limit if isinstance(backend, LimitsCache) else None,
        abilities=(
            *(name for name in PROTOCOLS if isinstance(backend, getattr(base, name))),
            *(name for name in METHODS if hasattr(backend, name)),
        ),
        own_adjustment=backend.own_adjustment if isinstance(backend, AdjustsTokens) else NOTHING,
        parameters=backend.parameters if isinstance(backend, TellsSize) else None,
    )
