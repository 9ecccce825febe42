"""The conformance suite: our backends pass it, and faults fail the checks of their rules."""

from __future__ import annotations

import math
import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from adafuse_llm import InvalidOptionError
from adafuse_llm.backends import (
    FakeBackend,
    KnowsDistributions,
    LimitsCache,
    Node,
    NodeQuery,
    NodeResult,
    SupportsClose,
    TokenTree,
    base,
    conformance,
    prefixes,
)
from adafuse_llm.backends.conformance import Check, ConformanceError, Subject
from adafuse_llm.backends.fake import END, FakeCodec
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.backends.huggingface.tree_form import TreeForm
from tests.support.compare import SINGLE_TOLERANCE, TOLERANCE
from tests.support.models import SINGLE_PRECISION, Recipe, backend, model, reference, tokenizer
from tests.support.paths import ROOT

BY_NAME = {check.name: check for check in conformance.CHECKS}

every_check = pytest.mark.parametrize("check", conformance.CHECKS, ids=str)

VOCABULARY = (*string.ascii_letters, *" .,:\n<>/|_", "the", " and", "er")
TEXTS = ("The ferry to orrin leaves at nine", " and the post.", "\n  two, ", "a", " ")


def rule(text: str) -> dict[str, float]:
    """Probabilities that depend on the last forty characters."""
    chance = random.Random(text[-40:])
    weights = {token: chance.random() ** 4 for token in (END, *VOCABULARY)}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def fake() -> FakeBackend:
    return FakeBackend("fake", rule, VOCABULARY, is_complete=True)


def fake_logits(ids: Sequence[int]) -> list[float]:
    member = fake()
    chances = rule(member.codec.decode(ids))
    return [math.log(chances[text]) for text in member.codec.texts]


def subject(make: Callable[[], Any], **options: Any) -> Subject:
    """A member with the codec of `fake` as a subject."""
    return Subject(make, **{"logits": fake_logits, "texts": TEXTS, "odd_texts": (), **options})


