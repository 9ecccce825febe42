"""Remote members over hosts in this process: their results are bitwise those of a local member."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import Mock

import pytest

from adafuse_llm import AdaFuseEngine, LoadError, MemberError, RuntimeConfig
from adafuse_llm.backends import (
    Backend,
    DrawsTokens,
    FakeBackend,
    FollowsGrammars,
    LimitsCache,
    LimitsDrafting,
    NodeQuery,
    RestrictsTokens,
    RunsElsewhere,
    SupportsClose,
    SupportsPlacement,
    TokenTree,
    conformance,
)
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.backends.remote import HostDied, join_host
from adafuse_llm.errors import MemberOutOfMemoryError
from adafuse_llm.sampling import Draw
from tests.support.models import Recipe, model, tokenizer
from tests.support.remote import BackendText, MemoryHosts, fake

STEPS = 120
LONGEST = 60
TIMES: Any = {"rounds": {"__all__": {"elapsed"}}}


def tiny(arch: str = "llama") -> HuggingFaceBackend:
    return HuggingFaceBackend(model(Recipe(arch=arch)), tokenizer("bytelevel"), "tiny")


class Twins:
    """A tree of a remote member and one of a local member, which change in the same way."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.trees = (TokenTree(prompt), TokenTree(prompt))

    def paths(self) -> list[list[int]]:
        tree = self.trees[1]
        return [tree.tokens(node) for node in tree.nodes()]

    def commit(self, path: list[int]) -> None:
        for tree in self.trees:
            tree.commit(tree.grow(path))

    def prune(self, paths: list[list[int]]) -> None:
        for tree in self.trees:
            tree.prune([tree.grow(path) for path in paths])

    def queries(self, evaluate, score, top, word_ends=False) -> list[NodeQuery]:
        made = []
        for tree in self.trees:
            nodes = []
            for path, mask, draw in evaluate:
                nodes.append(tree.grow(path))
                nodes[-1].allowed, nodes[-1].draw = mask, draw
            scored = tuple(map(tree.grow, score))
            made.append(NodeQuery(tree, tuple(nodes), scored, top, word_ends))
        return made


