"""Requests in, events out: the ensemble as users of this package see it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from typing_extensions import Self, Unpack

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import AdaFuseConfig, DecodeOptions, RuntimeConfig
from adafuse_llm.decoding.draft import Drafting, Drafts, NoDrafts
from adafuse_llm.decoding.member import Member
from adafuse_llm.decoding.rounds import cancelled, decode, score_texts
from adafuse_llm.errors import (
    ContextWindowError,
    InvalidInputError,
    MemberError,
)
from adafuse_llm.loading.config_file import read_config
from adafuse_llm.results import Generation, Round, Scores, StreamEvent
from adafuse_llm.runtime.budget import CacheBudget
from adafuse_llm.runtime.heap import trim_heap
from adafuse_llm.runtime.scheduler import Request, Scheduler
from adafuse_llm.strategies.base import Strategy, StrategyContext, refuse_unused_options
from adafuse_llm.strategies.registry import find_strategy
from adafuse_llm.text.chat import as_plain_text, check_messages
from adafuse_llm.text.stops import Transcript
from adafuse_llm.text.words import check_text

if TYPE_CHECKING:
    import torch

    from adafuse_llm.loading.specs import MemberSpec

logger = logging.getLogger(__name__)

SENTENCEPIECE_SPACES = 1
"""Spaces dropped from the start of a reply to messages: SentencePiece members write one there."""

CROWD = 2
"""More running requests per member than these are a crowd: their passes are worth filling."""

RoundObserver = Callable[[Round], None]
Messages = Sequence[Mapping[str, Any]]


class AdaFuseEngine:
    """An ensemble of language models that decode one response together.

    Thread-safe. All requests of the engine share their forward passes; a model is run by one
    thread, and members on different devices run at the same time.
    Usable as a context manager; `close` ends running requests.

    Args:
        members: at least one backend, each with its own name.
        config: default options, which every call can override.
        strategy: how the next piece of text is chosen: a `Strategy`, or the name of one.
        runtime: how requests are run; never changes what they return.
        on_round: called with every round of every request, where the caller consumes the events.
            An observer that raises is logged and does not disturb the decode.

    Raises:
        InvalidInputError: no members, or two of the same name.
        InvalidOptionError: ``config`` names members that are not there, or its weights do not
            fit; there is no such strategy, or it does not use an option that ``config`` sets.
    """

    def __init__(
        self,
        members: Sequence[Backend],
        config: AdaFuseConfig | None = None,
        *,
        strategy: Strategy | str = "adafuse",
        runtime: RuntimeConfig | None = None,
        on_round: RoundObserver | None = None,
    ) -> None:
        if isinstance(members, str) or not all(isinstance(each, Backend) for each in members):
            raise InvalidInputError(
                "members must be loaded backends; to load models by path or hub id use "
                "AdaFuseEngine.from_pretrained([...])"
            )
        if not members:
            raise InvalidInputError("an ensemble needs at least one member; got none")
        self._backends = tuple(members)
        self.members: tuple[str, ...] = tuple(backend.name for backend in self._backends)
        if len(set(self.members)) != len(self.members):
            raise InvalidInputError(
                f"members need different names; got {', '.join(self.members)}. "
                "Name them with MemberSpec(name=...)."
            )
        self.config = config or AdaFuseConfig()
        self.strategy = find_strategy(strategy)
        refuse_unused_options(self.strategy, self.config)
        self._chosen(self.config)
        self._on_round = on_round
        self.runtime = runtime or RuntimeConfig()
        self._budget = CacheBudget(self.runtime.cache_bytes)
        self._scheduler = Scheduler(self._backends, self.runtime, self._budget)

    @classmethod
    def from_pretrained(
        cls,
        members: Sequence[str | MemberSpec],
        *,
        config: AdaFuseConfig | None = None,
        strategy: Strategy | str = "adafuse",
        runtime: RuntimeConfig | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        on_round: RoundObserver | None = None,
    ) -> AdaFuseEngine:
        """Load Hugging Face causal language models (local folders or hub ids) as an ensemble.

        Args:
            members: at least one; a `MemberSpec` sets more than the path.
            config: default options.
            strategy: as for the constructor.
            runtime: how requests are run.
            dtype: dtype of the weights, ``"auto"`` for the checkpoint's own.
            device_map: passed to accelerate; with ``"auto"``, free memory is divided among the
                members in proportion to their sizes.
            trust_remote_code: allow code that comes with a model to run.
            revision: revision of hub models.
            on_round: as for the constructor.

        Raises:
            LoadError: a member cannot be loaded, or cannot take part in an ensemble.
            InvalidInputError: no members, or two explicit names are the same.
        """
        from adafuse_llm.loading.members import load_members

        loaded, weights = load_members(
            members,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            revision=revision,
        )
        config = config or AdaFuseConfig()
        if config.weights is None and weights is not None:
            config = config.override({"weights": weights})
        return cls(loaded, config, strategy=strategy, runtime=runtime, on_round=on_round)

    @classmethod
    def from_embedded(
        cls,
        *,
        config: AdaFuseConfig | None = None,
        strategy: Strategy | str = "adafuse",
        runtime: RuntimeConfig | None = None,
        on_round: RoundObserver | None = None,
    ) -> AdaFuseEngine:
        """The three small models that ship with this package, for trying out and for tests."""
        from adafuse_llm.embedded import member_paths

        paths = [str(path) for path in member_paths()]
        return cls.from_pretrained(
            paths, config=config, strategy=strategy, runtime=runtime, on_round=on_round
        )

    @classmethod
    def from_config(
        cls,
        path: str | PathLike[str],
        *,
        runtime: RuntimeConfig | None = None,
        trust_remote_code: bool = False,
        on_round: RoundObserver | None = None,
    ) -> AdaFuseEngine:
        """The ensemble that a configuration file describes, such as one by ``adafuse tune``.

        Args:
            path: YAML or JSON; see :mod:`adafuse_llm.loading.config_file`.
            runtime: as for `from_pretrained`.
            trust_remote_code: as for `from_pretrained`; a file cannot allow it.
            on_round: as for `from_pretrained`.

        Raises:
            InvalidInputError: there is no such file, or it says something that cannot be used.
            LoadError: a member cannot be loaded, or cannot take part in an ensemble.
        """
        from adafuse_llm.embedded import member_paths

        said = read_config(path)
        return cls.from_pretrained(
            said.models or [str(member) for member in member_paths()],
            config=said.config,
            strategy=said.strategy,
            runtime=runtime,
            dtype=said.dtype,
            device_map=said.device_map,
            revision=said.revision,
            trust_remote_code=trust_remote_code,
            on_round=on_round,
        )

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The members themselves."""
        return self._backends

    @property
    def context_window(self) -> int | None:
        """Tokens of the smallest member window; None if no member has a limit."""
        windows = [b.context_window for b in self._backends if b.context_window is not None]
        return min(windows, default=None)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        on_round: RoundObserver | None = None,
        cancel: threading.Event | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> Generation:
        """Decode a whole response.

        Args:
            prompt: text to continue; or
            messages: a conversation (role/content dicts) to answer, rendered for every member
                with its own chat template.
            on_round: observer of this call, besides the engine's.
            cancel: set it from anywhere to end the decode within a round; the result then has
                ``finish_reason="cancelled"`` and the text so far.
            **overrides: any option of `AdaFuseConfig`.

        Raises:
            InvalidInputError: prompt, messages or options cannot be used; nothing was computed.
            MemberError: a member failed; the engine stays usable.
        """
        request = self._request(prompt, messages, cancel, overrides)
        *_, last = self._stream_one(request, on_round)
        assert last.generation is not None, "a decode ends with its generation or an error"
        return last.generation

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        on_round: RoundObserver | None = None,
        cancel: threading.Event | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> Generator[StreamEvent, None, None]:
        """Decode span by span; arguments and errors as for `generate`.

        Yields one event per committed span, the last one with the whole result. Arguments are
        checked before this returns; decoding starts with the first event asked for. Closing the
        iterator, or leaving a loop over it, stops the decode within a round.
        """
        request = self._request(prompt, messages, cancel, overrides)
        return self._stream_one(request, on_round)

    def generate_batch(
        self,
        prompts: Sequence[str] | None = None,
        *,
        messages: Sequence[Messages] | None = None,
        on_round: RoundObserver | None = None,
        cancel: threading.Event | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> list[Generation]:
        """Decode many prompts (or conversations) at the same time, results in order.

        All inputs are checked before anything is computed. If one decode fails, the others are
        stopped and its error is raised.
        """
        events = self.stream_batch(
            prompts, messages=messages, on_round=on_round, cancel=cancel, **overrides
        )
        done = {index: event.generation for index, event in events if event.generation}
        return [done[index] for index in range(len(done))]

    def stream_batch(
        self,
        prompts: Sequence[str] | None = None,
        *,
        messages: Sequence[Messages] | None = None,
        on_round: RoundObserver | None = None,
        cancel: threading.Event | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> Generator[tuple[int, StreamEvent], None, None]:
        """`generate_batch` span by span: the events of all decodes as they come, each with the
        number of its prompt. Closing the iterator stops all decodes within a round.
        """
        if (prompts is None) == (messages is None) or isinstance(prompts, str):
            raise InvalidInputError("pass a list of prompts, or a list of conversations")
        requests = [
            *(self._request(prompt, None, cancel, overrides) for prompt in prompts or ()),
            *(self._request(None, turns, cancel, overrides) for turns in messages or ()),
        ]
        return self._stream_all(requests, on_round)

    def score(
        self,
        prompt: str | None = None,
        continuations: Sequence[str] = (),
        *,
        messages: Messages | None = None,
        stops: bool = False,
        **overrides: Unpack[DecodeOptions],
    ) -> Scores:
        """What the ensemble makes of given texts: the likelihood of each after the prompt.

        A member reads the prompt once and all continuations in one pass. A continuation is taken
        as it stands, its leading whitespace included; spaces that the prompt ends in count as the
        beginning of each. Of the options only ``weights`` and ``use`` matter here.

        Args:
            prompt: text that comes before; empty for texts that nothing comes before, which then
                follow the special tokens that a member's prompts begin with, or its end-of-sequence
                token where there are none; or
            messages: a conversation that the continuations are replies to.
            continuations: texts of at least one character.
            stops: whether the response is to end after each: adds the probability of that.
            **overrides: any option of `AdaFuseConfig`.

        Raises:
            InvalidInputError: prompt, continuations or options cannot be used.
            MemberError: a member failed; the engine stays usable.
        """
        if isinstance(continuations, str) or not continuations:
            raise InvalidInputError("continuations must be a list of at least one text")
        for text in continuations:
            if not isinstance(text, str) or not text:
                raise InvalidInputError(f"a continuation must be text, not empty; got {text!r}")
            check_text(text, "a continuation")
        config = self.config.override(overrides)
        members, spaces = self._members(config, prompt, messages, may_be_empty=True)
        texts = [" " * spaces + text for text in continuations] if prompt else list(continuations)
        for member in members:
            for text in texts:
                member.place(text)
        room = max(sum(1 for _ in member.tree.nodes()) for member in members)
        needs = self._budget.needs(members, config.override({"max_new_tokens": 1}), spare=room)
        request = Request(members, needs, score_texts(members, texts, stops=stops))
        outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._running([request], lambda _, event: outbox.put(event)):
            scores: Scores = _raise_error(outbox.get())
        given = [
            scored.model_copy(update={"text": text})
            for scored, text in zip(scores.texts, continuations, strict=True)
        ]
        return scores.model_copy(update={"texts": tuple(given)})

    async def agenerate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        on_round: RoundObserver | None = None,
        cancel: threading.Event | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> Generation:
        """`generate` without blocking the event loop; cancelling the task stops the decode."""
        generation = None
        async for event in self.astream(
            prompt, messages=messages, on_round=on_round, cancel=cancel, **overrides
        ):
            generation = event.generation
        assert generation is not None
        return generation

    async def astream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        on_round: RoundObserver | None = None,
        cancel: threading.Event | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> AsyncGenerator[StreamEvent, None]:
        """`stream` without blocking the event loop; cancelling the task, or closing the iterator,
        stops the decode. Observers run on the event loop.
        """
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        request = await asyncio.to_thread(self._request, prompt, messages, cancel, overrides)

        def deliver(_: int, event: Any) -> None:
            try:
                loop.call_soon_threadsafe(inbox.put_nowait, event)
            except RuntimeError:  # the loop was closed: nobody waits any more
                request.abandoned.set()

        with self._running([request], deliver):
            while True:
                event: StreamEvent = _raise_error(await inbox.get())
                self._observe(event, on_round)
                yield event
                if event.generation is not None:
                    return

    @property
    def closed(self) -> bool:
        """Whether the engine takes no more requests."""
        return self._scheduler.closed

    def close(self) -> None:
        """End running requests and stop the threads. The engine takes no more requests."""
        self._scheduler.close()
        trim_heap()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(members=[{', '.join(self.members)}])"

    @contextmanager
    def _running(
        self, requests: Sequence[Request], deliver: Callable[[int, Any], None]
    ) -> Iterator[None]:
        """Run requests inside the block; abandon those that have not ended when it is left.

        Args:
            requests: the requests to start at the same time.
            deliver: called on the scheduler's thread with a request's index and its next event,
                or the error that ended it.
        """
        try:
            self._scheduler.submit(
                *((request, partial(deliver, index)) for index, request in enumerate(requests))
            )
            yield
        finally:
            for request in requests:
                request.abandoned.set()

    def _stream_all(
        self, requests: Sequence[Request], on_round: RoundObserver | None
    ) -> Generator[tuple[int, StreamEvent], None, None]:
        outbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        unfinished = len(requests)
        with self._running(requests, lambda index, event: outbox.put((index, event))):
            while unfinished:
                index, event = outbox.get()
                self._observe(_raise_error(event), on_round)
                unfinished -= event.generation is not None
                yield index, event

    def _stream_one(
        self, request: Request, on_round: RoundObserver | None
    ) -> Generator[StreamEvent, None, None]:
        with closing(self._stream_all([request], on_round)) as events:
            for _, event in events:
                yield event

    def _observe(self, event: StreamEvent, on_round: RoundObserver | None) -> None:
        if event.round is None:
            return
        for observer in (self._on_round, on_round):
            if observer is None:
                continue
            try:
                observer(event.round)
            except Exception:
                logger.exception("an on_round observer failed in round %d", event.round.index)

    def _request(
        self,
        prompt: str | None,
        messages: Messages | None,
        cancel: threading.Event | None,
        overrides: Mapping[str, Any],
    ) -> Request:
        """Check and encode everything about a request; computes nothing."""
        config = self.config.override(overrides)
        refuse_unused_options(self.strategy, config)
        self.strategy.check([backend for backend, _ in self._chosen(config)])
        members, spaces = self._members(config, prompt, messages)
        needs = self._budget.needs(
            members, config, self.strategy.max_extra_tokens(len(members), config)
        )
        play = self.strategy.begin(StrategyContext(members, config, self._new_drafting))
        transcript = Transcript(config.stop, spaces)
        rounds: list[Round] = []
        return Request(
            members,
            needs,
            decode(members, config, play, transcript, rounds),
            cancelled=partial(cancelled, members, transcript, rounds),
            cancel=cancel,
        )

    def _members(
        self,
        config: AdaFuseConfig,
        prompt: str | None,
        messages: Messages | None,
        *,
        may_be_empty: bool = False,
    ) -> tuple[list[Member], int]:
        """The members that decode, each with the prompt; and spaces at the start of what follows
        that the prompt already ends in.
        """
        chosen = self._chosen(config)
        if (prompt is None) == (messages is None):
            raise InvalidInputError("pass either a prompt or messages")
        spaces = SENTENCEPIECE_SPACES
        if messages is not None:
            messages = check_messages(messages)
        if prompt is not None:
            if not isinstance(prompt, str):
                raise InvalidInputError(f"prompt must be text; got {type(prompt).__name__}")
            check_text(prompt, "the prompt")
            spaces = len(prompt) - len(prompt.rstrip(" "))
            prompt = prompt.rstrip(" ")
            if not prompt and not may_be_empty:
                raise InvalidInputError("the prompt is empty: pass some text to continue")
        top = self.strategy.top(config)
        asked = prompt if messages is None else as_plain_text(messages)
        members = []
        for backend, weight in chosen:
            ids = _encode(backend, prompt, messages)
            if prompt == "":
                ids = ids or sorted(backend.end_ids)[:1]
            _check_window(backend, len(ids))
            members.append(Member(backend, ids, top, weight, asked or ""))
        return members, spaces

    def _new_drafting(self, members: Sequence[Member]) -> Drafting:
        if not self.runtime.drafting:
            return NoDrafts(members)
        return Drafts(members, self._is_crowded)

    def _is_crowded(self) -> bool:
        return self._scheduler.running > CROWD * len(self._backends)

    def _chosen(self, config: AdaFuseConfig) -> list[tuple[Backend, float]]:
        """The members that decode, each with its weight.

        Raises:
            InvalidOptionError: members that the engine does not have, or weights that do not fit.
        """
        weights = config.member_weights(self.members)
        return [(each, weights[each.name]) for each in self._backends if each.name in weights]


def _raise_error(event: Any) -> Any:
    """Return an event of a request, or raise the error that ended the request."""
    if isinstance(event, BaseException):
        raise event
    return event


def _encode(backend: Backend, prompt: str | None, messages: Messages | None) -> list[int]:
    """The prompt in a member's tokens; what goes wrong names the member."""
    try:
        if prompt is not None:
            return backend.codec.encode_prompt(prompt)
        return backend.codec.encode_messages(messages or ())
    except InvalidInputError as error:
        raise InvalidInputError(f"member {backend.name!r}: {error}") from error
    except Exception as error:
        reason = f"its tokenizer failed ({type(error).__name__}: {error})"
        raise MemberError(backend.name, reason) from error


def _check_window(backend: Backend, tokens: int) -> None:
    window = backend.context_window
    if not tokens:
        raise InvalidInputError(f"member {backend.name!r} sees no token in this prompt")
    if window is not None and tokens >= window:
        raise ContextWindowError(
            f"the prompt has {tokens} tokens for member {backend.name!r}, whose context window "
            f"holds {window}, response included. Shorten the prompt or leave this member out."
        )
