"""One member that draws at temperature T writes texts as often as p^(1/T) says.

The exact distribution of the first tokens is enumerated and compared with many seeds (Pearson's
chi-square test).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from tests.reference_sampling import kept
from tests.support.sizes import sized

TOKENS = 4
RESPONSES = 100
"""Responses of one request."""


def letters(text: str) -> dict[str, float]:
    """Words of a few letters, where the next token decides whether a word goes on."""
    if text.endswith("b"):
        return {" a": 0.2, "b": 0.2, "c": 0.5, END: 0.1}
    return {" a": 0.4, "b": 0.3, "c": 0.25, END: 0.05}


def chances_of(temperature: float, top_p: float) -> dict[str, float]:
    """The probability of every text of a member that writes `letters`."""
    found: defaultdict[str, float] = defaultdict(float)

    def visit(text: str, size: int, chance: float) -> None:
        if size == TOKENS:
            found[text] += chance
            return
        tokens, row = zip(*letters(text).items(), strict=True)
        values = {i: math.log(p) / temperature for i, p in enumerate(row)}
        chosen = kept(values, None, top_p)
        total = math.fsum(math.exp(values[i]) for i in chosen)
        for i in chosen:
            part = chance * math.exp(values[i]) / total
            if tokens[i] == END:
                found[text] += part
            else:
                visit(text + tokens[i], size + 1, part)

    visit("", 0, 1.0)
    return dict(found)


def chi_square(observed: Counter[str], chances: Mapping[str, float]) -> float:
    """Probability of a deviation from `chances` that is as large as the observed one or larger."""
    count = observed.total()
    assert set(observed) <= set(chances), set(observed) - set(chances)
    terms: list[float] = []
    got = expected = 0.0
    for text in sorted(chances, key=lambda text: (chances[text], text)):
        got, expected = got + observed[text], expected + count * chances[text]
        if expected >= 5:
            terms.append((got - expected) ** 2 / expected)
            got = expected = 0.0
    freedom = torch.tensor((len(terms) - 1) / 2, dtype=torch.float64)
    statistic = torch.tensor(math.fsum(terms) / 2, dtype=torch.float64)
    assert len(terms) > 5
    return float(torch.special.gammaincc(freedom, statistic))


@pytest.mark.sweep(1)
def test_a_member_draws_from_its_own_distribution() -> None:
    member = FakeBackend("fake", lambda text: letters(text.rpartition(":")[2]), [" a", "b", "c"])
    draws: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}
    observed: Counter[str] = Counter()
    with AdaFuseEngine([member]) as engine:
        for seed in range(sized(4, 30)):
            first = engine.generate(
                "Say:", **draws, seed=seed, n=RESPONSES, max_new_tokens=TOKENS, max_words=1
            )
            observed.update(each.text for each in (first, *first.alternatives))
    assert chi_square(observed, chances_of(**draws)) > 0.001
