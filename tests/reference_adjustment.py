"""Changed distributions, for the reference: transformers' own processors in the order of generate.

The presence and frequency penalties are written from OpenAI's formula.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import logits_process as transformers

FORBIDDEN = 10_000.0
"""What a token loses that transformers forbids with minus infinity."""

Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Penalties:
    """mu[j] -> mu[j] - c[j] * frequency - (c[j] > 0) * presence, where c counts the response."""

    prompt: int
    presence: float
    frequency: float

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros_like(scores)
        for token in ids[0, self.prompt :].tolist():
            counts[0, token] += 1
        return scores - counts * self.frequency - (counts > 0) * self.presence


def processors(
    config: Any,
    options: Any,
    biases: Mapping[tuple[int, ...], float] | None,
    prompt: int,
    end_ids: Sequence[int],
) -> list[Process]:
    """The processors of a request: its options, or else those of a member's generation config."""

    def setting(name: str) -> Any:
        given = getattr(options, name, None)
        return getattr(config, name, None) if given is None else given

    found: list[Process] = []
    biases = getattr(config, "sequence_bias", None) if biases is None else biases
    if biases:
        found.append(transformers.SequenceBiasLogitsProcessor(biases))
    if (penalty := setting("repetition_penalty")) not in (None, 1):
        found.append(transformers.RepetitionPenaltyLogitsProcessor(float(penalty)))
    presence, frequency = (setting(f"{name}_penalty") or 0.0 for name in ("presence", "frequency"))
    if presence or frequency:
        found.append(Penalties(prompt, presence, frequency))
    if size := setting("no_repeat_ngram_size"):
        found.append(transformers.NoRepeatNGramLogitsProcessor(size))
    if words := setting("bad_words_ids"):
        found.append(transformers.NoBadWordsLogitsProcessor(words, list(end_ids)))
    if count := setting("min_new_tokens"):
        found.append(transformers.MinNewTokensLengthLogitsProcessor(prompt, count, list(end_ids)))
    if tokens := setting("suppress_tokens"):
        found.append(transformers.SuppressTokensLogitsProcessor(tokens))
    if tokens := setting("begin_suppress_tokens"):
        found.append(transformers.SuppressTokensAtBeginLogitsProcessor(tokens, prompt))
    return found


def processed(found: Sequence[Process], ids: Sequence[int], row: Any) -> Any:
    """The logits after `ids` when the processors have changed them."""
    tokens, scores = torch.tensor([list(ids)]), torch.tensor(row)[None]
    forbidden = torch.zeros_like(scores, dtype=torch.bool)
    for process in found:
        changed = process(tokens, scores)
        forbidden |= changed.isinf()
        scores = torch.where(changed.isinf(), scores, changed)
    return torch.where(forbidden, scores - FORBIDDEN, scores)[0].numpy()
