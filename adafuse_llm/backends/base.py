"""The protocols between the algorithm and a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from adafuse_llm.adjustment import Adjustment
from adafuse_llm.text.codec import TextCodec
from adafuse_llm.tree import Next, Node, TokenTree

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class NodeQuery:
    """A query about nodes of one tree.

    Attributes:
        tree: the request's tree at this member.
        evaluate: nodes whose next-token distribution the backend returns, in any order. Their
            ancestors need not be evaluated.
        score: nodes whose log-probability after their parent the backend returns. This query or an
            earlier query evaluates the parent.
        top: number of likeliest next tokens in each summary, at least two.
        word_ends: whether each summary must have ``Next.word_end_logprob``.
    """

    tree: TokenTree
    evaluate: tuple[Node, ...]
    score: tuple[Node, ...]
    top: int
    word_ends: bool = False


@dataclass(frozen=True, slots=True)
class NodeResult:
    """The result of one query.

    Attributes:
        next: a summary of the next-token distribution for each node of ``NodeQuery.evaluate``, in
            order.
        logprobs: a natural-log probability for each node of ``NodeQuery.score``, in order. A value
            may be minus infinity.
        passes: number of forward passes that the query took part in.
        tokens: number of tokens that the backend processed for the query.
        reused: number of prompt tokens that the backend did not process, because it had cached
            them for another request.
    """

    next: tuple[Next, ...]
    logprobs: tuple[float, ...]
    passes: int
    tokens: int
    reused: int = 0

    @property
    def has_nan(self) -> bool:
        """Whether any log-probability in the result is NaN."""
        summaries = (value for each in self.next for value in each.values)
        return any(map(math.isnan, (*summaries, *self.logprobs)))


@runtime_checkable
class Backend(Protocol):
    """One member of an ensemble.

    The tree holds everything that a backend needs: ``tree.ids`` are the committed tokens, and
    ``tree.path(node)`` are the nodes from the root to a node, without the root itself. A backend
    may store its own state for a request in ``TokenTree.state``. A stateless backend runs its model
    over ``tree.ids + tree.tokens(node)``.

    If ``tree.root`` has moved since the last query, the engine has committed a span, and the tree
    has dropped every node that is not below the new root. The tree may also drop nodes without a
    commit. ``tree.cuts`` increases in both cases.

    An engine calls `evaluate`, `release` and `read_piece` (`ReadsInPieces`) from one thread at
    a time. A backend that several engines share must synchronize these calls.
    """

    @property
    def name(self) -> str:
        """Name of the member in results and errors, unique within an engine."""
        ...

    @property
    def codec(self) -> TextCodec:
        """Codec that converts text to tokens and tokens to text."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end a response."""
        ...

    @property
    def context_window(self) -> int | None:
        """Maximum number of tokens in a sequence, prompt included; None for no limit."""
        ...

    def evaluate(self, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        """Return one result for each query, in order. Queries may belong to different requests.

        At best, a backend runs one forward pass for all queries, over the nodes that are not
        evaluated yet.

        Raises:
            Exception: the evaluation failed, for example because of a token that the vocabulary
                does not have. The exception may have any type. The engine may then
                repeat each query in a call of its own. If a query fails again, the engine raises a
                `MemberError` for this member. The engine handles an invalid result, such as one
                with a NaN log-probability, in the same way. So a backend must not cache anything
                from a result that contains NaN.
        """
        ...

    def release(self, tree: TokenTree) -> None:
        """Free the resources in ``tree.state``, and set it to None, because the request has ended.

        A tree can be released without any query, or twice.
        """
        ...


@runtime_checkable
class ReadsInPieces(Protocol):
    """An optional extension of `Backend` for a member that reads long prompts piece by piece.

    Between two pieces, an engine evaluates the queries of other requests, and a request that is
    cancelled reads no further piece.
    """

    def read_piece(self, trees: Sequence[TokenTree]) -> list[bool]:
        """Process a piece of the committed tokens that the member has not processed yet.

        The trees share the piece, so its size does not depend on their number.

        Returns:
            For each tree, whether it has so few of these tokens left that `Backend.evaluate` can
            process them together with its nodes.

        Raises:
            Exception: as for `Backend.evaluate`.
        """
        ...


@runtime_checkable
class SupportsPlacement(Protocol):
    """An optional extension of `Backend` that describes its device and its memory.

    An engine runs members at the same time if they are on different devices. It delays a request
    until the devices have enough memory for its caches. The engine assumes that all backends
    without this extension share one device and cache nothing.
    """

    @property
    def device(self) -> str:
        """Device that the member runs on, such as ``"cpu"`` or ``"cuda:0"``."""
        ...

    def cache_bytes(self, tokens: int) -> int:
        """Return the cache size, in bytes, of a request with sequences of up to `tokens` tokens."""
        ...

    def free_bytes(self) -> int:
        """Return the free memory of the device, in bytes."""
        ...


@runtime_checkable
class LimitsCache(SupportsPlacement, Protocol):
    """An optional extension of `SupportsPlacement` for a member with a cache of fixed size.

    Such a member allocates its cache when it is loaded. So requests wait for room in this cache,
    not for free memory of the device. If the cache has no room for all nodes of a query, the member
    evaluates them in parts.
    """

    @property
    def cache_limit(self) -> int:
        """Number of bytes that all requests together can have in the member's cache."""
        ...


@runtime_checkable
class TellsSize(Protocol):
    """An optional extension of `Backend` that tells the size of its model.

    Without the option ``weights``, the strategy `Mixture` weighs members by their size.
    """

    @property
    def parameters(self) -> int | None:
        """Number of the model's parameters; None if it is not known."""
        ...


@runtime_checkable
class RunsElsewhere(Protocol):
    """An optional extension of `Backend` for a member that computes outside this process.

    An engine runs such a member at the same time as all other members, whatever their devices are.
    """

    @property
    def host(self) -> str:
        """Where the member computes, for messages, such as ``"server http://host:8000"``."""
        ...


@runtime_checkable
class SupportsClose(Protocol):
    """An optional extension of `Backend` for a member with resources that must be closed.

    An engine closes the members that it loaded when it is closed.
    """

    def close(self) -> None:
        """Free all resources, such as connections. Later calls of `Backend.evaluate` fail."""
        ...


@runtime_checkable
class RunsBeside(Protocol):
    """An optional extension of `Backend` for a member in this process with threads of its own.

    Its passes release the interpreter, so they run at the same time as those of other members.
    """

    @property
    def runs_beside(self) -> bool:
        """Whether the member runs at the same time as others."""
        ...


def lane(backend: Backend) -> str:
    """Return the name of a member's lane.

    Members of the same lane take turns. Members of different lanes run at the same time.
    """
    if isinstance(backend, RunsElsewhere) or (
        isinstance(backend, RunsBeside) and backend.runs_beside
    ):
        return f"member {backend.name}"
    return device(backend)


def device(backend: Backend) -> str:
    """Return the device of a member, as far as it is known."""
    return backend.device if isinstance(backend, SupportsPlacement) else "unknown"


@runtime_checkable
class DraftsSparingly(Protocol):
    """An optional extension of `Backend` for members whose passes cost as much as their tokens.

    Quantized weights on a CPU are an example. Such a member drafts only what it must score anyway.
    """

    @property
    def drafts_sparingly(self) -> bool:
        """Whether a pass over n tokens takes about as long as n passes over one token."""
        ...


@runtime_checkable
class LimitsDrafting(Protocol):
    """An optional extension of `Backend` that limits drafts.

    A draft is a node that the engine evaluates before the algorithm needs it. For a backend without
    this extension, the engine assumes that a pass over several tokens costs little more than a pass
    over one token, and that the result for a node does not depend on the other nodes of the pass.
    """

    def draft_limit(self, length: int) -> int:
        """Return the maximum length of a drafted sequence, prompt included.

        Args:
            length: number of committed tokens. A backend that runs one pass per token returns
                `length`, which disables drafts.
        """
        ...


@runtime_checkable
class ListsFewTokens(Protocol):
    """An optional extension of `Backend` for a member that does not know whole distributions.

    Such a member tells the likeliest tokens and the probabilities of given tokens. An engine
    refuses strategies that need more.
    """

    @property
    def listed_limit(self) -> int:
        """Maximum number of likeliest tokens in a summary, at least two."""
        ...

    def tells_word_ends(self) -> bool:
        """Return whether the member sets ``Next.word_end_logprob`` if a query asks for it."""
        ...


@runtime_checkable
class RestrictsTokens(Protocol):
    """An optional extension of `Backend` that restricts the tokens that may follow a node.

    A backend with this extension lists only tokens that ``Node.allowed`` permits in `Next`, and
    sets ``Next.mass``. ``Node.allowed`` is set when the engine passes a node to `evaluate`. The
    engine never restricts the tokens of a backend without this extension. It passes the spaces at
    the end of a prompt to such a backend as part of the prompt.
    """

    @property
    def token_texts(self) -> Sequence[str] | None:
        """The text of each token in the middle of a text, by token id.

        U+FFFD stands for an incomplete character. The text is empty for ids without a token. None
        if the texts are not known, so that the engine cannot restrict the tokens.
        """
        ...


@runtime_checkable
class DrawsTokens(Protocol):
    """An optional extension of `Backend` that draws tokens at random (`temperature` above 0).

    A backend with this extension sets ``Next.drawn`` for every node that has ``Node.draw``, as
    :mod:`adafuse_llm.sampling` describes. ``Node.draw`` is set when the engine passes a node to
    `evaluate`. An engine refuses a temperature above 0 for a member without this extension.
    """

    def prepare_draws(self) -> None:
        """Compute what all draws need, such as the hashes of the tokens.

        An engine calls this method, from any thread, before a request that draws tokens. Only the
        first call takes long.
        """
        ...


@runtime_checkable
class AdjustsTokens(Protocol):
    """An optional extension of `Backend` that changes its distributions, such as penalties do.

    A backend with this extension applies ``TokenTree.changes`` to the logits after a node before it
    computes anything from them: summaries, masses, draws and log-probabilities. It may
    cache the unchanged logits. An engine refuses options such as `repetition_penalty` for a member
    without this extension.
    """

    @property
    def own_adjustment(self) -> Adjustment:
        """The changes that the member's checkpoint asks for. Options of a request replace them."""
        ...


@runtime_checkable
class FollowsGrammars(RestrictsTokens, Protocol):
    """An optional extension of `RestrictsTokens` for responses that must fit a grammar."""

    @property
    def follows_grammars(self) -> bool:
        """Whether the member's tokens can follow a grammar."""
        ...

    def grammar_tokenizer(self) -> Any:
        """Return an ``llguidance.LLTokenizer`` with the member's tokens.

        An engine calls this method once. Creating the tokenizer may take seconds.

        Raises:
            Exception: the tokenizer is of a kind that llguidance cannot read.
        """
        ...


@runtime_checkable
class KnowsDistributions(Protocol):
    """An optional extension of `Backend` for strategies that need whole distributions."""

    def distribution(self, tree: TokenTree, node: Node) -> NDArray[np.floating[Any]]:
        """Return the natural log of the probability of every token after a node, [vocabulary].

        ``Node.allowed`` does not change it. The node must be evaluated: the method runs no forward
        pass. Any thread may call it.
        """
        ...
