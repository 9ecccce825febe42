"""A member whose backend is in another process: the side of the engine."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

from adafuse_llm.adjustment import Adjustment
from adafuse_llm.backends.base import NodeQuery, NodeResult
from adafuse_llm.backends.remote.protocol import (
    Channel,
    Connector,
    Delta,
    Facts,
    HostDied,
    decoded_result,
    encoded_adjustment,
    encoded_draw,
    value_of,
)
from adafuse_llm.errors import LoadError, MemberError, MemberUnavailableError
from adafuse_llm.forks import after_fork
from adafuse_llm.text.codec import TextCodec
from adafuse_llm.tree import Node, TokenTree

logger = logging.getLogger(__name__)

T = TypeVar("T")

FEWEST_TOP: Final = 2
"""Number of likeliest tokens in a summary that nobody reads."""

LIMITS: Final = 256
"""Number of draft limits that the client asks for at a time."""


class MemberText(Protocol):
    """The part of a member that needs its tokenizer but not its model."""

    @property
    def codec(self) -> TextCodec:
        """As in `Backend`."""
        ...

    @property
    def token_texts(self) -> Sequence[str] | None:
        """As in `RestrictsTokens`."""
        ...

    @property
    def follows_grammars(self) -> bool:
        """As in `FollowsGrammars`."""
        ...

    def grammar_tokenizer(self, size: int | None, end_ids: Collection[int]) -> Any:
        """Return the tokens as in `FollowsGrammars`.

        Args:
            size: number of tokens in a distribution; None if it is not known.
            end_ids: ids of the end-of-sequence tokens.
        """
        ...


def join_host(name: str, text: MemberText, connect: Connector, channel: Channel) -> RemoteBackend:
    """Return the member of a host as soon as the host has loaded it.

    The member satisfies exactly those optional protocols that the host's backend satisfies.

    Args:
        name: the member's name.
        text: the member's text side, which stays in this process.
        connect: starts the host again if it ends.
        channel: the channel to a new host. It is closed if the host cannot load the member.

    Raises:
        LoadError: the host cannot load the member.
    """
    try:
        facts = _greeted(channel)
    except HostDied as error:
        raise LoadError(f"member {name!r} cannot be loaded: {error.reason}") from error
    kind = _class_with(facts.abilities)
    return kind(name, text, connect, _Session(channel), facts)


def _greeted(channel: Channel) -> Facts:
    """Wait until a host has loaded its backend, and return the facts about it."""
    try:
        return Facts.decoded(value_of(channel.receive()))
    except BaseException:
        channel.close()
        raise


class _Session:
    """One incarnation of a host: what ends when the host ends.

    Args:
        channel: the channel to the host.

    Attributes:
        opened: number of requests that were opened so far.
        released: numbers of the requests that the host must close with the next evaluation.
        draws: whether the host has prepared draws.
        is_lost: whether the host has ended, or a reply is left unread.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.opened = 0
        self.released: deque[int] = deque()
        self.draws = False
        self.is_lost = False

    def call(self, *message: Any) -> Any:
        """Send a message, and return the value of the reply."""
        with self._unless_lost():
            self.channel.send(message)
            reply = self.channel.receive()
        return value_of(reply)

    def ask(self, *question: Any) -> Any:
        """Return the answer to a question that the host answers at once."""
        with self._unless_lost():
            answer = self.channel.ask(question)
        return value_of(answer)

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # such as an interrupt
            self.is_lost = True
            self.channel.close()
            raise

    def open(self, tree: TokenTree) -> tuple[_Mirror, list[int]]:
        """Return the mirror of a tree that the host does not know, and the tree's tokens."""
        self.opened += 1
        return _Mirror(self, self.opened, tree), list(tree.ids)

    def to_close(self) -> tuple[int, ...]:
        """Remove the numbers in `released`, and return them."""
        return tuple(self.released.popleft() for _ in range(len(self.released)))


