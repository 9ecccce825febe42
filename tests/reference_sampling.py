"""Sampling, for the reference: hashes, noise and cuts, one token at a time, in plain Python."""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence

WORD = 2**64


def digest(text: str) -> int:
    """64 bits that depend on `text`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seeds(seed: int, count: int) -> list[int]:
    """The seeds of `count` responses."""
    return [seed, *(digest(f"response {i} {seed}") >> 1 for i in range(1, count))]


def key(seed: int, silent: int, text: str) -> int:
    """Where a member stands: after `text`, `silent` tokens since this text last changed."""
    return digest(f"{seed} {silent} {text}")


def codes(texts: Sequence[str], end_ids: Collection[int], size: int) -> list[int]:
    """A number for every token id below `size`, from its text."""
    ends = sorted(end_ids)
    seen: dict[str, int] = {}
    found = []
    for token in range(size):
        if token in end_ids:
            found.append(digest(f"end {ends.index(token)}"))
            continue
        text = texts[token] if token < len(texts) else ""
        number = seen.get(text, 0)
        seen[text] = number + 1
        found.append(digest(f"text {number} {text}"))
    return found


def noise(place: int, code: int) -> float:
    """Standard Gumbel noise of the token with `code` at the key `place`."""
    z = ((place ^ code) + 0x9E3779B97F4A7C15) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    bits = z ^ (z >> 31)
    uniform = ((bits >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def kept(
    values: Mapping[int, float], top_k: int | None, top_p: float, min_p: float = 0.0
) -> list[int]:
    """The tokens that the cuts leave of those with `values`, in descending order."""
    order = sorted(values, key=lambda token: (-values[token], token))
    if top_k is not None and top_k < len(order):
        lowest = values[order[top_k - 1]]
        order = [token for token in order if values[token] >= lowest]
    highest = values[order[0]]
    shares = [math.exp(values[token] - highest) for token in order]
    total = math.fsum(shares)
    before = 0.0
    for place, share in enumerate(shares):
        if place and (before >= top_p or share < min_p):
            return order[:place]
        before += share / total
    return order


def draw(
    logits: Mapping[int, float],
    place: int,
    code: Sequence[int],
    *,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float = 0.0,
    ends: Collection[int] = (),
) -> int:
    """The token that a member draws at the key `place` among the permitted ones.

    It is one of `ends`, if the cuts leave any of them.
    """
    values = {token: float(logit) / temperature for token, logit in logits.items()}
    chosen = kept(values, top_k, top_p, min_p)
    chosen = [token for token in chosen if token in ends] or chosen
    return min(chosen, key=lambda token: (-(values[token] + noise(place, code[token])), token))
