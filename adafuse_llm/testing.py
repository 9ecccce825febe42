"""Tests for backends: the rules of `Backend`, as a class to inherit in a test file.

Write ``class TestMine(BackendTests)`` with a method ``member`` that returns your backend. Three
tests skip a backend that does not know whole distributions (`Backend.knows_distributions`).
"""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any
from unittest import SkipTest

from adafuse_llm.backends import base
from adafuse_llm.backends.checks import check_results
from adafuse_llm.backends.fake import answered
from adafuse_llm.text.codec import TextCodec
from adafuse_llm.tree.adjustment import Adjustment
from adafuse_llm.tree.sampling import Draw
from adafuse_llm.tree.tokens import Next, Node, TokenTree

__all__ = ["BackendTests"]

DRAWS = ((1.0, 1.0, None), (3.0, 1.0, None), (1.0, 0.8, None), (1.5, 1.0, 3), (1.5, 1.0, None, 0.3))
UNKNOWN = 10**9  # a token id that no vocabulary has


class BackendTests:
    """The rules of a backend. A subclass must define `member`, and can replace the attributes.

    Attributes:
        texts: texts that the codec must encode exactly. Their tokens make up all prompts.
        odd_texts: texts that the codec need not encode exactly.
        tolerance: maximum difference of log-probabilities. It is relative for values below -1.
        steps: number of steps of the longest random walk.
    """

    texts: Sequence[str] = (
        "The ferry leaves at nine. It carries twelve people",
        " and the post.",
        "a",
        " ",
        '\n\n- oil: 14.50\n  two spaces, and  two more \nif x:\n    print("yes")\n',
    )
    odd_texts: Sequence[str] = (
        "Caf\u00e9 e\u0301\tx\r\ny \u0627\u0644\u0644\u063a\u0629 \u4e2d\u6587\u3002",
        "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 <s> </s> <unk> <|endoftext|> <eos>",
    )
    tolerance: float = 1e-4
    steps: int = 60

    def member(self) -> base.Backend:
        """Return the backend, a new one or always the same."""
        raise NotImplementedError("define the method `member`, which returns the backend to test")

    def logits(self, ids: tuple[int, ...]) -> Iterable[float] | None:  # noqa: ARG002
        """Return the logits of all tokens after `ids`, from a forward pass without any cache.

        If the result is None, the tests compare with new requests to the same backend instead.
        They then overlook an error that the backend makes every time.
        """
        return None

    @classmethod
    def check_all(cls) -> tuple[str, ...]:
        """Run all tests without pytest, and return the names of those that apply to the backend."""
        applied = []
        for name in (name for name in vars(BackendTests) if name.startswith("test_")):
            with suppress(SkipTest):
                getattr(cls(), name)()
                applied.append(name)
        return tuple(applied)

    def _bench(self, *, full: bool = False) -> _Bench:
        bench = _Bench(self)
        if full and not bench.member.knows_distributions:
            raise SkipTest("the backend does not know whole distributions")
        return bench

    def test_texts(self) -> None:
        """If the codec calls tokens exact, they decode to their text, together and one by one."""
        bench = self._bench()
        codec, prompt = bench.codec, bench.prompt
        whole = codec.decode_continuation((), prompt)
        assert "".join(self.texts) in whole, f"encode_prompt returned the tokens of {whole!r}"
        for before in ("", *self.texts):
            context = [*prompt, *codec.encode_continuation(prompt, before)[0]]
            for text in ("", *self.texts, *self.odd_texts):
                ids, exact = codec.encode_continuation(context, text)
                assert exact or text not in self.texts, f"the tokens of {text!r} are not exact"
                got = codec.decode_continuation(context, ids)
                assert got == text or not exact, f"exact tokens of {text!r} decode to {got!r}"
                parts = [(context + ids[:at], ids[at : at + 1]) for at in range(len(ids))]
                singles = [codec.decode_continuation(*part) for part in parts]
                got = "".join(singles)
                message = f"the tokens of {text!r} decode one by one to {got!r}"
                assert got == text or not exact or "\ufffd" in got, message
                for token, single in [*zip(ids, singles, strict=True)][1:]:
                    known = codec.token_text(token)
                    assert known in (None, single) or "\ufffd" in got, f"token_text: {known!r}"

    def test_prompts(self) -> None:
        """Prompts and messages have tokens. No text becomes an end token, even if it spells one."""
        bench = self._bench()
        codec, ends, spelled = bench.codec, bench.member.end_ids, ["</s>", "<|endoftext|>"]
        for end in ends:
            with suppress(Exception):  # the codec may refuse it
                spelled.append(codec.decode_continuation(bench.prompt, [end]))

        def encode(text: str) -> list[list[int]]:
            chat = codec.encode_messages([{"role": "user", "content": text}])
            every = codec.encode_prompt(text), chat, codec.encode_continuation(chat, text)[0]
            assert all(every), f"the text {text!r} has no tokens"
            return [[token for token in ids if token in ends] for ids in every]

        for text in spelled:
            with suppress(ValueError):  # the vocabulary lacks these characters
                same = encode(self.texts[0] + text) == encode(self.texts[0])
                assert same, f"the text {text!r} becomes a token that ends a response"

    def test_walk(self) -> None:
        """Results depend only on tokens, whatever was evaluated, committed or dropped before."""
        self._bench().walk(self.steps)

    def test_failures(self) -> None:
        """An unknown token raises an exception, and later results are still right."""
        bench = self._bench()
        if bench.member.is_remote:
            raise SkipTest("the engine sends no such token to a server, which may never answer")
        bench.walk(self.steps // 3, fails=True)

    def test_release(self) -> None:
        """`release` frees what `tree.state` holds. It accepts every tree, even a freed one."""
        bench = self._bench()
        bench.release(TokenTree(bench.prompt))
        for _ in range(self.steps // 2):  # without release, they would need too much room
            tree = bench.begin()
            bench.check(bench.query(tree))
            tree.commit([*tree.nodes()][-1])
            bench.check(bench.query(tree))
            bench.release(tree)
        trace = weakref.ref(tree)
        del tree
        gc.collect()
        assert trace() is None, "after release, the backend still refers to the tree"

    def test_masks(self) -> None:
        """`Node.allowed` restricts listed tokens, `mass`, `word_end_logprob` and draws, no more."""
        bench = self._bench(full=True)
        for token in bench.words if bench.texts else ():
            got, want = bench.texts[token], bench.codec.decode_continuation(bench.prompt, [token])
            assert got == want or "\ufffd" in got + want, f"token_texts: {got!r} is not {want!r}"
        bench.walk(self.steps // 2, masks=True)
        if bench.member.follows_grammars:
            size = bench.member.grammar_tokenizer().vocab_size
            assert size > bench.words[-1], f"grammar_tokenizer has only {size} tokens"

    def test_draws(self) -> None:
        """`Next.drawn` is the token that `adafuse_llm.backends.logits.draw.drawn` returns."""
        bench = self._bench(full=True)
        bench.walk(self.steps // 2, draws=True)
        bench.walk(self.steps // 3, draws=True, masks=True)
        wrong, count = bench.draws.count(False), len(bench.draws)
        assert wrong <= count / 50, f"{wrong} of {count} draws are wrong"  # noise decides near ties

    def test_adjustments(self) -> None:
        """The backend applies `TokenTree.changes` to logits before it uses them."""
        bench = self._bench(full=True)
        (one, two, *_), ends = bench.words, tuple(bench.member.end_ids)
        for bench.adjustment in (
            Adjustment(presence_penalty=1.5, frequency_penalty=0.5, no_repeat_ngram_size=2),
            Adjustment(biases=(((one,), 2.0), ((one, two), -3.0)), suppressed=(two,)),
            Adjustment(repetition_penalty=1.4, min_new_tokens=2, end_ids=ends),
        ):
            bench.walk(self.steps // 5)


class _Bench:
    """Sends random requests to a backend, and checks the numbers that it returns."""

    def __init__(self, tests: BackendTests) -> None:
        member = tests.member()
        assert isinstance(member, base.Backend), f"{type(member).__name__} is no Backend"
        self.tests, self.member = tests, member
        for thing, kind in ((member, base.Backend), (member.codec, TextCodec)):
            names = [*getattr(kind, "__annotations__", ()), *dir(kind)]
            lacks = ", ".join(name for name in names if name[0] != "_" and not hasattr(thing, name))
            assert not lacks, f"the {type(thing).__name__} has no {lacks} ({kind.__name__})"
        self.codec = member.codec
        assert isinstance(member.end_ids, frozenset), "end_ids must be a frozenset"
        self.chance = random.Random(0)  # noqa: S311  # nothing secret
        self.adjustment: Adjustment | None = None
        self.texts: Sequence[str] = member.token_texts or ()
        self.room: int = member.context_window or 2**31
        self.prompt = self.codec.encode_prompt("".join(tests.texts))
        self.words = sorted({*self.prompt} - member.end_ids)
        self._prompts = [self.prompt[shift:] + self.prompt * 5 for shift in (0, 1, 5)]
        has_logits = tests.logits(tuple(self.prompt[:1])) is not None
        self._logits: Any = cache(tests.logits) if has_logits else None
        self.draws: list[bool] = []
        self._where = ""

    def walk(self, steps: int, *, fails: bool = False, **ways: bool) -> None:
        """Grow, commit and release three token trees at random, and check all results."""
        trees = [self.begin() for _ in range(3)]
        for _ in range(steps):
            for at, tree in enumerate(trees):
                action, nodes = self.chance.random(), self._grown(tree)
                if action < 0.05 or tree.root.length + 4 > self.room:
                    self.release(tree)
                    self._prompts.append(tree.ids)
                    trees[at] = self.begin()
                elif action < 0.35:
                    tree.commit(self.chance.choice(nodes[1:] or nodes))
            # ask twice: the second results must be right, too, and cost no more
            queries = [self.query(tree, **ways) for tree in self.chance.sample(trees, 2)]
            if fails:
                self._fail(queries)
            for one, two in zip(self.check(*queries), self.check(*queries), strict=True):
                assert (two.passes, two.tokens) <= (one.passes, one.tokens), "a query costs more"
        for tree in trees:
            self.release(tree)

    def begin(self) -> TokenTree:
        ids = self.chance.choice(self._prompts)
        ids = ids[: min(self.room, self.chance.choice((1, 3, 20, 48, 70, 150)))]
        last = self.chance.choice((ids[-1], *self.words[:2]))
        return TokenTree([*ids[:-1], last], self.adjustment)

    def release(self, tree: TokenTree) -> None:
        for _ in range(2):
            self.member.release(tree)
            assert tree.state is None, f"after release, tree.state is {tree.state!r}"

    def _grown(self, tree: TokenTree) -> list[Node]:
        """Add paths of random tokens to a tree, and return all its nodes, the root first."""
        nodes = [*tree.nodes()]
        for node in self.chance.sample(nodes, min(2, len(nodes))):
            length = min(self.chance.randint(1, 3), self.room - node.length)
            tree.grow(self.chance.choices(self.words, k=length), node)
        return [*tree.nodes()]

    def query(self, tree: TokenTree, *, masks: bool = False, draws: bool = False) -> base.Query:
        nodes, chance = self._grown(tree), self.chance
        evaluate = chance.sample(nodes, min(len(nodes), chance.randint(0, 5)))
        known = [node for node in nodes if node.next or node in evaluate]
        score = [child for node in known for child in node.children.values()][:8]
        for node in (evaluate := evaluate if score else [tree.root]):
            node.draw = Draw(chance.getrandbits(64), *chance.choice(DRAWS)) if draws else None
            node.allowed = self._mask(node) if masks and self.texts else None
        words = masks and bool(self.texts) and chance.random() < 0.5
        return base.Query(tree, tuple(evaluate), tuple(score), chance.choice((2, 16)), words)

    def _mask(self, node: Node) -> bytes | None:
        if node.next is None or self.chance.random() < 0.2:
            return None
        bits = bytearray(len(self.texts) // 8 + 1)
        others = self.chance.choices(range(len(self.texts)), k=self.chance.choice((0, 3, 50)))
        for token in (self.chance.choice(node.next.tokens), *others):
            bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def _fail(self, queries: list[base.Query]) -> None:
        tree = self.chance.choice((queries[0].tree, TokenTree([UNKNOWN])))
        wrong = tree.child(tree.root, UNKNOWN)
        try:
            self.member.evaluate([*queries, base.Query(tree, (tree.root, wrong), (), 2)])
        except Exception:  # backends may raise any type
            del tree.root.children[UNKNOWN]
        else:
            raise AssertionError(f"evaluate returned results for token {UNKNOWN}")

    def check(self, *queries: base.Query) -> list[base.QueryResult]:
        """Evaluate queries in one call, and compare the results with the expected ones."""
        if self.chance.random() < 0.5:
            self.member.read_piece([query.tree for query in queries])  # changes no result
        results: list[base.QueryResult] = list(self.member.evaluate(list(queries)))
        check_results(self.member.name, queries, results)
        for query, result in zip(queries, results, strict=True):
            tree, more = query.tree, replace(query, top=query.top + 8)  # noise reorders near ties
            logits = self._logits
            want = answered(self.member, more, logits) if logits else self._anew(more)
            assert 0 <= result.reused < len(tree.ids), f"reused is {result.reused}"
            for node, got, right in zip(query.evaluate, result.next, want.next, strict=True):
                node.next = got
                self._where = f"after {len(tree.ids)} tokens and {tree.tokens(node)}"
                self._compare(query, got, right)
            for node, p, q in zip(query.score, result.logprobs, want.logprobs, strict=True):
                self._near(f"the log-probability of {tree.tokens(node)}", p, q)
        return results

    def _anew(self, query: base.Query) -> base.QueryResult:
        """Return the result of a query, computed with a new request for every node."""
        old, results = query.tree, list[base.QueryResult]()
        for node in (*query.evaluate, *query.score):
            start = node if len(results) < len(query.evaluate) else node.parent or old.root
            tree = TokenTree([*old.ids, *old.tokens(start)], old.adjustment)
            tree.prompt_tokens = old.prompt_tokens
            tree.root.allowed, tree.root.draw = start.allowed, start.draw
            child = tree.child(tree.root, node.token)
            new = replace(query, tree=tree, evaluate=(tree.root,), score=(child,))
            results += self.member.evaluate([new])
            self.member.release(tree)
        nexts = tuple(result.next[0] for result in results[: len(query.evaluate)])
        logprobs = tuple(result.logprobs[0] for result in results[len(query.evaluate) :])
        return base.QueryResult(nexts, logprobs, 0, 0)

    def _compare(self, query: base.Query, got: Next, want: Next) -> None:
        count, fewest = len(got.tokens), sum(p > -math.inf for p in want.logprobs[: query.top])
        assert fewest <= count <= query.top, f"{self._where}, {count} tokens are listed"
        known = dict(zip(want.tokens, want.logprobs, strict=True))
        listed = [*zip(got.tokens, got.logprobs, strict=True)]
        for at, (token, p) in enumerate(listed):
            self._near(f"likely token {at + 1}", p, want.logprobs[at])
            self._near(f"token id {token}", p, known.get(token, want.logprobs[-1]))
        for (a, p), (b, q) in pairwise(listed):
            tie = p == q and known.get(a, 1.0) == known.get(b, 2.0)
            assert a < b or not tie, f"the equally likely tokens {a} and {b} are not in order"
        self._near("end_logprob", got.end_logprob, want.end_logprob)
        self._near("mass", got.mass, want.mass)
        if query.word_ends:
            self._near("word_end_logprob", got.word_end_logprob, want.word_end_logprob)
        if want.drawn is not None and self.texts:
            self.draws.append(got.drawn == want.drawn)

    def _near(self, what: str, got: Any, want: Any) -> None:
        near = self.tests.tolerance
        assert math.isclose(got, want, rel_tol=near, abs_tol=near), (
            f"{self._where}, {what} is {got}; expected {want}"
        )
