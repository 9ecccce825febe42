"""One member's side of one request."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from adafuse_llm.backends.base import Answer, Ask, Backend
from adafuse_llm.errors import MemberError
from adafuse_llm.text.codec import TextCodec
from adafuse_llm.tree import Next, Node, TokenTree

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asking:
    """A question on its way to a member."""

    member: Member
    ask: Ask


Steps = Generator[tuple[Asking, ...], None, T]
"""A computation that asks members, several of them at a time, and is resumed once the trees hold
all the answers."""


def together(steps: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Run computations side by side: what they ask at the same time is asked at once.

    Returns:
        Their results, in order.
    """
    results: dict[int, T] = {}
    running = dict(enumerate(steps))
    while running:
        asked: list[Asking] = []
        for index, step in list(running.items()):
            try:
                asked += next(step)
            except StopIteration as done:
                results[index] = done.value
                del running[index]
        if asked:
            yield tuple(asked)
    return [results[index] for index in range(len(steps))]


class Member:
    """A token tree, and the text it stands for.

    Args:
        backend: who answers for the member; only its plain properties are read here.
        prompt: the request's prompt in the member's tokens.
        top: how many of the likeliest tokens the algorithm will look at.
        weight: w in the fused score.

    Attributes:
        passes, tokens: what the request has cost this member so far.
        reused: tokens of the prompt that cost nothing.
    """

    def __init__(self, backend: Backend, prompt: Sequence[int], top: int, weight: float) -> None:
        self.name: str = backend.name
        self.codec: TextCodec = backend.codec
        self.end_ids: frozenset[int] = backend.end_ids
        self.window: int | None = backend.context_window
        self.backend = backend
        self.weight = weight
        self.tree = TokenTree(prompt)
        self.prompt_tokens = len(self.tree.ids)
        self.passes = 0
        self.tokens = 0
        self.reused = 0
        self._top = top
        self._texts: dict[Node, str] = {}

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

    def place(self, text: str) -> tuple[Node, bool] | None:
        """The node at the end of `text`, encoded as a continuation of the committed tokens, and
        whether it stands for exactly that text; None if it exceeds the window.
        """
        with self._named():
            tokens, exact = self.codec.encode_continuation(self.tree.ids, text)
        if self.window is not None and len(self.tree.ids) + len(tokens) > self.window:
            return None
        return self.tree.grow(tokens), exact

    def evaluate(self, nodes: Iterable[Node]) -> Steps[None]:
        """Have `nodes` evaluated, and scored where their log-probability is not known."""
        wanted = [node for node in dict.fromkeys(nodes) if node.next is None]
        unknown = [node for node in wanted if node.parent is not None and node.logprob is None]
        if wanted:
            yield (Asking(self, Ask(self.tree, tuple(wanted), tuple(unknown), self._top)),)

    def learn(self, ask: Ask, answer: Answer) -> None:
        """Write an answer into the tree.

        Raises:
            FloatingPointError: a log-probability is NaN.
        """
        heads = [number for next_ in answer.next for number in next_.logprobs[:1]]
        if any(map(math.isnan, (*heads, *answer.logprobs))):
            raise FloatingPointError("its logits are NaN or infinite")
        for node, summary in zip(ask.evaluate, answer.next, strict=True):
            node.next = summary
        for node, logprob in zip(ask.score, answer.logprobs, strict=True):
            node.logprob = logprob
        self.passes += answer.passes
        self.tokens += answer.tokens
        self.reused += answer.reused

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
