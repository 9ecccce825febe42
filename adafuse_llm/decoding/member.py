"""The state of one member in one request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import TypeVar
from weakref import proxy

from adafuse_llm.backends.base import Backend, Query, QueryResult
from adafuse_llm.decoding.draws import Draws
from adafuse_llm.decoding.permits import Form, Permits
from adafuse_llm.errors import InvalidInputError, MemberError
from adafuse_llm.grammar.grammar import GrammarState
from adafuse_llm.results import TokenLogprob, TopToken
from adafuse_llm.text.opening import Opening, SpaceTokens
from adafuse_llm.text.words import REPLACEMENT, added
from adafuse_llm.tree.adjustment import Adjustment
from adafuse_llm.tree.sampling import Sampling, derived_seed
from adafuse_llm.tree.tokens import Next, Node, TokenTree

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MemberQuery:
    """A query to one member. It may get drafts if `may_draft`.

    If it has drafts and fails, the query `without_drafts` is tried instead.
    """

    member: MemberState
    query: Query
    may_draft: bool = False
    without_drafts: Query | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """The queries of a computation. The computation resumes once the trees hold the results."""

    queries: tuple[MemberQuery, ...]


Steps = Generator[Ask, None, T]
"""A computation that asks members, and returns a value."""


def in_lockstep(steps: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Run computations together: each `Ask` has the next queries of all. Return all results."""
    results: dict[int, T] = {}
    running = dict(enumerate(steps))
    while running:
        queries: list[MemberQuery] = []
        # let every computation go on until it asks, or ends
        for index, step in list(running.items()):
            try:
                queries += next(step).queries
            except StopIteration as done:
                results[index] = done.value
                del running[index]
        if queries:
            yield Ask(tuple(queries))
    return [results[index] for index in range(len(steps))]


