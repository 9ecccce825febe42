"""PairRanker (LLM-Blender, arXiv 2306.02561): a trained model that compares two answers.

The model is ``llm-blender/PairRM-hf`` on the Hugging Face hub (0.4 B parameters, DeBERTa v3 large).
Its weights are read from a local folder. Nothing is downloaded.

The model reads the question and two answers, each after its own marker. A small head computes a
score for each answer from the last hidden states at two markers: those of the question and of the
answer. The score of (question, first answer) minus the
score of (question, second answer) is the logit that the first answer is better.
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
"""Markers before the question and the two answers."""

_IDS: Final = {
    QUESTION: "source_prefix_id",
    FIRST: "cand1_prefix_id",
    SECOND: "cand2_prefix_id",
}

LONGEST_QUESTION, LONGEST = 1224, 2048
"""Maximum number of tokens of the question, and of the question with both answers. The published
model was trained with these limits. The end of a longer text is cut off."""

_HEAD: Final = ("head_layer.1", "head_layer.4")
_BODY: Final = "pretrained_model."


class PairRanker:
    """Ranker that compares answers in pairs, for `Rerank(ranker=...)`.

    Args:
        folder: folder with the configuration, tokenizer and safetensors files of
            ``llm-blender/PairRM-hf``.
        device: device of the model.
        dtype: data type of the weights, such as ``"bfloat16"``.

    Raises:
        LoadError: the folder does not exist, or holds another kind of model.
        InvalidOptionError: the dtype does not exist.
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
                f"PairRanker: the folder {path} does not exist. Download llm-blender/PairRM-hf "
                "from the Hugging Face hub, and pass its folder."
            )
        try:
            config = AutoConfig.from_pretrained(path)
            tokenizer = AutoTokenizer.from_pretrained(path)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise LoadError(f"PairRanker: {path} cannot be read ({reason})") from error
        if config.model_type != "deberta-v2":
            raise _not_pair_rm(path, f"its model type is {config.model_type!r}, not 'deberta-v2'")
        ids = tokenizer.convert_tokens_to_ids(list(_IDS))
        if ids != [getattr(config, name, None) for name in _IDS.values()]:
            raise _not_pair_rm(path, f"config and tokenizer differ in the ids of {', '.join(_IDS)}")
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
                raise _not_pair_rm(path, " ".join(str(error).split())) from error
            part.to(device=device, dtype=kind).eval().requires_grad_(False)

    def _renew(self) -> None:
        self._lock = threading.Lock()  # the tokenizer stores its truncation limit

    def compare(self, question: str, answers: Sequence[str]) -> list[list[float]]:
        """Return the comparison matrix of the answers.

        Row i, column j holds the logit that answer i is better than answer j if the model reads
        answer i first. The diagonal is 0. One pass evaluates all ordered pairs.

        Raises:
            InvalidInputError: there are no answers.
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
        """Return the tokens of the three texts, each with its marker and special tokens."""
        start = self._cut(QUESTION, question, LONGEST_QUESTION)
        room = (LONGEST - len(start)) // 2
        return [*start, *self._cut(FIRST, first, room), *self._cut(SECOND, second, room)]

    def _cut(self, marker: str, text: str, most: int) -> list[int]:
        for name in _IDS:  # the text itself must not contain markers
            text = text.replace(name, " ")
        return list(self._tokenizer.encode(marker + text, max_length=most, truncation=True))

    def _logits(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        device = next(self._model.parameters()).device
        longest = max(map(len, rows))
        padding = self._tokenizer.pad_token_id or 0
        padded = [[*row, *[padding] * (longest - len(row))] for row in rows]
        is_token = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        tokens = torch.tensor(padded, device=device)  # [pairs, tokens]
        mask = torch.tensor(is_token, device=device)
        states = self._model(input_ids=tokens, attention_mask=mask).last_hidden_state
        source, first, second = (self._at(states, tokens, marker) for marker in self._ids)
        better = self._head(torch.cat([source, first], dim=-1))  # [pairs, heads]
        worse = self._head(torch.cat([source, second], dim=-1))
        return [float(logit) for logit in (better - worse).mean(dim=-1)]

    def _at(self, states: torch.Tensor, tokens: torch.Tensor, marker: int) -> torch.Tensor:
        """Return the states at the first position of a marker, [pairs, hidden]."""
        import torch

        places = (tokens == marker).int().argmax(dim=1)
        return states[torch.arange(len(tokens), device=tokens.device), places]


def _weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise LoadError(
            f"PairRanker: {path} holds no safetensors files. Use llm-blender/PairRM-hf; "
            "llm-blender/PairRM has another format."
        )
    weights: dict[str, Any] = {}
    for file in files:
        weights |= load_file(file)
    return weights


def _not_pair_rm(path: Path, reason: str) -> LoadError:
    return LoadError(
        f"PairRanker: {path} is not a PairRM model such as llm-blender/PairRM-hf: {reason}"
    )
