"""Test a loaded model, to find the fastest way of evaluation that gives correct numbers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch

from adafuse_llm.backends.huggingface.architecture import sliding_windows, tree_attention
from adafuse_llm.backends.huggingface.decoder import Decoder
from adafuse_llm.backends.huggingface.executor import Executor, Passes
from adafuse_llm.backends.huggingface.kv import device_shares
from adafuse_llm.backends.huggingface.passes import PackedPasses, SinglePasses
from adafuse_llm.backends.huggingface.state import RequestState
from adafuse_llm.errors import UnsupportedModelError
from adafuse_llm.tree import Node, TokenTree

logger = logging.getLogger(__name__)

TRIAL_TOKENS, TRIAL_DEPTH = 9, 3
"""Length of the longest test sequence, and the number of its tokens that follow the prompt. If the
test crosses a sliding window, the sequence is longer by the window."""

MAX_CROSSING, MAX_CROSSING_ON_CPU = 2e13, 1e11
"""Largest product of the number of weights that a token passes and the window that the test
crosses. A pass makes about two operations for each unit."""

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest accepted mean error of the logits, relative to their standard deviation."""

ROUNDED_TOLERANCE, ROUNDED_NOISE = 5e-3, 4
"""Largest accepted error for quantized weights and for weights of lower precision. If activations
are rounded, the logits of a token depend on the shape of its pass, and on the other sequences in
it. So the test also accepts an error of up to `ROUNDED_NOISE` times the difference between plain
passes of different shapes, with and without another sequence, and of up to `ROUNDED_NOISE` times
the distance between numbers of the data type near 1. On a GPU, plain passes of different shapes may
use the same kernels and so not differ, while passes with a cache use others: with bfloat16 and 32
layers, the error was 1.2 %."""


