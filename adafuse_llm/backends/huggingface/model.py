"""Run forward passes of a transformers model.

Shapes: n new tokens, v vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from adafuse_llm.backends.huggingface.few_rows import few_rows, slow_layers
from adafuse_llm.backends.logits.state import check_tokens, to_device


class Decoder:
    """Runs the forward passes of a model, and keeps no state of requests. Inputs go to `device`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocabulary_size = int(model.get_input_embeddings().weight.shape[0])
        self.device = torch.device(model.get_input_embeddings().weight.device)
        # if the weights are offloaded, accelerate moves inputs from the CPU to them
        if self.device.type == "meta":
            self.device = torch.device("cpu")
        self._is_whole = len({parameter.device for parameter in model.parameters()}) == 1
        self._slow_layers = slow_layers(model)
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
        # find out which arguments the model takes
        parameters = inspect.signature(inner.forward).parameters
        self._takes_keep = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        names = ("past_key_values", "cache_params")
        self._cache_name = next((name for name in names if name in parameters), names[0])

    def run(
        self,
        tokens: Sequence[int],
        cache: Any,
        *,
        keep: Sequence[int],
        positions: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Run one forward pass over n tokens, and return logits and the model's cache.

        `keep` has indices of tokens, in ascending order. The logits, [len(keep), v], are those
        after these tokens. If `positions` is None, the model computes the positions.
        """
        check_tokens(tokens, self.vocabulary_size)
        inputs: dict[str, Any] = {
            "input_ids": to_device(torch.tensor([list(tokens)]), self.device),
            "use_cache": True,
        }
        if cache is not None:
            inputs[self._cache_name] = cache
        if positions is not None and self._takes_positions:
            inputs["position_ids"] = to_device(torch.tensor([list(positions)]), self.device)
        # ask only for the logits in `keep`; if it is empty, for those after the last token
        last = [len(tokens) - 1]
        kept: Any = list(keep) or last
        # for a model on several devices, keep a list, because its last layer can be on any of them
        if self._is_whole:
            kept = to_device(torch.tensor(kept), self.device)
        if self._takes_keep:
            inputs["logits_to_keep"] = 1 if list(keep) in ([], last) else kept
        with few_rows(self._slow_layers, len(tokens)):
            output = self.model(**inputs, return_dict=True)
        logits = output.logits[0]  # [n, v], or only the kept rows
        if not self._takes_keep:
            logits = logits[kept]
        return precise(logits[: len(keep)]), getattr(output, self._cache_name)

    def plain(self, tokens: Sequence[int], last: int = 1) -> torch.Tensor:
        """Run without a cache, and return the logits after each of the last tokens, [last, v]."""
        ids = torch.tensor([list(tokens)], device=self.device)
        output = self.model(input_ids=ids, use_cache=False, return_dict=True)
        return precise(output.logits[0, -last:])


def precise(logits: torch.Tensor) -> torch.Tensor:
    """Return `logits` in float32 or a higher precision."""
    return logits if logits.dtype == torch.float64 else logits.float()
