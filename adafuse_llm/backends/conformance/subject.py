"""What the author of a backend tells the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from adafuse_llm.backends.base import Backend
from adafuse_llm.errors import InvalidOptionError, short_repr

Logits = Callable[[Sequence[int]], Iterable[float]]
"""A function that returns the logits after a sequence of token ids, by token id."""

TEXTS = (
    "The ferry leaves at nine. It carries twelve people",
    " and the post.",
    "\n\n- bread, salt and oil: 14.50\n",
    "  two spaces, and  two more ",
    'if x:\n    print("yes")\n',
    "a",
    " ",
)
"""Texts that all usual tokenizers encode exactly."""

ODD_TEXTS = (
    "Caf\u00e9 Orrin",
    "\U0001f600 and \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u4e2d\u6587\u6ca1\u6709\u7a7a\u683c\u3002",
    "\u0627\u0644\u0644\u063a\u0629",
    "e\u0301\tx\r\ny",
    "<s> </s> <unk> <|endoftext|> <|im_end|> <|eot_id|> <eos> <end_of_turn>",
)
"""Texts that some tokenizers cannot encode exactly."""


@dataclass(frozen=True)
class Subject:
    """A backend to check.

    Attributes:
        make: function that returns the backend. Each check calls it once. It may always return the
            same backend. The last check closes a backend that implements `SupportsClose`.
        logits: function that returns the logits, or the log-probabilities, of all tokens after a
            sequence of token ids, from a plain forward pass without any cache. The checks compare
            all results with these values, and expect that summaries list as many tokens as a query
            asks for. Without this function, they compare the results with
            results of the same backend for new requests, so they do not notice a backend that is
            wrong in the same way for every request.
        texts: texts that the codec must encode exactly. The first text has several tokens. The
            prompts of the checks are made of the tokens of these texts.
        odd_texts: texts that the codec may encode inexactly.
        tolerance: maximum difference of log-probabilities. It is relative for values below -1.
        seed: seed for the random choices of the checks.
    """

    make: Callable[[], Backend]
    logits: Logits | None = None
    texts: Sequence[str] = TEXTS
    odd_texts: Sequence[str] = ODD_TEXTS
    tolerance: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise InvalidOptionError(
                "make must be a function that returns the backend, such as lambda: member; got "
                f"{short_repr(self.make)}"
            )
        if isinstance(self.texts, str) or not self.texts or not all(self.texts):
            raise InvalidOptionError(
                f"texts must be a list of texts that are not empty; got {self.texts!r}"
            )
        if not self.tolerance > 0:
            raise InvalidOptionError(f"tolerance must be above 0; got {self.tolerance!r}")
