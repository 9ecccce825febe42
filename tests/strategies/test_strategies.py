"""Strategies besides AdaFuse: what defines each, and each against a second computation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    Generation,
    InvalidInputError,
    InvalidOptionError,
    RuntimeConfig,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.backends.huggingface.state import RequestState
from adafuse_llm.strategies import (
    SAFE,
    AdaFuse,
    BeamSearch,
    CoRE,
    DeePEn,
    FixedWords,
    GaC,
    HypothesisSearch,
    LookAhead,
    MajorityVote,
    Rerank,
    Single,
    SpecEM,
    Strategy,
    SweetSpan,
    UniTE,
    find_strategy,
)
from adafuse_llm.strategies.registry import NAMED
from adafuse_llm.tree import Node, TokenTree
from tests import reference_tokens
from tests.reference import Options, begin, commit, decode, mean_nll, pool, propose, score
from tests.reference import propose_beams as reference_beams
from tests.support.compare import TOLERANCE, approximately, as_data, assert_same
from tests.support.models import CHATML, STRICT, Recipe, backend, model, reference, tokenizer
from tests.support.sizes import sized

PAIR = (
    Recipe("llama", "bytelevel", seed=31, end_bias=2.0),
    Recipe("gpt2", "sentencepiece", seed=32, space_bias=1.5),
)
TRIPLE = (*PAIR, Recipe("qwen3", "unigram", seed=33, spread=0.6))
LOSSY = (Recipe("llama", "unknowns", seed=34), Recipe("qwen2", "bytelevel", seed=35))
RECURRENT = (Recipe("llama", "sentencepiece", seed=37), Recipe("mamba", "bytelevel", seed=36))
PROMPTS = (
    "The ferry to Orrin leaves at nine.",
    "Question: who keeps the light?\nAnswer:",
    "Caf\u00e9 \U0001f600 Orrin",
    "\u4e2d\u6587\u6ca1\u6709\u7a7a\u683c\u3002\u4e2d\u6587",
    "def f():\n     ",
)


def run(
    strategy: Strategy | str,
    recipes: Sequence[Recipe],
    prompt: str | None = PROMPTS[0],
    *,
    drafting: bool = True,
    **options: Any,
) -> Generation:
    members = [backend(recipe) for recipe in recipes]
    runtime = RuntimeConfig(drafting=drafting)
    with AdaFuseEngine(members, strategy=strategy, runtime=runtime) as engine:
        return engine.generate(prompt, **options)


# Words ----------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("prompt", PROMPTS[:-1])
@pytest.mark.parametrize("recipe", TRIPLE, ids=lambda recipe: recipe.kind)
def test_a_single_member_writes_what_its_own_generate_writes(recipe: Recipe, prompt: str) -> None:
    for drafting in (False, True):
        alone = run("single", [recipe], prompt, drafting=drafting, max_new_tokens=24)
        codec = backend(recipe).codec
        ids = codec.encode_prompt(prompt)
        written = (
            model(recipe)
            .generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids)),
                do_sample=False,
                max_new_tokens=alone.usage.completion_tokens[recipe.name]
                + (alone.finish_reason == "stop"),
                pad_token_id=0,
            )[0, len(ids) :]
            .tolist()
        )
        if alone.finish_reason == "stop":
            assert written.pop() in backend(recipe).end_ids
        assert alone.text == codec.decode_continuation(ids, written)


def test_a_single_member_is_chosen_among_those_of_an_engine() -> None:
    name = PAIR[1].name
    chosen = run("single", PAIR, use=name, max_new_tokens=24)
    assert as_data(chosen) == approximately(as_data(run("single", PAIR[1:], max_new_tokens=24)))
    with pytest.raises(InvalidInputError, match=r"one member; got 2 .*use="):
        run("single", PAIR)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("words", [1, 2, 3])
def test_a_fixed_number_of_words_is_algorithm_1_where_everybody_is_sure(words: int) -> None:
    for recipes, prompt in ((PAIR, PROMPTS[0]), (TRIPLE, PROMPTS[1]), (LOSSY, PROMPTS[2])):
        expected = decode(
            [reference(recipe) for recipe in recipes],
            prompt,
            Options(margin_threshold=0, max_words=words, branching_factor=1, max_new_tokens=24),
        )
        for drafting in (False, True):
            strategy = FixedWords(words)
            got = run(strategy, recipes, prompt, drafting=drafting, max_new_tokens=24)
            assert_same(got, expected, TOLERANCE)
        considered = {len(m) for each in got.rounds for m in each.margins.values()}
        assert max(considered) == words


def test_sweetspan_ignores_the_perplexities_of_members_without_weight() -> None:
    """Both members write the same, but the likelihood of the one with a weight is far lower."""
    sure, unsure = ({" a": chance, " b": 0.01} for chance in (0.99, 0.02))
    members = [
        FakeBackend("one", lambda _: unsure, [" a", " b"]),
        FakeBackend("two", lambda _: sure, [" a", " b"]),
    ]
    with AdaFuseEngine(members, strategy="sweetspan") as engine:
        generation = engine.generate("So:", weights=(1.0, 0.0), max_new_tokens=4)
    assert generation.text == " a a a a"
    assert generation.rounds[0].candidates[0].score == pytest.approx(-math.log(0.02))


def test_sweetspan_of_one_word_that_believes_all_is_one_word_a_round() -> None:
    for recipes in (PAIR, TRIPLE, LOSSY):
        spans = run(SweetSpan(words=1, ratio=math.inf), recipes, max_new_tokens=32)
        words = run("fixed-1", recipes, max_new_tokens=32)
        assert as_data(spans) == approximately(as_data(words))


@pytest.mark.parametrize("recipes", [PAIR, TRIPLE], ids=["pair", "triple"])
def test_sweetspan_leaves_out_ratings_out_of_proportion(recipes: Sequence[Recipe]) -> None:
    left_out = 0
    for prompt in PROMPTS[:2]:
        generation = run("sweetspan", recipes, prompt, max_new_tokens=32)
        words = run(FixedWords(4), recipes, prompt, max_new_tokens=32)
        assert {c.text for c in generation.rounds[0].candidates} == {
            c.text for c in words.rounds[0].candidates
        }
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


# Tokens ---------------------------------------------------------------------------------------


@functools.cache
def twins(recipe: Recipe) -> tuple[HuggingFaceBackend, HuggingFaceBackend]:
    known = tokenizer(recipe.kind)
    return backend(recipe), HuggingFaceBackend(model(recipe), known, "twin")


@pytest.mark.sweep(5)
@pytest.mark.parametrize("recipe", TRIPLE, ids=lambda recipe: recipe.kind)
@pytest.mark.parametrize("strategy", ["unite", "gac", "deepen", "core", "safe", "specem"])
def test_identical_members_write_what_one_writes_alone(strategy: str, recipe: Recipe) -> None:
    for prompt in PROMPTS[:: sized(2, 1)]:
        alone = run("single", [recipe], prompt, max_new_tokens=sized(24, 32))
        with AdaFuseEngine(twins(recipe), strategy=strategy) as engine:
            both = engine.generate(prompt, max_new_tokens=sized(16, 24))
        assert alone.text.startswith(both.text)
        assert both.finish_reason == "length" or both.text == alone.text
        assert both.text


def same(got: Generation, expected: reference_tokens.Decoded) -> None:
    assert [each.text for each in got.rounds] == [text for text, _ in expected.rounds]
    for each, (_, average) in zip(got.rounds, expected.rounds, strict=True):
        score = each.candidates[each.winner].score
        assert score == pytest.approx(-math.log(average), abs=1e-6)
    assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
    assert got.usage.completion_tokens == expected.completion_tokens


STRATEGIES: Mapping[str, tuple[Strategy, Callable[[], reference_tokens.Choose]]] = {
    "unite": (UniTE(), reference_tokens.unite),
    "unite of two": (UniTE(top_k=2), lambda: reference_tokens.unite(2)),
    "gac": (GaC(), reference_tokens.gac),
    "gac, gated": (GaC(threshold=0.15), lambda: reference_tokens.gac(0.15)),
    "core": (CoRE(), reference_tokens.core),
    "core of two, sharp": (CoRE(top_k=2, beta=30.0), lambda: reference_tokens.core(2, 30.0)),
    "safe": (SAFE(), reference_tokens.safe),
    "safe of two": (SAFE(draft=2, top_k=3), lambda: reference_tokens.safe(2, 3)),
    "specem": (SpecEM(), reference_tokens.specem),
    "specem of four": (SpecEM(tokens=4, rate=3.0), lambda: reference_tokens.specem(4, 3.0)),
}
"""Strategies, and functions that begin the second computation of a response."""


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "recipes", [PAIR, PAIR[::-1], TRIPLE, LOSSY], ids=["pair", "reversed", "triple", "lossy"]
)
def test_tokens_are_those_of_a_computation_without_caches(
    name: str, recipes: Sequence[Recipe]
) -> None:
    strategy, choose = STRATEGIES[name]
    for prompt in PROMPTS[1:3]:
        expected = reference_tokens.decode(
            [reference(recipe) for recipe in recipes], prompt, choose(), max_new_tokens=12
        )
        same(run(strategy, recipes, prompt, max_new_tokens=12), expected)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_tokens_in_conversations_windows_and_with_weights(name: str) -> None:
    strategy, choose = STRATEGIES[name]
    chatting = (
        Recipe("llama", "bytelevel", seed=51, template=CHATML),
        Recipe("gpt2", "sentencepiece", seed=52, template=STRICT),
    )
    messages = [{"role": "user", "content": "Who keeps the light?"}]
    room = len(tokenizer("sentencepiece").encode(PROMPTS[1])) + 5
    small = Recipe("llama", "sentencepiece", seed=61, window=room)
    cases: list[tuple[Sequence[Recipe], dict[str, Any], tuple[float, ...] | None]] = [
        (chatting, {"prompt": None, "messages": messages}, None),
        ((PAIR[0], small), {"prompt": PROMPTS[1]}, None),
        (PAIR, {"prompt": PROMPTS[0]}, (0.25, 1.5)),
    ]
    for recipes, given, weights in cases:
        if weights and "weights" not in strategy.options:
            continue
        members = [reference(recipe) for recipe in recipes]
        expected = reference_tokens.decode(
            members, choose=choose(), max_new_tokens=12, weights=weights, **given
        )
        same(run(strategy, recipes, max_new_tokens=12, weights=weights, **given), expected)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("recipes", [PAIR, PAIR[::-1], TRIPLE], ids=["pair", "reversed", "triple"])
def test_safe_spans_of_a_sure_drafter_are_those_without_caches(recipes: Sequence[Recipe]) -> None:
    """With even weights, members that know nothing of each other merge almost every token."""
    sharp = [replace(recipe, spread=1.5) for recipe in recipes]
    weights = (1.0, 0.1, 0.1)[: len(recipes)]
    spans = merges = 0
    for prompt in PROMPTS[: sized(3, None)]:
        for strategy, choose in (
            (SAFE(), reference_tokens.safe()),
            (SAFE(draft=2), reference_tokens.safe(2)),
        ):
            members = [reference(recipe) for recipe in sharp]
            got = run(strategy, sharp, prompt, max_new_tokens=16, weights=weights)
            expected = reference_tokens.decode(
                members, prompt, choose, max_new_tokens=16, weights=weights
            )
            same(got, expected)
            merges += sum(all(each.margins.values()) for each in got.rounds)
            spans += sum(not all(each.margins.values()) for each in got.rounds)
    assert min(spans, merges) > 10


def test_tokens_of_a_member_in_the_path_form_that_lags_behind() -> None:
    """The gate writes on while a recurrent member has not read what was committed."""
    for strategy, expected in (("gac", GaC(threshold=1.0)), (GaC(threshold=0.15), None)):
        got = run(strategy, RECURRENT, max_new_tokens=16)
        if expected is not None:
            assert as_data(got) == approximately(
                as_data(run(expected, RECURRENT, max_new_tokens=16))
            )
    lagging = RECURRENT[::-1]
    choose = reference_tokens.gac(0.15)
    members = [reference(recipe) for recipe in lagging]
    expected_text = reference_tokens.decode(members, PROMPTS[0], choose, max_new_tokens=16).text
    assert run(GaC(threshold=0.15), lagging, max_new_tokens=16).text == expected_text


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "recipes", [PAIR, PAIR[::-1], TRIPLE, LOSSY], ids=["pair", "reversed", "triple", "lossy"]
)
@pytest.mark.parametrize("rate", [0.15, 0.5])
def test_deepen_moves_as_far_as_a_computation_by_hand(
    recipes: Sequence[Recipe], rate: float
) -> None:
    changed = 0
    for prompt in PROMPTS[: sized(3, None)]:
        members = [reference(recipe) for recipe in recipes]
        choose = reference_tokens.deepen(rate=rate)
        expected = reference_tokens.decode(members, prompt, choose, max_new_tokens=12)
        same(run(DeePEn(rate=rate), recipes, prompt, max_new_tokens=12), expected)
        alone = run("single", recipes[:1], prompt, max_new_tokens=12).text
        changed += not alone.startswith(expected.text)
    assert changed


def test_deepen_with_weights_and_another_main_member() -> None:
    members = [reference(recipe) for recipe in PAIR[::-1]]
    choose = reference_tokens.deepen(steps=3, rate=0.3)
    expected = reference_tokens.decode(
        members, PROMPTS[1], choose, max_new_tokens=12, weights=(0.5, 2.0)
    )
    strategy = DeePEn(main=PAIR[1].name, steps=3, rate=0.3)
    same(run(strategy, PAIR, PROMPTS[1], max_new_tokens=12, weights=(2.0, 0.5)), expected)


def test_deepen_refuses_members_that_tell_no_distributions() -> None:
    with AdaFuseEngine([backend(PAIR[0]), saying("b", "No")], strategy="deepen") as engine:
        with pytest.raises(
            InvalidInputError, match=r"needs members with whole distributions .* Leave out b,"
        ):
            engine.generate("x")
        assert engine.generate("x", use=PAIR[0].name, max_new_tokens=3).text
    with pytest.raises(InvalidInputError, match="must be one of the members that decode"):
        run(DeePEn(main="nobody"), PAIR)


def test_deepen_refuses_members_whose_memory_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [HuggingFaceBackend(model(one), tokenizer(one.kind), one.name) for one in PAIR]
    anchors = len(members[0].vocabulary.keys() & members[1].vocabulary.keys())
    needed = sum(member.anchor_bytes(anchors) for member in members)
    free = needed - 1
    monkeypatch.setattr(HuggingFaceBackend, "free_bytes", lambda _: free)
    with AdaFuseEngine(members, strategy="deepen") as engine:
        with pytest.raises(InvalidInputError, match=rf"GB of memory on cpu for {anchors} shared"):
            engine.generate("x")
        free = needed
        text = engine.generate("x", max_new_tokens=3).text
        matrices = [member._space._matrix for member in members]
        assert needed == sum(matrix.nbytes for matrix in matrices if matrix is not None)
        free = 0  # the matrices are there now
        assert engine.generate("x", max_new_tokens=3).text == text


@pytest.mark.sweep(1)
@pytest.mark.parametrize("only", [0, 1])
def test_gac_with_one_weight_is_that_member(only: int) -> None:
    weights = tuple(float(index == only) for index in range(2))
    for prompt in PROMPTS[:: sized(2, 1)]:
        fused = run("gac", PAIR, prompt, weights=weights, max_new_tokens=24)
        alone = run("single", PAIR[only : only + 1], prompt, max_new_tokens=60)
        assert alone.text.startswith(fused.text)
        assert fused.text


@pytest.mark.quick
def test_gac_finds_what_is_nobodys_favourite_but_best_on_average() -> None:
    """Eleventh of both members, and likelier on average than what either likes better."""

    def member(name: str) -> FakeBackend:
        own = {f" {name}{number}": 0.06 for number in range(10)}
        return FakeBackend(name, lambda text: {**own, " z": 0.055, END: 0.001}, [*own, " z"])

    with AdaFuseEngine([member("a"), member("b")], strategy="gac") as engine:
        generation = engine.generate("x", max_new_tokens=1)
    (first,) = generation.rounds
    assert not first.candidates[first.winner].proposers
    assert "committed" in generation._repr_html_()
    assert first.text == " z"
    assert first.candidates[first.winner].score == pytest.approx(-math.log(0.055))
    with AdaFuseEngine([member("a"), member("b")], strategy="unite") as engine:
        assert engine.generate("x", max_new_tokens=1).text != " z"


def test_a_gate_that_decides_spares_the_others_their_passes() -> None:
    gated = run(GaC(threshold=0.0), PAIR, max_new_tokens=24)
    every = run("gac", PAIR, max_new_tokens=24)
    gate, other = (recipe.name for recipe in PAIR)
    assert all(set(each.margins) == {gate, other} for each in gated.rounds)
    assert [each.margins[other] for each in gated.rounds] == [()] * len(gated.rounds)
    assert gated.usage.forward_passes[other] <= 3 < every.usage.forward_passes[other]
    assert gated.usage.forward_passes[gate] >= len(gated.rounds)
    named = run(GaC(threshold=0.0, gate=other), PAIR, max_new_tokens=24)
    assert named.usage.forward_passes[gate] <= 3


def test_a_gate_decides_only_above_its_threshold() -> None:
    def member(name: str, chance: float) -> FakeBackend:
        return FakeBackend(name, lambda _: {" a": chance, " b": 1 - chance}, [" a", " b"])

    for chance, asked in ((0.5, 1), (0.51, 0)):
        members = [member("gate", chance), member("other", 0.25)]
        with AdaFuseEngine(members, strategy="gac-gated") as engine:
            (only,) = engine.generate("So:", max_new_tokens=1).rounds
        assert len(only.margins["other"]) == asked


@pytest.mark.parametrize("strategy", ["unite", "gac"])
def test_a_member_makes_one_pass_for_each_committed_token(strategy: str) -> None:
    with AdaFuseEngine(
        [saying("a", "one two three"), saying("b", "one two four")], strategy=strategy
    ) as engine:
        generation = engine.generate("Count:", weights=(2, 1))
    assert generation.text == " one two three"
    assert len(generation.rounds) == 4
    assert generation.usage.forward_passes == {"a": 4, "b": 4}


# Look-ahead -----------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("recipes", "words"), [(PAIR, 4), (TRIPLE, 1), (LOSSY, 2)], ids=["pair", "triple", "lossy"]
)
def test_continuations_are_those_without_any_cache(recipes: Sequence[Recipe], words: int) -> None:
    """The second prompt ends in spaces, which the members write first."""
    for prompt, stop in ((PROMPTS[0], ()), (PROMPTS[1] + "  ", ("e",))):
        options: dict[str, Any] = {"max_new_tokens": 8, "stop": stop}
        options["weights"] = (1.5, 0.25, 1.0)[: len(recipes)] if stop else None
        members = [reference(recipe) for recipe in recipes]
        expected = decode(members, prompt, Options(**options), words_ahead=words)
        assert_same(run(f"look-ahead-{words}", recipes, prompt, **options), expected, TOLERANCE)


@pytest.mark.quick
def test_a_continuation_decides_for_a_candidate_that_is_less_likely_alone() -> None:
    """The word "b" is less likely than "a", and what follows it is more likely."""
    after = {"": {" a": 0.55, " b": 0.4, " q": 0.05}, " a": {" x": 0.5, " y": 0.5}}
    after[" b"] = {" z": 1.0}

    def rule(text: str) -> dict[str, float]:
        return after.get(text.partition(":")[2], {END: 1.0})

    fakes = [FakeBackend("one", rule, [" a", " b", " q", " x", " y", " z"])]
    with AdaFuseEngine(fakes, strategy="adafuse") as engine:
        assert engine.generate("So:", max_words=1).text == " a x"
    with AdaFuseEngine(fakes, strategy=LookAhead(1)) as engine:
        generation = engine.generate("So:", max_words=1)
    assert generation.text == " b z"
    first = generation.rounds[0]
    assert [each.text for each in first.candidates] == [" a", " b", " q"]
    scores = [-math.log(0.55 * 0.5) / 2, -math.log(0.4) / 2]
    assert [each.score for each in first.candidates[:2]] == pytest.approx(scores)
    assert first.candidates[0].nll == pytest.approx({"one": scores[0]})
    assert first.candidates[2].score is None  # more than 1 nat above the lowest
    assert first.candidates[2].nll == pytest.approx({"one": -math.log(0.05)})


# Beams ----------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("recipes", [PAIR, TRIPLE, LOSSY], ids=["pair", "triple", "lossy"])
def test_beams_are_those_of_a_search_without_any_cache(
    recipes: Sequence[Recipe], size: int
) -> None:
    for number, prompt in enumerate(PROMPTS[: sized(3, None)]):
        options: dict[str, Any] = {"max_new_tokens": 12, "stop": ("e",) if number else ()}
        options["weights"] = (1.5, 0.25, 1.0)[: len(recipes)] if number % 2 else None
        expected = decode(
            [reference(recipe) for recipe in recipes],
            prompt,
            Options(**options),
            propose=reference_beams(size),
        )
        assert_same(run(f"beam-{size}", recipes, prompt, **options), expected, TOLERANCE)


def test_beams_of_a_member_in_the_path_form() -> None:
    """It computes a part in float32, so only the decisions are compared."""
    members = [reference(recipe) for recipe in RECURRENT]
    expected = decode(members, PROMPTS[0], Options(max_new_tokens=12), propose=reference_beams(3))
    got = run("beam-3", RECURRENT, PROMPTS[0], max_new_tokens=12)
    assert [each.text for each in got.rounds] == [each.text for each in expected.rounds]
    assert [[c.text for c in each.candidates] for each in got.rounds] == [
        [c.text for c in each.candidates] for each in expected.rounds
    ]
    assert got.finish_reason == expected.finish_reason


@pytest.mark.parametrize(
    ("strategy", "told"),
    [("beam-3", {"propose": reference_beams(3)}), ("look-ahead-3", {"words_ahead": 3})],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_words_in_conversations_and_small_windows(strategy: str, told: dict[str, Any]) -> None:
    chatting = (
        Recipe("llama", "bytelevel", seed=51, template=CHATML),
        Recipe("gpt2", "sentencepiece", seed=52, template=STRICT),
    )
    messages = [{"role": "user", "content": "Who keeps the light?"}]
    room = len(tokenizer("sentencepiece").encode(PROMPTS[1])) + 7
    small = Recipe("llama", "sentencepiece", seed=61, window=room)
    cases: list[tuple[Sequence[Recipe], dict[str, Any]]] = [
        (chatting, {"prompt": None, "messages": messages}),
        ((PAIR[0], small), {"prompt": PROMPTS[1]}),
    ]
    for recipes, given in cases:
        members = [reference(recipe) for recipe in recipes]
        settings = Options(max_new_tokens=14)
        expected = decode(members, options=settings, **told, **given)
        assert_same(run(strategy, recipes, max_new_tokens=14, **given), expected, TOLERANCE)


@pytest.mark.quick
def test_a_beam_is_cut_to_its_first_word_and_a_round_commits_one_word() -> None:
    """The likeliest first token is in no beam that is left, so its word is no candidate."""
    rule = {
        "": {" a": 0.6, " bc": 0.4},
        " a": {" c": 0.25, " d": 0.25, " e": 0.25, " f": 0.25},
        " bc": {"d": 0.9, " x": 0.1},
        " bcd": {" y": 1.0},
    }
    texts = [" a", " bc", "d", " c", " d", " e", " f", " x", " y"]
    member = FakeBackend("one", lambda text: rule.get(text[3:], {END: 1.0}), texts)
    with AdaFuseEngine([member], strategy="beam-2") as engine:
        generation = engine.generate("So:")
    assert [each.text for each in generation.rounds] == [" bcd", " y", ""]
    first, second, last = (
        [(each.text, each.stops) for each in one.candidates] for one in generation.rounds
    )
    assert first == [(" bcd", False), (" a", False)]
    assert (second, last) == ([(" y", False)], [("", True)])


def test_a_word_of_a_beam_has_at_most_five_tokens() -> None:
    member = FakeBackend("one", lambda text: {"x": 1.0}, ["x"])
    with AdaFuseEngine([member], strategy="beam-2") as engine:
        generation = engine.generate("So:", max_new_tokens=12)
    assert [each.text for each in generation.rounds] == ["xxxxx", "xxxxx", "xx"]


# Hypotheses -----------------------------------------------------------------------------------


def hypotheses(
    recipes: Sequence[Recipe], prompt: str, size: int, **options: Any
) -> list[tuple[str, bool, float]]:
    """Answers it ends with, the best first: text, whether it stops, mean F of its rounds."""
    members = [reference(recipe) for recipe in recipes]
    settings = Options(**options).settled(len(members), searches=True)
    start, begun = begin(members, prompt, None)
    kept: list[tuple[str, bool, list[float], dict[str, list[int]], bool]]
    kept = [("", False, [], begun, False)]
    while not all(each[4] for each in kept):
        found = [each for each in kept if each[4]]
        for text, _, fused, ids, done in kept:
            if done:
                continue
            opening = start.after(text)
            proposals = {m.name: propose(m, ids[m.name], settings, opening)[0] for m in members}
            candidates = pool(members, ids, proposals, opening)
            score(members, ids, candidates, [1.0] * len(members))
            for each in candidates:
                if each.score is None:
                    continue
                longer = {name: list(tokens) for name, tokens in ids.items()}
                fitted = commit(members, longer, each)
                new = {m.name: longer[m.name][len(begun[m.name]) :] for m in members}
                written = max(start.counted(m, begun[m.name], new[m.name]) for m in members)
                full = not fitted or written >= settings.max_new_tokens
                answer = text + each.written
                ends = each.stops or full or any(s in start.shown(answer) for s in settings.stop)
                found.append((answer, each.stops, [*fused, each.score], longer, ends))
        found.sort(key=lambda each: math.fsum(each[2]) / len(each[2]))
        different = {(each[0], each[1]): each for each in reversed(found)}
        ordered = [each for each in found if different[each[0], each[1]] is each]
        kept = ordered[:size]
    return [(start.shown(text), stops, math.fsum(f) / len(f)) for text, stops, f, _, _ in kept]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("recipes", [PAIR, TRIPLE, LOSSY, RECURRENT], ids=len)
def test_one_hypothesis_decides_what_adafuse_decides(recipes: Sequence[Recipe]) -> None:
    for prompt in PROMPTS[:2]:
        for others in ({"stop": ("e",)}, {"max_words": 1, "branching_factor": 2}):
            options: dict[str, Any] = {"max_new_tokens": 10, **others}
            usual = run("adafuse", recipes, prompt, drafting=False, **options)
            (only,) = (narrow := run("hypotheses-1", recipes, prompt, **options)).rounds
            assert (narrow.text, narrow.finish_reason) == (usual.text, usual.finish_reason)
            assert narrow.usage.completion_tokens == usual.usage.completion_tokens
            scores: list[Any] = [each.candidates[each.winner].score for each in usual.rounds]
            assert only.candidates[0].score == pytest.approx(sum(scores) / len(scores), abs=1e-9)
            for name, margins in only.margins.items():
                before = [margin for each in usual.rounds for margin in each.margins[name]]
                assert margins == pytest.approx(before, abs=1e-9)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("size", [2, 3, 1000], ids=lambda size: f"hypotheses-{size}")
@pytest.mark.parametrize("recipes", [PAIR, TRIPLE], ids=len)
def test_hypotheses_are_those_of_a_search_without_any_cache(
    recipes: Sequence[Recipe], size: int
) -> None:
    """A thousand are more than there are: then it is every answer that rounds can reach."""
    options: dict[str, Any] = {
        "max_new_tokens": 4 if size == 1000 else sized(8, 12),
        "max_words": 2,
        "branching_factor": 2,
    }
    for prompt in (PROMPTS[0], PROMPTS[1] + "  "):
        expected = hypotheses(recipes, prompt, size, **options)
        (only,) = run(HypothesisSearch(size), recipes, prompt, **options).rounds
        found = [(each.text, each.stops, each.score) for each in only.candidates]
        assert [each[:2] for each in found] == [each[:2] for each in expected]
        assert [each[2] for each in found] == pytest.approx([e[2] for e in expected], abs=1e-6)
        assert only.winner == 0


def test_partial_answers_share_passes() -> None:
    one, six = (
        run(HypothesisSearch(size), PAIR, PROMPTS[1], max_new_tokens=12, max_words=1).usage
        for size in (1, 6)
    )
    for name, passes in one.forward_passes.items():
        assert six.forward_passes[name] < 4 * passes
        assert six.tokens_processed[name] > 2 * one.tokens_processed[name]


@pytest.mark.parametrize("recipe", [PAIR[0], RECURRENT[0]], ids=lambda recipe: recipe.kind)
def test_hypotheses_that_lost_are_dropped(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is live after a round: a line per hypothesis, and a round's candidates below each."""
    live = []
    prune = TokenTree.prune

    def watched(tree: TokenTree, ends: Iterable[Node]) -> None:
        prune(tree, ends)
        live.append(sum(1 for _ in tree.nodes()))

    monkeypatch.setattr(TokenTree, "prune", watched)
    rows = []
    follow = RequestState.follow

    def watching(memory: RequestState) -> None:
        follow(memory)
        rows.append((len(memory.rows), sum(1 for _ in memory.tree.nodes())))

    monkeypatch.setattr(RequestState, "follow", watching)
    options: dict[str, Any] = {
        "max_new_tokens": 48,
        "max_words": 1,
        "branching_factor": 3,
        "max_word_tokens": 4,
    }
    run(HypothesisSearch(2), [recipe], **options)
    assert len(live) > 8
    assert max(live) <= 1 + 2 * (48 + 4 + 3 * 4)
    assert all(kept <= nodes for kept, nodes in rows)


