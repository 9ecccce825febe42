"""A member in this process, whose model returns logits as tensors."""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import torch

from adafuse_llm.backends.base import Backend, Query, QueryResult
from adafuse_llm.backends.logits.readout import TokenTable, logprobs, read
from adafuse_llm.backends.logits.state import RequestLogits, check_tokens
from adafuse_llm.backends.prefixes import MIN_SHARED, CachedTokens, PrefixCache
from adafuse_llm.backends.vocabulary import Vocabulary
from adafuse_llm.tree.tokens import TokenTree

S = TypeVar("S", bound=RequestLogits)
R = TypeVar("R")

PART_BYTES, MIN_PART = 2**25, 16
"""A long text is scored in parts. The logits of a part have at most `PART_BYTES` bytes, unless the
part has only `MIN_PART` tokens."""

PREFIX_CACHE_BYTES = 256 * 2**20
"""Default maximum size, in bytes, of a member's cache of finished requests."""


class LogitsBackend(Backend, Generic[S]):
    """A member in this process, whose model returns logits as tensors.

    The member reads prompts in pieces, and a new request reuses cached tokens of other requests. If
    a call fails, the member drops the states of the requests in it, so the engine can repeat the
    call. Several engines may share the member.

    A subclass calls `_set_up`, sets `_pieces` and `_kept`, and defines the abstract methods.

    Attributes:
        vocabulary_size: number of logits that the model returns after a token.
    """

    knows_distributions = True
    # maximum numbers of a prompt's tokens in a piece: while a request writes its response, and
    # while none does; the second number also limits all prompts of a piece together
    _pieces: tuple[int, int]
    # cached tokens of finished requests
    _kept: PrefixCache[Any]

    def _set_up(
        self,
        vocabulary: Vocabulary,
        end_ids: frozenset[int],
        size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._vocabulary = vocabulary
        self.codec = vocabulary.codec
        self.end_ids = end_ids
        self.vocabulary_size = size
        self._tokens = TokenTable(vocabulary, end_ids, size, device)
        self._lock = threading.Lock()
        # states of running requests, whose cached tokens others may reuse
        self._running: weakref.WeakSet[S] = weakref.WeakSet()

    @property
    def token_texts(self) -> Sequence[str]:
        return self._vocabulary.token_texts

    @property
    def follows_grammars(self) -> bool:
        return self._vocabulary.follows_grammars

    def grammar_tokenizer(self) -> Any:
        return self._vocabulary.grammar_tokenizer(self.vocabulary_size, self.end_ids)

    @torch.inference_mode()
    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        with self._lock:
            return self._attempt([q.tree for q in queries], lambda: self._in_turn(queries))

    @torch.inference_mode()
    def read_piece(self, trees: Sequence[TokenTree]) -> list[bool]:
        with self._lock:
            return self._attempt(trees, lambda: self._read(trees, self._running))

    @torch.inference_mode()
    def release(self, tree: TokenTree) -> None:
        """End a request, and keep its cached tokens for later requests."""
        with self._lock:
            if (state := self._taken(tree)) is not None:
                state.follow()
                self._keep(state)

    @abstractmethod
    def _new_state(self, tree: TokenTree) -> S:
        """Return the state of a new request, with cached tokens of others that it can reuse."""

    @abstractmethod
    def _advance(self, queries: Sequence[Query]) -> list[S]:
        """Evaluate the nodes that queries need, and return the states of the requests, in order."""

    @abstractmethod
    def _run_parts(self, parts: Sequence[tuple[S, int]]) -> None:
        """Run the next committed tokens of requests. `parts`: (state, number of tokens) pairs."""

    @abstractmethod
    def _sources(self) -> Iterable[CachedTokens[Any]]:
        """Return the cached tokens of the running requests."""

    @abstractmethod
    def _keep(self, state: S) -> None:
        """Keep the cached tokens of a finished request."""

    def _late(self, prompts: Mapping[int, Sequence[int]]) -> set[int]:
        return self._kept.late(prompts, self._sources())

    def _made_room(self, error: BaseException) -> bool:  # noqa: ARG002
        """Free memory after an error. Return whether the call can succeed now."""
        return False

    def _attempt(
        self, trees: Sequence[TokenTree], work: Callable[[], R], *, is_second: bool = False
    ) -> R:
        try:
            return work()
        except BaseException as error:
            # drop the states, because the call is repeated here or by the engine
            for tree in trees:
                self._forget(tree)
            if is_second or not self._made_room(error):
                raise
        return self._attempt(trees, work, is_second=True)

    def _forget(self, tree: TokenTree) -> None:
        """Drop the state of a request. Its next query evaluates its tokens again."""
        if (state := self._taken(tree)) is not None:
            state.drop()

    def _taken(self, tree: TokenTree) -> S | None:
        """Remove the state from a tree. Return it unless the backend has already dropped it."""
        state, tree.state = cast("S", tree.state), None
        if state not in self._running:
            return None
        self._running.discard(state)
        return state

    def _state_of(self, tree: TokenTree) -> S:
        state = cast("S | None", tree.state)
        if state is not None:
            state.follow()
            if tree.root in state.forgotten:  # a committed token cannot run a second time
                self._forget(tree)
                state = None
        if state is None:
            state = tree.state = self._new_state(tree)
            self._running.add(state)
        return state

    def _in_turn(self, queries: Sequence[Query]) -> list[QueryResult]:
        """Read the prompts of queries, and answer every query as soon as its prompt is read."""
        results: dict[int, QueryResult] = {}
        while waiting := {i: query for i, query in enumerate(queries) if i not in results}:
            is_read = self._read([query.tree for query in waiting.values()])
            ready = {i: q for (i, q), done in zip(waiting.items(), is_read, strict=True) if done}
            if ready:
                group = list(ready.values())
                scored = [node.token for query in group for node in query.score]
                check_tokens(scored, self.vocabulary_size)
                results.update(zip(ready, self._answer(group), strict=True))
        return [results[i] for i in range(len(queries))]

    def _answer(self, queries: Sequence[Query]) -> list[QueryResult]:
        # score many nodes, such as those of a long text, in parts
        size = max(MIN_PART, PART_BYTES // (4 * self.vocabulary_size))
        long = {i: self._score_long(q, size) for i, q in enumerate(queries) if len(q.score) > size}
        others = [query for i, query in enumerate(queries) if i not in long]
        read_others = iter(read(others, self._advance(others), self._tokens) if others else ())
        results = [long[i] if i in long else next(read_others) for i in range(len(queries))]
        for query, result in zip(queries, results, strict=True):
            if result.has_nan:
                self._forget(query.tree)
        return results

    def _score_long(self, query: Query, size: int) -> QueryResult:
        """Answer a query, `size` scored nodes at a time, and drop logits that only scores need."""
        state = self._state_of(query.tree)
        kept = {query.tree.root, *query.evaluate, *state.rows}
        scores: list[float] = []
        # score one node alone first: the root's logits stay, and keep those of their pass alive
        for start in range(1 - size, len(query.score), size):
            part = query.score[max(0, start) : start + size]
            self._advance([replace(query, evaluate=(), score=part)])
            scores += logprobs([(state, node) for node in part]).tolist()
            state.forget({node.parent for node in part if node.parent} - kept)
        # answer the rest of the query
        rest = replace(query, score=())
        (result,) = read([rest], self._advance([rest]), self._tokens)
        return replace(result, logprobs=tuple(scores))

    def _read(self, trees: Sequence[TokenTree], others: Iterable[S] = ()) -> list[bool]:
        """Read a piece of the long prompts, and return the result of `Backend.read_piece`."""
        # start new requests, except those that can soon reuse what another one is reading
        new = {i: tree.ids for i, tree in enumerate(trees) if tree.state is None}
        known = {*others, *(self._state_of(tree) for tree in trees if tree.state is not None)}
        half_read = [state.tree.ids for state in known if state.unread > MIN_SHARED]
        before = {-1 - i: ids for i, ids in enumerate(half_read)}
        waits = self._late({**before, **new}) if new else set()
        for i in new.keys() - waits:
            self._state_of(trees[i])  # this may drop the states of others
        # long prompts share a piece, which is smaller while another request writes
        states = {i: self._state_of(t) for i, t in enumerate(trees) if t.state is not None}
        unread = {i: state.unread for i, state in states.items()}
        long = [i for i, count in unread.items() if count > MIN_SHARED]
        someone_writes = any(state.unread <= MIN_SHARED for state in known)
        size = self._pieces[0] if someone_writes else self._pieces[1]
        share = max(1, min(size, self._pieces[1] // max(1, len(long))))
        # the rest of a prompt runs later, together with the nodes, if it fits into the share
        if parts := [(states[i], share) for i in long if unread[i] > share]:
            self._run_parts(parts)
        return [i in states and unread[i] <= max(share, MIN_SHARED) for i in range(len(trees))]
