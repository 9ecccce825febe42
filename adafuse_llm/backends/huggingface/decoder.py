"""Run forward passes of a transformers model.

Shapes: n new tokens, v vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from adafuse_llm.backends.huggingface.architecture import rotary_positions
from adafuse_llm.backends.huggingface.few_rows import FewRows
from adafuse_llm.backends.logits.rows import check_tokens, to_device


class Decoder:
    """The forward pass of a model. A decoder stores no state of requests."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.rope_types, self.rope_edge = rotary_positions(model)
        self.device = torch.device(model.get_input_embeddings().weight.device)
        if self.device.type == "meta":  # offloaded weights: accelerate moves the inputs
            self.device = torch.device("cpu")
        self._few_rows = FewRows(model)
        self._spread = len({parameter.device for parameter in model.parameters()}) > 1
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
        parameters = inspect.signature(inner.forward).parameters
        self._takes_keep = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self.cache_name = next(
            (name for name in ("past_key_values", "cache_params") if name in parameters), None
        )

    @property
    def packs(self) -> bool:
        """Whether a token's rotary frequencies are independent of the other tokens in a pass."""
        return self.rope_types.isdisjoint(("dynamic", "longrope"))

    def shares_prefixes(self, length: int) -> bool:
        """Return whether a prompt of `length` tokens may share its rows with other prompts."""
        return "dynamic" not in self.rope_types and self.takes_chunks(length)

    def takes_chunks(self, length: int) -> bool:
        """Return whether a prompt of `length` tokens may run in several passes instead of one."""
        return self.rope_edge is None or length <= self.rope_edge

    def run(
        self,
        tokens: Sequence[int],
        cache: Any,
        *,
        keep: Sequence[int],
        positions: Sequence[int] | None = None,
        mask: Any = None,
    ) -> tuple[torch.Tensor, Any]:
        """Run one forward pass over the n tokens of one sequence.

        Args:
            tokens: n token ids.
            cache: the model's cache; None to start without one.
            keep: indices of the tokens whose logits are returned, in ascending order.
            positions: positions of the tokens, [n]; with None, the model computes them.
            mask: the attention mask; None for causal attention.

        Returns:
            The logits after the tokens in `keep`, [len(keep), v], in at least float32; and the
            model's output.
        """
        check_tokens(tokens, self.vocabulary)
        inputs: dict[str, Any] = {
            "input_ids": to_device(torch.tensor([list(tokens)]), self.device),
            "use_cache": True,
        }
        if cache is not None:
            inputs[self.cache_name or "past_key_values"] = cache
        if positions is not None and self._takes_positions:
            inputs["position_ids"] = to_device(torch.tensor([list(positions)]), self.device)
        if mask is not None:
            inputs["attention_mask"] = mask
        last = max(1, len(keep))
        if list(keep[:1]) in ([], [len(tokens) - last]):  # only the last tokens
            kept: Any = last
        elif self._spread:  # a list works whichever device the last layer is on
            kept = list(keep)
        else:
            kept = to_device(torch.tensor(keep), self.device)
        if self._takes_keep:
            inputs["logits_to_keep"] = kept
        with self._few_rows.during(len(tokens)):
            output = self.model(**inputs, return_dict=True)
        logits = output.logits[0]  # [n, v], or only the kept rows
        if not self._takes_keep:
            logits = logits[-kept:] if isinstance(kept, int) else logits[kept]
        logits = logits[: len(keep)]
        return precise(logits), output

    def plain(self, tokens: Sequence[int], last: int = 1) -> torch.Tensor:
        """Return the logits after each of the `last` tokens of a sequence, [last, v].

        The forward pass has no cache.
        """
        ids = torch.tensor([list(tokens)], device=self.device)
        kept = {"logits_to_keep": last} if self._takes_keep else {}
        output = self.model(input_ids=ids, use_cache=False, return_dict=True, **kept)
        return precise(output.logits[0, -last:])


def precise(logits: torch.Tensor) -> torch.Tensor:
    """Return `logits` in float32 or a higher precision."""
    return logits if logits.dtype == torch.float64 else logits.float()
