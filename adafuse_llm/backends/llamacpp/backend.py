"""A GGUF model, run by llama.cpp, as a member."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from adafuse_llm.backends.base import Backend, Query, QueryResult
from adafuse_llm.backends.gguf.header import CACHE_TYPES, GGUFFacts, read_facts
from adafuse_llm.backends.llamacpp.batch import Batch, LlamaState
from adafuse_llm.backends.llamacpp.context import (
    PIECE_TOKENS,
    CacheFullError,
    Context,
    Entry,
)
from adafuse_llm.backends.llamacpp.model import Model
from adafuse_llm.backends.llamacpp.sequences import FreeSequences, TreeSequences
from adafuse_llm.backends.llamacpp.trial import Settings, measure, try_file
from adafuse_llm.backends.llamacpp.vocabulary import LlamaText
from adafuse_llm.backends.logits.readout import TokenTable, distribution, read
from adafuse_llm.backends.logits.rows import Logits, check_tokens, separate
from adafuse_llm.backends.prefixes import MIN_SHARED, KeptPrefixes, late, longest
from adafuse_llm.backends.reading import in_turn, read_piece
from adafuse_llm.errors import InvalidOptionError, LoadError, UnsupportedModelError
from adafuse_llm.text.codec import TextCodec
from adafuse_llm.tree import Node, TokenTree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from adafuse_llm.backends.huggingface.text import HuggingFaceText

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


class LlamaCppBackend(Backend):
    """A member that consists of a GGUF model, which llama.cpp runs.

    One call of llama.cpp evaluates all nodes that requests wait for. The cache has a fixed number
    of cells, one for each token, which all requests share. Before the constructor loads a file, a
    child process tries it, once for each library, processor and settings (`trial`).

    Args:
        path: the GGUF file, or the first file of a split model.
        name: the member's name.
        context: number of tokens in the cache, which also limits the context window. The default
            is 16,384, or the context window of the model if it is larger, but at most as many as
            fit into a quarter of the free memory. The cache has `SPARE_CELLS` more cells, for
            tokens that members propose.
        threads: number of CPU threads. The default is the number of physical cores.
        gpu_layers: number of layers that run on GPUs. The default is all layers if llama.cpp was
            built for a GPU.
        flash_attention: whether to use flash attention. By default, llama.cpp decides.
        cache_type: type of keys and values: ``"f32"``, ``"f16"`` (the default), ``"bf16"``,
            ``"q8_0"`` or ``"q4_0"``. The last two need flash attention.
        prefix_cache_bytes: maximum size, in bytes, of the cells that the member keeps from finished
            requests. Later requests that begin with the same tokens reuse them. With 0, the member
            keeps no cells.
        repeatable: whether a token's numbers depend only on the tokens before it, and not on what
            else runs, on drafts or on reused prefixes. It needs flash attention, and all layers on
            the CPU.
        end_tokens: spellings of tokens that end a response, in addition to those that the file
            names and the one with which its chat template ends a reply.
        tokenizer: a Hugging Face tokenizer with the same tokens as the file. By default, the member
            uses the vocabulary in the file.

    Raises:
        LoadError: llama.cpp cannot load the file, it ends the process on this processor, the model
            computes NaN, or the memory has no room for the cache.
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
        tokenizer: Any = None,
    ) -> None:
        cache_type = cache_type or "f16"
        _check_options(context, threads, flash_attention, cache_type)
        self.name = name
        self.path = Path(path)
        label = f"member {name!r} ({path})"
        facts = read_facts(self.path)  # this also checks the file before llama.cpp reads it
        self.parameters = facts.parameters
        flash = True if repeatable else flash_attention
        settings, cell_bytes = try_file(
            facts, label, Settings(not repeatable, gpu_layers, flash, cache_type)
        )
        self._model = Model(self.path, label, gpu_layers=gpu_layers, reorder=settings.reorder)
        self.drafts_sparingly = facts.file_type not in FLOATS and not self._model.on_gpu
        self._repeatable = repeatable
        if repeatable:
            flash_attention = self._check_repeatable(flash_attention)
        self._text, ends = _text_of(self._model, tokenizer)
        self.codec: TextCodec = self._text.codec
        self.end_ids = ends | self._ids_of(end_tokens)
        self.device = "GPU of llama.cpp" if self._model.on_gpu else "cpu"
        tokens = self._cache_tokens(facts, context, cache_type)
        self.context_window = min(facts.context_window or tokens, tokens)
        self._context = Context(
            self._model,
            cells=tokens + SPARE_CELLS,
            threads=threads or _cores(),
            flash_attention=flash_attention,
            cache_type=cache_type,
            repeatable=repeatable,
        )
        self._free = FreeSequences(self._context, self._context.sequences)
        text = self._text
        self._tokens = TokenTable(self.end_ids, lambda: text.token_texts, self.vocabulary_size)
        self._kept: KeptPrefixes[_Kept] = KeptPrefixes()
        self._kept_tokens = 0
        self._lock = threading.Lock()  # several engines may share this member
        self._running: weakref.WeakSet[LlamaState] = weakref.WeakSet()
        self._cell_bytes = cell_bytes or measure(self._model, settings)
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
    def vocabulary_size(self) -> int:
        """Number of tokens in a distribution."""
        return self._model.vocabulary

    @property
    def token_texts(self) -> Sequence[str]:
        return self._text.token_texts

    def prepare_draws(self) -> None:
        self._tokens.prepare_draws()

    @property
    def follows_grammars(self) -> bool:
        return self._text.follows_grammars

    def grammar_tokenizer(self) -> Any:
        return self._text.grammar_tokenizer(self.vocabulary_size, self.end_ids)

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
            if isinstance(self._text, LlamaText):
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
        batch = Batch()
        for state, count in parts:
            batch.add(state, state.sequences.read(count), ())
        self._run(batch)

    def _evaluate_once(
        self, queries: Sequence[Query], *, in_parts: bool = False
    ) -> list[QueryResult]:
        """Evaluate queries together.

        Args:
            queries: the queries.
            in_parts: whether to drop the cells of all other nodes before each part of a query, so
                that the cache has enough cells for any number of nodes.
        """
        scored = [node.token for query in queries for node in query.score]
        check_tokens(scored, self.vocabulary_size)
        states = []
        batch = Batch()
        for query in queries:
            state = self._state_of(query.tree, batch)
            if state in batch.states:
                self._run(batch)
            missing = state.missing(query)
            for start in range(0, len(missing), PART_NODES):
                if start:  # sequences cannot be copied before their tokens have run
                    self._run(batch)
                if in_parts:
                    state.sequences.drop_tips()
                self._plan(state, missing[start : start + PART_NODES], batch)
            states.append(state)
        separate(states)
        self._run(batch)
        results = read(queries, states, self._tokens)
        for state, result in zip(states, results, strict=True):
            if result.has_nan:
                self._forget(state)
        return results

    def _plan(self, state: LlamaState, nodes: Sequence[Node], batch: Batch) -> None:
        """Add the evaluation of nodes to a batch."""
        self._make_room(len(nodes), batch, state)
        sequences, root = state.sequences, state.tree.root
        below = sequences.missing([node for node in nodes if node is not root])
        check_tokens([node.token for node in below], self.vocabulary_size)
        kept = set(nodes)
        batch.add(state, sequences.plan(below, kept), [n for n in (root, *below) if n in kept])

    def _run(self, batch: Batch) -> None:
        """Run the tokens of a batch, and empty the batch."""
        for piece in batch.pieces(self._context.batch_tokens):
            logits = Logits(self._decode(piece.entries, batch.states))
            row = 0
            for state, nodes, tokens in piece.parts:
                state.learn(nodes, logits, row)
                row += len(nodes)
                state.tokens += tokens
            for state in dict.fromkeys(state for state, _, _ in piece.parts):
                state.passes += 1
        for state in batch.states:
            state.sequences.settle()
        batch.clear()

    def _decode(self, entries: Sequence[Entry], states: Collection[LlamaState]) -> torch.Tensor:
        """Run tokens. If the cache is full, drop cells that the requests do not need."""
        while True:
            try:
                return self._context.run(entries)
            except CacheFullError:
                if self._repeatable or not self._shed(states):
                    raise

    def _make_room(self, count: int, batch: Batch, state: LlamaState | None = None) -> None:
        """Make sure that `count` sequences are free."""
        while len(self._free) < count:
            if self._shed({*batch.states, *filter(None, [state])}):
                continue
            if batch.states:
                self._run(batch)
            else:
                assert state is not None, "a context has sequences for more than one request"
                state.sequences.drop_tips()

    def _shed(self, needed: Collection[LlamaState]) -> bool:
        """Drop what costs least to compute again. Return False if there is nothing to drop.

        Args:
            needed: the states of requests that must stay.
        """
        if self._kept:
            self._free.give_back([self._kept.pop_oldest().sequence])
            return True
        others = [state for state in self._running if state not in needed]
        for state in others:
            if state.sequences.tips:
                state.sequences.drop_tips()
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
        self._make_room(1, batch or Batch())
        sequences = TreeSequences(tree, self._context, self._free)
        found = longest(tree.ids, self._kept, self._known()) if self._kept_tokens else None
        if found is not None:
            sequences.begin_with(found[0].sequence, found[1])
        state = LlamaState(tree, sequences, found[1] if found else 0)
        self._running.add(state)
        tree.state = state
        return state

    def _late(self, prompts: Mapping[int, Sequence[int]]) -> set[int]:
        """Return the requests that should wait.

        They can reuse cells of another one, or there is no sequence for them.
        """
        waits = {*list(prompts)[max(1, len(self._free) + len(self._kept)) :]}
        if self._kept_tokens:
            waits |= late(prompts, self._kept, list(self._known()))
        return waits

    def _known(self) -> Iterator[tuple[Sequence[int], int, _Kept]]:
        """Yield the tokens of running requests, how many of them are cached, and their cells."""
        for state in self._running:
            ready = state.sequences.ready
            yield state.tree.ids, ready, _Kept(state.sequences.trunk, ready)

    def _keep(self, state: LlamaState) -> None:
        """Keep the trunk of a finished request, if no kept one begins with its tokens."""
        sequences = state.sequences
        sequences.drop_tips()
        length = min(sequences.ready, self._kept_tokens)
        ids = np.array(state.tree.ids[:length], dtype=np.int64)
        if length < MIN_SHARED or self._kept.shared(ids) == length:
            sequences.drop()
            return
        self._context.cut(sequences.trunk, length)
        dropped = [self._kept.add(ids, _Kept(sequences.trunk, length))]
        tokens = sum(kept.length for kept in self._kept)  # of MAX_KEPT at most
        while tokens > self._kept_tokens or len(self._kept) > MAX_KEPT:
            dropped.append(oldest := self._kept.pop_oldest())
            tokens -= oldest.length
        self._free.give_back(each.sequence for each in dropped if each is not None)

    def _drop_kept(self) -> None:
        self._free.give_back(kept.sequence for kept in self._kept)
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
            state.sequences.drop()
            state.tree.state = None

    def _start_anew(self) -> None:
        """Empty the cache. Requests go on, because their tokens are evaluated again."""
        self._forget_all(self._running)
        self._drop_kept()
        self._context.clear()

    def _check_repeatable(self, flash_attention: bool | None) -> bool:
        """Check that results can be repeatable. Return whether to use flash attention."""
        reason = None
        if flash_attention is False:
            reason = "flash attention. Remove flash_attention=False"
        elif self._model.on_gpu:
            reason = "all layers on the CPU. Pass gpu_layers=0"
        if reason is not None:
            raise InvalidOptionError(
                f"{self._model.label}: repeatable=True needs {reason}, or leave out repeatable"
            )
        return True

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


