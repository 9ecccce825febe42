"""Run the forward passes that evaluate the nodes of requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from adafuse_llm.backends.huggingface.model import Decoder
from adafuse_llm.backends.huggingface.packing import PackedCache, in_slots, use_packed_attention
from adafuse_llm.backends.huggingface.path_form import PathForm
from adafuse_llm.backends.huggingface.tree_cache import Piece, Pool, Rows, TreeForm
from adafuse_llm.backends.logits.state import learn
from adafuse_llm.tree.tokens import Node, TokenTree

PREFILL_TOKENS = 2048
"""Maximum number of tokens in a pass over several pieces. It limits the memory for activations."""

PIECE_TOKENS = (128, 512)
"""Maximum numbers of tokens in a piece of a prompt on a CPU: the first while another request
writes, the second while none does. Other requests wait until a piece is read, but short pieces cost
more: in pieces of 512, 128 and 64, a second of CPU time read 114, 103 and 81 tokens (0.5 B
parameters)."""


class Passes:
    """The forward passes of a member. Requests in the form ``"tree"`` share passes."""

    def __init__(self, decoder: Decoder, form: str) -> None:
        self.form = form
        # the sizes of pieces, as in `PIECE_TOKENS`
        is_fast = decoder.device.type != "cpu"
        self.pieces = (PREFILL_TOKENS, PREFILL_TOKENS) if is_fast else PIECE_TOKENS
        # bytes of a token's keys and values, by device; the self-test measures them
        self.token_bytes: Mapping[torch.device, int] = {}
        self._decoder = decoder
        self._pool = Pool()
        self._windows = use_packed_attention(decoder.model) if form == "tree" else {}

    def new_request(self, tree: TokenTree, kv: Rows | None = None) -> TreeForm | PathForm:
        return TreeForm(tree, kv) if self.form == "tree" else PathForm(tree, self._decoder)

    def advance(self, missing: Sequence[tuple[TreeForm | PathForm, Sequence[Node]]]) -> None:
        """Evaluate the missing nodes of each request."""
        pieces: list[Piece] = []
        for request, nodes in missing:
            if isinstance(request, PathForm):
                request.extend(nodes)
            elif nodes:
                pieces.append(request.plan(nodes))
        self._run(pieces)

    def read(self, parts: Sequence[tuple[TreeForm | PathForm, int]]) -> None:
        """Run the next prompt tokens of requests. `parts`: requests with numbers of tokens."""
        self._run([request.read(n) for request, n in parts if isinstance(request, TreeForm)])

    def _run(self, pieces: Sequence[Piece]) -> None:
        self._pool.reserve(pieces)
        for batch in _batches(sorted(pieces, key=in_slots)):
            learn(self._pass(batch), [(piece.request, piece.nodes) for piece in batch])
            for piece in batch:
                piece.request.kv.count = len(piece.positions)
                piece.request.passes += 1
                piece.request.tokens += len(piece.tokens)

    def _pass(self, pieces: Sequence[Piece]) -> torch.Tensor:
        tokens = [token for piece in pieces for token in piece.tokens]
        positions = np.concatenate([piece.queries for piece in pieces]).tolist()
        # find the index in the pass of each piece's first token
        starts = np.cumsum([0, *(len(piece.tokens) for piece in pieces)]).tolist()
        keep = [start + i for start, piece in zip(starts, pieces, strict=False) for i in piece.keep]
        cache = PackedCache(pieces, self._windows)
        with cache.in_use():
            return self._decoder.run(tokens, cache, keep=keep, positions=positions)[0]


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if batch and size + len(piece.tokens) > PREFILL_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += len(piece.tokens)
    if batch:
        yield batch
