"""One member alone, as a baseline."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import CONSTRAINTS, SAMPLING
from adafuse_llm.errors import InvalidInputError
from adafuse_llm.strategies.fixed import FixedWords


class Single(FixedWords):
    """One member alone, which decodes greedily. This is the baseline of every ensemble.

    The tokens are the same as those of the model's own greedy ``generate()``. A round has one word.
    If the engine has several members, choose one with the option ``use=("name",)``. The score and
    the NLL are both the word's mean negative log-likelihood per token, in nats.
    """

    name = "single"
    options = frozenset({*CONSTRAINTS, *SAMPLING, "max_word_letters", "max_word_tokens"})

    def __init__(self) -> None:
        super().__init__(1)

    @override
    def check(self, members: Sequence[Backend]) -> None:
        if len(members) != 1:
            raise InvalidInputError(
                f"strategy 'single' decodes with one member; got {len(members)} "
                f"({', '.join(member.name for member in members)}). Choose one with the option "
                f"use=({members[0].name!r},)."
            )