class _Mirror:
    """What a host knows about the tree of a request.

    Args:
        session: the incarnation of the host.
        number: number of the request.
        tree: the tree. The host knows its committed tokens.
    """

    def __init__(self, session: _Session, number: int, tree: TokenTree) -> None:
        self.session = session
        self.number = number
        self._root = tree.root
        self._committed = len(tree.ids)
        self._cuts = tree.cuts
        self._numbers = {tree.root: 0}
        self._next = 1

    def number_of(self, node: Node) -> int | None:
        """Return the number of a node, or None if the host does not know the node."""
        return self._numbers.get(node)

    def delta(self, query: NodeQuery, base: Sequence[int] | None) -> Delta:
        """Return what the host must know to evaluate a query."""
        alive, committed = self._follow(query.tree)
        new = [pair for node in (*query.evaluate, *query.score) for pair in self._add(node)]
        evaluate = [
            (self._numbers[node], node.allowed, encoded_draw(node.draw)) for node in query.evaluate
        ]
        score = [self._numbers[node] for node in query.score]
        adjustment = None if base is None else encoded_adjustment(query.tree)
        return Delta(
            self.number,
            base,
            adjustment,
            alive,
            committed,
            new,
            evaluate,
            score,
            query.top,
            query.word_ends,
        )

    def _follow(self, tree: TokenTree) -> tuple[list[int] | None, list[int]]:
        """Return the numbers that are alive, as `Delta.alive`, and the committed tokens."""
        if self._cuts == tree.cuts:
            return None, []
        self._cuts = tree.cuts
        known = len(self._numbers)
        self._keep(set(_below(self._root)))
        committed = tree.ids[self._committed :]
        is_pruned = len(self._numbers) < known or not committed
        alive = list(self._numbers.values()) if is_pruned else None
        if committed:
            self._keep(set(tree.nodes()))
            if tree.root not in self._numbers:
                self._number(tree.root)
            self._root, self._committed = tree.root, len(tree.ids)
        return alive, committed

    def _keep(self, nodes: Collection[Node]) -> None:
        self._numbers = {node: each for node, each in self._numbers.items() if node in nodes}

    def _number(self, node: Node) -> None:
        self._numbers[node] = self._next
        self._next += 1

    def _add(self, node: Node) -> Iterator[tuple[int, int]]:
        """Number a node and its ancestors, and yield those that are new to the host."""
        line = []
        while node not in self._numbers:
            assert node.parent is not None, "the node is not in the tree"
            line.append((node.parent, node))
            node = node.parent
        for parent, each in reversed(line):
            yield self._numbers[parent], each.token
            self._number(each)


