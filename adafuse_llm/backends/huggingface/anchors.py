"""Represent distributions by anchors, to compare different vocabularies (DeePEn).

Shapes: v vocabulary, a anchors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adafuse_llm.backends.huggingface.readout import likeliest

SHARPNESS = 100.0
"""Inverse temperature of the softmax over anchors."""

ROWS = 1024
"""Number of rows of the matrix that are computed at a time."""

COOLING, COOLEST = 10, 0.25
"""Number of steps in which the learning rate falls along a cosine, and the share of the initial
rate that remains."""


class AnchorSpace:
    """One model's distributions in the space of anchors.

    The anchors are tokens that all members share. A token is represented by the cosines between its
    input embedding and those of the anchors. The vector of cosines is normalized to length one, and
    a sharp softmax turns it into a distribution over the anchors. These distributions are the rows
    of a matrix, [v, a], which maps a distribution over tokens to one over anchors. The object
    caches the matrix for the anchors of the last call.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._anchors: tuple[int, ...] = ()
        self._matrix: torch.Tensor | None = None
        self._spellings: dict[str, int] | None = None

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Ids by spelling, for the tokens that have an embedding in the model.

        The markers U+0120 and U+2581 for a space have the same spelling here.
        """
        if self._spellings is None:
            ids = self._tokenizer.get_vocab()
            size = len(self._model.get_input_embeddings().weight)
            self._spellings = {
                spelling.replace("\u0120", "\u2581"): int(token)
                for spelling, token in sorted(ids.items(), key=lambda item: -int(item[1]))
                if int(token) < size
            }
        return self._spellings

    @torch.no_grad()
    def relative(self, logits: torch.Tensor, anchors: Sequence[int]) -> list[float]:
        """Return the distribution of `logits`, [v], over the anchors."""
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
    ) -> tuple[int, float]:
        """Move `logits`, [v], towards `target`, and return the likeliest token.

        Gradient descent moves the distribution over the anchors towards `target`.

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
        _, tokens, _ = likeliest(logprobs[None], 1, by_sorting=True)
        token = int(tokens[0, 0])
        return token, float(logprobs[token])

    def _matrix_of(self, anchors: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return the matrix for `anchors`, [v, a], in the precision of `logits`."""
        anchors = tuple(anchors)
        if self._matrix is None or self._anchors != anchors:
            with torch.inference_mode(mode=False), torch.no_grad():
                weight = self._model.get_input_embeddings().weight.detach()
                rows = torch.nn.functional.normalize(weight[: len(logits)].to(logits), dim=-1)
                chosen = rows[torch.tensor(anchors, device=rows.device)]  # [a, hidden]
                parts = [
                    (torch.nn.functional.normalize(part @ chosen.T, dim=-1) * SHARPNESS).softmax(-1)
                    for part in torch.split(rows, ROWS)
                ]
                self._matrix, self._anchors = torch.cat(parts), anchors
        return self._matrix