class Walk:
    """Random operations on requests of a remote member and its local twin.

    Args:
        remote: the remote member.
        local: the local member.
        size: number of tokens in the vocabulary.
        seed: chooses the operations.
        is_exact: whether all numbers are the same. They are nearly the same after a new host has
            read the committed tokens in one pass.
    """

    def __init__(self, remote, local, size: int, seed: int, *, is_exact: bool = True) -> None:
        self.remote, self.local, self.size = remote, local, size
        self.chance = random.Random(seed)
        self.is_exact = is_exact
        self.live: list[Twins] = []
        self.failures = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            while len(self.live) < 3:
                self.live.append(self.opened())
            self.change(self.chance.choice(self.live))
            self.evaluate(self.chance.sample(self.live, self.chance.randint(1, len(self.live))))

    def opened(self) -> Twins:
        others = {twins.prompt[0] for twins in self.live}
        first = self.chance.choice([token for token in range(6) if token not in others])
        return Twins([first, *(first + n for n in range(self.chance.randint(0, 6)))])

    def path(self, twins: Twins) -> list[int]:
        new = [self.chance.randrange(self.size) for _ in range(self.chance.choice((0, 1, 1, 2)))]
        return [*self.chance.choice(twins.paths()), *new]

    def change(self, twins: Twins) -> None:
        for kind in self.chance.choices(("commit", "prune", "both", None, "end"), k=2):
            if kind in ("prune", "both"):
                twins.prune([self.path(twins) for _ in range(self.chance.randint(0, 2))])
            if kind in ("commit", "both"):
                twins.commit(self.path(twins))
            if kind == "end" or len(twins.trees[0].ids) > LONGEST:
                for member, tree in zip((self.remote, self.local), twins.trees, strict=True):
                    member.release(tree)
                self.live = [each for each in self.live if each is not twins]
                return

    def evaluate(self, group: list[Twins]) -> None:
        group = [twins for twins in group if twins in self.live]
        pairs = []
        for twins in group:
            evaluate = [
                (self.path(twins), self.mask(), self.draw())
                for _ in range(self.chance.randint(0, 3))
            ]
            score = [path for path in (self.path(twins) for _ in range(2)) if path]
            top, word_ends = self.chance.randint(2, 5), self.chance.random() < 0.5
            pairs.append(twins.queries(evaluate, score, top, word_ends))
        if not pairs:
            return
        remote, local = (list(queries) for queries in zip(*pairs, strict=True))
        outcomes = [self.outcome(self.remote, remote), self.outcome(self.local, local)]
        self.compare(*outcomes)

    def outcome(self, member: Any, queries: list[NodeQuery]) -> Any:
        for _ in range(20):
            try:
                return member.evaluate(queries)
            except MemberError as error:
                if "a test" not in str(error):
                    raise
                self.failures += 1
            except RuntimeError:
                assert member is self.local
        raise AssertionError("the member failed every time")

    def compare(self, remote: Any, local: Any) -> None:
        if self.is_exact:
            assert remote == local
            return
        for got, want in zip(remote, local, strict=True):
            assert got.logprobs == pytest.approx(want.logprobs, abs=1e-9)
            assert [each.tokens for each in got.next] == [each.tokens for each in want.next]
            assert [each.drawn for each in got.next] == [each.drawn for each in want.next]
            for one, other in zip(got.next, want.next, strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9)
                assert one.mass == pytest.approx(other.mass, abs=1e-9)
                ends = pytest.approx(other.word_end_logprob, abs=1e-9)
                assert one.word_end_logprob == ends

    def mask(self) -> bytes | None:
        if self.chance.random() < 0.7:
            return None
        return bytes(self.chance.randrange(256) | 3 for _ in range(1 + self.size // 8))

    def draw(self) -> Draw | None:
        if self.chance.random() < 0.7:
            return None
        top_p, top_k = self.chance.choice((1.0, 0.8)), self.chance.choice((None, 5))
        return Draw(self.chance.getrandbits(64), 0.7, top_p, top_k)


def size_of(member: Any) -> int:
    return getattr(member, "vocabulary_size", None) or len(member.token_texts)


def walk(make: Callable[[], Any], seed: int, faults: Iterable[str | None] = (), **kind: Any):
    local = make()
    local.prepare_draws()
    hosts = MemoryHosts(make, faults)
    return Walk(hosts.member(local), local, size_of(local), seed, **kind), hosts


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(4))
def test_a_remote_fake_gives_the_results_of_a_local_one(seed: int) -> None:
    walked, hosts = walk(fake, seed)
    walked.run(STEPS)
    walked.evaluate(walked.live[:1])  # carries the last releases
    assert len(hosts.channels) == 1
    assert hosts.channels[0].served.open_requests <= len(walked.live)


@pytest.mark.parametrize("arch", ["llama", "mamba"])
def test_a_remote_model_gives_bitwise_the_results_of_a_local_one(arch: str) -> None:
    walked, _ = walk(lambda: tiny(arch), seed=7)
    walked.run(30 if arch == "llama" else 10)


def test_a_remote_model_gives_bitwise_the_results_of_a_local_one_after_failures() -> None:
    walked, _ = walk(lambda: failing(tiny(), random.Random(3)), seed=8)
    walked.run(STEPS)
    assert walked.failures > 5


def failing(backend: HuggingFaceBackend, chance: random.Random) -> HuggingFaceBackend:
    """A model whose passes fail now and then, after they have changed its state."""
    advance = backend._executor.advance

    def faulty(*arguments: Any) -> None:
        advance(*arguments)
        if chance.random() < 0.15:
            raise RuntimeError("a failure of a test")

    monkey: Any = backend._executor
    monkey.advance = faulty
    return backend


@pytest.mark.parametrize("make", [fake, tiny])
def test_results_survive_a_host_that_dies_at_any_message(make: Any, caplog: Any) -> None:
    caplog.set_level(logging.CRITICAL)
    chance = random.Random(5)
    faults = iter(lambda: chance.choice(("before", "after", None, None, None)), "end")
    walked, hosts = walk(make, 9, faults, is_exact=make is fake)
    walked.run(STEPS if make is fake else 15)
    assert walked.failures > 0
    assert len(hosts.channels) > 10


@pytest.mark.quick
def test_a_host_that_dies_once_is_started_again_with_a_warning(caplog: Any) -> None:
    hosts = MemoryHosts(fake, iter([None, "after"]))
    member = hosts.member(fake())
    tree = TokenTree([1, 2])
    first = member.evaluate([NodeQuery(tree, (tree.root,), (), 3)])
    again = member.evaluate([NodeQuery(tree, (tree.root,), (), 3)])
    assert first == again
    assert len(hosts.channels) == 2
    assert member.restarts == 1
    assert "'fake': its host died in a test. The member is started again" in caplog.text


@pytest.mark.quick
def test_a_host_that_dies_twice_in_a_call_fails_the_call_and_serves_the_next() -> None:
    hosts = MemoryHosts(fake, iter(["before", "after"]))
    member = hosts.member(fake())
    tree = TokenTree([1, 2])
    with pytest.raises(MemberError, match=r"'fake' failed: its host died in a test\. It had"):
        member.evaluate([NodeQuery(tree, (tree.root,), (), 3)])
    assert member.evaluate([NodeQuery(tree, (tree.root,), (), 3)])
    assert len(hosts.channels) == 3


class Failing(FakeBackend):
    """A fake that raises an error of a chosen kind."""

    error: BaseException

    def evaluate(self, queries: Any) -> Any:
        raise self.error


@pytest.mark.quick
@pytest.mark.parametrize("error", [MemoryError("no room"), ValueError("x"), MemberError("a", "b")])
def test_errors_have_the_type_and_the_text_that_they_have_without_a_host(error: Any) -> None:
    def make() -> Failing:
        made = Failing("m", lambda text: {"a": 1.0})
        made.error = error
        return made

    raised = []
    for backend in (make(), MemoryHosts(make).member(make())):
        with AdaFuseEngine([backend]) as engine, pytest.raises(MemberError) as caught:
            engine.generate("x", max_new_tokens=2)
        raised.append((type(caught.value), str(caught.value)))
    assert raised[0] == raised[1]
    assert (raised[0][0] is MemberOutOfMemoryError) == isinstance(error, MemoryError)


PROTOCOLS = (
    SupportsPlacement,
    LimitsCache,
    LimitsDrafting,
    RestrictsTokens,
    FollowsGrammars,
    DrawsTokens,
)


class Bare:
    """A backend with the required methods only."""

    def __init__(self) -> None:
        self._fake = fake()
        self.name, self.codec, self.end_ids = "bare", self._fake.codec, self._fake.end_ids
        self.context_window = 9
        self.evaluate, self.release = self._fake.evaluate, self._fake.release


class FixedCache(FakeBackend):
    """A fake with a cache of fixed size, in blocks of 16 tokens."""

    cache_limit = 77

    def cache_bytes(self, tokens: int) -> int:
        return -(-tokens // 16)


@pytest.mark.parametrize(
    "make", [fake, tiny, Bare, lambda: FixedCache("f", lambda text: {"a": 1.0})]
)
def test_a_remote_member_offers_exactly_the_protocols_of_its_backend(make: Any) -> None:
    backend = make()
    member: Any = MemoryHosts(make).member(backend)
    for own in (Backend, RunsElsewhere, SupportsClose):
        assert isinstance(member, own)
    for protocol in PROTOCOLS:
        assert isinstance(member, protocol) == isinstance(backend, protocol), protocol
    assert hasattr(member, "clear_prefix_cache") == hasattr(backend, "clear_prefix_cache")
    assert member.end_ids == backend.end_ids
    assert member.context_window == backend.context_window
    if hasattr(backend, "device"):
        assert member.device == backend.device
        assert [member.cache_bytes(n) for n in (1, 17)] == [backend.cache_bytes(n) for n in (1, 17)]
        assert member.free_bytes() > 0
    if hasattr(backend, "cache_limit"):
        assert member.cache_limit == 77
    if hasattr(backend, "draft_limit"):
        assert member.draft_limit(300) == backend.draft_limit(300)


def test_draft_limits_are_those_of_the_model() -> None:
    backend = tiny("mamba")
    member: Any = MemoryHosts(lambda: tiny("mamba")).member(backend)
    assert [member.draft_limit(n) for n in (1, 255, 256, 700)] == [1, 255, 256, 700]


@pytest.mark.quick
def test_a_host_that_changes_when_it_starts_again_is_an_error() -> None:
    sizes = iter((100, 200))
    hosts = MemoryHosts(
        lambda: FakeBackend("fake", lambda text: {"a": 1.0}, context_window=next(sizes)),
        iter(["before"]),
    )
    member = hosts.member(fake())
    tree = TokenTree([1])
    with pytest.raises(MemberError, match="its files have changed"):
        member.evaluate([NodeQuery(tree, (tree.root,), (), 2)])


@pytest.mark.quick
def test_a_host_that_dies_before_it_has_loaded_is_a_load_error() -> None:
    class Dead:
        host = "nowhere"

        def receive(self) -> Any:
            raise HostDied("its process 7 ended with exit code 1")

        def close(self) -> None: ...

    dead: Any = Dead()
    with pytest.raises(LoadError, match="'x' cannot be loaded: its process 7 ended"):
        join_host("x", BackendText(fake()), Mock(), dead)


@pytest.mark.quick
def test_a_closed_member_fails_and_is_not_started_again() -> None:
    hosts = MemoryHosts(fake)
    member = hosts.member(fake())
    member.close()
    tree = TokenTree([1])
    with pytest.raises(MemberError):
        member.evaluate([NodeQuery(tree, (tree.root,), (), 2)])
    assert len(hosts.channels) == 1


def test_an_engine_of_remote_members_decodes_as_one_of_local_members() -> None:
    recipes = [Recipe(), Recipe(seed=1, kind="unigram")]

    def made(recipe: Recipe) -> Callable[[], Any]:
        return lambda: HuggingFaceBackend(model(recipe), tokenizer(recipe.kind), recipe.name)

    for drafting in (False, True):
        runtime = RuntimeConfig(drafting=drafting)
        local = AdaFuseEngine([made(each)() for each in recipes], runtime=runtime)
        remote = AdaFuseEngine(
            [MemoryHosts(made(each)).member(made(each)()) for each in recipes], runtime=runtime
        )
        with local, remote:
            for prompt in ("The ferry to", "Anna counted: one,"):
                want = local.generate(prompt, max_new_tokens=12)
                got = remote.generate(prompt, max_new_tokens=12)
                assert got.text == want.text
                if not drafting:
                    assert got.model_dump(exclude=TIMES) == want.model_dump(exclude=TIMES)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("check", conformance.CHECKS, ids=str)
def test_a_remote_model_keeps_the_rules_of_backends(check: conformance.Check) -> None:
    check(conformance.Subject(lambda: MemoryHosts(tiny).member(tiny())))
