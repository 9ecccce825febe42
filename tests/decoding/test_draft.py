"""Drafts change what a decode costs, and nothing else."""

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adafuse_llm import AdaFuseEngine, Generation, RuntimeConfig
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.base import Query, QueryResult
from adafuse_llm.config import DecodeOptions
from adafuse_llm.decoding.draft import Drafts, Lookup
from adafuse_llm.decoding.member import MemberState
from adafuse_llm.tree.tokens import Node
from tests.support.compare import approximately, as_data
from tests.support.models import Recipe, engine
from tests.support.sizes import sized

WORDS = [f" w{number}" for number in range(200)]
PAIR = (Recipe("llama", "bytelevel", seed=1), Recipe("qwen2", "sentencepiece", seed=2))
PROMPT = "The ferry to Orrin leaves at nine."


class Bulk(FakeBackend):
    """A fake whose passes take any number of tokens.

    Attributes:
        sizes: tokens of every pass.
    """

    def __init__(
        self, name: str, rule: Callable[[str], dict[str, float]], device: str = "cpu"
    ) -> None:
        super().__init__(name, rule, WORDS, device=device)
        self.sizes: list[int] = []

    def evaluate(self, asks: Sequence[Query]) -> list[QueryResult]:
        self.sizes += [len(ask.evaluate) for ask in asks]
        return super().evaluate(asks)


def counting(text: str) -> dict[str, float]:
    """The words in order, after a prompt that holds none."""
    return {WORDS[text.count(" w") % 200]: 0.9, " x": 0.1}


def scattered(seed: int) -> Callable[[str], dict[str, float]]:
    """Words that no other seed and no earlier place tells."""

    def rule(text: str) -> dict[str, float]:
        word = random.Random(f"{seed} {text}").choice(WORDS)
        return {word: 0.6, " x": 0.4}

    return rule


def decode(
    members: Sequence[Any], prompt: str = "Go:", *, drafting: bool = True, **options: Any
) -> Generation:
    with AdaFuseEngine(members, runtime=RuntimeConfig(drafting=drafting)) as ensemble:
        return ensemble.generate(prompt, **options)


def misled(name: str, seed: int) -> Callable[[str], dict[str, float]]:
    """Words of a passage, mostly in another order, so that copies of the passage are wrong."""

    def rule(text: str) -> dict[str, float]:
        place = text.count(" w")
        chance = random.Random(f"{name} {seed} {place // 3}")
        word = WORDS[place % 12] if chance.random() > 0.8 else chance.choice(WORDS[:12])
        return {word: 0.75, " x": 0.1, " y": 0.05}

    return rule


def nearly(wrong: int) -> Callable[[str], dict[str, float]]:
    """The words in order, with one mistake among `wrong` words, and then unsure."""

    def rule(text: str) -> dict[str, float]:
        place = text.count(" w")
        is_right = place % wrong
        word = WORDS[place % 30 if is_right else 199]
        return {word: 0.9 if is_right else 0.45, " x": 0.1, "o": 0.03}

    return rule


def spelled(seed: int) -> Callable[[str], dict[str, float]]:
    """Words of three letters, each of which is a token."""

    def rule(text: str) -> dict[str, float]:
        if len(text) - text.rfind(" ") > 3:
            return {" ": 0.9}
        return {random.Random(f"{seed} {text}").choice("abcdefgh"): 0.8, "o": 0.1}

    return rule


SAME = ([misled("a", 1), misled("a", 1)], 0)
APART = ([misled("a", 1), misled("b", 1), scattered(1)], 0)
SIZED = ([nearly(9), nearly(7)], 90)
TWO = ([spelled(1), spelled(2)], 0)
LETTERS = ([spelled(1), spelled(2), spelled(3)], 0)
THREE = ([nearly(9), nearly(4), scattered(2)], 90)


