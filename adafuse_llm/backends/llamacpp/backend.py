"""A GGUF model, run by llama.cpp, as a member."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from adafuse_llm.backends.base import Backend, Query, QueryResult
from adafuse_llm.backends.gguf.header import GGUFFacts, read_facts
from adafuse_llm.backends.llamacpp.context import PIECE_TOKENS, CacheFullError, Context, Entry
from adafuse_llm.backends.llamacpp.library import Settings
from adafuse_llm.backends.llamacpp.state import LlamaState
from adafuse_llm.backends.llamacpp.trial import load, try_file
from adafuse_llm.backends.logits.readout import TokenTable, distribution, read
from adafuse_llm.backends.logits.rows import Logits, check_tokens
from adafuse_llm.backends.prefixes import MIN_SHARED, KeptPrefixes, late, longest
from adafuse_llm.backends.reading import in_turn, read_piece
from adafuse_llm.errors import InvalidOptionError, LoadError
from adafuse_llm.text.codec import TextCodec
from adafuse_llm.tree import Node, TokenTree

if TYPE_CHECKING:
    from numpy.typing import NDArray


PREFIX_CACHE_BYTES = 256 * 2**20
"""Default maximum size, in bytes, of the cells that a member keeps from finished requests."""

MAX_KEPT = 16
"""Maximum number of finished requests whose cells a member keeps. Every pass reads the positions of
all cells, so kept cells are not free."""

DEFAULT_TOKENS = 16_384
"""Number of tokens in the cache by default, or the context window of the model if it is larger, up
to the number that fits into `MEMORY_SHARE` of the free memory."""

MEMORY_SHARE = 0.25
"""Largest share of the free memory that the cache takes by default."""

SPARE_CELLS = 512
"""Number of additional cells, for the nodes of trees. So a request always has enough cells: it can
evaluate any number of nodes, in parts of `PART_NODES`."""

PART_NODES = 64
"""Maximum number of nodes that are planned together. Each may need a sequence of its own."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of weights that are not quantized."""


Batch = list[tuple[LlamaState, Entry, Node | None]]
"""Tokens that run together: the state of its request, the token, and its node if the logits of the
node are needed."""