def test_who_proposed_every_part_of_an_answer_proposed_it() -> None:
    rule = {"": {" a": 0.9, " b": 0.1}, " a": {END: 0.6, " a": 0.4}}
    other = {"": {" a": 0.9, " b": 0.1}, " a": {" b": 0.6, END: 0.4}, " a b": {END: 1.0}}

    def member(name: str, known: dict[str, dict[str, float]]) -> FakeBackend:
        return FakeBackend(name, lambda text: known.get(text[3:], {END: 1.0}), [" a", " b"])

    with AdaFuseEngine(
        [member("one", rule), member("two", other)], strategy="hypotheses-2"
    ) as engine:
        (only,) = engine.generate("So:", max_words=1, branching_factor=1).rounds
    proposers = {each.text: each.proposers for each in only.candidates}
    assert proposers == {" a": ("one",), " a b": ("two",)}


def test_a_hypothesis_that_begins_with_space_alone_is_still_at_the_first_word() -> None:
    """As AdaFuse: the second member's own leading space does not tell its word apart."""
    rules = [
        {"": {"\n": 1.0}, "\n": {"a": 0.9, "b": 0.1}},
        {"": {"\n": 1.0}, "\n": {" a": 0.9, " b": 0.1}},
    ]
    members = [
        FakeBackend(
            name,
            lambda text, known=known: known.get(  # type: ignore[misc]
                text.partition("Assistant:")[2], {END: 1.0}
            ),
            ["\n", "a", "b", " a", " b"],
        )
        for name, known in zip("ab", rules, strict=True)
    ]  # fmt: skip
    options: dict[str, Any] = {"max_words": 1, "branching_factor": 1, "max_word_tokens": 1}
    question = [{"role": "user", "content": "So?"}]
    with AdaFuseEngine(members, strategy="adafuse") as engine:
        usual = engine.generate(messages=question, **options)
    assert usual.rounds[1].candidates[0].proposers == ("a", "b")
    with AdaFuseEngine(members, strategy="hypotheses-1") as engine:
        (only,) = engine.generate(messages=question, **options).rounds
    assert (only.text, only.candidates[0].proposers) == (usual.text, ("a", "b"))