class Caching(FakeBackend):
    """A member that keeps what it has computed: right, with all extensions.

    `tree.state` holds distributions by the tokens after the root, and the number of cuts. Finished
    requests leave their distributions by all tokens.
    """

    cache_limit = 10_000

    def __init__(self) -> None:
        super().__init__("caching", rule, VOCABULARY, is_complete=True, bytes_per_token=2)
        self.finished: dict[tuple[int, ...], list[tuple[int, float]]] = {}
        self.is_closed = False

    def evaluate(self, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        assert not self.is_closed
        try:
            return [self.one(query) for query in queries]
        except BaseException:
            for query in queries:
                self.after_failure(query.tree)
            raise

    def after_failure(self, tree: TokenTree) -> None:
        tree.state = None

    def one(self, query: NodeQuery) -> NodeResult:
        if not isinstance(query.tree.state, dict):
            query.tree.state = {"cuts": query.tree.cuts}
        if query.tree.state["cuts"] != query.tree.cuts:
            self.follow(query.tree)
            query.tree.state["cuts"] = query.tree.cuts
        before, reused = self.passes, 0
        for node in (*query.evaluate, *(node.parent for node in query.score)):
            assert node is not None
            reused = max(reused, self.learn(query.tree, node))
        result = self._evaluate_one(query)
        self.passes, cost = before, self.passes - before - len(result.next)
        return replace(result, passes=cost, tokens=cost, reused=reused)

    def follow(self, tree: TokenTree) -> None:
        tree.state = {"cuts": tree.cuts}

    def learn(self, tree: TokenTree, node: Node) -> int:
        """Compute the distribution after a node. Return the number of tokens of a known prefix."""
        known, key = tree.state, tuple(tree.tokens(node))
        assert isinstance(known, dict)
        if key in known:
            return 0
        ids = (*tree.ids, *key)
        if found := self.finished.get(self.prefix(ids)):
            known[key] = found
            return len(tree.ids) - 1
        self.passes += 1
        known[key] = super()._distribution(ids)
        return 0

    def prefix(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return ids

    def distribution(self, tree: TokenTree, node: Node) -> Any:
        self.current = tree
        try:
            return super().distribution(tree, node)
        finally:
            del self.current

    def _evaluate_one(self, query: NodeQuery) -> NodeResult:
        self.current = query.tree
        try:
            return super()._evaluate_one(query)
        finally:
            del self.current

    def _distribution(self, ids: Sequence[int]) -> list[tuple[int, float]]:
        state = self.current.state
        assert isinstance(state, dict)
        return state[tuple(ids[len(self.current.ids) :])]

    def release(self, tree: TokenTree) -> None:
        if isinstance(tree.state, dict) and tree.state["cuts"] == tree.cuts:
            known = {key: each for key, each in tree.state.items() if key != "cuts"}
            self.finished |= {self.prefix((*tree.ids, *key)): each for key, each in known.items()}
        tree.state = None

    def close(self) -> None:
        self.is_closed = True

    def draft_limit(self, length: int) -> int:
        return 2 * length


class NoCodec(FakeBackend):
    """A fake with another codec."""

    def __init__(self, codec: FakeCodec) -> None:
        super().__init__("codec", rule, VOCABULARY, is_complete=True)
        self._codec = codec


# Our backends ----------------------------------------------------------------------------------


@pytest.mark.quick
@every_check
@pytest.mark.parametrize("make", [fake, Caching], ids=["fake", "caching"])
def test_members_without_a_model_pass(make: Callable[[], Any], check: Check) -> None:
    check(subject(make))


def test_all_extensions_of_the_caching_member_are_checked() -> None:
    member = Caching()
    assert isinstance(member, KnowsDistributions)
    assert isinstance(member, SupportsClose)
    assert isinstance(member, LimitsCache)
    report = conformance.run_checks(subject(lambda: member))
    assert report.passed == tuple(BY_NAME)
    assert str(report) == f"{len(BY_NAME)} checks passed"
    assert member.is_closed


@pytest.mark.parametrize("window", [4, 9])
def test_a_member_with_a_small_window_passes(window: int) -> None:
    member = FakeBackend("small", rule, VOCABULARY, window, is_complete=True)
    longest = []

    def logits(ids: Sequence[int]) -> list[float]:
        longest.append(len(ids))
        return fake_logits(ids)

    report = conformance.run_checks(subject(lambda: member, logits=logits))
    assert max(longest) == window
    assert report.skipped == ("drafts", "close")
    assert "; drafts, close do not apply" in str(report)


@pytest.mark.quick
def test_prompts_fit_a_cache_of_fixed_size() -> None:
    member = Caching()
    member.cache_limit = member.cache_bytes(150)
    lengths = []

    def logits(ids: Sequence[int]) -> list[float]:
        lengths.append(len(ids))
        return fake_logits(ids)

    BY_NAME["plain_passes"](subject(lambda: member, logits=logits))
    assert 64 < max(lengths) <= 150


@pytest.mark.parametrize(
    ("recipe", "form"),
    [
        (Recipe("llama", "bytelevel", seed=71), "tree"),
        (Recipe("mamba", "sentencepiece", seed=72), "path"),
        (Recipe("llama", "unigram", seed=73, window=64), "tree"),
    ],
    ids=["tree", "path", "window"],
)
def test_members_with_a_model_pass(recipe: Recipe, form: str) -> None:
    member = backend(recipe)
    assert member.form == form
    report = conformance.run_checks(
        Subject(
            lambda: member,
            logits=reference(recipe).logits,
            tolerance=SINGLE_TOLERANCE if recipe.arch in SINGLE_PRECISION else TOLERANCE,
        )
    )
    assert report.skipped == ("close",)


def test_a_member_is_compared_with_itself_without_logits() -> None:
    member = backend(Recipe("llama", "bytelevel", seed=71))
    assert conformance.run_checks(Subject(lambda: member)).skipped == ("close",)


# Members with a fault --------------------------------------------------------------------------


class ForgetsParents(FakeBackend):
    def _evaluate_one(self, query):
        flat = TokenTree(query.tree.ids)
        nodes = [
            flat.child(flat.root, node.token) if node.parent else flat.root
            for node in query.evaluate
        ]
        result = super()._evaluate_one(replace(query, tree=flat, evaluate=tuple(nodes)))
        return replace(result, logprobs=super()._evaluate_one(query).logprobs)


class KeepsStateAfterCommits(Caching):
    def follow(self, tree):
        pass


class NeedsAPrompt(Caching):
    def one(self, query):
        assert query.tree.state is not None or query.tree.cuts == 0
        return super().one(query)


class NumbersSiblings(FakeBackend):
    """Finds the tokens of a node by the numbers of the nodes among their siblings."""

    def _evaluate_one(self, query):
        tree = query.tree
        if not isinstance(tree.state, dict) or len(tree.ids) not in tree.state:
            tree.state = {len(tree.ids): {}}
        paths, found = tree.state[len(tree.ids)], TokenTree(tree.ids)
        nodes = []
        for node in query.evaluate:
            line = tree.path(node)
            places = tuple(
                list(parent.children).index(step.token)
                for parent, step in zip([tree.root, *line], line, strict=False)
            )
            nodes.append(found.grow(paths.setdefault(places, tree.tokens(node))))
        result = super()._evaluate_one(replace(query, tree=found, evaluate=tuple(nodes), score=()))
        return replace(result, logprobs=super()._evaluate_one(query).logprobs)


class IgnoresMasks(FakeBackend):
    def _next(self, ids, top, allowed, draw, changes):
        return super()._next(ids, top, None, draw, changes)


class NormalizesMasked(FakeBackend):
    def _next(self, ids, top, allowed, draw, changes):
        known = super()._next(ids, top, allowed, draw, changes)
        return replace(known, logprobs=tuple(p - known.mass for p in known.logprobs))


class WrongEnd(FakeBackend):
    def _next(self, ids, top, allowed, draw, changes):
        return replace(super()._next(ids, top, allowed, draw, changes), end_logprob=-1.0)


class WrongWordEnd(FakeBackend):
    def _word_end(self, tree, node):
        node = Node(node.token, node.parent, node.length)  # it has no mask
        return super()._word_end(tree, node)


class Unsorted(FakeBackend):
    def _next(self, ids, top, allowed, draw, changes):
        known = super()._next(ids, top, allowed, draw, changes)
        return replace(known, tokens=known.tokens[::-1], logprobs=known.logprobs[::-1])


class HigherIdsFirst(FakeBackend):
    """Orders equally likely tokens by descending id."""

    def _distribution(self, ids):
        known = super()._distribution(ids)
        equal = [(token, -math.log(len(VOCABULARY) + 1)) for token, _ in known]
        return sorted(equal, reverse=True)


class MissesTheSecond(FakeBackend):
    """Lists tokens in order, but not all of the likeliest."""

    def _next(self, ids, top, allowed, draw, changes):
        known = super()._next(ids, top + 1, allowed, draw, changes)
        drop = [0, *range(2, len(known.tokens))] if len(known.tokens) > 2 else [0]
        return replace(
            known,
            tokens=tuple(known.tokens[i] for i in drop),
            logprobs=tuple(known.logprobs[i] for i in drop),
        )


class LikeliestAsDrawn(FakeBackend):
    def _next(self, ids, top, allowed, draw, changes):
        known = super()._next(ids, top, allowed, draw, changes)
        return replace(known, drawn=None if draw is None else known.tokens[0])


class DrawsWithoutTopK(FakeBackend):
    def _next(self, ids, top, allowed, draw, changes):
        draw = None if draw is None else replace(draw, top_k=None)
        return super()._next(ids, top, allowed, draw, changes)


class ChangesOnlySummaries(FakeBackend):
    def _evaluate_one(self, query):
        plain = TokenTree(query.tree.ids)
        nodes = tuple(plain.grow(query.tree.tokens(node)) for node in query.score)
        scores = super()._evaluate_one(replace(query, tree=plain, evaluate=(), score=nodes))
        return replace(super()._evaluate_one(query), logprobs=scores.logprobs)


class CountsThePrompt(FakeBackend):
    """Takes committed tokens for tokens of the prompt."""

    def _evaluate_one(self, query):
        if query.tree.adjustment is None:
            return super()._evaluate_one(query)
        later = TokenTree(query.tree.ids, query.tree.adjustment)
        evaluate, score = (
            tuple(later.grow(query.tree.tokens(node)) for node in nodes)
            for nodes in (query.evaluate, query.score)
        )
        return super()._evaluate_one(replace(query, tree=later, evaluate=evaluate, score=score))


class ScoresAfterTheRoot(FakeBackend):
    def _evaluate_one(self, query):
        result = super()._evaluate_one(query)
        known = dict(self._distribution(query.tree.ids))
        return replace(result, logprobs=tuple(known[node.token] for node in query.score))


class KeepsTheFirstTop(Caching):
    def _next(self, ids, top, allowed, draw, changes):
        state = self.current.state
        assert isinstance(state, dict)
        top = state.setdefault(("top", *ids), top)
        return super()._next(ids, top, allowed, draw, changes)


class KeepsStateAfterFailures(Caching):
    """A failed pass leaves nodes without numbers, which later passes take for evaluated."""

    def after_failure(self, tree):
        if isinstance(tree.state, dict):
            broken = {k: list(reversed(v)) for k, v in tree.state.items() if k != "cuts"}
            tree.state |= {k: [(t, -1.0) for t, _ in v] for k, v in broken.items()}


class SwapsRequests(FakeBackend):
    def evaluate(self, queries):
        results = super().evaluate(queries)
        same = [i for i, query in enumerate(queries) if len(query.evaluate) == 1 and query.top == 4]
        for one, other in zip(same, reversed(same), strict=True):
            if one < other and not queries[one].score and not queries[other].score:
                results[one], results[other] = results[other], results[one]
        return results


class ReusesSimilarPrefixes(Caching):
    """Looks for a known prefix without its last token."""

    def prefix(self, ids):
        return ids[:-1]


class NeverFrees(Caching):
    def __init__(self) -> None:
        super().__init__()
        self.trees: list[TokenTree] = []

    def one(self, query):
        self.trees.append(query.tree)
        return super().one(query)


class RunsOutOfRoom(Caching):
    def __init__(self) -> None:
        super().__init__()
        self.slots = [*range(25)]

    def one(self, query):
        if query.tree.state is None:
            self.slots.pop()
        return super().one(query)


class KeepsItsState(Caching):
    def release(self, tree):
        pass


class ReleasesOnce(Caching):
    def release(self, tree):
        assert tree.state is not None
        super().release(tree)


class AcceptsAnything(FakeBackend):
    def _distribution(self, ids):
        return super()._distribution([token % (len(VOCABULARY) + 1) for token in ids])


class CountsWrongly(FakeBackend):
    def _evaluate_one(self, query):
        return replace(super()._evaluate_one(query), reused=len(query.tree.ids))


class CostsMoreAndMore(FakeBackend):
    def _evaluate_one(self, query):
        return replace(super()._evaluate_one(query), tokens=self.passes)


class WithoutFreeBytes(FakeBackend):
    free_bytes = property()  # raises AttributeError


class ShrinkingCache(FakeBackend):
    def cache_bytes(self, tokens):
        return 1000 // tokens


class SmallCache(Caching):
    cache_limit = 1


class ShortDrafts(Caching):
    def draft_limit(self, length):
        return length - 1


class ClosesOnce(Caching):
    def close(self):
        assert not self.is_closed
        super().close()


class UnevenDistribution(Caching):
    def distribution(self, tree, node):
        return 2 * super().distribution(tree, node)


class ListOfEnds(FakeBackend):
    end_ids = property(lambda self: [0])


class VagueAboutGrammars(FakeBackend):
    follows_grammars = property(lambda self: "yes")


class ShiftedTexts(FakeBackend):
    @property
    def token_texts(self):
        return self._codec.texts[1:]


class DropsSpaces(FakeCodec):
    def encode_continuation(self, context, text):
        return super().encode_continuation(context, text.lstrip(" ") if context else text)


class DropsSpacesAtFirst(FakeCodec):
    """Decodes the first of several tokens without its space."""

    def decode_continuation(self, context, tokens):
        text = super().decode_continuation(context, tokens)
        return text if len(tokens) > 1 else text.lstrip(" ") or text


class EmptyPrompts(FakeCodec):
    def encode_prompt(self, text):
        return super().encode_prompt(text[: len(text) // 2])


class NoMessages(FakeCodec):
    def encode_messages(self, messages):
        return []


class ReadsControlTokens(FakeCodec):
    def encode_continuation(self, context, text):
        parts = text.split(END)
        tokens = super().encode_continuation(context, parts[0])[0]
        for part in parts[1:]:
            tokens += [self.end_id, *super().encode_continuation(context, part)[0]]
        return tokens, True


def with_rule(kind: type[FakeBackend]) -> Callable[[], FakeBackend]:
    return lambda: kind("faulty", rule, VOCABULARY, is_complete=True)


def with_codec(kind: type[FakeCodec]) -> Callable[[], FakeBackend]:
    return lambda: NoCodec(kind(VOCABULARY, is_complete=True))


FAULTS: list[tuple[Callable[[], Any], str, str]] = [
    (with_rule(ForgetsParents), "branches", "expected"),
    (KeepsStateAfterCommits, "commits", "expected"),
    (KeepsStateAfterCommits, "unevaluated_commits", "expected"),
    (NeedsAPrompt, "early_commits", "raised AssertionError"),
    (with_rule(NumbersSiblings), "prunes", "expected"),
    (with_rule(ForgetsParents), "late_ancestors", "expected"),
    (with_rule(NumbersSiblings), "random_walk", "expected"),
    (with_rule(IgnoresMasks), "masks", "Node.allowed does not permit it"),
    (with_rule(NormalizesMasked), "masks", "log-probability of token"),
    (with_rule(WrongEnd), "plain_passes", "end_logprob is -1"),
    (with_rule(WrongWordEnd), "word_ends", "word_end_logprob is"),
    (with_rule(Unsorted), "plain_passes", "not in descending order"),
    (with_rule(MissesTheSecond), "plain_passes", "likeliest token number 2"),
    (with_rule(LikeliestAsDrawn), "draws", "the drawn token is"),
    (with_rule(DrawsWithoutTopK), "draws", "top_k=3"),
    (with_rule(ChangesOnlySummaries), "adjustments", "NodeResult.logprobs"),
    (with_rule(CountsThePrompt), "adjustments", "log-probability of token"),
    (with_rule(ScoresAfterTheRoot), "scores", "NodeResult.logprobs"),
    (KeepsTheFirstTop, "wider", "lists 2 tokens; expected 16"),
    (KeepsStateAfterFailures, "faults", "expected"),
    (with_rule(AcceptsAnything), "faults", "expected an exception"),
    (with_rule(SwapsRequests), "batches", "expected"),
    (ReusesSimilarPrefixes, "prefixes", "expected"),
    (NeverFrees, "release", "reference to the tree"),
    (RunsOutOfRoom, "many_requests", "raised IndexError: pop from empty list"),
    (KeepsItsState, "release", "tree.state is a dict"),
    (ReleasesOnce, "release", "raised AssertionError"),
    (with_rule(CountsWrongly), "costs", "NodeResult.reused is 20 for 20"),
    (with_rule(CostsMoreAndMore), "costs", "the same query had"),
    (with_rule(WithoutFreeBytes), "extensions", "but not free_bytes"),
    (with_rule(ShrinkingCache), "placement", "at least as many bytes"),
    (SmallCache, "placement", "cache_limit is 1"),
    (ShortDrafts, "drafts", "draft_limit(1) returned 0"),
    (ClosesOnce, "close", "raised AssertionError"),
    (UnevenDistribution, "distribution", "distribution()"),
    (with_rule(ListOfEnds), "facts", "expected a frozenset"),
    (with_rule(VagueAboutGrammars), "grammars", "expected True or False"),
    (with_rule(ShiftedTexts), "token_texts", "but the codec decodes it to"),
    (with_codec(DropsSpaces), "continuations", "says that they are exact"),
    (with_codec(DropsSpacesAtFirst), "pieces", "one by one"),
    (with_codec(EmptyPrompts), "prompts", "returned no tokens"),
    (with_codec(NoMessages), "messages", "returned no tokens"),
    (with_codec(ReadsControlTokens), "control_tokens", "'<end>' into a token that ends"),
]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("make", "name", "found"),
    FAULTS,
    ids=[f"{make.__qualname__.split('.')[0]}-{name}" for make, name, _ in FAULTS],
)
def test_a_fault_fails_the_check_of_its_rule(
    make: Callable[[], Any], name: str, found: str
) -> None:
    check = BY_NAME[name]
    with pytest.raises(ConformanceError) as caught:
        check(subject(make))
    (violation,) = caught.value.violations
    assert (violation.check, violation.rule) == (name, check.rule)
    assert found in violation.found
    assert check.rule in str(caught.value)


@pytest.mark.parametrize("name", ["commits", "prefixes"])
def test_a_fault_in_a_member_with_a_model_is_found_without_logits(name: str, monkeypatch) -> None:
    recipe = Recipe("llama", "bytelevel", seed=71)
    member = HuggingFaceBackend(model(recipe), tokenizer(recipe.kind), "faulty")
    if name == "commits":
        monkeypatch.setattr(TreeForm, "reroot", lambda form: None)
    else:
        monkeypatch.setattr(prefixes, "shared", lambda one, other: min(len(one), len(other)))
    with pytest.raises(ConformanceError):
        BY_NAME[name](Subject(lambda: member))


@pytest.mark.quick
def test_equally_likely_tokens_must_be_in_the_order_of_their_ids() -> None:
    ties = subject(with_rule(HigherIdsFirst), logits=lambda ids: [0.0] * (len(VOCABULARY) + 1))
    with pytest.raises(ConformanceError, match="equally likely; expected the lower id first"):
        BY_NAME["plain_passes"](ties)


@pytest.mark.quick
def test_every_check_finds_a_fault() -> None:
    assert {name for _, name, _ in FAULTS} == {*BY_NAME}


def test_all_broken_rules_are_reported_together() -> None:
    with pytest.raises(ConformanceError) as caught:
        conformance.run_checks(subject(with_rule(WrongEnd)))
    broken = [violation.check for violation in caught.value.violations]
    assert "plain_passes" in broken
    assert "facts" not in broken
    message = str(caught.value)
    assert message.startswith(
        f"the backend fails {len(broken)} checks. The first failure may cause the others:\n- "
    )
    assert BY_NAME["plain_passes"].rule in message


@pytest.mark.quick
def test_a_backend_without_the_basic_facts_gets_one_error() -> None:
    with pytest.raises(ConformanceError, match="fails 1 check:") as caught:
        conformance.run_checks(Subject(object))  # type: ignore[arg-type]
    assert [violation.check for violation in caught.value.violations] == ["facts"]


@pytest.mark.quick
def test_a_subject_needs_a_function() -> None:
    with pytest.raises(InvalidOptionError, match=r"make must be a function .*, such as lambda"):
        Subject(fake())  # type: ignore[arg-type]


@pytest.mark.quick
def test_an_exception_of_the_backend_is_the_cause_of_the_error() -> None:
    with pytest.raises(ConformanceError, match="raised AssertionError") as caught:
        BY_NAME["release"](subject(ReleasesOnce))
    assert isinstance(caught.value.__cause__, AssertionError)


def test_noise_within_the_tolerance_passes_and_larger_noise_fails() -> None:
    class Noisy(FakeBackend):
        def _distribution(self, ids: Sequence[int]) -> list[tuple[int, float]]:
            noisy = [(t, p + random.uniform(-5e-4, 5e-4)) for t, p in super()._distribution(ids)]
            return sorted(noisy, key=lambda item: -item[1])

    conformance.run_checks(subject(with_rule(Noisy), tolerance=2e-3))
    with pytest.raises(ConformanceError, match="log-probability of token"):
        BY_NAME["plain_passes"](subject(with_rule(Noisy), tolerance=1e-5))


def test_the_member_in_contributing_passes(tmp_path, monkeypatch, capsys) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    recipe = Recipe("llama", "bytelevel", seed=71)
    tokenizer(recipe.kind).save_pretrained(tmp_path / "path/to/model")
    model(recipe).save_pretrained(tmp_path / "path/to/model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    printed = capsys.readouterr().out
    assert re.search(r"^\d+ checks passed; token_texts, masks, .* do not apply\n$", printed)
    skipped = [name for name in BY_NAME if name in printed.partition(";")[2]]
    assert skipped == [
        *(
            "token_texts",
            "masks",
            "word_ends",
            "draws",
            "adjustments",
            "placement",
            "drafts",
            "grammars",
        ),
        *("distribution", "close"),
    ]


@pytest.mark.quick
def test_contributing_names_all_extensions() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a backend")[2]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    extensions = {
        name
        for name, value in vars(base).items()
        if getattr(value, "_is_protocol", False)
        and value.__module__ == base.__name__
        and name != "Backend"
    }
    assert {*rows} == extensions


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": ()}, "texts must be a list"),
        ({"texts": "The ferry"}, "texts must be a list"),
        ({"tolerance": 0.0}, "tolerance must be above 0"),
    ],
)
def test_a_subject_refuses_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        Subject(fake, **options)
