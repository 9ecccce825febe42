"""The messages between a `RemoteBackend` and its host.

A message is a tuple of plain values: numbers, texts, bytes, None, and tuples, lists and dicts of
these. So every transport can choose its own encoding. The host answers every message in order with
``("done", value)`` or ``("error", ...)``. The first message comes from the host: it is
``("done", facts)`` once its backend is loaded.

    message                                     value of the reply
    ("evaluate", closed requests, deltas)       results, one for each `Delta`
    ("prepare_draws",)                          None
    ("clear_prefix_cache",)                     None

A host answers the following questions at once, even while it evaluates:

    ("free_bytes",)                             as `SupportsPlacement.free_bytes`
    ("cache_bytes", tokens)                     as `SupportsPlacement.cache_bytes`
    ("draft_limits", length, count)             `LimitsDrafting.draft_limit` of `count` lengths
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, NamedTuple, Protocol

from adafuse_llm import errors
from adafuse_llm.adjustment import NOTHING, Adjustment
from adafuse_llm.backends.base import NodeResult
from adafuse_llm.errors import AdaFuseError, LoadError, MemberError, as_member_error
from adafuse_llm.sampling import Draw
from adafuse_llm.tree import Next, TokenTree

Message = tuple[Any, ...]

DONE, ERROR = "done", "error"


class HostDied(Exception):  # noqa: N818  # it is no defect of this package
    """A host cannot be reached any more.

    Args:
        reason: what happened to the host, such as ``"its process 4711 ended with exit code 1"``.
        is_closed: whether this side closed the channel.
    """

    def __init__(self, reason: str, *, is_closed: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_closed = is_closed


class Channel(Protocol):
    """A connection to a host. It ends when the host ends.

    One thread at a time calls `send` and `receive`. Any thread calls `ask` and `close`.
    """

    @property
    def host(self) -> str:
        """Where the host runs, for messages, such as ``"process 4711"``."""
        ...

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            HostDied: the host has ended.
        """
        ...

    def receive(self) -> Message:
        """Wait for the next message of the host, and return it.

        Raises:
            HostDied: the host has ended.
        """
        ...

    def ask(self, question: Message) -> Message:
        """Return the answer to a question that the host answers at once, even during a pass.

        Raises:
            HostDied: the host has ended.
        """
        ...

    def close(self) -> None:
        """End the host, even during a pass. Threads that wait for the host get `HostDied`."""
        ...


class Connector(Protocol):
    """Starts hosts of one member, one after the other."""

    def __call__(self) -> Channel:
        """Start a host, and return the channel to it.

        Raises:
            HostDied: the host ended before it could connect.
            LoadError: the host cannot be started.
        """
        ...

    def close(self) -> None:
        """End a host that has no channel yet. No other one will be started."""
        ...


class Delta(NamedTuple):
    """A query, and what has changed in its tree since the last query of the same request.

    Both sides number the nodes of a request in the order in which the host learns of them, so the
    numbers of new nodes are not sent. The first root is number 0. A new root that the host does not
    know yet comes before the nodes in `new`. The host applies the changes in the order of the
    fields.

    Attributes:
        request: number of the request. Each request that is opened has a number of its own.
        base: committed tokens of a request that the host does not know yet; None otherwise.
        adjustment: the number of prompt tokens and the adjustment of such a request, or None.
        alive: numbers of the nodes that were not pruned; None if all nodes are alive.
        committed: tokens that were committed.
        new: parent's number and token of each new node.
        evaluate: number, mask (``Node.allowed``) and draw of the nodes to evaluate.
        score: numbers of the nodes to score.
        top: as in `NodeQuery`.
        word_ends: as in `NodeQuery`.
    """

    request: int
    base: Sequence[int] | None
    adjustment: Sequence[Any] | None
    alive: Sequence[int] | None
    committed: Sequence[int]
    new: Sequence[tuple[int, int]]
    evaluate: Sequence[tuple[int, bytes | None, Sequence[Any] | None]]
    score: Sequence[int]
    top: int
    word_ends: bool