@pytest.mark.quick
def test_hypotheses_find_what_a_choice_in_every_round_misses() -> None:
    after = {"": {" a": 0.6, " b": 0.4}, " a": {" c": 0.3, " d": 0.3, " e": 0.3}}

    def rule(text: str) -> dict[str, float]:
        return after.get(text.partition(":")[2], {END: 1.0} if " " in text else {})

    after[" b"] = {" z": 1.0}
    fakes = [FakeBackend("one", rule, [" a", " b", " c", " d", " e", " z"])]
    with AdaFuseEngine(fakes, strategy="adafuse") as engine:
        assert engine.generate("So:", max_words=1).text == " a c"
    with AdaFuseEngine(fakes, strategy=HypothesisSearch(2)) as engine:
        generation = engine.generate("So:", max_words=1)
        assert generation.text == " b z"
        (only,) = generation.rounds
        assert only.candidates[0].score == pytest.approx(-math.log(0.4) / 3)


# Whole answers --------------------------------------------------------------------------------


def test_reranked_answers_are_the_members_own_and_the_likeliest_wins() -> None:
    for stop in ((), ("e",)):
        options: dict[str, Any] = {"max_new_tokens": 24, "stop": stop}
        (only,) = run("rerank", PAIR, PROMPTS[1], **options).rounds
        members = [reference(recipe) for recipe in PAIR]
        ids = {m.name: m.codec.encode_prompt(PROMPTS[1]) for m in members}
        for candidate, recipe in zip(only.candidates, PAIR, strict=True):
            assert candidate.proposers == (recipe.name,)
            alone = run("single", [recipe], PROMPTS[1], **options)
            assert candidate.text.startswith(alone.text)
            assert candidate.stops == (alone.finish_reason == "stop")
            text = candidate.text
            tokens = {m.name: m.codec.encode_continuation(ids[m.name], text)[0] for m in members}
            for member in members:
                nll = mean_nll(member, ids[member.name], tokens[member.name], stops=candidate.stops)
                if member.name != recipe.name:
                    assert candidate.nll[member.name] == pytest.approx(nll, abs=1e-6)
            mean = math.fsum(candidate.nll.values()) / len(candidate.nll)
            assert candidate.score == pytest.approx(mean, abs=1e-9)
        scores: list[Any] = [candidate.score for candidate in only.candidates]
        assert only.winner == scores.index(min(scores))


