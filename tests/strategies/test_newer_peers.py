"""CoRE, SAFE and SpecEM against numbers that were computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest

from adafuse_llm import AdaFuseEngine, Generation
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.strategies import SAFE, CoRE, SpecEM, Strategy

Chances = Mapping[str, float]
Rule = Callable[[str], Chances]


def decode(
    strategy: Strategy, *rules: Chances | Rule, tokens: int = 1, vocabularies: object = None
) -> Generation:
    """Decode with members whose next tokens have given probabilities, or follow the response."""
    members = []
    for number, given in enumerate(rules):
        rule = given if callable(given) else (lambda _, given=given: given)
        known = given.keys() if isinstance(given, Mapping) else ()
        texts = [text for text in known if text != END]
        if isinstance(vocabularies, list):
            texts = vocabularies[number]
        members.append(
            FakeBackend(f"m{number}", lambda text, rule=rule: rule(text[3:]), texts)  # type: ignore[misc]
        )
    with AdaFuseEngine(members, strategy=strategy) as engine:
        return engine.generate("So:", max_new_tokens=tokens)


def values(generation: Generation, number: int = 0) -> dict[str, float]:
    """The fused value of each candidate of a round, by its text."""
    return {
        each.text: math.exp(-each.score)
        for each in generation.rounds[number].candidates
        if each.score is not None
    }


# CoRE -----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_core_gives_the_main_member_at_least_half_of_the_weight() -> None:
    """The second member is the surer one, so its consistency of 3.353 is above 1.619."""
    found = decode(CoRE(), {" a": 0.6, " b": 0.4}, {" a": 0.1, " b": 0.9})
    assert values(found) == pytest.approx({" a": 0.35, " b": 0.65})
    assert found.text == " b"
    assert found.rounds[0].candidates[0].nll == pytest.approx(
        {"m0": -math.log(0.6), "m1": -math.log(0.1)}
    )


@pytest.mark.quick
def test_core_weights_members_by_consistency_and_entropy() -> None:
    """Every gap is 0.25, so the weights are as 1 / 0.32508 to 1 / 0.67301 (entropies in nats)."""
    found = decode(CoRE(), {" a": 0.9, " b": 0.1}, {" a": 0.4, " b": 0.6})
    assert values(found) == pytest.approx({" a": 0.73715, " b": 0.26285}, abs=1e-5)


@pytest.mark.quick
def test_core_damps_tokens_on_which_an_assistant_is_far_from_the_mean() -> None:
    """Gaps 0.2, 0, 0.2: factors 0.82959, 1.34082, 0.82959 for the assistant. UniTE chooses c."""
    main, assistant = {" a": 0.5, " b": 0.3, " c": 0.2}, {" a": 0.1, " b": 0.3, " c": 0.6}
    found = decode(CoRE(), main, assistant)
    expected = {" a": 0.29148, " b": 0.35112, " c": 0.34888}
    assert values(found) == pytest.approx(expected, abs=1e-5)
    assert found.text == " b"


@pytest.mark.quick
def test_core_keeps_the_main_members_text_if_one_text_begins_with_the_other() -> None:
    found = decode(CoRE(), {" in": 0.6, " inside": 0.4}, {" in": 0.1, " inside": 0.9})
    assert values(found) == pytest.approx({" in": 0.35})


@pytest.mark.quick
def test_core_ends_where_the_main_member_would_and_where_the_value_says() -> None:
    ended = decode(CoRE(), {END: 0.6, " b": 0.4}, {END: 0.1, " b": 0.9})
    assert (ended.text, ended.finish_reason) == ("", "stop")
    assert values(ended) == pytest.approx({"": 0.35})
    other = decode(CoRE(), {" b": 0.6, END: 0.4}, {" b": 0.1, END: 0.9})
    assert (other.text, other.finish_reason) == ("", "stop")
    assert values(other) == pytest.approx({" b": 0.35, "": 0.65})


# SAFE -----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_safe_accepts_what_every_verifier_likes_best_however_unlikely() -> None:
    unsure = {" a": 0.3, " b": 0.25, " c": 0.25, " d": 0.2}
    found = decode(SAFE(), unsure, unsure, tokens=12)
    assert [each.text for each in found.rounds] == [" a" * 5, " a" * 5, " a" * 2]
    assert values(found) == pytest.approx({" a" * 5: 0.3})
    assert len(found.rounds[0].margins["m0"]) == 5
    assert found.rounds[0].margins["m1"] == ()


@pytest.mark.quick
@pytest.mark.parametrize(("drafter", "texts"), [(0.82, [" a" * 5]), (0.8, [" a"] * 5)])
def test_safe_accepts_what_is_likelier_than_a_half_on_average(
    drafter: float, texts: list[str]
) -> None:
    """The mean with 0.2 of a verifier that likes b best is 0.51 or 0.5."""
    found = decode(SAFE(), {" a": drafter, " b": 1 - drafter}, {" a": 0.2, " b": 0.8}, tokens=5)
    assert [each.text for each in found.rounds] == texts


@pytest.mark.quick
def test_safe_merges_where_members_differ_and_sharpens_what_is_unsure() -> None:
    """Averages 0.35, 0.3, 0.35 at the third token: the geometric mean prefers the second."""
    last = {" c": 0.6, " x": 0.3, " y": 0.1}
    other = {" c": 0.1, " x": 0.3, " y": 0.6}

    def rule(end: Chances) -> Rule:
        steps = {"": {" a": 1.0}, " a": {" b": 1.0}, " a b": end, " a b x": {END: 1.0}}
        return lambda text: steps.get(text, {" c": 1.0})

    texts = [[" a", " b", " c", " x", " y"]] * 2
    found = decode(SAFE(draft=3), rule(last), rule(other), tokens=9, vocabularies=texts)
    assert [each.text for each in found.rounds] == [" a b", " x", ""]
    root = math.sqrt(0.06)
    assert values(found, 1) == pytest.approx({" c": root, " x": 0.3, " y": root})
    assert found.rounds[1].candidates[0].nll == pytest.approx(
        {"m0": -math.log(0.6), "m1": -math.log(0.1)}
    )
    assert found.finish_reason == "stop"
    assert found.usage.completion_tokens == {"m0": 3, "m1": 3}
    assert found.usage.forward_passes == {"m0": 5, "m1": 5}  # four for the draft, none for " x"


@pytest.mark.quick
def test_safe_does_not_sharpen_a_merge_that_is_sure() -> None:
    found = decode(SAFE(), {" a": 0.6, " b": 0.4}, {" a": 0.1, " b": 0.9})
    assert values(found) == pytest.approx({" a": 0.35, " b": 0.65})


@pytest.mark.quick
def test_safe_never_merges_inside_a_token_of_a_verifier() -> None:
    """The verifier has one token for both of the drafter's, even if a draft ends between."""
    vocabularies = [[" in", "side", " out", "er"], [" inside", " out", " in", "er"]]

    def drafter(text: str) -> Chances:
        return {"side": 0.6, "er": 0.4} if text.endswith(" in") else {" in": 0.9, " out": 0.1}

    def verifier(text: str) -> Chances:
        if text.endswith(" in"):
            return {"er": 1.0}
        return {" out": 0.6, " in": 0.2, " inside": 0.2}

    for draft in (1, 2):
        found = decode(SAFE(draft=draft), drafter, verifier, tokens=2, vocabularies=vocabularies)
        assert [each.text for each in found.rounds] == [" inside"]
        assert found.usage.completion_tokens == {"m0": 2, "m1": 1}