@pytest.mark.parametrize(
    ("members", "options", "counts"),
    [
        (SAME, {"branching_factor": 1}, [(37, 83), (37, 83)]),
        (SAME, {"branching_factor": 3, "margin_threshold": 0.5}, [(39, 86), (15, 72)]),
        (APART, {"branching_factor": 2, "max_words": 2}, [(81, 123), (109, 184), (109, 151)]),
        (TWO, {}, [(43, 151), (40, 124)]),
        (LETTERS, {}, [(47, 216), (47, 158), (52, 188)]),
        (SIZED, {}, [(21, 54), (38, 38)]),
        (SIZED, {"max_new_tokens": 9}, [(6, 13), (9, 9)]),
        (THREE, {}, [(28, 75), (48, 49), (30, 34)]),
    ],
)
def test_responses_cost_as_many_passes_and_tokens_as_before(
    members: tuple[list[Any], int], options: dict[str, Any], counts: list[tuple[int, int]]
):
    """Drafts change no result, so only these numbers show what goes wrong in them."""

    class Apart(Bulk):
        """A member with a lane of its own on the device of another one."""

        lane = "apart"

    rules, size = members
    kinds = (Bulk, Apart, Bulk)
    devices = ("cpu", "cpu", "other")
    made = [kinds[n](f"m{n}", rule, devices[n]) for n, rule in enumerate(rules)]
    for number, member in enumerate(made):
        member.parameters = size // 3**number
    strategy = "mixture" if size else "adafuse"
    with AdaFuseEngine(made, strategy=strategy) as ensemble:
        ensemble.generate("".join(WORDS[:12] * 2), **{"max_new_tokens": 40, **options})
    assert [(len(each.sizes), sum(each.sizes)) for each in made] == counts


class WildDrafts(Drafts):
    """Drafts anything, below whatever is evaluated."""

    choices = random.Random(0)

    def extra_nodes(self, member: MemberState, wanted: Sequence[Node]) -> list[Node]:
        drafted: list[Node] = []
        for _ in range(self.choices.randrange(8)):
            above = self.choices.choice([*wanted, *drafted])
            if not member.is_full(above):
                drafted.append(member.tree.child(above, self.choices.randrange(1, 250)))
        return drafted


@pytest.mark.sweep(1)
@settings(max_examples=sized(10, 25))
@given(
    seed=st.integers(0, 10_000),
    branches=st.sampled_from([1, 3]),
    threshold=st.sampled_from([0.0, 0.2, 0.7]),
)
def test_a_wrong_draft_never_changes_a_result(seed: int, branches: int, threshold: float):
    options: DecodeOptions = {
        "branching_factor": branches,
        "margin_threshold": threshold,
        "max_new_tokens": 12,
    }
    expected = engine(*PAIR, drafting=False).generate(PROMPT, **options)
    WildDrafts.choices.seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adafuse_llm.engine.Drafts", WildDrafts)
        drafted = engine(*PAIR).generate(PROMPT, **options)
    assert as_data(drafted) == approximately(as_data(expected))


def test_a_draft_that_fails_does_not_fail_the_request(monkeypatch: pytest.MonkeyPatch):
    failures: list[str] = []

    def delicate(text: str) -> dict[str, float]:
        response = text.removeprefix("Go:").split()
        if response != [word.strip() for word in WORDS[: len(response)]]:
            failures.append(text)
            raise RuntimeError("nobody asked for this")
        return {WORDS[len(response)]: 0.9, " x": 0.1}

    WildDrafts.choices.seed(0)
    monkeypatch.setattr("adafuse_llm.engine.Drafts", WildDrafts)
    assert decode([Bulk("a", delicate)], max_new_tokens=30).text == "".join(WORDS[:30])
    assert len(failures) == 1  # then the member drafts no more


