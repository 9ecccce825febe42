"""How a request changes a member's next-token distributions, before anything reads them.

The meaning and the order of the changes are those of transformers' ``generate``. The presence
penalty and the frequency penalty are those of OpenAI and vLLM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

FORBIDDEN = 10_000.0
"""Number of nats that the logit of a forbidden token loses. The token's probability is then exactly
0 in every float format. Unlike minus infinity, this number keeps forbidden tokens in order, so a
member can still go on where a grammar or another member leaves only such tokens."""

Sequences = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one distribution, in the order in which they apply.

    Attributes:
        added: numbers to add to the logits, by token id.
        penalty: the repetition penalty. It divides a positive logit of a token in `committed` or
            `new`, and multiplies a negative one.
        committed: the committed tokens, prompt included; empty if `penalty` is 1.
        new: the tokens after the committed ones.
        taken: numbers to subtract from the logits, by token id.
    """

    added: Mapping[int, float]
    penalty: float
    committed: Sequence[int]
    new: Sequence[int]
    taken: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Adjustment:
    """How a request, or a member's checkpoint, changes the distributions of the member.

    The default values change nothing. A sequence of `biases` or `bad_words` changes the logit of
    its last token wherever its other tokens have just been written.

    Attributes:
        repetition_penalty, no_repeat_ngram_size, min_new_tokens, presence_penalty,
            frequency_penalty: as in `AdaFuseConfig`.
        biases: sequences, each with the number to add to the logit of its last token.
        bad_words: forbidden sequences.
        suppressed: forbidden tokens.
        suppressed_first: tokens with which the response cannot begin.
        end_ids: tokens that end a response.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    biases: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words: Sequences = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()

    def changes(self, committed: Sequence[int], prompt: int, new: Sequence[int] = ()) -> Changes:
        """Return the changes of the distribution after the `committed` and the `new` tokens.

        The first `prompt` of the `committed` tokens are the prompt. A long prompt takes more time
        than a short one only with `no_repeat_ngram_size`.
        """
        sequences = [*(sequence for sequence, _ in self.biases), *self.bad_words]
        longest = max(map(len, sequences), default=0)
        last = [*committed[max(0, len(committed) - longest) :], *new]
        added: dict[int, float] = {}
        for sequence, bias in self.biases:
            if _follows(sequence, last):
                added[sequence[-1]] = added.get(sequence[-1], 0.0) + bias
        # penalties for tokens of the response
        taken: dict[int, float] = {}
        if self.presence_penalty or self.frequency_penalty:
            for token, count in Counter([*committed[prompt:], *new]).items():
                taken[token] = self.presence_penalty + count * self.frequency_penalty
        # forbidden tokens
        size = len(committed) + len(new) - prompt
        forbidden = {*self.suppressed}
        if size == 0:
            forbidden.update(self.suppressed_first)
        if size < self.min_new_tokens:
            forbidden.update(self.end_ids)
        forbidden.update(sequence[-1] for sequence in self.bad_words if _follows(sequence, last))
        if self.no_repeat_ngram_size:
            forbidden |= _repeated([*committed, *new], self.no_repeat_ngram_size)
        for token in forbidden:
            taken[token] = taken.get(token, 0.0) + FORBIDDEN
        penalizes = self.repetition_penalty != 1
        return Changes(added, self.repetition_penalty, committed if penalizes else (), new, taken)


NOTHING = Adjustment()
"""The adjustment that changes nothing."""


def changes_of(adjustment: Adjustment) -> dict[str, Any]:
    """Return the settings of an adjustment that differ from the defaults."""
    values = {each.name: getattr(adjustment, each.name) for each in fields(adjustment)}
    return {name: value for name, value in values.items() if value != getattr(NOTHING, name)}


def changed(logits: Mapping[int, float], changes: Changes) -> dict[int, float]:
    """Change the logits of a distribution, and return its log-probabilities, by token id.

    Backends with arrays compute the same numbers for all tokens at once.
    """
    values = {}
    penalized = {*changes.committed, *changes.new} if changes.committed else set()
    for token, logit in logits.items():
        value = logit + changes.added.get(token, 0.0)
        if token in penalized:
            value = value * changes.penalty if value < 0 else value / changes.penalty
        values[token] = value - changes.taken.get(token, 0.0)
    total = log_sum([*values.values()])
    return {token: value - total if total > -math.inf else value for token, value in values.items()}


def log_sum(values: Sequence[float]) -> float:
    """Return the natural logarithm of the sum of exp(value)."""
    highest = max(values, default=-math.inf)
    if highest == -math.inf:
        return highest
    return highest + math.log(math.fsum(math.exp(value - highest) for value in values))


def _follows(sequence: Sequence[int], ids: Sequence[int]) -> bool:
    before = len(sequence) - 1
    return not before or tuple(ids[-before:]) == tuple(sequence[:-1])


def _repeated(ids: Sequence[int], size: int) -> set[int]:
    """Return the tokens that, after `ids`, would repeat a sequence of `size` tokens in `ids`."""
    if size == 1:
        return {*ids}
    last = ids[-size + 1 :]
    # compare whole sequences only where the last token agrees, which is faster
    ends = [end for end, token in enumerate(ids[:-1], start=1) if token == last[-1]]
    return {ids[end] for end in ends if ids[max(0, end - size + 1) : end] == last}
