"""`max_new_tokens` is a cap for every member: what is written stays within it."""

from __future__ import annotations

import random

import pytest

from adafuse_llm import AdaFuseEngine
from tests.support.fuzz import check_cap, fake_member
from tests.support.sizes import sized

STRATEGIES = ("adafuse", "fixed-1", "fixed-3", "mixture")
CAPS = sized((1, 2, 3, 5, 8, 13, 20), (*range(1, 9), 11, 14, 17, 20))
PROMPTS = ("The ferry leaves at", "def f(x):\n    ", "Answer: ", "a,  b\n")[: sized(3, 4)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_member_writes_more_tokens_than_the_cap(strategy: str) -> None:
    chance = random.Random(strategy)
    lengths = set()
    for number, prompt in enumerate(PROMPTS):
        members = [fake_member(chance, f"m{at}", number, end=0.01) for at in range(2 + number % 2)]
        with AdaFuseEngine(members, strategy=strategy) as engine:
            for cap in CAPS:
                cut = check_cap(engine, prompt, cap)
                lengths.add(max(cut.usage.completion_tokens.values()))
    assert len(lengths) > sized(4, 5), "the responses are too short to try the caps"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cap", CAPS)
def test_one_member_alone_writes_up_to_the_cap(cap: int) -> None:
    """Its own tokens are all whole characters, so a cut response has exactly as many."""
    for number in range(10):
        member = fake_member(random.Random(number), "oak", number, end=0.01)
        with AdaFuseEngine([member]) as engine:
            full = engine.generate("The light is", max_new_tokens=60)
            cut = check_cap(engine, "The light is", cap)
        whole = full.usage.completion_tokens["oak"]
        assert cut.usage.completion_tokens["oak"] == min(cap, whole), (number, cut.text)


def test_spaces_of_the_prompt_do_not_count() -> None:
    """The member writes the indentation with three tokens before its two letters."""

    def rule(text: str) -> dict[str, float]:
        indented = text.endswith(("\n   ", "x"))
        return {"x": 0.9, "?": 0.1} if indented else {" ": 0.9, "?": 0.1}

    member = fake_member(random.Random(0), "oak", 0, rule=rule, vocabulary=())
    with AdaFuseEngine([member]) as engine:
        done = check_cap(engine, "if a:\n   ", 2)
    assert done.text == "xx"
    assert done.finish_reason == "length"
    assert done.usage.completion_tokens == {"oak": 2}
