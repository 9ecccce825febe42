"""The peers: what defines each, and each against a computation without any cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine, Generation
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.strategies import FixedWords, Strategy, find_strategy
from benchmarks import peers
from benchmarks.peers import BeamSearch, DeePEn, GaC, MajorityVote, Rerank, SweetSpan, UniTE
from tests import reference_tokens
from tests.reference import Options, decode, mean_nll, propose_beams
from tests.support.compare import TOLERANCE, as_data, assert_same
from tests.support.models import CHATTING, PAIR, TRIPLE, Recipe, backend, reference

PROMPT = "Question: who keeps the light?\nAnswer:"
MESSAGES = [{"role": "user", "content": "Who keeps the light?"}]


def run(
    strategy: Strategy, recipes: Sequence[Recipe], prompt: str | None = PROMPT, **options: Any
) -> Generation:
    with AdaFuseEngine([backend(recipe) for recipe in recipes], strategy=strategy) as engine:
        return engine.generate(prompt, **options)


def fake(name: str, rule: Callable[[str], Mapping[str, float]], *texts: str) -> FakeBackend:
    return FakeBackend(name, lambda text: rule(text.partition(":")[2]), texts)


def saying(name: str, reply: str) -> FakeBackend:
    """A member that writes one reply."""
    pieces = [*(f" {word}" for word in reply.split()), END]

    def rule(text: str) -> Mapping[str, float]:
        return {pieces[min(text.count(" "), len(pieces) - 1)]: 0.9, " um": 0.1}

    return fake(name, rule, *pieces[:-1], " um")


@pytest.mark.quick
def test_peers_have_their_names_once_they_are_registered() -> None:
    peers.register()
    for name in ("unite", "gac", "gac-gated", "gac-gated-0.9", "deepen", "deepen-0.3", "beam-3"):
        assert find_strategy(name).name == name
    assert find_strategy("gac-gated") == GaC(threshold=0.5)
    assert find_strategy("beam-5") == BeamSearch(5)


# Tokens ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "choose"),
    [
        (UniTE(), reference_tokens.unite()),
        (GaC(), reference_tokens.gac()),
        (GaC(threshold=0.15), reference_tokens.gac(0.15)),
        (DeePEn(rate=0.3), reference_tokens.deepen(rate=0.3)),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_tokens_are_those_of_a_computation_without_caches(
    strategy: Strategy, choose: reference_tokens.Choose
) -> None:
    cases: list[tuple[Sequence[Recipe], dict[str, Any], tuple[float, ...] | None]] = [
        (PAIR, {"prompt": PROMPT}, (0.25, 1.5)),
        (TRIPLE, {"prompt": "Caf\u00e9 \U0001f600 Orrin"}, None),
        (CHATTING, {"prompt": None, "messages": MESSAGES}, None),
        (PAIR[::-1], {"prompt": "def f():\n     "}, None),
    ]
    for recipes, given, weights in cases:
        members = [reference(recipe) for recipe in recipes]
        expected = reference_tokens.decode(
            members, choose=choose, max_new_tokens=12, weights=weights, **given
        )
        got = run(strategy, recipes, max_new_tokens=12, weights=weights, **given)
        assert [each.text for each in got.rounds] == [text for text, _ in expected.rounds]
        for each, (_, average) in zip(got.rounds, expected.rounds, strict=True):
            score = each.candidates[each.winner].score
            assert score == pytest.approx(-math.log(average), abs=1e-6)
        assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
        assert got.usage.completion_tokens == expected.completion_tokens


# Words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipes", [PAIR, TRIPLE], ids=["pair", "triple"])
def test_sweetspan_leaves_out_ratings_out_of_proportion(recipes: Sequence[Recipe]) -> None:
    left_out = 0
    generation = run(SweetSpan(), recipes, max_new_tokens=32)
    words = run(FixedWords(4), recipes, max_new_tokens=32)
    first = [{c.text for c in each.rounds[0].candidates} for each in (generation, words)]
    assert first[0] == first[1]
    for each in generation.rounds:
        scores = []
        for candidate in each.candidates:
            perplexities = [math.exp(nll) for nll in candidate.nll.values()]
            lowest, highest = min(perplexities), max(perplexities)
            kept = perplexities
            if highest > 10 * lowest:
                kept = [p for p in perplexities if lowest < p < highest] or [lowest]
            left_out += len(perplexities) - len(kept)
            scores.append(math.log(math.prod(kept)) / len(kept))
            assert candidate.score == pytest.approx(scores[-1], abs=1e-9)
        assert each.winner == scores.index(min(scores))
    assert left_out


def test_beams_are_those_of_a_search_without_any_cache() -> None:
    cases: list[tuple[Sequence[Recipe], dict[str, Any]]] = [
        (TRIPLE, {"prompt": PROMPT, "stop": ("e",), "weights": (1.5, 0.25, 1.0)}),
        (PAIR, {"prompt": "Caf\u00e9 \U0001f600 Orrin"}),
        (CHATTING, {"prompt": None, "messages": MESSAGES}),
    ]
    for recipes, given in cases:
        options = {name: given.pop(name) for name in ("stop", "weights") if name in given}
        members = [reference(recipe) for recipe in recipes]
        settings = Options(max_new_tokens=12, **options)
        expected = decode(members, options=settings, propose=propose_beams(3), **given)
        got = run(BeamSearch(3), recipes, max_new_tokens=12, **options, **given)
        assert_same(got, expected, TOLERANCE)


# Whole answers --------------------------------------------------------------------------------


def test_the_likeliest_of_the_members_own_answers_wins() -> None:
    (only,) = run(Rerank(), PAIR, max_new_tokens=24, stop=("e",)).rounds
    for candidate, recipe in zip(only.candidates, PAIR, strict=True):
        assert candidate.proposers == (recipe.name,)
        for member in map(reference, PAIR):
            before = member.codec.encode_prompt(PROMPT)
            tokens = member.codec.encode_continuation(before, candidate.text)[0]
            if member.name != recipe.name:
                nll = mean_nll(member, before, tokens, ends=candidate.ends)
                assert candidate.nll[member.name] == pytest.approx(nll, abs=1e-6)
        assert candidate.score == pytest.approx(math.fsum(candidate.nll.values()) / 2)
    scores: list[Any] = [candidate.score for candidate in only.candidates]
    assert only.winner == scores.index(min(scores))


@pytest.mark.quick
def test_most_votes_win_and_of_equal_ones_the_earlier_members_answer() -> None:
    members = [saying("a", "Twelve."), saying("b", "In Vell"), saying("c", "in vell!")]
    with AdaFuseEngine(members, strategy=MajorityVote()) as engine:
        generation = engine.generate("Where:")
        assert (generation.text, generation.finish_reason) == (" In Vell", "stop")
        (only,) = generation.rounds
        assert [c.score for c in only.candidates] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
        assert [set(c.nll) for c in only.candidates] == [{"a"}, {"b"}, {"c"}]
        assert engine.generate("Where:", weights=(3, 1, 1)).text == " Twelve."
        assert engine.generate("Where:", use=("a", "b")).text == " Twelve."


class Judge:
    """A ranker that prefers what comes first in its list."""

    def __init__(self, *preferred: str) -> None:
        self.preferred = preferred
        self.seen: list[tuple[str, tuple[str, ...]]] = []

    def compare(self, question: str, answers: Sequence[str]) -> list[list[float]]:
        self.seen.append((question, tuple(answers)))
        places = [self.preferred.index(each) for each in answers]
        return [[float(there - here) for there in places] for here in places]


@pytest.mark.quick
def test_the_answer_with_the_highest_mean_logit_is_committed() -> None:
    judge = Judge("two", "three", "one", "")
    members = [saying("a", "one"), saying("b", "two"), saying("c", "three"), saying("d", "one")]
    with AdaFuseEngine(members, strategy=Rerank(judge)) as engine:
        (only,) = engine.generate("Which:").rounds
        assert [c.text for c in only.candidates] == [" two", " three", " one"]
        assert [c.score for c in only.candidates] == [-1.5, 0, 1.5]
        assert [c.proposers for c in only.candidates] == [("b",), ("c",), ("a", "d")]
        assert [set(c.nll) for c in only.candidates] == [{"b"}, {"c"}, {"a", "d"}]
        assert judge.seen == [("Which:", ("one", "two", "three"))]
        engine.generate("Which:", stop="two")
        assert judge.seen[1] == ("Which:", ("one", "", "three"))


# All of them ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", peers.STRATEGIES, ids=lambda strategy: strategy.name)
def test_requests_of_a_batch_give_what_they_give_alone(strategy: Strategy) -> None:
    with AdaFuseEngine([backend(recipe) for recipe in PAIR], strategy=strategy) as engine:
        prompts = [PROMPT, "The ferry to Orrin leaves at nine."]
        alone = [engine.generate(prompt, max_new_tokens=8) for prompt in prompts]
        together = engine.generate_batch(prompts, max_new_tokens=8)
        assert [each.text for each in together] == [each.text for each in alone]
        events = list(engine.stream(PROMPT, max_new_tokens=8))
        assert "".join(event.text for event in events) == alone[0].text
        assert as_data(alone[0]) == as_data(engine.generate(PROMPT, max_new_tokens=8))
