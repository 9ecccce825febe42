"""Evaluate nodes of many requests. Requests in the tree form can share passes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from adafuse_llm.backends.huggingface.decoder import Decoder
from adafuse_llm.backends.huggingface.kv import RowCache
from adafuse_llm.backends.huggingface.passes import (
    PIECE_TOKENS,
    PREFILL_TOKENS,
    PackedPasses,
    SinglePasses,
)
from adafuse_llm.backends.huggingface.path_form import PathForm
from adafuse_llm.backends.huggingface.pieces import Piece
from adafuse_llm.backends.huggingface.state import RequestState
from adafuse_llm.backends.huggingface.tree_form import TreeForm
from adafuse_llm.backends.logits.rows import Logits
from adafuse_llm.tree import Node, TokenTree

Passes = PackedPasses | SinglePasses
"""Any class that runs passes for requests in the tree form."""


class Executor:
    """An evaluator of the nodes of a member's requests, in one form.

    Args:
        decoder: the model.
        form: ``"tree"`` or ``"path"``.
        passes: runner of passes for requests in the tree form; None for the path form.

    Attributes:
        form: the argument of the same name.
        passes: the argument of the same name.
        pieces: number of tokens in a piece of a prompt, while a request writes its response and
            while none does.
    """

    def __init__(self, decoder: Decoder, form: str, passes: Passes | None) -> None:
        self.form = form
        self.passes = passes
        is_fast = decoder.device.type != "cpu"
        self.pieces = (PREFILL_TOKENS, PREFILL_TOKENS) if is_fast else PIECE_TOKENS
        self._decoder = decoder

    def new_form(
        self, tree: TokenTree, rows: RowCache | None = None, *, whole: bool = False
    ) -> TreeForm | PathForm:
        """Create the form of a new request.

        Args:
            tree: the request's tree.
            rows: cached rows of the first tokens of the prompt; None if no rows are cached.
            whole: whether to run the whole prompt in one pass.
        """
        if self.form == "tree":
            chunked = not whole and self._decoder.takes_chunks(len(tree.ids))
            return TreeForm(tree, chunked=chunked, cache=rows)
        return PathForm(self._decoder, tree)

    def advance(self, states: Sequence[RequestState], missing: Sequence[Sequence[Node]]) -> None:
        """Evaluate the missing nodes of each request. Tree forms can share passes."""
        plans: list[tuple[RequestState, list[Piece]]] = []
        for state, nodes in zip(states, missing, strict=True):
            if not nodes:
                continue
            if isinstance(state.form, TreeForm):
                plans.append((state, state.form.plan(nodes)))
            else:
                passes, tokens = state.form.passes, state.form.tokens
                state.learn(nodes, Logits(state.form.extend(nodes)), 0)
                state.passes += state.form.passes - passes
                state.tokens += state.form.tokens - tokens
        self._run(plans)

    def read(self, parts: Sequence[tuple[RequestState, int]]) -> None:
        """Give the next committed tokens of each request, that many, their rows."""
        forms = [(state, state.form, count) for state, count in parts]
        self._run([(s, [form.read(n)]) for s, form, n in forms if isinstance(form, TreeForm)])

    def _run(self, plans: Sequence[tuple[RequestState, Sequence[Piece]]]) -> None:
        for batch in _batches(plans, self.passes):
            assert self.passes is not None
            logits = Logits(self.passes.run([piece for _, piece in batch]))
            row = 0
            for state, piece in batch:
                state.learn(piece.nodes, logits, row)
                row += len(piece.nodes)
                state.tokens += len(piece.tokens)
            for state in dict.fromkeys(state for state, _ in batch):
                state.passes += 1


def _batches(
    plans: Sequence[tuple[RequestState, Sequence[Piece]]], passes: Passes | None
) -> list[list[tuple[RequestState, Piece]]]:
    """Group pieces into passes of up to `PREFILL_TOKENS` tokens.

    The function assigns the first pieces of all requests before any other pieces. Each piece goes
    into the earliest pass that has room for it, but never into a pass before the one with the
    previous piece of the same request.
    """
    limit = 0 if isinstance(passes, SinglePasses) else PREFILL_TOKENS
    batches: list[list[tuple[RequestState, Piece]]] = []
    sizes: list[int] = []
    earliest = [0] * len(plans)
    for wave in zip_longest(*(pieces for _, pieces in plans)):
        for number, piece in enumerate(wave):
            if piece is None:
                continue
            size, index = len(piece.tokens), earliest[number]
            while index < len(batches) and sizes[index] + size > limit:
                index += 1
            if index == len(batches):
                batches.append([])
                sizes.append(0)
            batches[index].append((plans[number][0], piece))
            sizes[index] += size
            earliest[number] = index
    return batches
