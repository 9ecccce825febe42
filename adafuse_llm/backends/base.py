"""The one seam between the algorithm and a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from adafuse_llm.text.codec import TextCodec
from adafuse_llm.tree import Next, Node, TokenTree


@dataclass(frozen=True, slots=True)
class NodeQuery:
    """Questions about nodes of one tree.

    Attributes:
        tree: the request's tree at this member.
        evaluate: nodes whose next-token distribution is wanted.
        score: nodes whose log-probability under their parent is wanted; parents have been
            evaluated before, or are evaluated by this ask.
        top: how many of the likeliest next tokens are wanted, at least two.
    """

    tree: TokenTree
    evaluate: tuple[Node, ...]
    score: tuple[Node, ...]
    top: int


@dataclass(frozen=True, slots=True)
class NodeResult:
    """The answer to one ask.

    Attributes:
        next: a summary per node of ``NodeQuery.evaluate``, in order.
        logprobs: natural log per node of ``NodeQuery.score``, in order; may be minus infinity.
        passes: forward passes that this ask took part in.
        tokens: tokens that were processed for it.
        reused: tokens of the prompt that were not processed, as the backend had kept them from
            another request.
    """

    next: tuple[Next, ...]
    logprobs: tuple[float, ...]
    passes: int
    tokens: int
    reused: int = 0

    @property
    def has_nan(self) -> bool:
        """Whether a log-probability is NaN."""
        heads = (number for summary in self.next for number in summary.logprobs[:1])
        return any(map(math.isnan, (*heads, *self.logprobs)))


@runtime_checkable
class Backend(Protocol):
    """One member of an ensemble.

    A backend may keep what it likes for a request in ``TokenTree.state``. Everything it needs
    is in the tree: ``tree.ids`` are the committed tokens, ``tree.path(node)`` what follows them.
    When ``tree.root`` has moved since the last ask, a span was committed and every node not below
    the root is gone. Nodes may also go without that; ``tree.cuts`` grows either way. A stateless
    backend simply runs over ``tree.ids + tree.tokens(node)``.

    An engine calls `evaluate` and `release` from one thread at a time; a backend that several
    engines share must see to that itself.
    """

    @property
    def name(self) -> str:
        """Shown in results and errors; unique within an engine."""
        ...

    @property
    def codec(self) -> TextCodec:
        """Text to tokens and back."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end a response."""
        ...

    @property
    def context_window(self) -> int | None:
        """Most tokens a sequence can have, prompt included; None for no limit."""
        ...

    def evaluate(self, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        """Answer asks of any number of requests, one answer each, in order.

        Cost: at best one forward pass for all asks together, over the nodes not evaluated yet.

        Raises:
            Exception: anything. The engine may ask the same once more, without other requests;
                if that fails too, it reports a `MemberError` of this member. It does the same
                where a log-probability is NaN, so nothing of such an answer may be kept.
        """
        ...

    def release(self, tree: TokenTree) -> None:
        """The request is over: free what ``tree.state`` holds."""
        ...


@runtime_checkable
class SupportsPlacement(Protocol):
    """What a backend may tell besides, so that an engine can plan with it.

    Members on different devices run at the same time, and requests wait while there is no memory
    for what they would keep. Of a backend that tells nothing an engine assumes that it shares one
    device with all others of that kind, and that it keeps nothing.
    """

    @property
    def device(self) -> str:
        """Where the member runs, such as ``"cpu"`` or ``"cuda:0"``."""
        ...

    def cache_bytes(self, tokens: int) -> int:
        """Bytes kept for a request while its sequences have up to `tokens` tokens."""
        ...

    def free_bytes(self) -> int:
        """Bytes of the device's memory that are free."""
        ...


@runtime_checkable
class LimitsDrafting(Protocol):
    """What a backend may tell about tokens that are evaluated on suspicion.

    Of a backend that tells nothing it is assumed that a pass over some tokens costs little more
    than a pass over one, and that what is evaluated never depends on what else is.
    """

    def draft_limit(self, length: int) -> int:
        """Length that sequences of nodes nobody has asked for yet may reach, while `length`
        tokens are committed; `length` where every token costs a pass of its own.
        """
        ...


@runtime_checkable
class SupportsAnchors(Protocol):
    """What a backend may offer besides, for strategies that fuse whole distributions.

    A distribution over tokens is told as one over *anchors*: tokens of the member, given by id,
    that all members have. These methods make no pass; nodes have been evaluated before. Any
    thread may call them.
    """

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Token ids by spelling, the same spelling for the same token of any member."""
        ...

    def relative(self, tree: TokenTree, node: Node, anchors: Sequence[int]) -> Sequence[float]:
        """The distribution after a node, over the anchors."""
        ...

    def corrected(
        self,
        tree: TokenTree,
        node: Node,
        anchors: Sequence[int],
        target: Sequence[float],
        *,
        steps: int,
        rate: float,
    ) -> tuple[int, float]:
        """The likeliest token after a node, and the natural log of its probability, once the
        distribution was moved towards one that is `target` over the anchors.

        Args:
            tree: the request's tree.
            node: a node of it.
            anchors: token ids.
            target: a probability per anchor.
            steps: of gradient descent.
            rate: its learning rate.
        """
        ...
