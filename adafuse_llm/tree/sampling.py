"""Random numbers that depend only on a seed and on texts, however a response is computed.

A member draws a token by the Gumbel-max rule: it adds noise to the log-probabilities, and takes the
token with the highest sum. The noise comes from a hash of the seed, of the response up to the
token, and of the token's text. So it does not matter when a member computes the noise: drafts,
batching and streaming change nothing. Members that have written the same text get the same noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw the token after a node.

    Attributes:
        key: hash of the seed and of the response up to the node (`Sampling.draw`), below 2^64.
        temperature, top_p, top_k, min_p: as in `AdaFuseConfig`, but T is above 0.
        after_word: whether the token must begin with whitespace or end the response, because a word
            has ended. Has no effect if the other options leave no such token.
    """

    key: int
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float = 0.0
    after_word: bool = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request draws tokens: the seed, and options of `AdaFuseConfig`."""

    seed: int
    temperature: float
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0

    def draw(self, text: str, silent: int) -> Draw:
        """Return how to draw the token after a response `text` of whole characters.

        The last `silent` tokens have not changed the text, for example because they are parts of a
        character. Without this number, they and the next token would all get the same noise.
        """
        key = text_hash(f"{self.seed} {silent} {text}")
        return Draw(key, self.temperature, self.top_p, self.top_k, self.min_p)


def text_hash(text: str) -> int:
    """Return the BLAKE2b hash of a text, from 0 to 2^64 - 1."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def derived_seed(seed: int, use: str) -> int:
    """Derive a seed, from 0 to 2^63 - 1, from `seed`. It is a different one for every `use`."""
    return text_hash(f"{use} {seed}") >> 1


def token_codes(
    texts: Sequence[str] | None, end_ids: Collection[int], size: int
) -> tuple[int, ...]:
    """Return a hash of each token of a vocabulary of `size` tokens, from 0 to 2^64 - 1.

    Equal texts have the same hash in all vocabularies, but each repetition of a text within one has
    another. Tokens in `end_ids` are hashed by rank, and others by id if `texts` is None.
    """
    ends = {token: number for number, token in enumerate(sorted(end_ids))}
    seen: Counter[str] = Counter()
    codes = []
    for token in range(size):
        if token in ends:
            name = f"end {ends[token]}"
        elif texts is None:
            name = f"id {token}"
        else:
            text = texts[token] if token < len(texts) else ""
            name = f"text {seen[text]} {text}"
            seen[text] += 1
        codes.append(text_hash(name))
    return tuple(codes)
