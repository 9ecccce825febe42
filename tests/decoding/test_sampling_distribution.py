"""One member that draws at temperature T writes texts as often as p^(1/T) says.

The exact distribution of the first tokens is enumerated and compared with many seeds (Pearson's
chi-square test). Noise that breaks one of the rules fails the same test.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from tests.reference import Form, Options, allowance, begin
from tests.reference_sampling import kept
from tests.support.models import Recipe, engine, reference
from tests.support.sizes import sized

SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})
RESPONSES = 100
"""Responses of one request."""

Step = Callable[[tuple[Any, ...]], tuple[Mapping[Any, float], frozenset[Any]]]
"""From tokens to log-probabilities of the permitted next tokens, and the tokens that end."""


@dataclass(frozen=True)
class Case:
    """A member with its prompt, and what defines the distribution of its first tokens."""

    ensemble: AdaFuseEngine
    start: dict[str, Any]
    tokens: int
    step: Step
    text: Callable[[tuple[Any, ...]], str]
    options: dict[str, Any]
    count: Callable[[tuple[Any, ...]], int] = len

    def draw(self, seed: int, **draws: Any) -> list[str]:
        """The texts of `RESPONSES` responses."""
        first = self.ensemble.generate(
            **self.start,
            **self.options,
            **draws,
            seed=seed,
            n=RESPONSES,
            max_new_tokens=self.tokens,
        )
        return [each.text for each in (first, *first.alternatives)]

    def chances(self, *, temperature: float, top_p: float = 1.0) -> dict[str, float]:
        """The probability of every text."""
        found: defaultdict[str, float] = defaultdict(float)

        def visit(before: tuple[Any, ...], chance: float) -> None:
            if self.count(before) == self.tokens:
                found[shown(self.text(before))] += chance
                return
            logprobs, ends = self.step(before)
            tokens = list(logprobs)
            values = {i: logprobs[token] / temperature for i, token in enumerate(tokens)}
            chosen = kept(values, None, top_p)
            total = math.fsum(math.exp(values[i]) for i in chosen)
            for i in chosen:
                part = chance * math.exp(values[i]) / total
                if tokens[i] in ends:
                    found[shown(self.text(before))] += part
                elif part > 1e-12:
                    visit((*before, tokens[i]), part)

        visit((), 1.0)
        return dict(found)


def shown(text: str) -> str:
    """`text` up to a character that is not complete, which a limit of tokens may leave out."""
    return text.rstrip("\ufffd")


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


# Members --------------------------------------------------------------------------------------


def fake(
    rule: Callable[[str], Mapping[str, float]],
    vocabulary: list[str],
    start: dict[str, Any],
    tokens: int,
    *,
    lstrip: bool = False,
) -> Case:
    """A member that follows `rule`, which sees what of the text follows the last colon."""
    member = FakeBackend("fake", lambda text: rule(text.rpartition(":")[2]), vocabulary)

    def step(before: tuple[str, ...]) -> tuple[dict[str, float], frozenset[str]]:
        chances = rule("".join(before))
        return {token: math.log(chance) for token, chance in chances.items()}, frozenset({END})

    def text(before: tuple[str, ...]) -> str:
        return "".join(before).lstrip() if lstrip else "".join(before)

    options = {"max_words": 1}
    return Case(AdaFuseEngine([member]), start, tokens, step, text, options)


def letters() -> Case:
    """Words of a few letters, where the next token decides whether a word goes on."""

    def rule(text: str) -> dict[str, float]:
        if text.endswith("b"):
            return {" a": 0.2, "b": 0.2, "c": 0.5, END: 0.1}
        return {" a": 0.4, "b": 0.3, "c": 0.25, END: 0.05}

    return fake(rule, [" a", "b", "c"], {"prompt": "Say:"}, 4)


def spaces() -> Case:
    """A reply that begins with whitespace, which is not part of the response."""

    def rule(text: str) -> dict[str, float]:
        if not text.strip():
            return {" ": 0.3, "\n": 0.19, "  ": 0.1, " a": 0.2, "b": 0.21}
        return {" ": 0.2, "\n": 0.09, " a": 0.31, "b": 0.28, END: 0.12}

    start = {"messages": [{"role": "user", "content": "Say"}]}
    return fake(rule, [" ", "\n", "  ", " a", "b"], start, 4, lstrip=True)


def tiny(recipe: Recipe, prompt: str, tokens: int, regex: str | None = None) -> Case:
    """A small random model, of which every next token is computed by the reference."""
    member = reference(recipe)
    opening, ids = begin([member], prompt, None)
    before = ids[member.name]
    language = Options(regex=regex).language
    form = Form(language, [member], opening) if language else None
    allow = allowance(member, before, opening, form)

    def step(own: tuple[int, ...]) -> tuple[dict[int, float], frozenset[int]]:
        row = member.logprobs([*before, *own])
        allowed = allow(own)
        chosen = range(len(row)) if allowed is None else allowed
        return {token: row[token] for token in chosen}, member.end_ids

    def text(own: tuple[int, ...]) -> str:
        return opening.shown(opening.written(member, before, own))

    def count(own: tuple[int, ...]) -> int:
        return opening.counted(member, before, own)

    options: dict[str, Any] = {"max_words": 1, "max_word_tokens": 3, "regex": regex}
    return Case(engine(recipe), {"prompt": prompt}, tokens, step, text, options, count)


CASES: dict[str, Callable[[], Case]] = {
    "letters": letters,
    "spaces": spaces,
    "characters": lambda: tiny(
        Recipe("llama", "bytelevel", seed=3, spread=0.1, layers=1, end_bias=-60.0),  # rare bytes
        "The ferry",
        4,
        regex="[\u2104\u2105\u2108\u2109\u2144\u2145\u2148\u2149\u0434]*",
    ),
    "owed": lambda: tiny(Recipe("gpt2", "sentencepiece", seed=1, spread=0.3, layers=1), "So:  ", 1),
    "words": lambda: tiny(Recipe("qwen3", "bytelevel", seed=2, spread=0.4, layers=1), "The", 2),
}

COUNTS = {**dict.fromkeys(CASES, 600), "characters": 300}
"""Responses for a test that takes a second or two."""


@functools.cache
def case(name: str) -> Case:
    return CASES[name]()


def probability(name: str, count: int, settings: Mapping[str, Any]) -> float:
    """The p-value of `count` responses."""
    if name == "characters":
        pytest.importorskip("llguidance")
    member = case(name)
    seeds = range(count // RESPONSES)
    observed = Counter(shown(text) for seed in seeds for text in member.draw(seed, **settings))
    return chi_square(observed, member.chances(**settings))


@pytest.mark.sweep(5)
@pytest.mark.parametrize("settings", SETTINGS, ids=["T=1", "T=0.7, top_p=0.9"])
@pytest.mark.parametrize("name", CASES)
def test_a_member_draws_from_its_own_distribution(name: str, settings: dict[str, Any]) -> None:
    assert probability(name, sized(COUNTS[name], 3000), settings) > 0.001


# Noise that must fail -------------------------------------------------------------------------


@pytest.mark.quick
def test_the_chi_square_test_tells_a_wrong_distribution() -> None:
    generator = np.random.default_rng(1)
    chances = {text: (i + 1) / 55 for i, text in enumerate("abcdefghij")}
    right = Counter(generator.choice(list(chances), 3000, p=list(chances.values())).tolist())
    wrong = Counter(generator.choice(list(chances), 3000).tolist())
    assert chi_square(right, chances) > 0.01
    assert chi_square(wrong, chances) < 1e-9
