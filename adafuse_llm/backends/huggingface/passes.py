"""Evaluate nodes of many requests. Requests in the tree form share passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from adafuse_llm.backends.huggingface.model import Decoder
from adafuse_llm.backends.huggingface.packing import PackedCache, in_slots, use_packed_attention
from adafuse_llm.backends.huggingface.path_form import PathForm
from adafuse_llm.backends.huggingface.tree_cache import Piece, Pool, Rows, TreeForm
from adafuse_llm.backends.logits.state import Logits, RequestLogits
from adafuse_llm.tree.tokens import Node, TokenTree

PREFILL_TOKENS = 2048
"""Maximum number of tokens in one forward pass. This limits the memory for activations."""

PIECE_TOKENS = (128, 512)
"""Number of tokens in a piece of a prompt on a CPU, while other requests write and while none does.
Others wait for a piece, but a model with 0.5 B parameters read 114 tokens per CPU second in passes
over 512 tokens, 103 in passes over 128, and 81 in passes over 64."""


class RequestState(RequestLogits):
    """The form of one request, and the logits of its nodes."""

    def __init__(self, tree: TokenTree, form: TreeForm | PathForm, reused: int = 0) -> None:
        super().__init__(tree, reused)
        self.form = form

    @property
    def unread(self) -> int:
        return self.form.unread

    def follow(self) -> bool:
        is_cut = super().follow()
        if is_cut:
            self.form.reroot()
        return is_cut


class Passes:
    """The forward passes of a member, in the form ``"tree"`` or ``"path"``.

    Attributes:
        pieces: number of tokens in a piece of a prompt, while a request writes its response and
            while none does.
        token_bytes: bytes that a token takes on each device, which `choose` measures.

    Raises:
        UnsupportedModelError: the model's layers do not support the form.
    """

    def __init__(self, decoder: Decoder, form: str) -> None:
        self.form = form
        is_fast = decoder.device.type != "cpu"
        self.pieces = (PREFILL_TOKENS, PREFILL_TOKENS) if is_fast else PIECE_TOKENS
        self.token_bytes: Mapping[torch.device, int] = {}
        self._decoder = decoder
        self._pool = Pool()
        self._windows = use_packed_attention(decoder.model) if form == "tree" else {}

    def new_form(self, tree: TokenTree, rows: Rows | None = None) -> TreeForm | PathForm:
        return TreeForm(tree, rows) if self.form == "tree" else PathForm(self._decoder, tree)

    def advance(self, states: Sequence[RequestState], missing: Sequence[Sequence[Node]]) -> None:
        """Evaluate the missing nodes of each request."""
        pieces: list[tuple[RequestState, Piece]] = []
        for state, nodes in zip(states, missing, strict=True):
            if nodes and isinstance(state.form, TreeForm):
                pieces.append((state, state.form.plan(nodes)))
            elif nodes and isinstance(state.form, PathForm):
                logits, tokens = state.form.extend(nodes)
                state.learn(nodes, (logits, Logits(logits).total))
                state.passes += len(tokens)
                state.tokens += sum(tokens)
        self._run(pieces)

    def read(self, parts: Sequence[tuple[RequestState, int]]) -> None:
        """Give the next committed tokens of each request, that many, their rows."""
        self._run([(s, s.form.read(n)) for s, n in parts if isinstance(s.form, TreeForm)])

    def _run(self, pieces: Sequence[tuple[RequestState, Piece]]) -> None:
        self._pool.reserve([piece for _, piece in pieces])
        for batch in _batches(sorted(pieces, key=lambda each: in_slots(each[1]))):
            logits = self._pass([piece for _, piece in batch])
            parts = logits.split([len(piece.nodes) for _, piece in batch])
            for (state, piece), part in zip(batch, parts, strict=True):
                piece.rows.count = len(piece.positions)
                state.learn(piece.nodes, part)
                state.passes += 1
                state.tokens += len(piece.tokens)

    def _pass(self, pieces: Sequence[Piece]) -> Logits:
        tokens = [token for piece in pieces for token in piece.tokens]
        positions = np.concatenate([piece.queries for piece in pieces]).tolist()
        starts = np.cumsum([0, *(len(piece.tokens) for piece in pieces)]).tolist()
        keep = [start + i for start, piece in zip(starts, pieces, strict=False) for i in piece.keep]
        cache = PackedCache(pieces, self._windows)
        with cache.in_use():
            return Logits(self._decoder.run(tokens, cache, keep=keep, positions=positions)[0])


def _batches(
    pieces: Sequence[tuple[RequestState, Piece]],
) -> Iterator[list[tuple[RequestState, Piece]]]:
    batch: list[tuple[RequestState, Piece]] = []
    size = 0
    for state, piece in pieces:
        if batch and size + len(piece.tokens) > PREFILL_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append((state, piece))
        size += len(piece.tokens)
    if batch:
        yield batch