def saying(name: str, reply: str) -> FakeBackend:
    """A member that writes one reply."""
    pieces = [*(f" {word}" for word in reply.split()), END]

    def rule(text: str) -> dict[str, float]:
        return {pieces[min(text.count(" "), len(pieces) - 1)]: 0.9, " um": 0.1}

    return FakeBackend(name, rule, [*pieces[:-1], " um"])


@pytest.mark.quick
def test_most_votes_win_and_of_equal_ones_the_earlier_members_answer() -> None:
    members = [saying("a", "Twelve."), saying("b", "In Vell"), saying("c", "in vell!")]
    with AdaFuseEngine(members, strategy="vote") as engine:
        events = list(engine.stream("Where:"))
        assert len(events) == 1
        assert events[0].generation is not None
        assert events[0].text == " In Vell"
        (only,) = events[0].generation.rounds
        assert [c.score for c in only.candidates] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
        assert [set(c.nll) for c in only.candidates] == [{"a"}, {"b"}, {"c"}]
        assert events[0].generation.finish_reason == "stop"
        assert engine.generate("Where:", weights=(3, 1, 1)).text == " Twelve."
        assert engine.generate("Where:", use=("a", "b")).text == " Twelve."
    by_length = MajorityVote(key=lambda answer: str(len(answer)))
    with AdaFuseEngine(members, strategy=by_length) as engine:
        assert engine.generate("Where:", use=("b", "a")).text == " Twelve."
        assert engine.generate("Where:").text == " Twelve."


