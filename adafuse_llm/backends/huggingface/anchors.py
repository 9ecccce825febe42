"""Distributions seen from anchors, so that different vocabularies can be compared (DeePEn).

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
"""Rows of the matrix that are computed at a time."""

COOLING, COOLEST = 10, 0.25
"""The learning rate falls along a cosine, in so many steps, to this share of it."""


class AnchorSpace:
    """One model's distributions in the space of anchors.

    A token is described by its similarity to the anchors, tokens that all members share: the
    cosines of their input embeddings, made a vector of length one and then, by a sharp softmax, a
    distribution over the anchors. A distribution over tokens becomes one over anchors through
    that matrix, [v, a], which is kept for the anchors last asked for: v times a numbers.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._anchors: tuple[int, ...] = ()
        self._matrix: torch.Tensor | None = None
        self._spellings: dict[str, int] | None = None

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Token ids by spelling, of those that the model has an embedding for; both kinds of marker
        for a space are spelled alike.
        """
        if self._spellings is None:
            known = self._tokenizer.get_vocab()
            size = len(self._model.get_input_embeddings().weight)
            self._spellings = {
                spelling.replace("\u0120", "\u2581"): int(token)
                for spelling, token in sorted(known.items(), key=lambda item: -int(item[1]))
                if int(token) < size
            }
        return self._spellings

    @torch.no_grad()
    def relative(self, logits: torch.Tensor, anchors: Sequence[int]) -> list[float]:
        """The distribution of `logits`, [v], over the anchors."""
        seen: list[float] = (logits.softmax(-1) @ self._seen_from(anchors, logits)).tolist()
        return seen

    def corrected(
        self,
        logits: torch.Tensor,
        anchors: Sequence[int],
        target: Sequence[float],
        *,
        steps: int,
        rate: float,
    ) -> tuple[int, float]:
        """The likeliest token once `logits`, [v], are moved so that their relative distribution
        comes closer to `target`, and the natural log of its probability.
        """
        with torch.inference_mode(mode=False), torch.enable_grad():
            matrix = self._seen_from(anchors, logits)
            wanted = torch.tensor(target, dtype=logits.dtype, device=logits.device)
            moved = logits.clone().requires_grad_()
            optimizer = torch.optim.AdamW([moved], lr=rate)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=COOLING, eta_min=rate * COOLEST
            )
            smallest = torch.finfo(logits.dtype).tiny
            for _ in range(steps):
                relative = (moved.softmax(-1) @ matrix).clamp_min(smallest)
                optimizer.zero_grad()
                loss = torch.nn.functional.kl_div(relative.log(), wanted, reduction="sum")
                (loss / len(wanted)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
        logprobs = moved.detach().log_softmax(-1)
        _, tokens, _ = likeliest(logprobs[None], 1, by_sorting=True)
        token = int(tokens[0, 0])
        return token, float(logprobs[token])

    def _seen_from(self, anchors: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The matrix for anchors, in the precision of `logits`, [v, a]."""
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
