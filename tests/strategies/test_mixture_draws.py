"""Mixtures at temperatures above 0: a member is drawn for each word, and draws the word."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from adafuse_llm import AdaFuseEngine, Generation, RuntimeConfig
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from tests.decoding.cases import CONVERSATIONS, FORMS, OTHERS, PREFIXED, TEMPLATES
from tests.decoding.test_sampling import DRAWS
from tests.reference import Options, WordMixture, decode
from tests.reference_sampling import kept
from tests.support.compare import TOLERANCE, assert_same
from tests.support.models import LOSSY, PAIR, TRIPLE, Recipe, backend, reference
from tests.support.sizes import sized

Rule = Callable[[str], Mapping[str, float]]
Ended = tuple[str, bool]
"""A word, and whether whitespace or the end of the response must follow it."""


def run(recipes: Sequence[Recipe], *, drafting: bool = True, **options: Any) -> Generation:
    runtime = RuntimeConfig(drafting=drafting)
    members = [backend(recipe) for recipe in recipes]
    with AdaFuseEngine(members, strategy="mixture", runtime=runtime) as engine:
        return engine.generate(**options)


# The reference ----------------------------------------------------------------------------------

STARTS: tuple[dict[str, Any], ...] = (
    {"prompt": "The keeper lit the lamp and"},
    {"prompt": "Once:   "},
    {"messages": CONVERSATIONS[0]},
)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("start", STARTS, ids=["plain", "spaces", "messages"])
@pytest.mark.parametrize("draws", DRAWS, ids=["one", "top_p", "top_k", "both"])
def test_words_are_those_of_the_reference(draws: dict[str, Any], start: dict[str, Any]) -> None:
    for number, recipes in enumerate((PAIR, TRIPLE, OTHERS, PREFIXED, LOSSY)):
        if "messages" in start:
            recipes = TEMPLATES[: 2 + number % 2]  # noqa: PLW2901
        options: dict[str, Any] = {
            **draws,
            "max_new_tokens": 12,
            "max_word_tokens": (16, 3)[number % 2],
            "top_logprobs": number % 3,
            "weights": (3.0, 1.0, 2.0)[: len(recipes)],
            "stop": ("er",) * (number % 2),
            "seed": number,
        }
        check(recipes, start, options)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_words_of_a_form_are_those_of_the_reference(form: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    start = STARTS[FORMS.index(form) % 2]
    check(PAIR, start, {**DRAWS[0], **form, "max_new_tokens": 40, "weights": (1.0, 1.0)})


def check(recipes: Sequence[Recipe], start: dict[str, Any], options: dict[str, Any]) -> None:
    expected = decode(
        [reference(recipe) for recipe in recipes],
        start.get("prompt"),
        Options(**options, max_words=1, branching_factor=1),
        messages=start.get("messages"),
        rule=WordMixture(),
    )
    for drafting in (False, True):
        assert_same(run(recipes, drafting=drafting, **start, **options), expected, TOLERANCE)


# The distribution -------------------------------------------------------------------------------


RULES: tuple[Rule, Rule] = (
    lambda _: {" a": 0.3, " b": 0.01, "c": 0.64, END: 0.05},
    lambda _: {" a": 0.1, " b": 0.4, "c": 0.45, END: 0.05},
)
"""After a word of one member, the other member prefers another word. If they shared their noise,
the end of the word would tell which one the other member draws."""

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "weights": (1.0, 3.0)},
)
LONGEST = 3


def fake(name: str, rule: Rule) -> FakeBackend:
    vocabulary = [" a", " b", *"So:abc"]
    return FakeBackend(name, rule, vocabulary, is_complete=True)


def word_chances(
    rule: Rule, before: str, *, after_word: bool, temperature: float, top_p: float = 1.0
) -> dict[Ended, float]:
    """The chance of every next word of one member. The end of the response is the word END."""
    found: defaultdict[Ended, float] = defaultdict(float)

    def visit(word: str, size: int, chance: float) -> None:
        if size == LONGEST:
            found[word, False] += chance
            return
        tokens, row = zip(*rule(before + word).items(), strict=True)
        values = {at: math.log(p) / temperature for at, p in enumerate(row)}
        chosen = kept(values, None, top_p)
        if after_word and not size:
            chosen = [at for at in chosen if ends(tokens[at])] or chosen
        total = math.fsum(math.exp(values[at]) for at in chosen)
        for at in chosen:
            share = chance * math.exp(values[at]) / total
            if not size and tokens[at] == END:
                found[END, True] += share
            elif size and ends(tokens[at]):
                found[word, True] += share
            else:
                visit(word + tokens[at], size + 1, share)

    visit("", 0, 1.0)
    return found


def ends(token: str) -> bool:
    return token == END or token[0].isspace()


def mean_chances(
    rules: Sequence[Rule], weights: Sequence[float], words: int, **settings: Any
) -> dict[str, float]:
    """The chance of every sequence of words, with bars between them."""
    found: defaultdict[str, float] = defaultdict(float)

    def visit(before: list[str], chance: float, *, after_word: bool) -> None:
        if len(before) == words or before[-1:] == [END]:
            found["|".join(before)] += chance
            return
        for rule, weight in zip(rules, weights, strict=True):
            share = chance * weight / sum(weights)
            own = word_chances(rule, "".join(before), after_word=after_word, **settings)
            for (word, ended), each in own.items():
                visit([*before, word], share * each, after_word=ended)

    visit([], 1.0, after_word=False)
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


@pytest.mark.parametrize("settings", SETTINGS, ids=["T=1", "T=0.7, top_p=0.8"])
def test_words_are_draws_from_the_weighted_mean_of_the_members(settings: dict[str, Any]) -> None:
    exact = {"weights": (1.0, 1.0), **settings}
    chances = mean_chances(RULES, words=2, **exact)
    assert math.fsum(chances.values()) == pytest.approx(1)
    members = [fake(f"m{number}", rule) for number, rule in enumerate(RULES)]
    observed: Counter[str] = Counter()
    with AdaFuseEngine(members, strategy="mixture") as engine:
        for seed in range(sized(4, 30)):
            first = engine.generate(
                "So:", seed=seed, n=100, max_new_tokens=8, max_word_tokens=LONGEST, **exact
            )
            for each in (first, *first.alternatives):
                words = [END if one.candidates[0].ends else one.text for one in each.rounds[:2]]
                observed["|".join(words)] += 1
    assert chi_square(observed, chances) > 0.001


@pytest.mark.quick
def test_a_round_costs_the_passes_of_one_member() -> None:
    """A word of one token needs one pass, and one more if another member wrote the last word."""
    rule = lambda text: {" a": 1.0}  # noqa: E731
    members = [fake("one", rule), fake("other", rule)]
    with AdaFuseEngine(members, strategy="mixture") as engine:
        found = engine.generate("So:", temperature=1.0, seed=1, max_new_tokens=20)
    writers = [each.candidates[0].proposers for each in found.rounds]
    changes = sum(one != other for one, other in pairwise(writers))
    assert 0 < changes < 19
    assert sum(found.usage.forward_passes.values()) == 20 + 1 + changes