def test_votes_count_what_stands_before_a_stop_sequence() -> None:
    members = [saying("a", "No end"), saying("b", "Yes | then"), saying("c", "Yes | else")]
    with AdaFuseEngine(members, strategy="vote") as engine:
        generation = engine.generate("So:", stop="|")
    assert (generation.text, generation.finish_reason) == (" Yes ", "stop_sequence")


# All of them ----------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", [name for name in NAMED if name != "single"])
def test_streams_batches_and_results_are_those_of_one_request(name: str) -> None:
    members = [backend(recipe) for recipe in PAIR]
    with AdaFuseEngine(members, strategy=name) as engine:
        prompts = PROMPTS[:2]
        alone = [engine.generate(prompt, max_new_tokens=8) for prompt in prompts]
        together = engine.generate_batch(prompts, max_new_tokens=8)
        assert [as_data(each) for each in together] == [approximately(as_data(a)) for a in alone]
        events = list(engine.stream(PROMPTS[0], max_new_tokens=8))
        assert "".join(event.text for event in events) == alone[0].text
        assert len(events) == len(alone[0].rounds)
        assert engine.strategy.name == name
    assert Generation.model_validate_json(alone[0].model_dump_json()) == alone[0]


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMED)
def test_an_option_that_a_strategy_does_not_use_is_refused(name: str) -> None:
    strategy = find_strategy(name)
    other: dict[str, Any] = {
        "margin_threshold": 0.5,
        "max_words": 2,
        "branching_factor": 2,
        "max_word_tokens": 8,
        "max_word_letters": 8,
        "weights": (1.0, 2.0),
    }
    use = ("a",) if name == "single" else None
    fakes: list[Any] = [saying("a", "Yes"), saying("b", "No")]
    if name == "deepen":
        fakes = list(twins(PAIR[0]))
    with AdaFuseEngine(fakes, AdaFuseConfig(use=use), strategy=strategy) as engine:
        for option, value in other.items():
            if option in strategy.options:
                given: dict[str, Any] = {option: value, "max_new_tokens": 5}
                assert engine.generate("x", **given).text
            else:
                said = f"option '{option}': strategy '{name}' does not use it; got"
                with pytest.raises(InvalidOptionError, match=said):
                    engine.generate("x", **{option: value})
                with pytest.raises(InvalidOptionError, match=said):
                    AdaFuseEngine(fakes, AdaFuseConfig(**{option: value}), strategy=strategy)


