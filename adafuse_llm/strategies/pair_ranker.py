"""PairRanker (LLM-Blender, arXiv 2306.02561): a trained model that compares two answers.

Its published weights are read from a folder that the user has: those of ``llm-blender/PairRM-hf``
on the Hugging Face hub (0.4 B parameters, DeBERTa v3 large). Nothing is downloaded.

The model reads the question and two answers, each after a marker of its own, and the last hidden
states at the markers go through a small head: what that gives for (question, first answer) less
what it gives for (question, second answer) is the logit that the first is better.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from adafuse_llm.errors import InvalidInputError, InvalidOptionError, LoadError
from adafuse_llm.forks import after_fork

if TYPE_CHECKING:
    import torch

QUESTION, FIRST, SECOND = "<|source|>", "<|candidate1|>", "<|candidate2|>"
"""The markers, with their names in the model's configuration."""

_IDS: Final = {
    QUESTION: "source_prefix_id",
    FIRST: "cand1_prefix_id",
    SECOND: "cand2_prefix_id",
}

LONGEST_QUESTION, LONGEST = 1224, 2048
"""Tokens of the question, and of question and answers, that the published model was trained on;
what is longer is cut at its end."""

_HEAD: Final = ("head_layer.1", "head_layer.4")
_BODY: Final = "pretrained_model."


class PairRanker:
    """Compares answers in pairs, for `Rerank(ranker=...)`.

    Args:
        folder: what ``llm-blender/PairRM-hf`` holds: configuration, tokenizer, safetensors.
        device: where it runs.
        dtype: of its weights, such as ``"bfloat16"``.

    Raises:
        LoadError: there is no such folder, or it holds another kind of model.
        InvalidOptionError: there is no such dtype.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        device: str = "cpu",
        dtype: str | torch.dtype = "float32",
    ) -> None:
        import torch
        from transformers import AutoConfig, AutoTokenizer, DebertaV2Model

        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not (isinstance(kind, torch.dtype) and kind.is_floating_point):
            raise InvalidOptionError(
                "PairRanker(dtype=...) must be float32, bfloat16, float16 or float64; "
                f"got {dtype!r}"
            )
        path = Path(folder)
        if not path.is_dir():
            raise LoadError(
                f"PairRanker: there is no folder {path}. Download llm-blender/PairRM-hf from the "
                "Hugging Face hub, and pass the folder."
            )
        try:
            config = AutoConfig.from_pretrained(path)
            tokenizer = AutoTokenizer.from_pretrained(path)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise LoadError(f"PairRanker: {path} cannot be read ({reason})") from error
        if config.model_type != "deberta-v2":
            raise _another(path, f"its model type is {config.model_type!r}, not 'deberta-v2'")
        ids = tokenizer.convert_tokens_to_ids(list(_IDS))
        if ids != [getattr(config, name, None) for name in _IDS.values()]:
            raise _another(path, f"tokenizer and configuration disagree on {', '.join(_IDS)}")
        weights = _weights(path)
        self._tokenizer, self._ids = tokenizer, ids
        after_fork(self._renew)
        size = config.hidden_size
        first, second = _HEAD
        heads = weights[f"{second}.bias"].numel() if f"{second}.bias" in weights else 1
        self._head = torch.nn.Sequential(
            torch.nn.Linear(2 * size, size), torch.nn.Tanh(), torch.nn.Linear(size, heads)
        )
        self._model = DebertaV2Model(config)
        names = {f"{first}.": "0.", f"{second}.": "2."}
        for part, prefixes in ((self._model, {_BODY: ""}), (self._head, names)):
            own = {
                new + name.removeprefix(old): tensor
                for old, new in prefixes.items()
                for name, tensor in weights.items()
                if name.startswith(old) and not name.endswith("position_ids")
            }
            try:
                part.load_state_dict(own)
            except RuntimeError as error:
                raise _another(path, " ".join(str(error).split())) from error
            part.to(device=device, dtype=kind).eval().requires_grad_(False)

    def _renew(self) -> None:
        self._lock = threading.Lock()  # the tokenizer keeps what it truncates to

    def compare(self, question: str, answers: Sequence[str]) -> list[list[float]]:
        """The comparison matrix: in row i and column j the logit that answer i, read first, is
        better than answer j, read second; 0 where i is j. One pass over all ordered pairs.

        Raises:
            InvalidInputError: there is no answer.
        """
        import torch

        if not answers:
            raise InvalidInputError("there are no answers to compare")
        pairs = [(i, j) for i in range(len(answers)) for j in range(len(answers)) if i != j]
        matrix = [[0.0] * len(answers) for _ in answers]
        if pairs:
            with self._lock, torch.inference_mode():
                rows = [self._encode(question, answers[i], answers[j]) for i, j in pairs]
                logits = self._logits(rows)
            for (i, j), logit in zip(pairs, logits, strict=True):
                matrix[i][j] = logit
        return matrix

    def _encode(self, question: str, first: str, second: str) -> list[int]:
        """Tokens of the three texts, each with its marker and special tokens."""
        asked = self._cut(QUESTION, question, LONGEST_QUESTION)
        room = (LONGEST - len(asked)) // 2
        return [*asked, *self._cut(FIRST, first, room), *self._cut(SECOND, second, room)]

    def _cut(self, marker: str, text: str, most: int) -> list[int]:
        for each in _IDS:  # a marker inside a text is none
            text = text.replace(each, " ")
        return list(self._tokenizer.encode(marker + text, max_length=most, truncation=True))

    def _logits(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        device = next(self._model.parameters()).device
        longest = max(map(len, rows))
        padding = self._tokenizer.pad_token_id or 0
        padded = [[*row, *[padding] * (longest - len(row))] for row in rows]
        told = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        tokens = torch.tensor(padded, device=device)  # [pairs, tokens]
        mask = torch.tensor(told, device=device)
        states = self._model(input_ids=tokens, attention_mask=mask).last_hidden_state
        asked, first, second = (self._at(states, tokens, marker) for marker in self._ids)
        better = self._head(torch.cat([asked, first], dim=-1))  # [pairs, heads]
        worse = self._head(torch.cat([asked, second], dim=-1))
        return [float(logit) for logit in (better - worse).mean(dim=-1)]

    def _at(self, states: torch.Tensor, tokens: torch.Tensor, marker: int) -> torch.Tensor:
        """The states at the first place of a marker, [pairs, hidden]."""
        import torch

        places = (tokens == marker).int().argmax(dim=1)
        return states[torch.arange(len(tokens), device=tokens.device), places]


def _weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise LoadError(
            f"PairRanker: {path} holds no safetensors. Take llm-blender/PairRM-hf, which has "
            "them; llm-blender/PairRM is in another format."
        )
    weights: dict[str, Any] = {}
    for file in files:
        weights |= load_file(file)
    return weights


def _another(path: Path, reason: str) -> LoadError:
    return LoadError(
        f"PairRanker: {path} is no PairRM model such as llm-blender/PairRM-hf: {reason}"
    )