def _below(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it."""
    pending = [node]
    while pending:
        each = pending.pop()
        yield each
        pending.extend(each.children.values())


class RemoteBackend:
    """A member that computes in another process, on this machine or another one.

    The tokenizer stays in this process. One message per call of `evaluate` carries all queries. If
    the host ends, the member logs a warning, starts the host once more, sends the committed tokens
    of the requests, and repeats the call.

    `join_host` creates objects of this class. They also have the methods of the optional protocols
    that the host's backend satisfies.

    Args:
        name: the member's name.
        text: the member's text side.
        connect: starts the host again.
        session: the host's first incarnation.
        facts: the facts about the member.

    Attributes:
        restarts: number of times that the host was started again.
    """

    def __init__(
        self, name: str, text: MemberText, connect: Connector, session: _Session, facts: Facts
    ) -> None:
        self.name = name
        self._text = text
        self._connect = connect
        self._facts = facts
        self._end_ids = frozenset(facts.end_ids)
        self.restarts = 0
        self._is_closed = False
        self._loading: Channel | None = None
        self._lock = threading.Lock()
        self._session: _Session | None = None
        after_fork(self._renew)
        self._session = session

    def _renew(self) -> None:
        """Leave the host to the parent process after a fork."""
        self._lock = threading.Lock()
        self._session = None

    @property
    def codec(self) -> TextCodec:
        return self._text.codec

    @property
    def end_ids(self) -> frozenset[int]:
        return self._end_ids

    @property
    def context_window(self) -> int | None:
        return self._facts.context_window

    @property
    def parameters(self) -> int | None:
        return self._facts.parameters

    @property
    def host(self) -> str:
        """Where the member computes, for messages."""
        session = self._session
        return "no process" if session is None else session.channel.host

    def evaluate(self, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        with self._lock:
            return self._repeated(lambda session: self._evaluate(session, queries))

    def release(self, tree: TokenTree) -> None:
        """Let the host free the resources of a request when it evaluates next."""
        self._forget(tree)

    def close(self) -> None:
        """End the host, even during a pass. A call that waits for the host fails."""
        self._is_closed = True
        session, loading = self._session, self._loading
        for channel in (session.channel if session else None, loading):
            if channel is not None:
                channel.close()
        self._connect.close()

    def _evaluate(self, session: _Session, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        try:
            deltas = tuple(self._delta(session, query) for query in queries)
            closed = session.to_close()
            replies = session.call("evaluate", closed, tuple(map(tuple, deltas)))
            return [decoded_result(each) for each in replies]
        except BaseException:
            for query in queries:
                self._forget(query.tree)
            raise

    def _delta(self, session: _Session, query: NodeQuery) -> Delta:
        mirror, base = query.tree.state, None
        if not isinstance(mirror, _Mirror) or mirror.session is not session:
            mirror, base = session.open(query.tree)
            query.tree.state = mirror
        return mirror.delta(query, base)

    def _forget(self, tree: TokenTree) -> None:
        """Drop the mirror of a request, so that its next query opens it again."""
        mirror, tree.state = tree.state, None
        if isinstance(mirror, _Mirror):
            mirror.session.released.append(mirror.number)

    def _call(self, *message: Any) -> Any:
        """Send a message to the host, and return the value of its reply."""
        with self._lock:
            return self._repeated(lambda session: session.call(*message))

    def _ask(self, *question: Any) -> Any:
        """Return the answer to a question that the host answers even during a pass."""
        session = self._session
        if session is not None:
            try:
                return session.ask(*question)
            except HostDied as error:
                if not error.is_closed:
                    self._warn(error)
        with self._lock:
            return self._repeated(lambda session: session.ask(*question))

    def _repeated(self, call: Callable[[_Session], T]) -> T:
        """Call a function with the running host. If the host ends, repeat it with a new one.

        Raises:
            MemberError: the new host has ended, too.
            MemberUnavailableError: the new host cannot be started, or the member is closed.
            AdaFuseError: the host answered with an error.
        """
        try:
            return self._once(call)
        except HostDied as error:
            if error.is_closed:
                raise MemberUnavailableError(self.name, "it was closed") from error
            self._warn(error)
        try:
            return self._once(call)
        except HostDied as error:
            if error.is_closed:
                raise MemberUnavailableError(self.name, "it was closed") from error
            raise MemberError(
                self.name, f"{error.reason}. It had already been started again for this pass"
            ) from error

    def _warn(self, error: HostDied) -> None:
        logger.warning("member %r: %s. The member is started again", self.name, error.reason)

    def _once(self, call: Callable[[_Session], T]) -> T:
        """Call a function with the running host, and start the host if none is running."""
        if self._session is None or self._session.is_lost:
            self._session = self._start()
        return call(self._session)

    def _start(self) -> _Session:
        if self._is_closed:
            raise HostDied("it was closed", is_closed=True)
        try:
            self._loading = self._connect()
            if self._is_closed:
                self._loading.close()
            session = _Session(self._loading)
            facts = _greeted(session.channel)
        except LoadError as error:
            reason = str(error).removeprefix(f"member {self.name!r} cannot be loaded: ")
            raise MemberUnavailableError(
                self.name, f"it could not be started again: {reason}"
            ) from error
        finally:
            self._loading = None
        if not facts.has_model_of(self._facts):
            session.channel.close()
            raise MemberUnavailableError(
                self.name, "its files have changed. Load the ensemble again"
            )
        self._facts = facts
        self.restarts += 1
        return session


class _Placed(RemoteBackend):
    """A member that satisfies `SupportsPlacement`."""

    @property
    def device(self) -> str:
        assert self._facts.device is not None
        return self._facts.device

    def cache_bytes(self, tokens: int) -> int:
        if self._facts.token_bytes is not None:
            return tokens * self._facts.token_bytes
        return int(self._ask("cache_bytes", tokens))

    def free_bytes(self) -> int:
        return int(self._ask("free_bytes"))


class _FixedCache(_Placed):
    """A member that satisfies `LimitsCache`."""

    @property
    def cache_limit(self) -> int:
        assert self._facts.cache_limit is not None
        return self._facts.cache_limit


class _LimitsDrafts(RemoteBackend):
    """A member that satisfies `LimitsDrafting`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._limits: dict[int, Sequence[int]] = {}

    def draft_limit(self, length: int) -> int:
        block, index = divmod(length, LIMITS)
        if block not in self._limits:
            self._limits[block] = self._ask("draft_limits", block * LIMITS, LIMITS)
        return self._limits[block][index]


class _Restricts(RemoteBackend):
    """A member that satisfies `RestrictsTokens`."""

    @property
    def token_texts(self) -> Sequence[str] | None:
        return self._text.token_texts


class _FollowsGrammars(_Restricts):
    """A member that satisfies `FollowsGrammars`."""

    @property
    def follows_grammars(self) -> bool:
        return self._text.follows_grammars

    def grammar_tokenizer(self) -> Any:
        return self._text.grammar_tokenizer(self._facts.vocabulary_size, self._end_ids)


class _Draws(RemoteBackend):
    """A member that satisfies `DrawsTokens`."""

    def prepare_draws(self) -> None:
        session = self._session
        if session is None or not session.draws:
            with self._lock:
                self._repeated(_prepare_draws)

    def _evaluate(self, session: _Session, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        if any(node.draw is not None for query in queries for node in query.evaluate):
            _prepare_draws(session)  # the host may be a new one
        return super()._evaluate(session, queries)


def _prepare_draws(session: _Session) -> None:
    if not session.draws:
        session.call("prepare_draws")
        session.draws = True


class _Adjusts(RemoteBackend):
    """A member that satisfies `AdjustsTokens`."""

    @property
    def own_adjustment(self) -> Adjustment:
        return self._facts.own_adjustment


class _CachesPrefixes(RemoteBackend):
    """A member with a prefix cache that can be cleared."""

    def clear_prefix_cache(self) -> None:
        """Drop the rows of all requests so far."""
        self._call("clear_prefix_cache")


PARTS: Final[Mapping[str, type[RemoteBackend]]] = {
    "SupportsPlacement": _Placed,
    "LimitsCache": _FixedCache,
    "LimitsDrafting": _LimitsDrafts,
    "RestrictsTokens": _Restricts,
    "FollowsGrammars": _FollowsGrammars,
    "DrawsTokens": _Draws,
    "AdjustsTokens": _Adjusts,
    "clear_prefix_cache": _CachesPrefixes,
}
"""The class that offers each ability."""


@functools.cache
def _class_with(abilities: tuple[str, ...]) -> type[RemoteBackend]:
    """Return a class with exactly these abilities."""
    parts = [PARTS[name] for name in abilities if name in PARTS]
    bases = tuple(each for each in parts if not any(_is_above(each, other) for other in parts))
    return type("RemoteBackend", bases or (RemoteBackend,), {"__doc__": RemoteBackend.__doc__})


def _is_above(one: type, other: type) -> bool:
    return one is not other and issubclass(other, one)