@pytest.mark.quick
def test_a_strategy_is_given_by_name_or_as_an_object() -> None:
    fakes = [saying("a", "Yes")]
    for strategy in (
        AdaFuse(),
        BeamSearch(2),
        HypothesisSearch(2),
        Single(),
        FixedWords(7),
        UniTE(),
        GaC(),
        DeePEn(),
        DeePEn(rate=0.3),
        GaC(threshold=0.5),
        GaC(threshold=0.7),
        CoRE(),
        SAFE(),
        SpecEM(),
        Rerank(),
    ):
        assert AdaFuseEngine(fakes, strategy=strategy).strategy is strategy
        assert find_strategy(strategy.name).name == strategy.name
        assert type(find_strategy(strategy.name)) is type(strategy)
    assert AdaFuseEngine(fakes).strategy.name == "adafuse"
    assert find_strategy("fixed-7").name == "fixed-7"
    assert find_strategy("deepen-0.30") == DeePEn(rate=0.3)
    assert find_strategy("gac-gated-1") == GaC(threshold=1.0)
    numbered = ("fixed-0", "beam-0", "hypotheses-0", "look-ahead-0", "deepen-0", "gac-gated-2")
    for wrong in (*numbered, "unit", "beam", "gac-0.5", "deepen--0.3", 3, UniTE):
        with pytest.raises(InvalidOptionError):
            find_strategy(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="Did you mean 'unite'"):
        AdaFuseEngine(fakes, strategy="unit")