class Trial:
    """A test of a model on a few tokens.

    Args:
        name: the member's name, for messages.
        decoder: the model.
        window: context window of the model; None for no limit.

    Attributes:
        row_bytes: cached bytes per token for the way of evaluation that was tested last.
        shares: share of these bytes on each device.
    """

    def __init__(self, name: str, decoder: Decoder, window: int | None) -> None:
        self.row_bytes = 0
        self.shares = {decoder.device: 1.0}
        self._name = name
        self._decoder = decoder
        self._window = window
        self._length = min(window or TRIAL_TOKENS, TRIAL_TOKENS) + self._crossed()

    def choose(self, wanted: str) -> Executor:
        """Return an executor for the fastest way of evaluation that gives correct numbers.

        Args:
            wanted: ``"tree"`` or ``"path"`` to require that form; ``"auto"`` to try both.

        Raises:
            UnsupportedModelError: no way of evaluation gives correct numbers. The message gives the
                reasons.
        """
        attention = tree_attention(self._decoder.model, self._decoder.device)
        ways: list[tuple[str, Passes | None]] = []
        if attention is not None and not attention.additive and self._decoder.packs:
            ways.append(("tree", PackedPasses(self._decoder, attention)))
        if attention is not None:
            ways.append(("tree", SinglePasses(self._decoder, attention)))
        unsupported = "the model's layers or its attention implementation do not support tree masks"
        reasons = {} if ways else {"tree": unsupported}
        for form, passes in (*ways, ("path", None)):
            if wanted not in ("auto", form):
                continue
            executor = Executor(self._decoder, form, passes)
            reason = self._try(executor)
            if reason is None:
                return executor
            reasons[form] = reason
        explained = "; ".join(
            f"{form} form: {reason}" for form, reason in reasons.items() if wanted in ("auto", form)
        )
        kind = self._decoder.model.config.model_type
        raise UnsupportedModelError(
            f"member {self._name!r} ({kind}) cannot be used in an ensemble: {explained}"
        )

    def _try(self, executor: Executor) -> str | None:
        """Return the reason why an executor cannot be used; None if it can."""
        if executor.form == "path" and self._decoder.cache_name is None:
            return "the model has no cache"
        room = self._length - TRIAL_DEPTH
        if room < 1:
            too_small = "the context window of the model is too small for the test"
            return None if executor.form == "path" else too_small
        try:
            logits, expected = self._run(executor, room)
        except Exception as error:  # a model may raise any exception
            return f"{type(error).__name__}: {error}"
        if expected.isnan().any():
            return "the logits are NaN"
        return _difference(logits, expected, self._tolerance(min(self._length, TRIAL_TOKENS)))

    def _crossed(self) -> int:
        """Return the sliding window that the test crosses, in tokens; 0 if there is none."""
        decoder = self._decoder
        embedded = decoder.model.get_input_embeddings().weight.numel()
        weights = max(0, sum(each.numel() for each in decoder.model.parameters()) - embedded)
        most = MAX_CROSSING_ON_CPU if decoder.device.type == "cpu" else MAX_CROSSING
        longest = min(self._window or sys.maxsize, decoder.rope_edge or sys.maxsize) - TRIAL_TOKENS
        windows = sorted(window for window in sliding_windows(decoder.model) if window <= longest)
        crossed = [window for window in windows if window * weights <= most]
        for window in windows[len(crossed) :]:
            logger.info(
                "member %r: the test at load does not cross the model's sliding window of %d "
                "tokens, which would take too long",
                self._name,
                window,
            )
        return max(crossed, default=0)

    @torch.inference_mode()
    def _tolerance(self, length: int) -> float:
        """Return the largest accepted relative error for this model."""
        model = self._decoder.model
        if model.dtype in TOLERANCE and not getattr(model, "is_quantized", False):
            return TOLERANCE[model.dtype]
        tokens, other = (
            [(step * i + first) % self._decoder.vocabulary for i in range(length)]
            for step, first in ((7, 3), (5, 11))
        )
        parts = torch.cat([self._decoder.plain(tokens[: end + 1]) for end in range(length)])
        noise = 0.0
        for rows in ([tokens], [tokens, other]):
            ids = torch.tensor(rows, device=self._decoder.device)
            whole = model(input_ids=ids, use_cache=False, return_dict=True).logits[0].float()
            noise = max(noise, float((whole - parts).abs().mean() / parts.std()))
        noise = max(noise, torch.finfo(model.dtype).eps)
        return max(ROUNDED_TOLERANCE, ROUNDED_NOISE * noise)

    @torch.inference_mode()
    def _run(self, executor: Executor, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate two small trees together, commit a node of each, and evaluate another node.

        Returns:
            The logits of the executor, and those of plain forward passes over the same sequences.
        """
        vocabulary = self._decoder.vocabulary
        lengths = (room, max(1, min(room, TRIAL_TOKENS - TRIAL_DEPTH) - 2))
        trees = [TokenTree([(7 * i + n) % vocabulary for i in range(n)]) for n in lengths]
        states = [RequestState(tree, executor.new_form(tree), None) for tree in trees]
        actual: dict[tuple[int, ...], torch.Tensor] = {}

        def check(nodes: Sequence[Sequence[Node]]) -> None:
            executor.advance(states, nodes)
            for state, own in zip(states, nodes, strict=True):
                for node in own:
                    logits, _ = state.rows[node]
                    actual[(*state.tree.ids, *state.tree.tokens(node))] = logits

        check([[tree.root] for tree in trees])
        forks = [
            [tree.grow([(11 * i + j) % vocabulary for j in range(2)]) for i in (1, 2)]
            for tree in trees
        ]
        check(
            [[*t.path(left), *t.path(right)] for t, (left, right) in zip(trees, forks, strict=True)]
        )
        for tree, (left, _) in zip(trees, forks, strict=True):
            tree.commit(tree.path(left)[0])
        for state in states:
            state.follow()
        check([[t.child(left, 5 % vocabulary)] for t, (left, _) in zip(trees, forks, strict=True)])
        self.row_bytes = states[0].form.row_bytes
        self.shares = device_shares(states[0].form.layers) or {self._decoder.device: 1.0}
        expected = self._expected(sorted(actual, key=len, reverse=True))
        return torch.stack([actual[each] for each in expected]), torch.stack([*expected.values()])

    def _expected(
        self, sequences: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], torch.Tensor]:
        """Return the logits after sequences, from plain passes over those that none continues.

        Only the first long sequence has a pass, because each pass over it takes long.

        Args:
            sequences: the sequences, the longest first.
        """
        expected: dict[tuple[int, ...], torch.Tensor] = {}
        for whole in sequences:
            if whole in expected or (expected and len(whole) > TRIAL_TOKENS):
                continue
            parts = [part for part in sequences if whole[: len(part)] == part]
            first = len(parts[-1])
            logits = self._decoder.plain(whole, len(whole) - first + 1)
            expected.update({part: logits[len(part) - first] for part in parts})
        return expected


def _difference(logits: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    """Return a message if the error of the logits exceeds the tolerance, otherwise None."""
    finite = torch.isfinite(expected)
    gap = float((logits - expected)[finite].abs().mean())
    scale = float(expected[finite].std())
    if gap <= tolerance * scale:
        return None
    return (
        f"the logits differ from those of plain forward passes by {gap:.2g} on average "
        f"(standard deviation of the logits: {scale:.2g})"
    )
