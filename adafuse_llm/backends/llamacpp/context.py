"""The cache of a llama.cpp model, which many sequences of tokens share.

llama.cpp calls an entry of the cache a cell. A cell holds the key and the value of one token. It
can belong to several sequences, so sequences that begin with the same tokens need no copies.

Shapes: k tokens with ``keep``, v vocabulary.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from adafuse_llm.backends.llamacpp.library import Model, collect_errors, load_library
from adafuse_llm.errors import LoadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_SEQUENCES = 256
"""Number of sequences of a context. llama.cpp does not support more."""

BATCH_TOKENS = 2048
"""Maximum number of tokens in one call of llama.cpp. Small caches and `repeatable` lower it."""

PIECE_TOKENS = (32, 64)
"""Numbers of tokens in a piece of a prompt on a CPU: the first while another request writes, the
second while none does. Others wait until a piece is read: with 0.5 B parameters and one thread, 64
tokens take a second. With flash attention, short pieces are slower: a second of CPU time read 66
tokens in pieces of 32, 74 in pieces of 64, and 77 in pieces of 256."""

REPEATABLE_TOKENS = (8, 32)
"""Minimum and maximum number of tokens in a call of llama.cpp, if results must not depend on this
number. llama.cpp uses other kernels for fewer tokens if weights have certain types, and for 64 or
more tokens with flash attention."""

NO_ROOM = 1
"""The result of ``llama_decode`` if the cache has no room. The cache is then unchanged."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A token that extends `sequences`. `keep`: whether to return the logits after it."""

    token: int
    position: int
    sequences: Sequence[int]
    keep: bool


class CacheFullError(MemoryError):
    """The cache has no room for a batch, and is unchanged."""


class Context:
    """The cache of a loaded model.

    Attributes:
        cells: number of cells. llama.cpp rounds it up to a multiple of 256.
        free: the sequences that no request uses.
        fills_gaps: whether new tokens may take the cells of removed tokens at once. With
            ``repeatable``, it may be True only while no cells after a gap are in use.
        batch_tokens: maximum number of tokens in one call of llama.cpp.

    Raises:
        LoadError: llama.cpp cannot allocate the cache.
    """

    def __init__(self, model: Model, *, cells: int, threads: int, repeatable: bool = False) -> None:
        # if `repeatable`, a token's numbers depend only on the tokens before it. So every call has
        # a size for which llama.cpp uses the same kernels. Attention adds up cells in their order,
        # so no token takes the cell of a removed one until `clear`
        self.fills_gaps = not repeatable
        self.free = list(range(MAX_SEQUENCES - (2 if repeatable else 0)))
        self._garbage, self._padding = MAX_SEQUENCES - 2, MAX_SEQUENCES - 1
        self._least = REPEATABLE_TOKENS[0] if repeatable else 0
        from gguf.constants import GGMLQuantizationType

        # create a cache that sequences share
        self._library = library = load_library()
        self._model = model  # Python must not free it before the cache
        params = library.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = BATCH_TOKENS
        params.n_seq_max = MAX_SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        flash, cache_type = model.settings.flash_attention, model.settings.cache_type
        params.flash_attn_type = -1 if flash is None else int(flash)
        params.type_k = params.type_v = GGMLQuantizationType[cache_type.upper()]
        params.kv_unified = True  # so that a cell can belong to several sequences
        params.swa_full = True  # so that sequences can be cut back
        params.no_perf = True
        with collect_errors() as errors:
            self._pointer = library.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            reason = f" ({errors[0]})" if errors else ""
            raise LoadError(
                f"{model.label} cannot be loaded: llama.cpp cannot create a cache of type "
                f"{cache_type} for {cells:,} tokens{reason}. Lower GGUFMember(context=...), or "
                "choose another cache_type."
            )
        self._free = weakref.finalize(self, library.llama_free, self._pointer)
        self._memory = library.llama_get_memory(self._pointer)
        self.cells = int(library.llama_n_ctx(self._pointer))
        self.batch_tokens = int(library.llama_n_batch(self._pointer))  # small caches lower it
        if repeatable:
            self.batch_tokens = min(self.batch_tokens, REPEATABLE_TOKENS[1])

    def use_threads(self, threads: int) -> None:
        """Compute with another number of threads."""
        self._library.llama_set_n_threads(self._pointer, threads, threads)

    @property
    def closed(self) -> bool:
        return not self._free.alive

    def close(self) -> None:
        self._free()

    def run(self, entries: Sequence[Entry]) -> NDArray[np.float32]:
        """Evaluate up to `batch_tokens` tokens, which continue their sequences without gaps.

        Returns:
            The logits after the tokens with ``keep``, [k, v].

        Raises:
            CacheFullError: the cache has no room for the tokens.
            RuntimeError: llama.cpp failed. All sequences of the batch are in an unknown state.
        """
        # pad a call that is too short
        padding = range(self._least - len(entries))
        entries = [*entries, *(Entry(0, position, [self._padding], False) for position in padding)]
        # lay out the arrays of the batch
        sizes = np.array([len(entry.sequences) for entry in entries], dtype=np.int32)
        sequences = np.array([s for entry in entries for s in entry.sequences], dtype=np.int32)
        starts = (np.cumsum(sizes) - sizes) * sequences.itemsize
        keep = np.array([entry.keep for entry in entries], dtype=np.int8)
        arrays: dict[str, NDArray[Any]] = {  # they must stay alive during the call
            "token": np.array([entry.token for entry in entries], dtype=np.int32),
            "pos": np.array([entry.position for entry in entries], dtype=np.int32),
            "n_seq_id": sizes,
            "seq_id": (sequences.ctypes.data + starts).astype(np.uintp),
            "logits": keep,
        }
        batch = self._library.llama_batch()
        batch.n_tokens = len(entries)
        for name, kind in batch._fields_:
            if name in arrays:
                setattr(batch, name, ctypes.cast(arrays[name].ctypes.data, kind))
        code = self._library.llama_decode(self._pointer, batch)
        if code == NO_ROOM:
            raise CacheFullError(
                f"the cache of {self.cells:,} tokens is full; GGUFMember(context=...) makes it "
                "larger"
            )
        if code:
            raise RuntimeError(f"llama.cpp failed to evaluate a batch (code {code})")
        # remove the padding, and read the logits
        if padding:
            self.cut(self._padding)
        shape = int(keep.sum()), self._model.vocabulary_size
        if not shape[0]:
            return np.empty(shape, dtype=np.float32)
        logits = self._library.llama_get_logits(self._pointer)
        return np.ctypeslib.as_array(logits, shape).copy()

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Add tokens of `source` to `target`: from position `start` to before `end` (-1: all)."""
        self._library.llama_memory_seq_cp(self._memory, source, target, start, end)

    def cut(self, sequence: int, length: int = 0) -> None:
        """Remove all tokens of a sequence after the first `length` ones."""
        if not self.fills_gaps:
            self.copy(sequence, self._garbage, length, -1)
        if not self._library.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise RuntimeError("llama.cpp cannot remove tokens from the cache of this model")

    def give_back(self, sequences: Iterable[int]) -> None:
        """Clear `sequences`, and add them to `free`."""
        for sequence in sequences:
            self.cut(sequence)
            self.free.append(sequence)

    def clear(self) -> None:
        self._library.llama_memory_clear(self._memory, False)