@pytest.mark.quick
@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedWords(0),
        lambda: BeamSearch(0),
        lambda: BeamSearch(2.5),  # type: ignore[arg-type]
        lambda: HypothesisSearch(0),
        lambda: HypothesisSearch(2.5),  # type: ignore[arg-type]
        lambda: SweetSpan(words=0),
        lambda: SweetSpan(ratio=0.5),
        lambda: SweetSpan(ratio=math.nan),
        lambda: UniTE(top_k=0),
        lambda: GaC(threshold=1.5),
        lambda: GaC(threshold=math.nan),
        lambda: GaC(gate="a"),
        lambda: DeePEn(steps=0),
        lambda: DeePEn(rate=0.0),
        lambda: DeePEn(rate=math.nan),
        lambda: CoRE(top_k=0),
        lambda: CoRE(beta=0.0),
        lambda: CoRE(beta=math.nan),
        lambda: SAFE(draft=0),
        lambda: SAFE(top_k=0),
        lambda: SpecEM(tokens=0),
        lambda: SpecEM(rate=-1.0),
        lambda: SpecEM(rate=math.inf),
    ],
)
def test_settings_of_strategies_are_checked(make: Any) -> None:
    with pytest.raises(InvalidOptionError):
        make()


def test_a_gate_that_does_not_decode_is_refused() -> None:
    with (
        AdaFuseEngine([saying("a", "Yes")], strategy=GaC(threshold=0.5, gate="b")) as engine,
        pytest.raises(InvalidInputError, match="must be one of the members that decode"),
    ):
        engine.generate("x")