@pytest.mark.quick
def test_safe_sees_that_a_verifier_wants_to_end() -> None:
    ended = decode(SAFE(), {" a": 0.6, END: 0.4}, {" a": 0.1, END: 0.9})
    assert (ended.text, ended.finish_reason) == ("", "stop")
    assert values(ended) == pytest.approx({" a": 0.35, "": 0.65})


@pytest.mark.quick
def test_safe_accepts_an_end_with_the_tokens_before_it() -> None:
    def rule(text: str) -> Chances:
        return {" a": 1.0} if len(text) < 4 else {END: 0.6, " a": 0.4}

    found = decode(SAFE(), rule, rule, tokens=9, vocabularies=[[" a"]] * 2)
    assert [each.text for each in found.rounds] == [" a a"]
    assert found.finish_reason == "stop"
    assert values(found) == pytest.approx({" a a": 0.6 ** (1 / 3)})


# SpecEM ---------------------------------------------------------------------------------------


@pytest.mark.quick
def test_specem_changes_the_weights_by_what_the_other_members_say() -> None:
    """Rewards 1/4 (for no win), 2/4 and 1/4; steps sqrt(1/3) and half of it."""
    rules = (
        {" a": 0.5, " b": 0.3, " c": 0.2},
        {" a": 0.1, " b": 0.6, " c": 0.3},
        {" a": 0.1, " b": 0.3, " c": 0.6},
    )
    found = decode(SpecEM(tokens=1), *rules, tokens=2)
    first = {" a": 0.22677, " b": 0.40984, " c": 0.36339}
    assert values(found) == pytest.approx(first, abs=1e-5)
    second = {" a": 0.22339, " b": 0.41491, " c": 0.36170}
    assert values(found, 1) == pytest.approx(second, abs=1e-5)
    assert found.text == " b b"
    kept = decode(SpecEM(tokens=1, rate=0.0), *rules, tokens=2)
    assert values(kept, 1) == pytest.approx({" a": 0.7 / 3, " b": 0.4, " c": 1.1 / 3})


