"""`AdaFuseEngine.score` against the reference's cache-free arithmetic."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from adafuse_llm import (
    AdaFuseEngine,
    ContextWindowError,
    InvalidInputError,
    InvalidOptionError,
    MemberError,
    Request,
    RequestCancelledError,
    RuntimeConfig,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from tests.reference import mean_nll
from tests.support.models import CHATML, Recipe, engine, reference
from tests.support.waiting import wait_until

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


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT + "  ", "x"])
@pytest.mark.parametrize("ends", [False, True])
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


@pytest.mark.quick
def test_with_an_empty_prompt_a_text_follows_the_tokens_that_begin_prompts():
    recipe = Recipe("llama", "bytelevel", 31)  # its tokenizer adds no special tokens to a prompt
    member = reference(recipe)
    (scored,) = engine(recipe).score("", ["The ferry"]).texts
    (end,) = member.end_ids
    tokens, _ = member.codec.encode_continuation([end], "The ferry")
    assert scored.nll[recipe.name] == pytest.approx(mean_nll(member, [end], tokens, ends=False))


@pytest.mark.quick
def test_texts_can_be_replies_to_a_conversation():
    recipe = Recipe("llama", "bytelevel", 31, template=CHATML)
    messages = [{"role": "user", "content": "who?"}]
    (scored,) = engine(recipe).score(messages=messages, continuations=["Anna"]).texts
    member = reference(recipe)
    ids = member.codec.encode_messages(messages)
    tokens, _ = member.codec.encode_continuation(ids, "Anna")
    assert scored.nll[recipe.name] == pytest.approx(mean_nll(member, ids, tokens, ends=False))


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
    assert (neither.nll, neither.tokens, neither.score, neither.loglikelihood) == (
        {},
        {},
        None,
        None,
    )


@pytest.mark.quick
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


@pytest.mark.parametrize(("prompt", "temperature"), [("x ", 0.0), ("x", 1.0)])
def test_an_error_of_the_texts_of_tokens_names_the_member(prompt, temperature):
    class Broken(FakeBackend):
        @property
        def token_texts(self):
            raise RuntimeError("boom")

        def prepare_draws(self):
            raise RuntimeError("boom")

    with (
        AdaFuseEngine([Broken("one", lambda _: {"yes": 1.0}, ["yes"])]) as ensemble,
        pytest.raises(MemberError, match=r"'one'.*boom"),
    ):
        ensemble.generate(prompt, temperature=temperature)


# Scores are requests like all others ----------------------------------------------------------


class Hanging(FakeBackend):
    """A member whose passes for prompts with "hang" wait for `gate`."""

    def __init__(self) -> None:
        super().__init__("one", self._chances, ["yes", "no"])
        self.gate, self.inside = threading.Event(), threading.Event()
        self.sizes: list[int] = []

    def _chances(self, text: str) -> dict[str, float]:
        if "hang" in text:
            self.inside.set()
            assert self.gate.wait(30)
        return {"yes": 0.25, "no": 0.75}

    def evaluate(self, queries: Any) -> Any:
        self.sizes.append(len(queries))
        return super().evaluate(queries)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    member = Hanging()
    yield member
    member.gate.set()


@pytest.mark.quick
def test_a_score_can_be_cancelled(hanging: Hanging) -> None:
    """One score runs, one waits in the queue, and one is cancelled before."""
    runtime = RuntimeConfig(max_requests=1)
    with AdaFuseEngine([hanging], runtime=runtime) as ensemble, ThreadPoolExecutor(2) as pool:
        cancel, other = threading.Event(), threading.Event()
        running = pool.submit(ensemble.score, "hang", ["yes"], cancel=cancel)
        assert hanging.inside.wait(10)
        queued = pool.submit(ensemble.score, "x", ["yes"], cancel=other)
        wait_until(lambda: ensemble.scheduler.waiting)
        for flag, future in ((other, queued), (cancel, running)):
            assert not future.done()
            flag.set()
            with pytest.raises(RequestCancelledError, match="before its texts were scored"):
                future.result(10)
        assert not hanging.gate.is_set()
        with pytest.raises(RequestCancelledError):
            ensemble.score("x", ["yes"], cancel=cancel)
        hanging.gate.set()
        assert ensemble.score("x", ["yes"], cancel=threading.Event()).texts[0].score
        with pytest.raises(InvalidOptionError, match="cancel must be"):
            ensemble.score("x", ["yes"], cancel=True)  # type: ignore[arg-type]


@pytest.mark.quick
def test_a_batch_of_scores_shares_passes_and_equals_single_scores(hanging: Hanging) -> None:
    requests = [
        Request(prompt=prompt, texts=texts)
        for prompt, texts in (("x", ["yes"]), ("yes", ["no", "yesno"]), ("no no", ["yes"]))
    ]
    with AdaFuseEngine([hanging]) as ensemble:
        alone = [ensemble.open([each]).results()[0] for each in requests]
        hanging.sizes.clear()
        assert ensemble.open(requests).results() == alone
        assert hanging.sizes == [3]
        with pytest.raises(InvalidInputError, match=r"input 1 of the batch: a continuation must"):
            ensemble.open([requests[0], Request(prompt="x", texts=[""])])
