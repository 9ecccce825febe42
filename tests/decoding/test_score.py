"""Scores against the reference's cache-free arithmetic, and which candidate wins with them."""

import math
from typing import Any

import pytest

from adafuse_llm import (
    AdaFuseEngine,
    Candidate,
    ContextWindowError,
    InvalidInputError,
    InvalidOptionError,
    MemberError,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.decoding.score import best_candidate
from tests.reference import mean_nll
from tests.support.models import CHATML, Recipe, engine, reference

pytestmark = pytest.mark.quick

MEMBERS = (
    Recipe("llama", "bytelevel", 31),
    Recipe("gpt2", "sentencepiece", 32),
    Recipe("mamba", "unigram", 33),
)
PROMPT = "Question: who keeps the light?\nAnswer:"
TEXTS = (
    " Anna",
    " the keeper of the light",
    "\nNobody knew;",
    " Café \U0001f600 中文",
    ".",
    " the",
)


def expected(recipes, prompt, text, *, ends=False, weights=None):
    """Return the NLL and the number of terms by member, F, and the fused log-likelihood."""
    nll, terms = {}, {}
    for member in map(reference, recipes):
        ids = member.codec.encode_prompt(prompt.rstrip(" "))
        spaces = len(prompt) - len(prompt.rstrip(" "))
        tokens, exact = member.codec.encode_continuation(ids, " " * spaces + text)
        if exact:
            nll[member.name] = mean_nll(member, ids, tokens, ends=ends)
            terms[member.name] = len(tokens) + ends
    shares = {name: (weights or {}).get(name, 1.0) for name in nll}
    total = sum(shares.values())
    fused = sum(shares[name] * nll[name] for name in nll) / total
    summed = sum(shares[name] * nll[name] * terms[name] for name in nll) / total
    return nll, terms, fused, -summed


@pytest.mark.parametrize(("prompt", "ends"), [(PROMPT, True), (PROMPT + "  ", False), ("x", True)])
def test_given_texts_are_scored_as_the_reference_scores_them(prompt, ends):
    scores = engine(*MEMBERS).score(prompt, TEXTS, ends=ends)
    assert [scored.text for scored in scores.texts] == list(TEXTS)
    for scored in scores.texts:
        nll, terms, fused, summed = expected(MEMBERS, prompt, scored.text, ends=ends)
        assert scored.nll == pytest.approx(nll, abs=1e-5)  # one member computes in float32
        assert scored.tokens == terms
        assert scored.score == pytest.approx(fused, abs=1e-5)
        assert scored.loglikelihood == pytest.approx(summed, abs=1e-4)


def test_a_call_can_set_weights_and_members():
    recipes = MEMBERS[:2]
    weights = {recipes[0].name: 3.0, recipes[1].name: 1.0}
    (scored,) = (
        engine(*MEMBERS).score(PROMPT, [" the light"], weights=weights, use=[*weights]).texts
    )
    nll, _, fused, summed = expected(recipes, PROMPT, " the light", weights=weights)
    assert set(scored.nll) == set(nll)
    assert scored.score == pytest.approx(fused, abs=1e-9)
    assert scored.loglikelihood == pytest.approx(summed, abs=1e-8)


def test_all_continuations_take_one_pass_over_their_different_tokens():
    recipe = Recipe("llama", "bytelevel", 31)
    codec = reference(recipe).codec
    texts = [" the light", " the night", " the light is"]
    usage = engine(recipe).score("The keeper of Vell said that", texts).usage
    assert usage.forward_passes == {recipe.name: 1}
    encoded = [codec.encode_continuation((), text)[0] for text in texts]
    read = {tuple(ids[:at]) for ids in encoded for at in range(1, len(ids))}  # not the last tokens
    fresh = usage.prompt_tokens[recipe.name] - usage.cached_tokens[recipe.name]
    assert usage.tokens_processed[recipe.name] == fresh + len(read)


def test_a_text_follows_a_conversation_or_the_tokens_that_begin_prompts():
    recipe = Recipe("llama", "bytelevel", 31, template=CHATML)
    member, messages = reference(recipe), [{"role": "user", "content": "who?"}]
    starts = (
        ({"prompt": ""}, sorted(member.end_ids)),  # the tokenizer adds no tokens to a prompt
        ({"messages": messages}, member.codec.encode_messages(messages)),
    )
    for start, ids in starts:
        (scored,) = engine(recipe).score(**start, continuations=["Anna"]).texts
        tokens, _ = member.codec.encode_continuation(ids, "Anna")
        nll = mean_nll(member, ids, tokens, ends=False)
        assert scored.nll[recipe.name] == pytest.approx(nll)


def fake(name, chances, **options):
    return FakeBackend(name, lambda text: chances, ["yes", "no"], **options)


def test_a_text_that_no_member_can_score_has_no_score():
    one = fake("one", {"yes": 0.5, END: 0.5})
    other = fake("other", {"yes": 0.25, "no": 0.75}, context_window=3)
    with AdaFuseEngine([one, other]) as ensemble:
        yes, no, long, neither = ensemble.score("x", ["yes", "no", "yesyesyes", "maybe"]).texts
    assert yes.score == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert no.nll == {"other": pytest.approx(-math.log(0.75))}
    assert long.nll == {"one": pytest.approx(math.log(2))}
    assert long.tokens == {"one": 3}
    assert long.loglikelihood == pytest.approx(-3 * math.log(2))
    assert neither.nll == neither.tokens == {}
    assert neither.score is neither.loglikelihood is None


def test_invalid_input_is_an_error():
    with AdaFuseEngine([fake("one", {"yes": 1.0}, context_window=4)]) as ensemble:
        wrong: list[Any] = [[], "yes", [""], [3], ["\ud800"]]
        for continuations in wrong:
            with pytest.raises(InvalidInputError):
                ensemble.score("x", continuations)
        with pytest.raises(InvalidInputError, match="either"):
            ensemble.score(continuations=["yes"])
        with pytest.raises(InvalidOptionError):
            ensemble.score("x", ["yes"], wieghts=None)  # type: ignore[call-arg]
        with pytest.raises(ContextWindowError):
            ensemble.score("xxxx", ["yes"])


def test_an_error_of_the_texts_of_tokens_names_the_member():
    class Broken(FakeBackend):
        @property
        def token_texts(self):
            raise RuntimeError("boom")

    with (
        AdaFuseEngine([Broken("one", lambda _: {"yes": 1.0}, ["yes"])]) as ensemble,
        pytest.raises(MemberError, match=r"'one'.*boom"),
    ):
        ensemble.generate("x ")


# Which candidate wins a round ------------------------------------------------------------------


def scored(*scores: float | None) -> list[Candidate]:
    return [Candidate(text="a", ends=False, proposers=(), nll={}, score=each) for each in scores]


@pytest.mark.parametrize(
    ("scores", "winner"),
    [((0.5, 0.2, 0.3), 1), ((0.2, 0.2), 0), ((0.3, 0.1, 0.1), 1), ((None, 0.4, 0.4), 1)],
)
def test_the_lowest_score_wins_and_the_first_of_equal_ones(
    scores: tuple[float | None, ...], winner: int
) -> None:
    assert best_candidate(scored(*scores)) == winner