@dataclass(frozen=True, eq=False)
class _Kept:
    """The cells of a finished request.

    Attributes:
        sequence: the sequence that has the cells.
        length: number of its tokens.
    """

    sequence: int
    length: int


def _text_of(model: Model, tokenizer: Any) -> tuple[LlamaText | HuggingFaceText, frozenset[int]]:
    """Return the text side of a member, and the ids that end a response.

    A file without a vocabulary needs a Hugging Face tokenizer.
    """
    if tokenizer is None:
        own = LlamaText(model)
        return own, own.end_ids
    from adafuse_llm.backends.huggingface.text import HuggingFaceText

    try:
        ends = LlamaText(model).end_ids
    except UnsupportedModelError:
        ends = frozenset({tokenizer.eos_token_id} - {None})
    return HuggingFaceText(tokenizer), ends


def _cores() -> int:
    """Return the number of physical cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(allowed or 1, psutil.cpu_count(logical=False) or allowed or 1))


def _check_options(
    context: int | None,
    threads: int | None,
    flash_attention: bool | None,
    cache_type: str,
) -> None:
    for name, value in (("context", context), ("threads", threads)):
        if value is not None and value < 1:
            raise InvalidOptionError(f"{name} must be 1 or more; got {value}")
    if cache_type not in CACHE_TYPES:
        raise InvalidOptionError(
            f"cache_type must be one of {', '.join(CACHE_TYPES)}; got {cache_type!r}"
        )
    if cache_type.startswith("q") and flash_attention is False:
        raise InvalidOptionError(
            f"cache_type={cache_type!r} needs flash attention. Remove flash_attention=False, or "
            "choose f16, bf16 or f32"
        )