@contextmanager
def naming_member(name: str) -> Iterator[None]:
    """Name the member in errors of its tokenizer."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"member {name!r}: {error}") from error
    except Exception as error:
        reason = f"its tokenizer failed ({type(error).__name__}: {error})"
        raise MemberError(name, reason) from error


class MemberState:
    """State of one member in one request: the token tree, the texts of the nodes, and the costs.

    Args:
        backend: the member's backend, of which only properties are read.
        prompt: the prompt in the member's tokens.
        top: number of likeliest next tokens that the strategy needs.
        weight: the member's weight w in the fused score.
        limit: maximum number of tokens in the response (``max_new_tokens``).
        opening: the beginning of the response.
        space_tokens: the member's tokens that begin with spaces; None if the spaces of `opening`
            are in `prompt`.
        form: the form that the response must have, with the spaces of `opening` first; or None.
        reply_prefix: text with which the chat templates began the reply.
        sampling: how to draw tokens; None to take the likeliest ones.
        adjustment: how to change the member's distributions, or None.

    Attributes:
        grammar: the response as the grammar reads it, the same for all members; None without one.
        prompt_tokens: number of committed tokens of the prompt, its last spaces included.
        passes, tokens: number of forward passes so far, and of tokens in them.
        reused: number of committed tokens that the member had processed for other requests.
        word_ends: whether the strategy needs ``Next.word_end_logprob``. The strategy sets this
            before the first round.
        after_word: whether a token that the member draws next must begin another word or end the
            response, because a word has ended. The strategy sets this.
    """

    def __init__(
        self,
        backend: Backend,
        prompt: Sequence[int],
        top: int,
        weight: float,
        *,
        limit: int = sys.maxsize,
        opening: Opening | None = None,
        space_tokens: SpaceTokens | None = None,
        form: Form | None = None,
        reply_prefix: str = "",
        sampling: Sampling | None = None,
        adjustment: Adjustment | None = None,
    ) -> None:
        self.name = backend.name
        self.codec = backend.codec
        self.end_ids = backend.end_ids
        self.window = backend.context_window
        self.backend = backend
        self.weight = weight
        self.limit = limit
        self.opening = replace(opening or Opening(), is_held=space_tokens is None)
        self.reply_prefix = reply_prefix
        self.sampling = sampling
        self.tree = TokenTree(prompt, adjustment)
        self.prompt_tokens = len(self.tree.ids)
        self.passes = 0
        self.tokens = 0
        self.reused = 0
        self.word_ends = False
        self.after_word = False
        text_of = partial(MemberState.text, proxy(self))  # a proxy, to avoid a reference cycle
        self.grammar: GrammarState | None = None if form is None else form.text
        self.permits = Permits(self.name, self.tree, text_of, form, space_tokens)
        self._draws = None if sampling is None else Draws(sampling, self.tree.root)
        self._top = top
        self._texts: dict[Node, str] = {self.tree.root: ""}
        self._encoded: dict[tuple[Node, str], tuple[Node, bool] | None] = {}

    @property
    def response_tokens(self) -> int:
        """Number of committed tokens after the prompt."""
        return len(self.tree.ids) - self.prompt_tokens

    def room(self, node: Node) -> int:
        """Return how many tokens the limit allows after `node`; below 0 if `node` exceeds it."""
        return self.limit - self.response_tokens - self._new_tokens(node)

    def _new_tokens(self, node: Node) -> int:
        # number of tokens from the root to `node`, without those that only write prompt spaces
        if not self.opening.spaces or self.opening.is_held:
            return node.length - self.tree.root.length
        return sum(len(self.text(step)) > self.opening.spaces for step in self.tree.path(node))

    def shown(self, node: Node) -> str:
        """Return the part of the text from the root to `node` that belongs to the response."""
        return self.opening.visible(self.opening.from_tree_text(self.text(node)))

    def is_full(self, node: Node) -> bool:
        """Return whether the context window has no room for a token after `node`."""
        return self.window is not None and node.length >= self.window

    def text(self, node: Node) -> str:
        """Return the text of the path from the root to `node`."""
        text = self._texts.get(node)
        if text is None:
            before = self._texts.get(node.parent) if node.parent else None
            if before and before[-1] != REPLACEMENT:
                last = self._call(self.codec.token_text, node.token)
                text = None if last is None else before + last
            if text is None:
                tokens = self.tree.tokens(node)
                text = self._call(self.codec.decode_continuation, self.tree.ids, tokens)
            self._texts[node] = text
        return text

    def _call(self, method: Callable[..., T], *args: object) -> T:
        try:
            return method(*args)
        except Exception:  # a context manager takes as long as a fast tokenizer
            with naming_member(self.name):
                raise

    def encode(self, text: str, after: Node | None = None) -> tuple[Node, bool] | None:
        """Encode `text` as the continuation of `after` (default: the root), and grow the tree.

        Return the last node of the text, and whether the tokens decode to exactly this text; None
        if the context window has no room for them.
        """
        start = after or self.tree.root
        if (start, text) not in self._encoded:
            before = self.tree.tokens(start)
            context = [*self.tree.ids, *before] if before else self.tree.ids
            tokens, exact = self._call(self.codec.encode_continuation, context, text)
            fits = self.window is None or start.length + len(tokens) <= self.window
            self._encoded[start, text] = (self.tree.grow(tokens, start), exact) if fits else None
        return self._encoded[start, text]

    def size(self, response: str) -> int:
        """Return how many tokens the member needs for a whole response, as `limit` counts them."""
        text = self.opening.tree_text(self.opening.with_spaces(response))
        tokens, _ = self._call(self.codec.encode_continuation, self.tree.ids, text)
        return self._new_tokens(self.tree.grow(tokens))

    def draw_apart(self, name: str) -> None:
        """Draw other random numbers than the other members do. Call this before any query."""
        assert self.sampling is not None, "the request draws tokens"
        seed = derived_seed(self.sampling.seed, name)
        self._draws = Draws(replace(self.sampling, seed=seed), self.tree.root)

    def evaluate(
        self, nodes: Iterable[Node], scored: Iterable[Node] = (), *, drafting: bool = True
    ) -> Steps[None]:
        """Evaluate `nodes`, and get the log-probabilities of `nodes` and `scored`.

        The query leaves out what the tree holds. If `drafting`, the pass may carry drafts.
        """
        wanted = [node for node in dict.fromkeys(nodes) if node.next is None]
        unknown = [node for node in scored if node.logprob is None]
        if wanted or unknown:
            query = self._query(wanted, unknown)
            yield Ask((MemberQuery(self, query, drafting and bool(wanted)),))

    def with_drafts(self, query: Query, nodes: Iterable[Node]) -> MemberQuery:
        """Add drafts to a query: all `nodes` (parents first) that are new and can be evaluated."""
        new = [
            node
            for node in dict.fromkeys(nodes)
            if node.next is None
            and node not in query.evaluate
            and (self.window is None or node.length <= self.window)
        ]
        if not (drafts := self.permits.permitted(new)):
            return MemberQuery(self, query)
        drafted = self._query(drafts, query.score, query.evaluate)
        return MemberQuery(self, drafted, without_drafts=query)

    def _query(
        self, nodes: Sequence[Node], scored: Sequence[Node], ready: Sequence[Node] = ()
    ) -> Query:
        # set which tokens may follow each node, and the random numbers that draw one of them;
        # another query has set both for the nodes that are `ready`
        for node in nodes:
            node.allowed = self.permits.mask(node, self.opening)
            if self._draws is not None:
                node.draw = self._draws.draw(node, self.shown)
                if self.after_word and node is self.tree.root:
                    node.draw = replace(node.draw, after_word=True)
        # ask for those log-probabilities that the tree does not hold yet
        unknown = dict.fromkeys(scored)
        for node in nodes:
            if node.logprob is None and node.parent is not None:
                unknown[node] = None
        return Query(self.tree, (*ready, *nodes), tuple(unknown), self._top, self.word_ends)

    def learn(self, query: Query, result: QueryResult) -> None:
        """Write a checked result into the tree, and add its cost to the member's counts."""
        for node, summary in zip(query.evaluate, result.next, strict=True):
            node.next = summary
        for node, logprob in zip(query.score, result.logprobs, strict=True):
            node.logprob = logprob
        self.passes += result.passes
        self.tokens += result.tokens
        self.reused += result.reused

    def logprobs(self, node: Node, count: int) -> tuple[TokenLogprob, ...]:
        """Return the scored tokens up to `node`, each with the `count` likeliest in its place.

        A character belongs to the last of its tokens. Joining the texts gives the text of `node`.
        """
        tokens = []
        start, whole = 0, self.text(node)
        for step in self.tree.path(node):
            assert step.parent is not None, "the root is no token of the path"
            assert step.logprob is not None, "the token is not scored"
            # a token inside a character adds no text yet
            text = self.text(step)
            end = max(start, len(text) - len(added(whole, text)))
            logprob = step.logprob if isfinite(step.logprob) else None
            # the tokens that could have stood in its place
            before, summary = self.text(step.parent), self.next(step.parent)
            others = [self.text(self.tree.child(step.parent, t)) for t in summary.tokens[:count]]
            top = tuple(
                TopToken(text=added(before, text), logprob=value)
                for text, value in zip(others, summary.logprobs, strict=False)
                if isfinite(value)
            )
            tokens.append(TokenLogprob(text=whole[start:end], logprob=logprob, top=top))
            start = end
        return tuple(tokens)

    def next(self, node: Node) -> Next:
        """Return the next-token distribution after an evaluated node."""
        assert node.next is not None, "the node is not evaluated"
        return node.next

    def commit(self, node: Node, text: str) -> None:
        """Commit the path to `node`, this member's tokens for `text`."""
        # tokens that only write spaces of the prompt belong to the prompt
        self.prompt_tokens += node.length - self.tree.root.length - self._new_tokens(node)
        if self._draws is not None:
            self._draws.commit(node, self.opening.visible(text), self.shown)
        self.permits.commit(node, self.opening.tree_text(text))
        self.opening = self.opening.advanced(text)
        self.tree.commit(node)
        self._texts = {node: ""}
        self._encoded.clear()