def test_a_token_that_ends_a_response_needs_no_text():
    def first_stops(text: str) -> dict[str, float]:
        return {"<end>": 0.6, " no": 0.4} if text == ">" else {"<end>": 1.0}

    def goes_on(text: str) -> dict[str, float]:
        return {" yes": 0.9, "<end>": 0.1} if text == ">" else {"<end>": 1.0}

    one, two = Bulk("one", first_stops), Bulk("two", goes_on)
    decode = one.codec.decode_continuation

    def words_only(context: Sequence[int], tokens: Sequence[int]) -> str:
        assert one.codec.end_id not in tokens
        return decode(context, tokens)

    one.codec.decode_continuation = words_only  # type: ignore[method-assign]
    assert AdaFuseEngine([two, one]).generate(">").finish_reason == "stop"


def test_nothing_of_the_drafts_piles_up():
    alive: list[int] = []

    class Watched(Bulk):
        """Counts all nodes before two of its passes, during which no tree changes."""

        def evaluate(self, asks: Sequence[Query]) -> list[QueryResult]:
            if len(self.sizes) in (40, 240):
                gc.collect()
                alive.append(sum(type(each) is Node for each in gc.get_objects()))
            return super().evaluate(asks)

    decode([Watched("a", scattered(0)), Bulk("b", scattered(1))], max_new_tokens=260)
    assert len(alive) == 2
    assert alive[1] <= alive[0] + 60


class Quantized(Bulk):
    token_cost = 1.0


@pytest.mark.quick
@pytest.mark.parametrize("branches", [1, 3])
def test_members_whose_tokens_are_expensive_read_no_more_than_without_drafts(branches: int):
    def tokens(kind: type[Bulk], *, drafting: bool) -> int:
        members = [kind("a", scattered(1)), kind("b", scattered(2))]
        decode(members, drafting=drafting, max_new_tokens=40, branching_factor=branches)
        return sum(sum(member.sizes) for member in members)

    most = tokens(Bulk, drafting=False)
    assert tokens(Quantized, drafting=True) <= most < tokens(Bulk, drafting=True)


def copied(lookup: Lookup, member: MemberState, node: Node) -> list[int]:
    return [each.token for each in lookup.after(member, node)]


@pytest.mark.quick
def test_a_longer_match_lets_more_tokens_be_copied():
    ids = [11, 12, 13, 17, 18, 12, 13, 19, 14, 15, 16, 20, 21, 22, 14, 15, 16]
    member = MemberState(Bulk("a", counting), ids, 2, 1.0)
    assert copied(Lookup(), member, member.tree.root) == [20, 21]  # three tokens are equal
    assert copied(Lookup(), member, member.tree.grow([12, 13])) == [19, 14]  # the last place of two
    assert copied(Lookup(), member, member.tree.grow([5, 17])) == [18]
    assert copied(Lookup(), member, member.tree.grow([5])) == []
    first = MemberState(Bulk("a", counting), [11, 12, 11], 2, 1.0)
    assert copied(Lookup(), first, first.tree.root) == [12]


@pytest.mark.quick
def test_no_token_is_copied_after_an_end_or_beyond_the_window():
    backend = Bulk("a", counting)
    (end,) = backend.end_ids
    member = MemberState(backend, [11, 12, 13, end, 14, 15, 11, 12, 13], 2, 1.0)
    assert copied(Lookup(), member, member.tree.root) == []
    further = member.tree.grow([end, 14])
    assert copied(Lookup(), member, further) == [15, 11, 12]
    member.window = further.length + 1
    assert copied(Lookup(), member, further) == [15]


def test_without_its_drafts_a_question_still_asks_for_every_score():
    """The last token of an unlikely candidate is scored, even where it was drafted, too."""
    fake = FakeBackend("a", counting)
    member = MemberState(fake, fake.codec.encode_prompt("Go:"), 2, 1.0)
    end = member.tree.grow(fake.codec.encode_prompt(" w1 w2"))

    (asked,) = next(member.evaluate([member.tree.root], [end])).queries
    assert asked.may_draft
    drafted = member.with_drafts(asked.query, [end])
    assert end in drafted.query.evaluate
    assert end in drafted.query.score
    assert drafted.without_drafts is not None
    assert drafted.without_drafts.evaluate == (member.tree.root,)
    assert drafted.without_drafts.score == (end,)
