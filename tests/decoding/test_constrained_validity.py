"""Responses of a given form are valid on every mix of members, whatever the options."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")

from adafuse_llm import AdaFuseEngine, InvalidOptionError
from adafuse_llm.strategies.registry import NAMED
from tests.reference import Options
from tests.support.models import CHATML, STRICT, Recipe, backend, engine
from tests.support.schemas import is_valid, schemas
from tests.support.sizes import sized

pytestmark = pytest.mark.usefixtures("untried")

TINY = tuple(
    Recipe(arch, kind, seed=seed, layers=1)
    for seed, (arch, kind) in enumerate(
        [
            ("llama", "bytelevel"),
            ("gpt2", "sentencepiece"),
            ("qwen3", "unigram"),
            ("llama", "gemma"),
            ("qwen2", "legacy"),
            ("llama", "prefixed"),
        ],
        start=200,
    )
)
TALKING = (
    Recipe("llama", "bytelevel", seed=210, layers=1, template=CHATML),
    Recipe("gpt2", "sentencepiece", seed=211, layers=1, template=STRICT),
)
MIXES = tuple((TINY[at], TINY[(at + 1) % len(TINY)]) for at in range(len(TINY)))
STARTS: tuple[dict[str, Any], ...] = (
    {"prompt": "The ferry to"},
    {"prompt": "Answer:  "},
    {"messages": [{"role": "user", "content": "Who keeps the light?"}]},
)


def members_of(number: int, start: dict[str, Any]) -> AdaFuseEngine:
    if "messages" in start and number % 2:
        return engine(*TALKING)
    return engine(*MIXES[number % len(MIXES)])


def least(ensemble: AdaFuseEngine, start: dict[str, Any], **form: Any) -> int:
    """The lowest limit that is not refused, as the error names it."""
    try:
        ensemble.generate(**start, **form, max_new_tokens=1)
    except InvalidOptionError as error:
        found = re.search(r"at least (\d+)", str(error))
        assert found, str(error)
        return int(found[1])
    return 1


@pytest.mark.sweep(1)
@settings(max_examples=sized(25, 5000))
@given(
    schema=schemas(),
    number=st.integers(0, 11),
    start=st.sampled_from(STARTS),
    extra=st.integers(0, 30),
    threshold=st.sampled_from([0.0, 0.3, 0.7]),
)
def test_random_schemas_give_valid_documents(
    schema: dict[str, Any], number: int, start: dict[str, Any], extra: int, threshold: float
) -> None:
    """A document within the lowest limit and `extra` more tokens; one token less is refused."""
    ensemble = members_of(number, start)
    lowest = least(ensemble, start, json_schema=schema)
    found = ensemble.generate(
        **start, json_schema=schema, max_new_tokens=lowest + extra, margin_threshold=threshold
    )
    assert is_valid(schema, found.text), (schema, found.text)
    assert max(found.usage.completion_tokens.values()) <= lowest + extra
    assert "".join(entry.text for entry in found.rounds) == found.text
    own = found.text.removesuffix(found.closing)
    assert found.closing == ("" if own == found.text else found.rounds[-1].text)
    assert found.finish_reason == "length" or not found.closing
    if lowest > 1:
        with pytest.raises(InvalidOptionError, match=f"at least {lowest}"):
            ensemble.generate(
                **start, json_schema=schema, max_new_tokens=lowest - 1, margin_threshold=threshold
            )


FORMS: tuple[dict[str, Any], ...] = (
    {
        "json_schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}},
            "required": ["name", "n"],
        }
    },
    {"regex": "(the |a )?[a-z]{2,9}( and [a-z]{2,9})*\\."},
    {"grammar": 'start: sum\nsum: sum "+" num | num\nnum: /[0-9]{1,3}/ | "(" sum ")"'},
    {"choices": ["yes", "no", "perhaps not"]},
)


def holds(form: dict[str, Any], text: str) -> bool:
    if "choices" in form:
        return text in form["choices"]
    language = Options(**form).language
    assert language is not None
    return language.holds(text.encode())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("strategy", sorted(NAMED))
@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_every_strategy_obeys_or_refuses(form: dict[str, Any], strategy: str) -> None:
    obeyed = refused = 0
    for start in STARTS[1:]:
        members = TINY[:2] if "prompt" in start else TALKING
        with AdaFuseEngine([backend(member) for member in members], strategy=strategy) as ensemble:
            use = [members[0].name] if strategy == "single" else None
            try:
                found = ensemble.generate(**start, **form, max_new_tokens=28, use=use)
            except InvalidOptionError as error:
                assert next(iter(form)) in str(error)
                refused += 1
            else:
                assert holds(form, found.text), found.text
                obeyed += 1
    assert (obeyed == 0) != (refused == 0)
    assert obeyed or strategy != "adafuse"


@pytest.mark.parametrize("form", FORMS[:3], ids=lambda form: next(iter(form)))
def test_no_valid_text_of_another_member_scores_minus_infinity(form: dict[str, Any]) -> None:
    """Every member has a finite score of every candidate, whoever proposed it."""
    scored = 0
    for number, members in enumerate((*MIXES[::2], TINY)):
        threshold = 0.2 if number % 2 == 0 and members is not TINY else 1.0
        found = engine(*members).generate(
            "The ferry to", **form, margin_threshold=threshold, max_new_tokens=28
        )
        for entry in found.rounds:
            for candidate in () if entry.forced else entry.candidates:
                expected = {member.name for member in members}
                assert set(candidate.nll) == expected, candidate
                scored += 1
    assert scored > 25


@settings(max_examples=8)
@given(schema=schemas(), number=st.integers(0, 5))
def test_random_texts_of_a_grammar_can_be_scored(schema: dict[str, Any], number: int) -> None:
    """Valid texts that no member would write have a finite score for every member."""
    from adafuse_llm import AdaFuseConfig
    from adafuse_llm.text.grammar import Grammar
    from tests.support.schemas import walk

    grammar = Grammar.of(AdaFuseConfig(json_schema=schema))
    assert grammar is not None
    texts = {text for seed in range(4) if (text := walk(grammar.text(), seed, 60))}
    if texts:
        found = engine(*MIXES[number]).choose("The ferry to", choices=sorted(texts))
        assert len(found.nll) == 2
        assert sum(found.probabilities) == pytest.approx(1)