@pytest.mark.quick
def test_specem_scores_the_end_and_divides_by_the_sum_over_all_segments() -> None:
    """Geometric means sqrt(0.9 · 0.6) and 0.1 for the first member, sqrt(0.2 · 0.6) and 0.8."""

    def rule(first: Chances) -> Rule:
        return lambda text: {END: 0.6, " c": 0.4} if text else first

    rules = rule({" a": 0.9, " b": 0.1}), rule({" a": 0.2, " b": 0.8})
    found = decode(SpecEM(), *rules, tokens=9, vocabularies=[[" a", " b", " c"]] * 2)
    (only,) = found.rounds
    one, two = ((math.sqrt(p * 0.6), math.sqrt(q * 0.6)) for p, q in ((0.9, 0.1), (0.2, 0.8)))
    expected = (one[0] / sum(one) + two[0] / sum(two)) / 2
    assert (only.text, only.candidates[0].stops) == (" a", True)
    assert values(found)[" a"] == pytest.approx(expected)
    assert only.candidates[0].nll == pytest.approx(
        {"m0": -math.log(one[0]), "m1": -math.log(two[0])}
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "limit", "segments"),
    [
        (" one two three", 3, [" one two", " three"]),
        (" one two. three", 3, [" one two.", " three"]),
        (" one\ntwo three", 2, [" one\n", "two", " three"]),
        ("abcdefg", 3, ["abc", "def", "g"]),
        ("a b \u4e2d\u6587x", 4, ["a b ", "\u4e2d\u6587x"]),
    ],
)
def test_specem_cuts_segments_at_the_last_space(text: str, limit: int, segments: list[str]) -> None:
    """What ends the response is whole, and so is a word without a space."""
    pieces = [" one", " two", " three", "two", "."]

    def rule(written: str) -> Chances:
        rest = text[len(written) :]
        own = [piece for piece in pieces if rest.startswith(piece)]
        return {(own or [rest[:1] or END])[0]: 1.0}

    found = decode(SpecEM(tokens=limit), rule, rule, tokens=99, vocabularies=[pieces] * 2)
    assert [each.text for each in found.rounds] == segments
    assert found.finish_reason == "stop"
