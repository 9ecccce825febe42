"""PairRanker (LLM-Blender, arXiv 2306.02561): a trained model that compares two answers.

The model is ``llm-blender/PairRM-hf`` on the Hugging Face hub (0.4 B parameters, DeBERTa v3 large).
Its weights are read from a local folder. Nothing is downloaded.

The model reads the question and two answers, each after its own marker. A small head computes a
score for each answer from the last hidden states at two markers: those of the question and of the
answer. The score of (question, first answer) minus the score of (question, second answer) is the
logit that the first answer is better. The tests use a tiny random model of this architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, DebertaV2Model

from adafuse_llm import LoadError

MARKERS: Final = {
    "<|source|>": "source_prefix_id",
    "<|candidate1|>": "cand1_prefix_id",
    "<|candidate2|>": "cand2_prefix_id",
}
"""Markers before the question and the two answers, with the names of their ids in the config."""

LONGEST_QUESTION, LONGEST = 1224, 2048
"""Maximum number of tokens of the question, and of the question with both answers. The published
model was trained with these limits. The end of a longer text is cut off."""


class PairRanker:
    """Ranker that compares answers in pairs, for `Rerank(ranker=...)`.

    Args:
        folder: folder with the configuration, tokenizer and safetensors files of
            ``llm-blender/PairRM-hf``.
        device: device of the model.
        dtype: data type of the weights.

    Raises:
        LoadError: the folder holds another kind of model.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config = AutoConfig.from_pretrained(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._ids = self._tokenizer.convert_tokens_to_ids(list(MARKERS))
        if self._ids != [getattr(config, name, None) for name in MARKERS.values()]:
            raise LoadError(
                f"PairRanker: {folder} is not a PairRM model such as llm-blender/PairRM-hf: config "
                f"and tokenizer differ in the ids of {', '.join(MARKERS)}"
            )
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            weights |= load_file(file)
        size = config.hidden_size
        self._model = DebertaV2Model(config)
        self._head = torch.nn.Sequential(
            torch.nn.Linear(2 * size, size), torch.nn.Tanh(), torch.nn.Linear(size, config.n_tasks)
        )
        names = {"pretrained_model.": "", "head_layer.1.": "0.", "head_layer.4.": "2."}
        for part, prefixes in (
            (self._model, ("pretrained_model.",)),
            (self._head, ("head_layer.1.", "head_layer.4.")),
        ):
            own = {
                names[prefix] + name.removeprefix(prefix): tensor
                for prefix in prefixes
                for name, tensor in weights.items()
                if name.startswith(prefix) and not name.endswith("position_ids")
            }
            part.load_state_dict(own)
            part.to(device=device, dtype=dtype).eval().requires_grad_(False)

    @torch.inference_mode()
    def compare(self, question: str, answers: Sequence[str]) -> list[list[float]]:
        """Return the comparison matrix of the answers.

        Row i, column j holds the logit that answer i is better than answer j if the model reads
        answer i first. The diagonal is 0. One pass evaluates all ordered pairs.
        """
        pairs = [(i, j) for i in range(len(answers)) for j in range(len(answers)) if i != j]
        matrix = [[0.0] * len(answers) for _ in answers]
        if pairs:
            rows = [self._encode(question, answers[i], answers[j]) for i, j in pairs]
            for (i, j), logit in zip(pairs, self._logits(rows), strict=True):
                matrix[i][j] = logit
        return matrix

    def _encode(self, question: str, first: str, second: str) -> list[int]:
        """Return the tokens of the three texts, each with its marker and special tokens."""
        source, *candidates = MARKERS
        start = self._cut(source, question, LONGEST_QUESTION)
        room = (LONGEST - len(start)) // 2
        for marker, text in zip(candidates, (first, second), strict=True):
            start = [*start, *self._cut(marker, text, room)]
        return start

    def _cut(self, marker: str, text: str, most: int) -> list[int]:
        for name in MARKERS:  # the text itself must not contain markers
            text = text.replace(name, " ")
        return list(self._tokenizer.encode(marker + text, max_length=most, truncation=True))

    def _logits(self, rows: Sequence[Sequence[int]]) -> list[float]:
        device = next(self._model.parameters()).device
        longest, padding = max(map(len, rows)), self._tokenizer.pad_token_id or 0
        padded = [[*row, *[padding] * (longest - len(row))] for row in rows]
        is_token = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        tokens = torch.tensor(padded, device=device)  # [pairs, tokens]
        mask = torch.tensor(is_token, device=device)
        states = self._model(input_ids=tokens, attention_mask=mask).last_hidden_state
        source, first, second = (
            states[torch.arange(len(rows)), (tokens == marker).int().argmax(dim=1)]
            for marker in self._ids
        )  # [pairs, hidden]
        better = self._head(torch.cat([source, first], dim=-1))  # [pairs, heads]
        worse = self._head(torch.cat([source, second], dim=-1))
        return [float(logit) for logit in (better - worse).mean(dim=-1)]
