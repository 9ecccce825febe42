"""One member's side of one request."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from typing_extensions import override

from adafuse_llm.backends.base import Backend, NodeQuery, NodeResult
from adafuse_llm.errors import MemberError
from adafuse_llm.text.codec import TextCodec
from adafuse_llm.tree import Next, Node, TokenTree

T = TypeVar("T")

RECENT_WEIGHT = 0.2
"""Weight of the latest observation in averages that follow the request."""


@dataclass(frozen=True, slots=True)
class MemberQuery:
    """A query to a member.

    Attributes:
        drafts: how many nodes at the end of ``query.evaluate`` are drafts.
        scored: nodes that only their log-probability is wanted of.
    """

    member: Member
    query: NodeQuery
    drafts: int = 0
    scored: tuple[Node, ...] = ()

    def without_drafts(self) -> MemberQuery:
        """Return the same query without its drafts."""
        wanted = self.query.evaluate[: len(self.query.evaluate) - self.drafts]
        return MemberQuery(self.member, self.member.query(wanted, self.scored), 0, self.scored)


Steps = Generator[tuple[MemberQuery, ...], None, T]
"""A computation that yields queries to members, and is resumed once the trees hold the results."""


class Drafter(Protocol):
    """Chooses what else a pass evaluates. It changes the cost of a decode, never its result."""

    def extra_nodes(self, member: Member, wanted: Sequence[Node]) -> Sequence[Node]:
        """Nodes to evaluate in the pass that evaluates `wanted`, parents before children; none
        that is wanted or has been evaluated.
        """
        ...


class NoDrafter(Drafter):
    """Adds nothing."""

    @override
    def extra_nodes(self, member: Member, wanted: Sequence[Node]) -> Sequence[Node]:
        return ()


NO_DRAFTER = NoDrafter()


class Member:
    """A token tree, and the text it stands for.

    Args:
        backend: who answers for the member; only its plain properties are read here.
        prompt: the request's prompt in the member's tokens.
        top: how many of the likeliest tokens the algorithm will look at.
        weight: w in the fused score.
        prompt_text: the prompt as plain text, the same for all members.

    Attributes:
        drafter: chooses what its passes evaluate in addition.
        passes, tokens: what the request has cost this member so far.
        reused: tokens of the prompt that cost nothing.
        pass_seconds: what a pass takes, the prompt's aside; None before there was one.
    """

    def __init__(
        self,
        backend: Backend,
        prompt: Sequence[int],
        top: int,
        weight: float,
        prompt_text: str = "",
    ) -> None:
        self.name: str = backend.name
        self.codec: TextCodec = backend.codec
        self.end_ids: frozenset[int] = backend.end_ids
        self.window: int | None = backend.context_window
        self.backend = backend
        self.weight = weight
        self.prompt_text = prompt_text
        self.tree = TokenTree(prompt)
        self.prompt_tokens = len(self.tree.ids)
        self.drafter: Drafter = NO_DRAFTER
        self.passes = 0
        self.tokens = 0
        self.reused = 0
        self.pass_seconds: float | None = None
        self._top = top
        self._texts: dict[Node, str] = {}
        self._places: dict[tuple[Node, str], tuple[Node, bool] | None] = {}

    @property
    def response_tokens(self) -> int:
        """Committed tokens after the prompt."""
        return len(self.tree.ids) - self.prompt_tokens

    def is_full(self, node: Node) -> bool:
        """Whether no token fits after `node`."""
        return self.window is not None and node.length >= self.window

    def text(self, node: Node) -> str:
        """Text from the root to `node`."""
        if node is self.tree.root:
            return ""
        text = self._texts.get(node)
        if text is None:
            tokens = self.tree.tokens(node)
            with self._named():
                text = self.codec.decode_continuation(self.tree.ids, tokens)
            self._texts[node] = text
        return text

    def place(self, text: str, after: Node | None = None) -> tuple[Node, bool] | None:
        """The node at the end of `text`, encoded as a continuation of `after` (default: of the
        committed tokens), and whether it stands for exactly that text; None if it exceeds the
        window.
        """
        start = after or self.tree.root
        if (start, text) not in self._places:
            self._places[start, text] = self._encode(start, text)
        return self._places[start, text]

    def _encode(self, start: Node, text: str) -> tuple[Node, bool] | None:
        before = self.tree.tokens(start)
        context = [*self.tree.ids, *before] if before else self.tree.ids
        with self._named():
            tokens, exact = self.codec.encode_continuation(context, text)
        if self.window is not None and start.length + len(tokens) > self.window:
            return None
        return self.tree.grow(tokens, start), exact

    def evaluate(self, nodes: Iterable[Node], scored: Iterable[Node] = ()) -> Steps[None]:
        """Have `nodes` evaluated, and these and `scored` ones scored, where that is not known.

        A pass that has to be made carries drafts.
        """
        wanted = [node for node in dict.fromkeys(nodes) if node.next is None]
        unknown = [node for node in scored if node.logprob is None]
        if wanted:
            drafts = self.drafter.extra_nodes(self, wanted)
            query = self.query([*wanted, *drafts], unknown)
            yield (MemberQuery(self, query, len(drafts), tuple(unknown)),)
        elif unknown:
            yield (MemberQuery(self, self.query((), unknown), 0, tuple(unknown)),)

    def widen(self, node: Node, top: int) -> Steps[None]:
        """Get more of the likeliest tokens after an evaluated node: `top` of them, or all."""
        if max(self._top, len(self.next(node).tokens)) < top:
            yield (MemberQuery(self, NodeQuery(self.tree, (node,), (), top)),)

    def draft(self, node: Node) -> Steps[None]:
        """Evaluate a node that is not needed yet. If that fails, it stays unevaluated."""
        drafts = [node, *self.drafter.extra_nodes(self, [node])]
        yield (MemberQuery(self, self.query(drafts), len(drafts)),)

    def stop_drafting(self) -> None:
        """Evaluate only what is needed from now on."""
        self.drafter = NO_DRAFTER

    def query(self, nodes: Sequence[Node], scored: Sequence[Node] = ()) -> NodeQuery:
        """The question for everything about `nodes` that is not known, and the scores of `scored`
        ones.
        """
        unknown = dict.fromkeys(
            node for node in (*nodes, *scored) if node.parent is not None and node.logprob is None
        )
        return NodeQuery(self.tree, tuple(nodes), tuple(unknown), self._top)

    def learn(self, query: NodeQuery, result: NodeResult, seconds: float = 0.0) -> None:
        """Write a result into the tree.

        Args:
            query: the query.
            result: the backend's result for it.
            seconds: wall-clock seconds that it took.

        Raises:
            FloatingPointError: a log-probability is NaN.
        """
        if result.has_nan:
            raise FloatingPointError("its logits are NaN or infinite")
        for node, summary in zip(query.evaluate, result.next, strict=True):
            node.next = summary
        for node, logprob in zip(query.score, result.logprobs, strict=True):
            node.logprob = logprob
        if self.passes and result.passes:
            known, new = self.pass_seconds, seconds / result.passes
            self.pass_seconds = new if known is None else known + RECENT_WEIGHT * (new - known)
        self.passes += result.passes
        self.tokens += result.tokens
        self.reused += result.reused

    def next(self, node: Node) -> Next:
        """The distribution after an evaluated node."""
        assert node.next is not None, "asked for before it was evaluated"
        return node.next

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What fails in the tokenizer is this member's failure."""
        try:
            yield
        except Exception as error:
            reason = f"its tokenizer failed ({type(error).__name__}: {error})"
            raise MemberError(self.name, reason) from error

    def commit(self, node: Node) -> None:
        """Commit the path to `node`."""
        self.tree.commit(node)
        self._texts.clear()
        self._places.clear()

    def prune(self, ends: Iterable[Node]) -> None:
        """Keep the paths to `ends`, and what is below these."""
        self.tree.prune(ends)
        alive = set(self.tree.nodes())
        self._texts = {node: text for node, text in self._texts.items() if node in alive}
        self._places.clear()
