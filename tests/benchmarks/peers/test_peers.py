"""The peers: what defines each, and each against a computation without any cache."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from adafuse_llm import AdaFuseEngine, Generation
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.strategies import Strategy
from benchmarks import peers
from benchmarks.peers import BeamSearch, DeePEn, GaC, MajorityVote, Rerank, SweetSpan, UniTE
from tests.reference import mean_nll
from tests.strategies.test_strategies import saying
from tests.support.models import PAIR, TRIPLE, Recipe, backend, reference

PROMPT = "Question: who keeps the light?\nAnswer:"


def run(
    strategy: Strategy, recipes: Sequence[Recipe], prompt: str | None = PROMPT, **options: Any
) -> Generation:
    with AdaFuseEngine([backend(recipe) for recipe in recipes], strategy=strategy) as engine:
        return engine.generate(prompt, **options)


def fake(name: str, rule: Callable[[str], Mapping[str, float]], *texts: str) -> FakeBackend:
    return FakeBackend(name, lambda text: rule(text.partition(":")[2]), texts)


@pytest.mark.quick
def test_peers_have_names() -> None:
    assert {"unite", "gac", "gac-gated-0.9", "deepen", "deepen-0.3"} <= peers.NAMED.keys()
    assert peers.NAMED["gac-gated"] == GaC(threshold=0.5)
    assert peers.NAMED["beam-5"] == BeamSearch(5)


# Tokens ---------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("strategy", "text", "average"),
    [
        (UniTE(), " ab", (0.5 / 1.0 + 0.45 / 1.45) / 2),  # each relative to what is offered
        (GaC(), " c", (0.3 + 0.55) / 2),  # " ab" is no token of heron's
        (GaC(threshold=0.4), " ab", 0.5),  # wren alone
    ],
    ids=["unite", "gac", "gac-gated"],
)
def test_the_token_with_the_highest_average_is_committed(
    strategy: Strategy, text: str, average: float
) -> None:
    firsts = {"wren": {" ab": 0.5, " c": 0.3, " a": 0.2}, "heron": {" c": 0.55, " a": 0.45}}
    members = [
        fake(name, partial(lambda own, written: {END: 1.0} if written else own, own), *own)
        for name, own in firsts.items()
    ]
    with AdaFuseEngine(members, strategy=strategy) as engine:
        generation = engine.generate("Say:")
    first, last = generation.rounds
    assert (generation.text, last.candidates[last.winner].ends) == (text, True)
    assert first.candidates[first.winner].score == pytest.approx(-math.log(average))


def test_deepen_moves_the_first_member_toward_the_average_over_anchors() -> None:
    recipes = [Recipe(seed=31, end_bias=-9.0), Recipe("qwen2", seed=35)]
    (first, *_) = run(DeePEn(rate=0.3), recipes, max_new_tokens=1, weights=(0.25, 1.5)).rounds
    spaces, chances = [], []
    for member in map(reference, recipes):
        weight = member.model.get_input_embeddings().weight.detach().double()
        unit = torch.nn.functional.normalize(weight)
        known = sorted({*member.tokenizer.get_vocab().values()})  # one tokenizer: all are anchors
        cosines = torch.nn.functional.normalize(unit @ unit[known].T)
        spaces.append((100 * cosines).softmax(-1))
        row = member.logprobs(member.codec.encode_prompt(PROMPT))
        chances.append(torch.tensor(row).exp() @ spaces[-1])
    target = (0.25 * chances[0] + 1.5 * chances[1]) / 1.75
    main = reference(recipes[0])
    moved = torch.tensor(main.logprobs(main.codec.encode_prompt(PROMPT)), requires_grad=True)
    steps = torch.optim.AdamW([moved], lr=0.3)
    for step in range(5):
        steps.param_groups[0]["lr"] = 0.075 + 0.225 * (1 + math.cos(math.pi * step / 10)) / 2
        steps.zero_grad()
        loss = -(target * (moved.softmax(-1) @ spaces[0]).log()).sum() / len(target)
        loss.backward()
        steps.step()
    best = moved.detach().log_softmax(-1).max(-1)
    assert first.text == main.text(main.codec.encode_prompt(PROMPT), [int(best.indices)])
    score = first.candidates[first.winner].score
    assert score == pytest.approx(-float(best.values), abs=1e-6)


# Words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipes", [PAIR, TRIPLE], ids=["pair", "triple"])
def test_sweetspan_leaves_out_ratings_out_of_proportion(recipes: Sequence[Recipe]) -> None:
    left_out = 0
    for each in run(SweetSpan(), recipes, max_new_tokens=32).rounds:
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


@pytest.mark.quick
def test_beams_are_words_whose_five_tokens_are_likely_together() -> None:
    after = {"": {" x": 0.6, " y": 0.4}, " x": {"a": 0.4, "b": 0.3, "c": 0.3}, " y": {"d": 1.0}}
    member = fake("oak", lambda text: after.get(text, {" z": 1.0}), " x", " y", " z")
    with AdaFuseEngine([member], strategy=BeamSearch(3)) as engine:
        (first,) = engine.generate("Say:", max_new_tokens=2).rounds
    assert [c.text for c in first.candidates] == [" yd", " xa", " xb"]
    assert first.text == " yd"


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
