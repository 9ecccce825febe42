"""Penalties, biases and minimum lengths: the rule, requests, and who refuses them."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adafuse_llm import AdaFuseEngine, InvalidOptionError
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.huggingface.checkpoint import ignored_settings, own_adjustment
from adafuse_llm.backends.logits.adjust import adjusted
from adafuse_llm.backends.logits.state import Written
from adafuse_llm.tree.adjustment import FORBIDDEN, NOTHING, Adjustment, changed
from tests.reference_adjustment import processed, processors
from tests.support.models import Recipe
from tests.support.models import engine as tiny_engine

pytestmark = pytest.mark.quick

SIZE, END = 12, 0
WORDS = ["a ", "b ", "c "]


def rule(text: str) -> dict[str, float]:
    return {"a ": 0.4, "b ": 0.3, "c ": 0.2, "<end>": 0.1}


def engine(*names: str, **options: Any) -> AdaFuseEngine:
    return AdaFuseEngine([FakeBackend(name, rule, WORDS) for name in names or ("wren",)], **options)


def drawn_adjustment(chance: random.Random) -> tuple[dict[str, Any], Adjustment]:
    """Settings of transformers, and what they are here."""
    sequences = [
        tuple(chance.choices(range(1, 5), k=chance.randint(1, 3)))
        for _ in range(chance.randint(1, 4))
    ]
    given: dict[str, Any] = {
        "repetition_penalty": chance.choice([1.0, 1.3, 0.5]),
        "no_repeat_ngram_size": chance.randint(0, 4),
        "min_new_tokens": chance.randint(0, 6),
        "presence_penalty": chance.choice([0.0, 1.5, -0.5]),
        "frequency_penalty": chance.choice([0.0, 0.25, -0.5]),
    }
    lists: dict[str, Any] = {
        "sequence_bias": {each: chance.uniform(-9, 9) for each in sequences},
        "bad_words_ids": [list(each) for each in sequences[:2]],
        "suppress_tokens": [5],
        "begin_suppress_tokens": [6, 7],
    }
    config = SimpleNamespace(generation_config=SimpleNamespace(**lists))
    adjustment = replace(own_adjustment(config, frozenset()), **given, end_ids=(END,))
    return {**given, **lists}, adjustment


def test_changes_equal_the_processors_of_transformers() -> None:
    chance = random.Random(5)
    for _ in range(300):
        given, adjustment = drawn_adjustment(chance)
        prompt = chance.randint(1, 5)
        ids = chance.choices(range(1, 5), k=prompt + chance.randint(0, 8))
        row = torch.randn(SIZE, dtype=torch.float64, generator=None)
        found = processors(SimpleNamespace(**given), SimpleNamespace(), None, prompt, [END])
        expected = torch.tensor(processed(found, ids, row.numpy())).log_softmax(-1)
        committed = chance.randint(prompt, len(ids))  # the rest is not committed yet
        changes = adjustment.changes(ids[:committed], prompt, ids[committed:])
        mine = changed(dict(enumerate(row.tolist())), changes)
        assert [mine[token] for token in range(SIZE)] == pytest.approx(expected.tolist(), abs=1e-5)
        other = torch.randn(SIZE, dtype=torch.float64)
        rows = torch.stack([other, row])
        before, total = rows.clone(), rows.logsumexp(-1, keepdim=True)
        logits, totals = adjusted(rows, total, [None, changes], [Written(), Written()])
        assert torch.equal(rows, before)
        assert torch.equal(logits[0], other)
        assert torch.equal(totals[0], total[0])
        assert (logits - totals)[1].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_grammar_wins_over_forbidden_tokens() -> None:
    ensemble = tiny_engine(Recipe("llama", "bytelevel", seed=31))  # shared, so it stays open
    biases = {"a": -90, " a": -90}
    assert ensemble.generate("x", regex="(a |b ){3}", logit_bias=biases).text == "b b b "
    result = ensemble.generate("x", regex="(a ){3}", no_repeat_ngram_size=1, min_new_tokens=9)
    assert result.text == "a a a "


def test_a_member_that_cannot_change_distributions_is_one_error() -> None:
    unable = FakeBackend("finch", rule, WORDS)
    unable.knows_distributions = False
    with AdaFuseEngine([FakeBackend("wren", rule, WORDS), unable]) as ensemble:
        with pytest.raises(
            InvalidOptionError, match="'presence_penalty': member 'finch' lists only"
        ):
            ensemble.generate("x", presence_penalty=1)
        neutral = ensemble.generate("x", max_new_tokens=2, repetition_penalty=1, min_new_tokens=0)
        assert neutral.text == ensemble.generate("x", max_new_tokens=2).text
        assert ensemble.generate("x", max_new_tokens=2, use="wren", presence_penalty=1)


def test_a_minimum_length_above_the_limit_is_refused() -> None:
    with engine() as ensemble, pytest.raises(InvalidOptionError, match=r"\(8\); got 9"):
        ensemble.generate("x", min_new_tokens=9, max_new_tokens=8)


# Generation configs -----------------------------------------------------------------------------


def model(**settings: Any) -> Any:
    return SimpleNamespace(generation_config=SimpleNamespace(**settings))


def test_settings_that_change_nothing_are_not_mentioned() -> None:
    assert own_adjustment(SimpleNamespace(), frozenset()) == NOTHING
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": None}
    old = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "num_beams": 1, "do_sample": False}
    quiet = model(**neutral, **old, length_penalty=1.0, min_length=0, suppress_tokens=None)
    assert own_adjustment(quiet, frozenset()) == NOTHING
    assert ignored_settings(quiet) == {}
    assert ignored_settings(model(temperature=0.7, length_penalty=2.0)) == {}


def test_lists_of_tokens_are_followed() -> None:
    config = model(
        repetition_penalty=1.1,
        bad_words_ids=[[1, 2], [3]],
        suppress_tokens=[-1, 4],
        begin_suppress_tokens=[5],
        sequence_bias=[[[6], -2.5], [[7, 8], float("-inf")]],
    )
    assert own_adjustment(config, frozenset({3})) == Adjustment(
        repetition_penalty=1.1,
        bad_words=((1, 2),),
        suppressed=(4,),
        suppressed_first=(5,),
        biases=(((6,), -2.5), ((7, 8), -FORBIDDEN)),
    )
