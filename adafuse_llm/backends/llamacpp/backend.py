"""A member that consists of a GGUF model, which llama.cpp runs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import psutil
import torch

from adafuse_llm.backends.base import Query, QueryResult
from adafuse_llm.backends.gguf.header import GGUFFacts, read_facts
from adafuse_llm.backends.llamacpp.context import PIECE_TOKENS, CacheFullError, Context, Entry
from adafuse_llm.backends.llamacpp.library import Settings
from adafuse_llm.backends.llamacpp.state import LlamaState
from adafuse_llm.backends.llamacpp.trial import load, try_file
from adafuse_llm.backends.logits.backend import PREFIX_CACHE_BYTES, LogitsBackend
from adafuse_llm.backends.logits.pass_cost import measured_token_cost
from adafuse_llm.backends.logits.state import check_tokens, learn
from adafuse_llm.backends.prefixes import CachedTokens, PrefixCache
from adafuse_llm.errors import InvalidOptionError, LoadError
from adafuse_llm.tree.tokens import Node, TokenTree

MAX_KEPT = 16
"""Maximum number of finished requests whose cells a member keeps. Cells in use slow passes down."""

DEFAULT_TOKENS = 16_384
"""Default number of tokens in the cache. A longer context window of the model raises it, and
`MEMORY_SHARE` of the free memory limits it."""

MEMORY_SHARE = 0.25
"""Largest share of the free memory that the cache takes by default."""

SPARE_CELLS = 512
"""Number of cells for the nodes of trees, in addition to those for `context`."""

PART_NODES = 64
"""Maximum number of nodes that a request adds to a batch at a time. Each may need a sequence."""

Batch = list[tuple[LlamaState, Entry, Node | None]]
"""Tokens to run: for each, its request's state, its entry, and its node, or None if no query needs
the logits after the token."""


class LlamaCppBackend(LogitsBackend[LlamaState]):
    """A member that consists of a GGUF model, which llama.cpp runs.

    A call of llama.cpp can evaluate nodes of many requests. The requests share a cache with a
    fixed number of cells, one for each token. A child process tries a new file first.

    Args:
        path: the GGUF file, or the first file of a split model.
        name: the member's name.
        context: number of tokens in the cache, which has `SPARE_CELLS` more cells. `GGUFMember`
            describes this argument and the following ones.

    Attributes:
        facts: facts from the header of the file.
        tokenizer: the tokenizer. Its ``warnings`` are defects of the file that make answers worse.

    Raises:
        LoadError: llama.cpp cannot load the file, or would end or block this process; or the cache
            does not fit into the memory.
        UnsupportedModelError: the model cannot be a member.
        InvalidOptionError: an option is not valid.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str,
        *,
        context: int | None = None,
        threads: int | None = None,
        gpu_layers: int | None = None,
        flash_attention: bool | None = None,
        cache_type: str = "f16",
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        repeatable: bool = False,
    ) -> None:
        self.name = name
        label = f"member {name!r} ({path})"
        # check the header, try the file in a child process, and load it
        self.facts = facts = read_facts(os.fspath(path))
        flash = True if repeatable else flash_attention
        settings = Settings(not repeatable, gpu_layers, flash, cache_type)
        try_file(facts, label, settings)
        self._model, vocabulary = load(facts, label, settings)
        self.parameters = self._model.parameters
        self.tokenizer = vocabulary.tokenizer
        self._repeatable = repeatable
        if repeatable and self._model.on_gpu:
            raise InvalidOptionError(
                f"{label}: repeatable=True needs all layers on the CPU. Pass gpu_layers=0, or "
                "leave out repeatable"
            )
        self._set_up(vocabulary, self.tokenizer.end_ids, self._model.vocabulary_size)
        self.device = "GPU of llama.cpp" if self._model.on_gpu else "cpu"
        # create the cache, and limit how much of it finished requests may keep
        tokens = self._cache_tokens(facts, context, cache_type)
        self.context_window = min(facts.context_window or tokens, tokens)
        cells, threads = tokens + SPARE_CELLS, threads or _cores()
        self._context = Context(self._model, cells=cells, threads=threads, repeatable=repeatable)
        most = self._context.batch_tokens
        self._pieces = (most, most) if self._model.on_gpu else PIECE_TOKENS
        self._batch: Batch = []  # the tokens for `_run`
        self._in_parts = False
        self._cell_bytes = max(1, facts.cache_bytes(1, cache_type))
        self.cache_limit = self._context.cells * self._cell_bytes
        self._kept: PrefixCache[int] = PrefixCache(prefix_cache_bytes // self._cell_bytes, MAX_KEPT)
        self._context.use_threads(1)  # as `measured_token_cost` asks
        self.token_cost = measured_token_cost(self, self._forget)
        self._context.use_threads(threads)

    @property
    def lane(self) -> str:
        return f"member {self.name}"  # its own, because a pass releases Python's lock

    def cache_bytes(self, tokens: int) -> int:
        return tokens * self._cell_bytes

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def clear_prefix_cache(self) -> None:
        """Drop the cells of all finished requests."""
        with self._lock:
            self._context.give_back(self._kept.clear())

    def close(self) -> None:
        """Free the model and its cache. Later evaluations fail."""
        with self._lock:
            self._running.clear()
            self._kept.clear()
            self._context.close()
            self.tokenizer.close()
            self._model.close()

    def _read(self, trees: Sequence[TokenTree], others: Iterable[LlamaState] = ()) -> list[bool]:
        if self._context.closed:
            raise RuntimeError("the member is closed")
        self._batch = []  # a call that failed may have left tokens
        return super()._read(trees, others)

    def _made_room(self, error: BaseException) -> bool:
        # a repeatable member never uses a freed cell again until it clears the cache
        is_full = self._repeatable and isinstance(error, CacheFullError)
        if is_full:
            self._start_anew()
        return is_full

    def _run_parts(self, parts: Sequence[tuple[LlamaState, int]]) -> None:
        self._batch = [(state, *planned) for state, count in parts for planned in state.read(count)]
        self._run()

    def _in_turn(self, queries: Sequence[Query]) -> list[QueryResult]:
        try:
            return super()._in_turn(queries)
        except CacheFullError:
            if len(queries) > 1:
                raise
        # the cache is full: forget the request, and with `repeatable` all others, too
        self._forget(queries[0].tree)
        if self._repeatable:
            self._start_anew()
        try:
            # let every part of a query take the cells of the part before it, so that all nodes fit
            self._in_parts = True
            self._context.fills_gaps = True  # a repeatable member has nothing else in its cache
            return self._answer(queries)
        finally:
            self._in_parts = False
            self._context.fills_gaps = not self._repeatable

    def _advance(self, queries: Sequence[Query]) -> list[LlamaState]:
        states = []
        for query in queries:
            # a second query of the same request runs after the first
            state = self._state_of(query.tree)
            if state in self._planned():
                self._run()
            # plan the nodes whose logits are missing, and the uncached nodes above them
            missing = state.missing(query)
            for start in range(0, len(missing), PART_NODES):
                if start:  # sequences cannot be copied before their tokens have run
                    self._run()
                if self._in_parts:
                    state.drop_tips()
                nodes = missing[start : start + PART_NODES]
                self._make_room(len(nodes), state)
                below = state.uncached([node for node in nodes if node is not state.tree.root])
                check_tokens([node.token for node in below], self.vocabulary_size)
                self._batch += [(state, *planned) for planned in state.plan(below, set(nodes))]
            states.append(state)
        self._run()
        return states

    def _planned(self) -> set[LlamaState]:
        return {state for state, _, _ in self._batch}

    def _run(self) -> None:
        states, limit = self._planned(), self._context.batch_tokens
        batch, self._batch = self._batch, []
        for start in range(0, len(batch), limit):
            # run one call, and keep the logits of its nodes
            part = batch[start : start + limit]
            logits = self._decode([entry for _, entry, _ in part], states)
            learn(logits, [(state, [node]) for state, _, node in part if node is not None])
            # count the costs of the call
            for state, tokens in Counter(state for state, _, _ in part).items():
                state.tokens += tokens
                state.passes += 1
        for state in states:
            state.ready = state.committed

    def _decode(self, entries: Sequence[Entry], states: Collection[LlamaState]) -> torch.Tensor:
        while True:
            try:
                return torch.from_numpy(self._context.run(entries))
            except CacheFullError:  # take cells from other requests, and try again
                if self._repeatable or not self._shed(states):
                    raise

    def _make_room(self, count: int, state: LlamaState | None = None) -> None:
        # first take sequences from other requests, then run the batch; last, drop nodes of `state`
        while len(self._context.free) < count:
            if self._shed({*self._planned(), state}):
                continue
            if self._batch:
                self._run()
            else:
                assert state is not None, "a context has sequences for more than one request"
                state.drop_tips()

    def _shed(self, needed: Collection[LlamaState | None]) -> bool:
        """Drop cells of a request that is not `needed`; return False if there is none."""
        # drop a finished request, or else the nodes of a running one, or else a whole running one
        if len(self._kept):
            self._context.give_back([self._kept.pop_oldest()])
            return True
        others = [state for state in self._running if state not in needed]
        for state in others:
            if state.tips:
                state.drop_tips()
                return True
        for state in others[:1]:
            self._forget(state.tree)
        return bool(others)

    def _new_state(self, tree: TokenTree) -> LlamaState:
        self._make_room(1)
        state = LlamaState(tree, self._context)
        if prefix := self._kept.longest(tree.ids, self._sources()):
            source, length = prefix
            self._context.copy(source, state.trunk, 0, length)
            state.committed = state.ready = state.reused = length
        return state

    def _late(self, prompts: Mapping[int, Sequence[int]]) -> set[int]:
        # requests that find no free sequence wait, too
        free = len(self._context.free) + len(self._kept)
        return super()._late(prompts) | {*[*prompts][max(1, free) :]}

    def _sources(self) -> list[CachedTokens[int]]:
        return [(state.tree.ids, state.ready, state.trunk) for state in self._running]

    def _keep(self, state: LlamaState) -> None:
        # keep the tokens of the trunk that have run, within the limit
        state.drop_tips()
        ids = self._kept.fitting(state.tree.ids[: state.ready])
        if len(ids):
            self._context.cut(state.trunk, len(ids))
            self._context.give_back(self._kept.add(ids, state.trunk))
        else:
            state.drop()

    def _start_anew(self) -> None:
        # forget all requests; running ones evaluate their tokens again
        for state in list(self._running):
            self._forget(state.tree)
        self._context.give_back(self._kept.clear())
        self._context.clear()

    def _cache_tokens(self, facts: GGUFFacts, context: int | None, cache_type: str) -> int:
        free = self.free_bytes()
        if self._model.on_gpu and torch.cuda.is_available():
            free = torch.cuda.mem_get_info()[0]
        # choose a default
        if context is None:
            fitting = int(MEMORY_SHARE * free / max(1, facts.cache_bytes(1, cache_type)))
            return max(SPARE_CELLS, min(fitting, max(DEFAULT_TOKENS, facts.context_window or 0)))
        # or check that the user's choice fits into the memory
        size = facts.cache_bytes(context + SPARE_CELLS, cache_type)
        if size > free and not self._model.on_gpu:
            raise LoadError(
                f"{self._model.label} cannot be loaded: a cache of type {cache_type} for "
                f"{context:,} tokens takes {size / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB of "
                "memory are free. Lower GGUFMember(context=...), or choose another cache_type."
            )
        return context


def _cores() -> int:
    # the number of physical cores that this process may use
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(allowed or 1, psutil.cpu_count(logical=False) or allowed or 1))