@dataclass(frozen=True)
class Facts:
    """The facts about a member that do not change while its host runs.

    Attributes:
        end_ids: as in `Backend`.
        context_window: as in `Backend`.
        vocabulary_size: number of tokens in a distribution; None if it is not known.
        device: as in `SupportsPlacement`; None for a member without a device.
        token_bytes: bytes that one token takes in the cache; None if tokens differ.
        cache_limit: as in `LimitsCache`; None if the cache has no fixed size.
        abilities: names of the optional protocols that the member satisfies, and of optional
            methods.
        own_adjustment: as in `AdjustsTokens`.
        parameters: as in `TellsSize`.
    """

    end_ids: tuple[int, ...]
    context_window: int | None
    vocabulary_size: int | None
    device: str | None
    token_bytes: int | None
    cache_limit: int | None
    abilities: tuple[str, ...]
    own_adjustment: Adjustment = NOTHING
    parameters: int | None = None

    def has_model_of(self, other: Facts) -> bool:
        """Return whether the facts are those of the same model.

        A cache of fixed size can have another size after a restart, because the size can depend on
        the free memory. The size limits the context window.
        """
        if self.cache_limit is not None and other.cache_limit is not None:
            window, limit = self.context_window, self.cache_limit
            other = replace(other, context_window=window, cache_limit=limit)
        return self == other

    def encoded(self) -> dict[str, Any]:
        """Return the facts as plain values."""
        return asdict(self)

    @classmethod
    def decoded(cls, values: dict[str, Any]) -> Facts:
        """Return the facts that `encoded` returned as plain values."""
        lists = {name: tuple(values[name]) for name in ("end_ids", "abilities")}
        own = Adjustment(**{name: _tuples(each) for name, each in values["own_adjustment"].items()})
        return cls(**{**values, **lists, "own_adjustment": own})


def encoded_draw(draw: Draw | None) -> Sequence[Any] | None:
    """Return a draw as plain values."""
    return None if draw is None else astuple(draw)


def decoded_draw(values: Sequence[Any] | None) -> Draw | None:
    """Return the draw that `encoded_draw` returned as plain values."""
    return None if values is None else Draw(*values)


def encoded_adjustment(tree: TokenTree) -> Sequence[Any] | None:
    """Return the adjustment of a tree as plain values."""
    if tree.adjustment is None:
        return None
    return tree.prompt_tokens, *astuple(tree.adjustment)


def adjusted_tree(base: Sequence[int], values: Sequence[Any] | None) -> TokenTree:
    """Return the tree of committed tokens and what `encoded_adjustment` returned."""
    tree = TokenTree(base)
    if values is not None:
        tree.prompt_tokens, *rest = values
        tree.adjustment = Adjustment(*_tuples(rest))
    return tree


def _tuples(value: Any) -> Any:
    """Return a value with tuples in place of lists."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def encoded_result(result: NodeResult) -> tuple[Any, ...]:
    """Return a result as plain values."""
    summaries = tuple(map(_plain, result.next))
    return summaries, result.logprobs, result.passes, result.tokens, result.reused


def _plain(summary: Next) -> tuple[Any, ...]:
    return (
        summary.tokens,
        summary.logprobs,
        summary.end_logprob,
        summary.mass,
        summary.drawn,
        summary.word_end_logprob,
    )


def decoded_result(values: Sequence[Any]) -> NodeResult:
    """Return the result that `encoded_result` returned as plain values."""
    summaries, logprobs, passes, tokens, reused = values
    nexts = tuple(Next(tuple(ids), tuple(likely), *others) for ids, likely, *others in summaries)
    return NodeResult(nexts, tuple(logprobs), passes, tokens, reused)


def encoded_error(name: str, error: BaseException) -> Message:
    """Return the reply for an error of a member, in the form that an engine would raise.

    Args:
        name: the member's name.
        error: any error.
    """
    raised = as_member_error(name, error)
    kind = next(c.__name__ for c in type(raised).__mro__ if c.__name__ in errors.__all__)
    member = (raised.member, raised.reason) if isinstance(raised, MemberError) else (str(raised),)
    return ERROR, kind, member, "".join(traceback.format_exception(error))


def encoded_load_error(name: str, error: BaseException) -> Message:
    """Return the first message of a host that cannot load its member.

    Args:
        name: the member's name.
        error: any error.
    """
    if isinstance(error, AdaFuseError):
        return encoded_error(name, error)
    wrapped = LoadError(f"member {name!r} cannot be loaded: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return encoded_error(name, wrapped)


def decoded_error(kind: str, arguments: Sequence[str], trace: str) -> AdaFuseError:
    """Return the error of a reply. Its cause shows where the host raised it."""
    error: AdaFuseError = getattr(errors, kind)(*arguments)
    error.__cause__ = _HostTraceback(trace)
    return error


def value_of(reply: Message) -> Any:
    """Return the value of a reply.

    Raises:
        AdaFuseError: the reply is an error.
    """
    status, *content = reply
    if status == ERROR:
        raise decoded_error(*content)
    return content[0]


class _HostTraceback(Exception):  # noqa: N818  # it only shows a text
    """The traceback of an error in a host."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f"\n{self._text}"