class LlamaCppBackend(Backend):
    """A member that consists of a GGUF model, which llama.cpp runs.

    One call of llama.cpp evaluates all nodes that requests wait for. The cache has a fixed number
    of cells, one for each token, which all requests share. Before the constructor loads a file, a
    child process tries it, once for each library, processor and settings (`trial`).

    Args:
        path: the GGUF file, or the first file of a split model.
        name: the member's name.
        context: as all other arguments, the field of `GGUFMember` of the same name, which checks
            the values. The cache has `SPARE_CELLS` more cells, for tokens that members propose.

    Raises:
        LoadError: llama.cpp cannot load the file, or would end or block this process; or the memory
            has no room for the cache.
        UnsupportedModelError: the model cannot be a member.
        InvalidOptionError: an option is not valid.
        MissingDependencyError: llama.cpp is not installed.
    """

    full = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str,
        *,
        context: int | None = None,
        threads: int | None = None,
        gpu_layers: int | None = None,
        flash_attention: bool | None = None,
        cache_type: str | None = None,
        prefix_cache_bytes: int | None = None,
        repeatable: bool = False,
        end_tokens: Sequence[str] = (),
    ) -> None:
        cache_type = cache_type or "f16"
        self.name = name
        self.path = Path(path)
        label = f"member {name!r} ({path})"
        facts = read_facts(self.path)  # this also checks the file before llama.cpp reads it
        self.parameters = facts.parameters
        flash = True if repeatable else flash_attention
        settings = try_file(facts, label, Settings(not repeatable, gpu_layers, flash, cache_type))
        self._model, self._text = load(self.path, label, settings)
        self.drafts_sparingly = facts.file_type not in FLOATS and not self._model.on_gpu
        self._repeatable = repeatable
        if repeatable and self._model.on_gpu:
            raise InvalidOptionError(
                f"{label}: repeatable=True needs all layers on the CPU. Pass gpu_layers=0, or "
                "leave out repeatable"
            )
        self.codec: TextCodec = self._text.codec
        self.end_ids = self._text.end_ids | self._ids_of(end_tokens)
        self.device = "GPU of llama.cpp" if self._model.on_gpu else "cpu"
        tokens = self._cache_tokens(facts, context, cache_type)
        self.context_window = min(facts.context_window or tokens, tokens)
        cells, threads = tokens + SPARE_CELLS, threads or _cores()
        self._context = Context(self._model, cells=cells, threads=threads, repeatable=repeatable)
        text = self._text
        self._tokens = TokenTable(self.end_ids, lambda: text.token_texts, self._model.vocabulary)
        self._kept: KeptPrefixes[_Kept] = KeptPrefixes()
        self._lock = threading.Lock()  # several engines may share this member
        self._running: weakref.WeakSet[LlamaState] = weakref.WeakSet()
        self._cell_bytes = max(1, facts.cache_bytes(1, cache_type))
        self.cache_limit = self._context.cells * self._cell_bytes
        limit = PREFIX_CACHE_BYTES if prefix_cache_bytes is None else prefix_cache_bytes
        self._kept_tokens = limit // self._cell_bytes

    @property
    def lane(self) -> str:
        return f"member {self.name}"  # its passes release the interpreter

    def cache_bytes(self, tokens: int) -> int:
        """Return the size, in bytes, of the cells of a request with up to `tokens` tokens."""
        return tokens * self._cell_bytes

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    @property
    def token_texts(self) -> Sequence[str]:
        return self._text.token_texts

    def prepare_draws(self) -> None:
        self._tokens.prepare_draws()

    @property
    def follows_grammars(self) -> bool:
        return self._text.follows_grammars

    def grammar_tokenizer(self) -> Any:
        return self._text.grammar_tokenizer(self._model.vocabulary, self.end_ids)

    @torch.inference_mode()
    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        with self._lock:
            try:
                return in_turn(queries, self._read, self._evaluate_once)
            except BaseException as error:
                self._forget_all(query.tree.state for query in queries)
                is_full = isinstance(error, CacheFullError)
                if not is_full or (len(queries) > 1 and not self._repeatable):
                    raise
            try:
                if self._repeatable:
                    self._start_anew()
                    if len(queries) > 1:
                        return in_turn(queries, self._read, self._evaluate_once)
                    self._context.fills_gaps = True  # nothing else is in the cache
                return self._evaluate_once(queries, in_parts=True)
            except BaseException:
                self._forget_all(query.tree.state for query in queries)
                raise
            finally:
                self._context.fills_gaps = not self._repeatable

    @torch.inference_mode()
    def read_piece(self, trees: Sequence[TokenTree]) -> list[bool]:
        with self._lock:
            try:
                return self._read(trees, self._running)
            except BaseException as error:
                self._forget_all(tree.state for tree in trees)
                if not (self._repeatable and isinstance(error, CacheFullError)):
                    raise
            self._start_anew()
            return [False] * len(trees)

    def release(self, tree: TokenTree) -> None:
        with self._lock:
            state, tree.state = tree.state, None
            if self._context.closed:  # by another engine that shares this member
                return
            if isinstance(state, LlamaState) and state in self._running:
                state.follow()
                self._running.discard(state)
                self._keep(state)

    def distribution(self, tree: TokenTree, node: Node) -> NDArray[np.floating[Any]]:
        with self._lock:
            return distribution(tree, node)

    def clear_prefix_cache(self) -> None:
        """Drop the cells of all finished requests."""
        with self._lock:
            self._drop_kept()

    def close(self) -> None:
        """Free the model and its cache. Later evaluations fail."""
        with self._lock:
            self._context.close()
            self._text.close()
            self._model.close()

    def _read(self, trees: Sequence[TokenTree], others: Iterable[LlamaState] = ()) -> list[bool]:
        if self._context.closed:
            raise RuntimeError("the member is closed")
        most = self._context.batch_tokens
        return read_piece(
            trees,
            others,
            (most, most) if self._model.on_gpu else PIECE_TOKENS,
            find_late=self._late,
            state_of=self._state_of,
            read=self._run_parts,
        )

    def _run_parts(self, parts: Sequence[tuple[LlamaState, int]]) -> None:
        """Run the next committed tokens of each request, that many."""
        self._run([(state, *each) for state, count in parts for each in state.read(count)])

    def _evaluate_once(
        self, queries: Sequence[Query], *, in_parts: bool = False
    ) -> list[QueryResult]:
        """Evaluate queries together.

        With `in_parts`, the cells of all other nodes are dropped before each part of a query, so
        the cache has enough cells for any number of nodes.
        """
        scored = [node.token for query in queries for node in query.score]
        check_tokens(scored, self._model.vocabulary)
        states = []
        batch: Batch = []
        for query in queries:
            state = self._state_of(query.tree, batch)
            if state in _states(batch):
                self._run(batch)
            missing = state.missing(query)
            for start in range(0, len(missing), PART_NODES):
                if start:  # sequences cannot be copied before their tokens have run
                    self._run(batch)
                if in_parts:
                    state.drop_tips()
                self._plan(state, missing[start : start + PART_NODES], batch)
            states.append(state)
        self._run(batch)
        results = read(queries, states, self._tokens)
        for state, result in zip(states, results, strict=True):
            if result.has_nan:
                self._forget(state)
        return results

    def _plan(self, state: LlamaState, nodes: Sequence[Node], batch: Batch) -> None:
        """Add the evaluation of nodes to a batch."""
        self._make_room(len(nodes), batch, state)
        below = state.uncached([node for node in nodes if node is not state.tree.root])
        check_tokens([node.token for node in below], self._model.vocabulary)
        batch += [(state, *each) for each in state.plan(below, set(nodes))]

    def _run(self, batch: Batch) -> None:
        """Run the tokens of a batch, and empty the batch."""
        states, limit = _states(batch), self._context.batch_tokens
        for start in range(0, len(batch), limit):
            part = batch[start : start + limit]
            logits = Logits(self._decode([entry for _, entry, _ in part], states))
            kept = [(state, node) for state, _, node in part if node is not None]
            for row, (state, node) in enumerate(kept):
                state.learn([node], logits, row)
            for state, tokens in Counter(state for state, _, _ in part).items():
                state.tokens += tokens
                state.passes += 1
        for state in states:
            state.settle()
        batch.clear()

    def _decode(self, entries: Sequence[Entry], states: Collection[LlamaState]) -> torch.Tensor:
        """Run tokens. If the cache is full, drop cells that the requests do not need."""
        while True:
            try:
                return torch.from_numpy(self._context.run(entries))
            except CacheFullError:
                if self._repeatable or not self._shed(states):
                    raise

    def _make_room(self, count: int, batch: Batch, state: LlamaState | None = None) -> None:
        """Make sure that `count` sequences are free."""
        while len(self._context.free) < count:
            if self._shed({*_states(batch), *filter(None, [state])}):
                continue
            if batch:
                self._run(batch)
            else:
                assert state is not None, "a context has sequences for more than one request"
                state.drop_tips()

    def _shed(self, needed: Collection[LlamaState]) -> bool:
        """Drop what costs least to compute again, but not what the states in `needed` hold.

        Return False if there is nothing to drop.
        """
        if self._kept:
            self._context.give_back([self._kept.pop_oldest().sequence])
            return True
        others = [state for state in self._running if state not in needed]
        for state in others:
            if state.tips:
                state.drop_tips()
                return True
        for state in others[:1]:
            self._forget(state)
        return bool(others)

    def _state_of(self, tree: TokenTree, batch: Batch | None = None) -> LlamaState:
        """Return the current state of a request, and create it for a new request.

        The trunk of a new request begins with the cached cells of the prompt's first tokens.
        """
        if isinstance(tree.state, LlamaState):
            tree.state.follow()
            return tree.state
        self._make_room(1, [] if batch is None else batch)
        state = LlamaState(tree, self._context)
        found = longest(tree.ids, self._kept, self._known()) if self._kept_tokens else None
        if found is not None:
            state.begin_with(found[0].sequence, found[1])
        self._running.add(state)
        tree.state = state
        return state

    def _late(self, prompts: Mapping[int, Sequence[int]]) -> set[int]:
        """Return the requests for which another one reads cells, or which have no sequence."""
        waits = {*list(prompts)[max(1, len(self._context.free) + len(self._kept)) :]}
        if self._kept_tokens:
            waits |= late(prompts, self._kept, list(self._known()))
        return waits

    def _known(self) -> Iterator[tuple[Sequence[int], int, _Kept]]:
        """Yield the tokens of running requests, how many of them are cached, and their cells."""
        for state in self._running:
            ready = state.ready
            yield state.tree.ids, ready, _Kept(state.trunk, ready)

    def _keep(self, state: LlamaState) -> None:
        """Keep the trunk of a finished request, if no kept one begins with its tokens."""
        state.drop_tips()
        length = min(state.ready, self._kept_tokens)
        ids = np.array(state.tree.ids[:length], dtype=np.int64)
        if length < MIN_SHARED or self._kept.shared(ids) == length:
            state.drop()
            return
        self._context.cut(state.trunk, length)
        dropped = [self._kept.add(ids, _Kept(state.trunk, length))]
        tokens = sum(kept.length for kept in self._kept)  # of MAX_KEPT at most
        while tokens > self._kept_tokens or len(self._kept) > MAX_KEPT:
            dropped.append(oldest := self._kept.pop_oldest())
            tokens -= oldest.length
        self._context.give_back(each.sequence for each in dropped if each is not None)

    def _drop_kept(self) -> None:
        self._context.give_back(kept.sequence for kept in self._kept)
        self._kept = KeptPrefixes()

    def _forget_all(self, states: Iterable[object]) -> None:
        for state in list(states):
            self._forget(state)

    def _forget(self, state: object) -> None:
        """Drop the state of a request, because it is incomplete or wrong, or needs too much room.

        The request can go on, because its tokens are evaluated again.
        """
        if isinstance(state, LlamaState) and state in self._running:
            self._running.discard(state)
            state.drop()
            state.tree.state = None

    def _start_anew(self) -> None:
        """Empty the cache. Requests go on, because their tokens are evaluated again."""
        self._forget_all(self._running)
        self._drop_kept()
        self._context.clear()

    def _ids_of(self, end_tokens: Sequence[str]) -> set[int]:
        """Return the ids of tokens by their spellings."""
        vocabulary = self._text.tokenizer.get_vocab() if end_tokens else {}
        if unknown := [token for token in end_tokens if token not in vocabulary]:
            raise InvalidOptionError(
                f"{self._model.label}: end_tokens must be spellings of tokens of the file; "
                f"{unknown[0]!r} is none"
            )
        return {vocabulary[token] for token in end_tokens}

    def _cache_tokens(self, facts: GGUFFacts, context: int | None, cache_type: str) -> int:
        """Return the number of tokens of the cache, given the number that the user has set.

        Raises:
            LoadError: that number does not fit into the memory.
        """
        free = self.free_bytes()
        if self._model.on_gpu and torch.cuda.is_available():
            free = torch.cuda.mem_get_info()[0]
        if context is None:
            fitting = int(MEMORY_SHARE * free / max(1, facts.cache_bytes(1, cache_type)))
            return max(SPARE_CELLS, min(fitting, max(DEFAULT_TOKENS, facts.context_window or 0)))
        size = facts.cache_bytes(context + SPARE_CELLS, cache_type)
        if size > free and not self._model.on_gpu:
            raise LoadError(
                f"{self._model.label} cannot be loaded: a cache of type {cache_type} for "
                f"{context:,} tokens takes {size / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB of "
                "memory are free. Lower GGUFMember(context=...), or choose another cache_type."
            )
        return context


def _states(batch: Batch) -> set[LlamaState]:
    return {state for state, _, _ in batch}


@dataclass(frozen=True, eq=False)
class _Kept:
    """The cells of a finished request: the sequence that has them, and the number of tokens."""

    sequence: int
    length: int


def _cores() -> int:
    """Return the number of physical cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(allowed or 1, psutil.cpu_count(logical=False) or allowed or 1))
