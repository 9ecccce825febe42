"""Represent distributions over tokens as distributions over anchors (DeePEn).

Anchors make the distributions of models with different vocabularies comparable.

Shapes: v vocabulary, a anchors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from adafuse_llm.backends.logits.adjust import adjusted
from adafuse_llm.backends.logits.likeliest import likeliest
from adafuse_llm.backends.logits.readout import masked
from adafuse_llm.backends.logits.rows import RequestLogits
from adafuse_llm.tree import Node, TokenTree

SHARPNESS = 100.0
"""Inverse temperature of the softmax over anchors."""

ROWS = 1024
"""Number of matrix rows that are computed at the same time."""

FLOAT_BYTES = 4
"""Smallest size of a number in the matrix, in bytes."""

COOLING, COOLEST = 10, 0.25
"""Within `COOLING` steps, the learning rate falls along a cosine to `COOLEST` times its initial
value."""


class AnchorSpace:
    """A converter of one model's distributions over tokens to distributions over anchors.

    The anchors are tokens that all members share. A vector represents each token. It contains the
    cosines between the token's input embedding and the input embeddings of the anchors. The vector
    is normalized to length one, and a sharp softmax turns it into a distribution over the anchors.
    These distributions are the rows of a matrix, [v, a], which maps a distribution over tokens to
    one over anchors. The object caches the matrix for the anchors of the last call.

    Args:
        embeddings: function that returns the input embeddings of the tokens, [v or more, hidden].
        spellings: function that returns the token ids by spelling, as the tokenizer spells them.
    """

    def __init__(
        self, embeddings: Callable[[], torch.Tensor], spellings: Callable[[], Mapping[str, int]]
    ) -> None:
        self._embeddings = embeddings
        self._read_spellings = spellings
        self._anchors: tuple[int, ...] = ()
        self._matrix: torch.Tensor | None = None
        self._spellings: dict[str, int] | None = None

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Token ids by spelling, for all tokens that have an embedding in the model.

        Tokenizers mark a space with U+0120 or with U+2581. In this mapping, all spellings use
        U+2581.
        """
        if self._spellings is None:
            size = len(self._embeddings())
            self._spellings = shared_spellings(self._read_spellings(), size)
        return self._spellings

    def missing_bytes(self, count: int) -> int:
        """Return the bytes that a matrix for `count` anchors takes beyond the present one."""
        weight, more = self._embeddings(), max(0, count - len(self._anchors))
        return max(FLOAT_BYTES, weight.element_size()) * len(weight) * more

    @torch.no_grad()
    def relative(self, logits: torch.Tensor, anchors: Sequence[int]) -> list[float]:
        """Convert `logits`, [v], to a distribution over the anchors."""
        relative: list[float] = (logits.softmax(-1) @ self._matrix_of(anchors, logits)).tolist()
        return relative

    def corrected(
        self,
        logits: torch.Tensor,
        anchors: Sequence[int],
        target: Sequence[float],
        *,
        steps: int,
        rate: float,
        allowed: bytes | None = None,
    ) -> tuple[int, float]:
        """Return the likeliest token after gradient descent on `logits`, [v].

        Gradient descent moves the distribution over the anchors towards `target`. Only tokens that
        `allowed` permits are returned. It has the format of ``Node.allowed``.

        Returns:
            The token id, and the natural log of its probability.
        """
        with torch.inference_mode(mode=False), torch.enable_grad():
            matrix = self._matrix_of(anchors, logits)
            goal = torch.tensor(target, dtype=logits.dtype, device=logits.device)
            moved = logits.clone().requires_grad_()
            optimizer = torch.optim.AdamW([moved], lr=rate)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=COOLING, eta_min=rate * COOLEST
            )
            smallest = torch.finfo(logits.dtype).tiny
            for _ in range(steps):
                relative = (moved.softmax(-1) @ matrix).clamp_min(smallest)
                optimizer.zero_grad()
                loss = torch.nn.functional.kl_div(relative.log(), goal, reduction="sum")
                (loss / len(goal)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
        logprobs = moved.detach().log_softmax(-1)
        rows = logprobs[None] if allowed is None else masked(logprobs[None], [allowed])
        _, tokens, _ = likeliest(rows, 1, by_sorting=True)
        token = int(tokens[0, 0])
        return token, float(logprobs[token])

    def _matrix_of(self, anchors: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return the matrix for `anchors`, [v, a], in the precision of `logits`."""
        anchors = tuple(anchors)
        if self._matrix is None or self._anchors != anchors:
            with torch.inference_mode(mode=False), torch.no_grad():
                weight = self._embeddings().detach()
                rows = torch.nn.functional.normalize(weight[: len(logits)].to(logits), dim=-1)
                chosen = rows[torch.tensor(anchors, device=rows.device)]  # [a, hidden]
                self._matrix, self._anchors = None, ()
                matrix = logits.new_empty(len(rows), len(anchors))
                self._anchors = anchors  # the memory of the matrix counts as taken from here
                parts = zip(torch.split(rows, ROWS), torch.split(matrix, ROWS), strict=True)
                for part, into in parts:
                    cosines = torch.nn.functional.normalize(part @ chosen.T, dim=-1)
                    torch.softmax(cosines * SHARPNESS, -1, out=into)
                self._matrix = matrix
        return self._matrix


class SupportsAnchorsWithLogits:
    """The methods of `SupportsAnchors`, for backends whose states are `RequestLogits`.

    A subclass sets the attributes.

    Attributes:
        _space: converts the distributions of the model.
        _lock: lock for the states of requests.
    """

    _space: AnchorSpace
    _lock: threading.Lock

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """As in `SupportsAnchors`."""
        return self._space.vocabulary

    def anchor_bytes(self, count: int) -> int:
        """As in `SupportsAnchors`."""
        return self._space.missing_bytes(count)

    def relative(self, tree: TokenTree, node: Node, anchors: Sequence[int]) -> list[float]:
        """As in `SupportsAnchors`."""
        with self._lock:
            return self._space.relative(_logits(tree, node), anchors)

    def corrected(
        self,
        tree: TokenTree,
        node: Node,
        anchors: Sequence[int],
        target: Sequence[float],
        *,
        steps: int,
        rate: float,
    ) -> tuple[int, float]:
        """As in `SupportsAnchors`."""
        with self._lock:
            return self._space.corrected(
                _logits(tree, node), anchors, target, steps=steps, rate=rate, allowed=node.allowed
            )


def shared_spellings(vocabulary: Mapping[str, int], size: int) -> dict[str, int]:
    """Return the token ids of a vocabulary by a spelling that is the same in every member.

    Tokenizers mark a space with U+0120 or with U+2581. In the result, all spellings use U+2581. If
    two tokens get the same spelling, it stands for the token with the lower id.

    Args:
        vocabulary: token ids, as the tokenizer spells them.
        size: number of tokens of the model. Tokens with other ids are left out.
    """
    return {
        spelling.replace("\u0120", "\u2581"): int(token)
        for spelling, token in sorted(vocabulary.items(), key=lambda item: -int(item[1]))
        if int(token) < size
    }


def _logits(tree: TokenTree, node: Node) -> torch.Tensor:
    """Return the logits after an evaluated node, [v]."""
    assert isinstance(tree.state, RequestLogits), "the node is not evaluated"
    row = tree.state.logits(node)[None]
    return adjusted(row, row[:, :1], [tree.changes(node)])[0][0]
