"""What one run of one check needs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cached_property

from adafuse_llm.backends.base import Backend, LimitsCache, NodeQuery, NodeResult
from adafuse_llm.backends.checks import check_results
from adafuse_llm.backends.conformance.oracle import (
    Expected,
    FreshOracle,
    Oracle,
    PlainOracle,
    compare,
    compare_logprobs,
    log_total,
)
from adafuse_llm.backends.conformance.subject import Subject
from adafuse_llm.backends.conformance.violations import expect, fail
from adafuse_llm.errors import MemberError
from adafuse_llm.sampling import token_codes
from adafuse_llm.tree import Next, Node, TokenTree

PROMPT = 20
"""Number of tokens in most prompts, if the context window has room for them."""

DEPTH = 5
"""Maximum number of tokens after a prompt, if the context window has room for them."""

TOP = 4
"""Number of likeliest tokens in most summaries."""

SMALLEST = 64
"""Number of tokens for which every cache of fixed size must have room."""


class WatchedTree(TokenTree):
    """A token tree that weak references can refer to."""

    __slots__ = ("__weakref__",)


class Harness:
    """A backend and what a check needs to use it.

    Args:
        subject: the backend to check.

    Attributes:
        subject: the backend to check.
        backend: the backend.
        tolerance: as in `Subject`.
        chance: source of random choices.
        room: maximum number of tokens in a sequence.
        size: number of tokens in most prompts.
        depth: maximum number of tokens after a prompt of `size` tokens.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.backend = subject.make()
        self.tolerance = subject.tolerance
        self.chance = random.Random(subject.seed)  # noqa: S311  # nothing secret
        self.room = _room(self.backend)
        self.size = max(1, min(PROMPT, self.room - DEPTH - 1))
        self.depth = min(DEPTH, self.room - self.size)
        self._trees: list[TokenTree] = []
        self._codes: Sequence[int] = ()

    def end(self) -> None:
        """Release all trees of the run."""
        while self._trees:
            self.backend.release(self._trees.pop())

    @cached_property
    def stream(self) -> list[int]:
        """Token ids of the subject's texts, as one text."""
        codec = self.backend.codec
        first, *others = self.subject.texts
        stream = list(codec.encode_prompt(first))
        for text in others:
            stream += codec.encode_continuation(stream, text)[0]
        return stream

    @cached_property
    def words(self) -> list[int]:
        """Ids of different tokens that do not end a response."""
        words = sorted({*self.stream} - self.backend.end_ids)
        if len(words) < 2:
            fail("The tokens of the texts have fewer than two different ids. Pass longer texts.")
        return words

    @cached_property
    def oracle(self) -> Oracle:
        """The numbers that the backend must return."""
        if self.subject.logits is not None:
            return PlainOracle(self.subject.logits, self.backend.end_ids)
        return FreshOracle(self.backend, lambda query: self.ask(query)[0])

    @cached_property
    def token_texts(self) -> Sequence[str] | None:
        """The texts of the backend's tokens; None if they are not known."""
        return getattr(self.backend, "token_texts", None)

    def codes(self, size: int) -> Sequence[int]:
        """Return the hashes of at least `size` tokens."""
        if len(self._codes) < size:
            self._codes = token_codes(self.token_texts, self.backend.end_ids, size)
        return self._codes

    def prompt(self, size: int | None = None, shift: int = 0) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            size: number of tokens; None for the usual number.
            shift: number of tokens of `stream` before the first token of the prompt.
        """
        stream, count = self.stream, self.size if size is None else size
        return [stream[(shift + place) % len(stream)] for place in range(count)]

    def begin(self, prompt: Sequence[int] | None = None) -> TokenTree:
        """Return the tree of a new request. `end` releases it."""
        tree = WatchedTree(self.prompt() if prompt is None else prompt)
        self._trees.append(tree)
        return tree

    def finish(self, tree: TokenTree) -> None:
        """Release a tree."""
        self._trees = [other for other in self._trees if other is not tree]
        self.backend.release(tree)

    def line(self, tree: TokenTree, length: int, start: Node | None = None) -> list[Node]:
        """Add a path of random tokens to a tree, and return its nodes."""
        node = start or tree.root
        nodes = []
        for _ in range(min(length, self.room - node.length)):
            node = tree.child(node, self.chance.choice(self.words))
            nodes.append(node)
        return nodes

    def siblings(self, tree: TokenTree, count: int, start: Node | None = None) -> list[Node]:
        """Add up to `count` children of one node to a tree, and return them."""
        chosen = self.chance.sample(self.words, min(count, len(self.words)))
        return [tree.child(start or tree.root, token) for token in chosen]

    def ask(self, *queries: NodeQuery) -> list[NodeResult]:
        """Evaluate queries in one call, and write the results into the trees, as an engine does.

        Raises:
            BrokenRuleError: the results do not have the form that `Backend.evaluate` promises.
        """
        results = list(self.backend.evaluate(list(queries)))
        try:
            check_results(str(self.backend.name), queries, results)
        except MemberError as error:
            fail(f"{error}.")
        for query, result in zip(queries, results, strict=True):
            _check_costs(query, result)
            for node, summary in zip(query.evaluate, result.next, strict=True):
                node.next = summary
            for node, logprob in zip(query.score, result.logprobs, strict=True):
                node.logprob = logprob
        return results

    def check(self, *queries: NodeQuery) -> list[NodeResult]:
        """Evaluate queries in one call, and compare the results with the expected ones.

        Raises:
            BrokenRuleError: a result is wrong.
        """
        results = self.ask(*queries)
        for query, result in zip(queries, results, strict=True):
            for node, summary in zip(query.evaluate, result.next, strict=True):
                self._check_next(query, node, summary)
            for node, logprob in zip(query.score, result.logprobs, strict=True):
                self._check_score(query.tree, node, logprob)
        return results

    def check_nodes(
        self, tree: TokenTree, nodes: Sequence[Node], score: Sequence[Node] = (), top: int = TOP
    ) -> NodeResult:
        """Evaluate and score nodes of one tree, and compare the results with the expected ones.

        Raises:
            BrokenRuleError: a result is wrong.
        """
        (result,) = self.check(NodeQuery(tree, tuple(nodes), tuple(score), top))
        return result

    def summary(self, tree: TokenTree, node: Node, top: int) -> Expected:
        """Return the expected summary of the distribution after a node."""
        return self.oracle.summary([*tree.ids, *tree.tokens(node)], top)

    def _check_next(self, query: NodeQuery, node: Node, summary: Next) -> None:
        where = place(query.tree, node)
        compare(
            where,
            summary,
            self.summary(query.tree, node, query.top),
            query.top,
            self.tolerance,
        )
        listed = dict(zip(summary.tokens, summary.logprobs, strict=True))
        total = math.exp(log_total(summary.logprobs))
        expect(
            total <= 1 + 2 * self.tolerance,
            f"{where}, the probabilities of the listed tokens sum to {total:.6g}; expected 1 at "
            "most.",
        )
        if self.backend.end_ids <= listed.keys():
            ends = log_total(listed[token] for token in self.backend.end_ids)
            compare_logprobs(where, "end_logprob", summary.end_logprob, ends, self.tolerance)

    def _check_score(self, tree: TokenTree, node: Node, logprob: float) -> None:
        assert node.parent is not None
        want = self.oracle.logprob([*tree.ids, *tree.tokens(node.parent)], node.token)
        what = f"the log-probability of token {node.token} in NodeResult.logprobs"
        compare_logprobs(place(tree, node.parent), what, logprob, want, self.tolerance)


def _room(backend: Backend) -> int:
    """Return the number of tokens for which the window and the cache of a backend have room."""
    room = getattr(backend, "context_window", None) or 2**31
    if isinstance(backend, LimitsCache):
        while room > SMALLEST and backend.cache_bytes(room) > backend.cache_limit:
            room //= 2
    return room


def place(tree: TokenTree, node: Node) -> str:
    """Describe where a node is."""
    tokens = tree.tokens(node)
    after = f" and the tokens {tokens}" if tokens else ""
    return f"After {len(tree.ids)} committed tokens{after}"


def _check_costs(query: NodeQuery, result: NodeResult) -> None:
    """Check the costs in a result."""
    for name in ("passes", "tokens", "reused"):
        value = getattr(result, name)
        expect(
            type(value) is int and value >= 0,
            f"NodeResult.{name} is {value!r}; expected an integer of at least 0.",
        )
    size = len(query.tree.ids)
    expect(
        result.reused < size,
        f"NodeResult.reused is {result.reused} for {size} committed tokens; expected a smaller "
        "number, because the backend must process the last token of a prompt.",
    )
