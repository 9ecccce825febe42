"""The engine: an ensemble that turns the requests of an application into responses."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, closing, contextmanager
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from typing_extensions import Self, Unpack

from adafuse_llm.backends.base import (
    Backend,
    DrawsTokens,
    FollowsGrammars,
    RestrictsTokens,
    RunsElsewhere,
    SupportsClose,
)
from adafuse_llm.config import (
    GRAMMARS,
    AdaFuseConfig,
    ChoiceOptions,
    DecodeOptions,
    RuntimeConfig,
)
from adafuse_llm.decoding.costs import PassTimes
from adafuse_llm.decoding.draft import Drafting, Drafts, NoDrafts
from adafuse_llm.decoding.member import Form, Member
from adafuse_llm.decoding.rounds import (
    PlayRound,
    cancelled,
    choose,
    decode,
    pool_texts,
    score_texts,
)
from adafuse_llm.errors import (
    ContextWindowError,
    GrammarError,
    InvalidInputError,
    InvalidOptionError,
    MemberError,
    short_repr,
)
from adafuse_llm.forks import after_fork
from adafuse_llm.loading.config_file import read_config
from adafuse_llm.results import Choice, Generation, PassCost, Round, Scores, StreamEvent
from adafuse_llm.runtime.budget import CacheBudget
from adafuse_llm.runtime.heap import trim_heap
from adafuse_llm.runtime.scheduler import Request, Scheduler
from adafuse_llm.sampling import Sampling
from adafuse_llm.strategies.base import Strategy, StrategyContext, refuse_unused_options
from adafuse_llm.strategies.registry import find_strategy
from adafuse_llm.summary import choice_probabilities
from adafuse_llm.text.chat import Tool, as_plain_text
from adafuse_llm.text.codec import encode_conversation
from adafuse_llm.text.conversation import Conversation, check_conversation
from adafuse_llm.text.grammar import (
    NO_LEAD,
    ONE_SPACE,
    Grammar,
    GrammarText,
    GrammarVocabulary,
    is_available,
)
from adafuse_llm.text.opening import Opening, SpaceTokens
from adafuse_llm.text.reply_start import check_variables, mixed_reasoning, start_replies
from adafuse_llm.text.stops import Transcript
from adafuse_llm.text.templates import ReplyStart
from adafuse_llm.text.words import check_text

if TYPE_CHECKING:
    import torch

    from adafuse_llm.loading.specs import MemberSpec

logger = logging.getLogger(__name__)

CROWD = 2
"""Number of running requests per member above which all members propose at the same time. With so
many requests, sharing forward passes saves more than proposing one after another."""

RoundObserver = Callable[[Round], None]
Messages = Sequence[Mapping[str, Any]] | Conversation
Tools = Sequence[Tool | Mapping[str, Any]]


class AdaFuseEngine:
    """An ensemble of language models that decode one response together.

    An engine is thread-safe. Requests that run at the same time share forward passes. Each
    model runs in only one thread. Members on different devices, and members in processes of their
    own, run at the same time.

    An engine is also a context manager. On exit it calls `close`, which ends running requests.

    Args:
        members: at least one backend, each with a different name.
        config: default options, which every call can override.
        strategy: the `Strategy` that chooses the next piece of text, or its name.
        runtime: options that determine how requests run. They never change the results.
        on_round: function that the engine calls with every round of every request, in the thread
            or event loop that consumes the events. If the function raises an exception, the engine
            logs it and continues to decode.

    Raises:
        InvalidInputError: ``members`` is empty, or two members have the same name.
        InvalidOptionError: the strategy is unknown, ``config`` names unknown members or sets an
            option that the strategy does not use, or its weights do not match the members.
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
                "members must be loaded backends. To load models by path or hub id, use "
                "AdaFuseEngine.from_pretrained([...])."
            )
        if not members:
            raise InvalidInputError("an ensemble needs at least one member; got none")
        self._backends = tuple(members)
        self.members: tuple[str, ...] = tuple(backend.name for backend in self._backends)
        if len(set(self.members)) != len(self.members):
            raise InvalidInputError(
                f"members need different names; got {', '.join(self.members)}. "
                "Set names with MemberSpec(name=...)."
            )
        self.config = config or AdaFuseConfig()
        self.strategy = find_strategy(strategy)
        refuse_unused_options(self.strategy, self.config)
        self._active_backends(self.config)
        self._on_round = on_round
        self._space_vocabularies: dict[str, SpaceTokens] = {}
        self._grammar_vocabularies: dict[str, GrammarVocabulary] = {}
        after_fork(self._renew)
        self._warned: set[str] = set()
        self._pass_times = {name: PassTimes() for name in self.members}
        self.runtime = runtime or RuntimeConfig()
        self._budget = CacheBudget(self.runtime.cache_bytes)
        self._owned: tuple[Backend, ...] = ()
        self._scheduler = Scheduler(self._backends, self.runtime, self._budget)
        self._warn_of_mixed_reasoning()

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
        """Load transformers and GGUF models as an ensemble.

        The arguments `dtype`, `device_map` and `trust_remote_code` do not apply to GGUF members.

        Args:
            members: at least one folder, GGUF file, hub id or `MemberSpec`. A `MemberSpec` also
                sets options of the member.
            config: default options.
            strategy: as for the constructor.
            runtime: as for the constructor.
            dtype: dtype of the weights, or ``"auto"`` for the dtype of the checkpoint.
            device_map: device map for accelerate. With ``"auto"``, free memory is divided among
                the members in proportion to their sizes.
            trust_remote_code: whether code that comes with a model may run.
            revision: revision of models from the hub.
            on_round: as for the constructor.

        Raises:
            LoadError: a member cannot be loaded, or cannot take part in an ensemble.
            InvalidInputError: ``members`` is empty, or two members are given the same name.
        """
        from adafuse_llm.loading.members import load_members

        loaded, weights = load_members(
            members,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            revision=revision,
        )
        try:
            config = config or AdaFuseConfig()
            if config.weights is None and weights is not None:
                config = config.override({"weights": weights})
            engine = cls(loaded, config, strategy=strategy, runtime=runtime, on_round=on_round)
        except BaseException:
            _close_members(loaded)
            raise
        engine._owned = tuple(loaded)  # of this class
        return engine

    @classmethod
    def from_embedded(
        cls,
        *,
        config: AdaFuseConfig | None = None,
        strategy: Strategy | str = "adafuse",
        runtime: RuntimeConfig | None = None,
        on_round: RoundObserver | None = None,
    ) -> AdaFuseEngine:
        """Load the three small models that ship with this package, for experiments and tests."""
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
        """Load the ensemble that a configuration file describes.

        Args:
            path: a YAML or JSON file, such as one that ``adafuse tune`` wrote. The module
                :mod:`adafuse_llm.loading.config_file` describes its format.
            runtime: as for `from_pretrained`. The default is the section ``runtime`` of the file.
            trust_remote_code: as for `from_pretrained`; the file cannot set it.
            on_round: as for `from_pretrained`.

        Raises:
            InvalidInputError: the file does not exist, or its contents cannot be used.
            LoadError: a member cannot be loaded, or cannot take part in an ensemble.
        """
        file = read_config(path)
        return cls.from_pretrained(
            file.members,
            config=file.config,
            strategy=file.strategy,
            runtime=runtime or file.runtime,
            dtype=file.dtype,
            device_map=file.device_map,
            revision=file.revision,
            trust_remote_code=trust_remote_code,
            on_round=on_round,
        )

    def _warn_of_mixed_reasoning(self) -> None:
        """Log a warning if only some members reason before they answer."""
        codecs = {b.name: b.codec for b, _ in self._active_backends(self.config)}
        given = self.config.chat_template_kwargs
        reasoning, others = mixed_reasoning(codecs, given, self.members)
        if reasoning:
            logger.warning(
                "only some members reason before they answer: %s, but not %s. All members write "
                "the same text. So reasoning that a chat template opens is closed before the "
                "response, and other reasoning is a part of it. Use members that all reason, or "
                "members that do not",
                ", ".join(map(repr, reasoning)),
                ", ".join(map(repr, others)),
            )

    def _renew(self) -> None:
        self._building = threading.Lock()

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backends of all members, in member order."""
        return self._backends

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that runs the requests; metrics read its state."""
        return self._scheduler

    @property
    def context_window(self) -> int | None:
        """The smallest context window of all members, in tokens. None if no member has a limit."""
        windows = [b.context_window for b in self._backends if b.context_window is not None]
        return min(windows, default=None)

    @property
    def pass_costs(self) -> dict[str, PassCost]:
        """What a forward pass of each member costs, measured in the passes of recent requests.

        The engine drafts fewer tokens with a member whose tokens are expensive. A member without
        enough passes of different sizes is missing.
        """
        costs = {name: times.cost for name, times in self._pass_times.items()}
        return {name: cost for name, cost in costs.items() if cost is not None}

    @property
    def can_enforce(self) -> bool:
        """Whether responses can be made to fit a JSON schema, an expression or a grammar.

        This needs the extra ``grammar``, members whose tokens can follow a grammar, and a strategy
        that uses these options.
        """
        return (
            is_available()
            and self.strategy.options.issuperset(GRAMMARS)
            and all(
                isinstance(backend, FollowsGrammars) and backend.follows_grammars
                for backend in self._backends
            )
        )

    def check_grammar(self, **overrides: Unpack[DecodeOptions]) -> None:
        """Check that the options can be enforced, without decoding anything.

        The first check of a member takes seconds if its vocabulary is large. The results of checks
        are kept, so later checks of the same grammar are fast.

        Args:
            **overrides: any option of `AdaFuseConfig`.

        Raises:
            GrammarError: the members cannot follow the JSON schema, expression or grammar.
            InvalidOptionError: an option is invalid, or the strategy does not use it.
            MissingDependencyError: llguidance is not installed.
        """
        config = self.config.override(overrides)
        refuse_unused_options(self.strategy, config)
        if (grammar := Grammar.of(config)) is not None:
            for backend, _ in self._active_backends(config):
                self._grammar_vocabulary(backend).matcher(grammar, NO_LEAD)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        on_round: RoundObserver | None = None,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> Generation:
        """Decode a whole response. Pass either a prompt or messages.

        Args:
            prompt: text to continue.
            messages: a conversation to answer, as dicts with a role and content. Each member
                renders it with its own chat template. An assistant's message may have
                ``tool_calls`` (dicts with ``id``, ``name`` and ``arguments``) and
                ``reasoning_content`` (text for chat templates that read it), and a tool's message
                the ``tool_call_id`` of the call that it answers.
            tools: tools that the reply can call: `Tool`, or dicts in the form of OpenAI's API. Each
                member reads tools, calls and results in the form of its own chat template, if the
                template supports tools. All members write calls in the same form, which
                :mod:`adafuse_llm.text.conversation` describes.
            tool_choice: ``"auto"``; ``"none"`` to omit the tools; ``"required"`` to request a call
                of any tool; or the name of a tool, to request a call of that tool. The choice
                becomes part of the prompt and is not enforced.
            on_round: function to call with every round of this call, in addition to the engine's
                observer.
            cancel: an event that any thread can set to end the decode after at most one more round.
                The result then has the text so far and ``finish_reason="cancelled"``.
            timeout: maximum seconds that the request waits and decodes. The time that it takes to
                encode the prompt does not count.
            **overrides: any option of `AdaFuseConfig`.

        Raises:
            InvalidInputError: prompt, messages or options cannot be used; nothing was computed.
            MemberError: a member failed; the engine stays usable.
            RequestTimeoutError: the request took longer than `timeout`.
            QueueFullError: too many requests wait; nothing was computed.
        """
        messages = _with_tools(messages, tools, tool_choice)
        requests = self._requests(prompt, messages, cancel, timeout, overrides)
        with closing(self._stream_all(requests, on_round)) as events:
            done = {index: event.generation for index, event in events if event.generation}
        return _with_alternatives([done[index] for index in range(len(requests))])

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        on_round: RoundObserver | None = None,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> Generator[StreamEvent, None, None]:
        """Decode span by span. The arguments and errors are the same as for `generate`.

        The iterator yields one event per committed span. The last event has the whole result.
        Arguments are checked before this method returns; decoding starts when the first event is
        requested. The seconds of `timeout` count from then on, and a consumer that reads the events
        slowly neither slows the decode nor uses up its time. Closing the iterator, or leaving a
        loop over it, stops the decode after at most one more round.
        """
        messages = _with_tools(messages, tools, tool_choice)
        (request,) = self._requests(prompt, messages, cancel, timeout, overrides, streams=True)
        return self._stream_one(request, on_round)

    def generate_batch(
        self,
        prompts: Sequence[str] | None = None,
        *,
        messages: Sequence[Messages] | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        on_round: RoundObserver | None = None,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> list[Generation]:
        """Decode many prompts (or conversations) at the same time; return the results in order.

        The engine checks all inputs before it computes anything. If one decode fails, or takes
        longer than `timeout`, the engine stops the others and raises the error.
        """
        size = self.config.override(overrides).n
        events = self.stream_batch(
            prompts,
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            on_round=on_round,
            cancel=cancel,
            timeout=timeout,
            **overrides,
        )
        done = {index: event.generation for index, event in events if event.generation}
        responses = [done[index] for index in range(len(done))]
        starts = range(0, len(responses), size)
        return [_with_alternatives(responses[start : start + size]) for start in starts]

    def stream_batch(
        self,
        prompts: Sequence[str] | None = None,
        *,
        messages: Sequence[Messages] | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        on_round: RoundObserver | None = None,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> Generator[tuple[int, StreamEvent], None, None]:
        """Decode many prompts (or conversations) at the same time, span by span.

        The iterator yields the events of all decodes as they arrive, each with the index of its
        prompt. With the option ``n``, this is the index of the response: n times the index of the
        prompt, plus the number of the response. Closing the iterator stops all decodes after at
        most one more round.
        """
        requests = [
            request
            for number, (prompt, conversation) in enumerate(_split_batch(prompts, messages))
            for request in self._batch_requests(
                number, prompt, conversation, tools, tool_choice, cancel, timeout, overrides
            )
        ]
        return self._stream_all(requests, on_round)

    def score(
        self,
        prompt: str | None = None,
        continuations: Sequence[str] = (),
        *,
        messages: Messages | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        stops: bool = False,
        timeout: float | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> Scores:
        """Compute the likelihood of each given text as a continuation of the prompt.

        Pass either a prompt or messages. Each member reads the prompt once, and then reads all
        continuations in one forward pass. The scores include the leading whitespace of a
        continuation. Spaces at the end of the prompt are scored as the beginning of every
        continuation. Only the options ``weights``, ``use``, ``chat_template_kwargs`` and
        ``continue_final_message`` affect the scores. If all members reason before they answer, a
        continuation is the beginning of such a reply.

        Args:
            prompt: text before the continuations. If it is empty, a continuation follows the
                special tokens with which the member begins every prompt. If the member uses no
                such tokens, the continuation follows its end-of-sequence token.
            messages: a conversation to which the continuations are replies.
            tools: as for `generate`.
            tool_choice: as for `generate`.
            continuations: texts of at least one character.
            stops: whether to include the probability that the response ends after each text.
            timeout: maximum seconds, as for `generate`.
            **overrides: any option of `AdaFuseConfig`.

        Raises:
            InvalidInputError: prompt, continuations or options cannot be used.
            MemberError: a member failed; the engine stays usable.
            RequestTimeoutError: the request took longer than `timeout`.
            QueueFullError: too many requests wait; nothing was computed.
        """
        if isinstance(continuations, str) or not continuations:
            raise InvalidInputError("continuations must be a list of at least one text")
        for text in continuations:
            if not isinstance(text, str) or not text:
                raise InvalidInputError(
                    f"a continuation must be non-empty text; got {short_repr(text)}"
                )
            check_text(text, "a continuation")
        self._check_start(timeout)
        config = self.config.override(overrides)
        messages = _with_tools(messages, tools, tool_choice)
        members = self._members(config, prompt, messages, to_score=True)
        pool = pool_texts(members, continuations, stops=stops)
        room = max(sum(1 for _ in member.tree.nodes()) for member in members)
        needs = self._budget.needs(members, config.override({"max_new_tokens": 1}), spare=room)
        steps = score_texts(members, pool)
        request = Request(members, needs, steps, timeout=timeout)
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._running([request], lambda _, event: events.put(event)):
            scores: Scores = _raise_error(events.get())
        return scores

    def choose(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        choices: Sequence[str],
        timeout: float | None = None,
        **overrides: Unpack[ChoiceOptions],
    ) -> Choice:
        """Choose one of several texts as the response. Pass either a prompt or messages.

        The members score all texts, each with the end of the response, in one forward pass each. A
        member that cannot score one of the texts takes no part in the choice.

        Args:
            prompt: text to continue.
            messages: a conversation to answer.
            tools: as for `generate`.
            tool_choice: as for `generate`.
            choices: different texts.
            timeout: maximum seconds, as for `generate`.
            **overrides: ``weights``, ``use``, ``max_new_tokens``, ``chat_template_kwargs`` and
                ``continue_final_message``, as in `AdaFuseConfig`.

        Raises:
            InvalidInputError: prompt, messages, choices or options cannot be used.
            DecodingError: no member can score all texts.
            MemberError: a member failed; the engine stays usable.
            RequestTimeoutError: the request took longer than `timeout`.
            QueueFullError: too many requests wait; nothing was computed.
        """
        options = _with_choices(choices, overrides)
        generation = self.generate(
            prompt,
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            timeout=timeout,
            **options,
        )
        return _choice(generation)

    async def achoose(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        choices: Sequence[str],
        timeout: float | None = None,
        **overrides: Unpack[ChoiceOptions],
    ) -> Choice:
        """Like `choose`, but does not block the event loop."""
        options = _with_choices(choices, overrides)
        generation = await self.agenerate(
            prompt,
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            timeout=timeout,
            **options,
        )
        return _choice(generation)

    def choose_batch(
        self,
        prompts: Sequence[str] | None = None,
        *,
        messages: Sequence[Messages] | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        choices: Sequence[str],
        timeout: float | None = None,
        **overrides: Unpack[ChoiceOptions],
    ) -> list[Choice]:
        """Choose among the same texts for many prompts (or conversations) at the same time."""
        options = _with_choices(choices, overrides)
        results = self.generate_batch(
            prompts,
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            timeout=timeout,
            **options,
        )
        return [_choice(generation) for generation in results]

    async def agenerate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        on_round: RoundObserver | None = None,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> Generation:
        """Like `generate`, but does not block the event loop.

        Cancelling the task stops the decode.
        """
        messages = _with_tools(messages, tools, tool_choice)
        requests = await asyncio.to_thread(
            self._requests, prompt, messages, cancel, timeout, overrides
        )
        async with aclosing(self._astream_all(requests, on_round)) as events:
            done = {index: event.generation async for index, event in events if event.generation}
        return _with_alternatives([done[index] for index in range(len(requests))])

    async def astream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        on_round: RoundObserver | None = None,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> AsyncGenerator[StreamEvent, None]:
        """Like `stream`, but does not block the event loop.

        Cancelling the task, or closing the iterator, stops the decode. The ``on_round`` observers
        run on the event loop.
        """
        stream = await self._open_astream(
            prompt,
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            on_round=on_round,
            cancel=cancel,
            timeout=timeout,
            **overrides,
        )
        async with aclosing(stream):
            async for event in stream:
                yield event

    async def _open_astream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        on_round: RoundObserver | None = None,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> AsyncGenerator[StreamEvent, None]:
        """Check the arguments of `astream` now, and return its iterator."""
        messages = _with_tools(messages, tools, tool_choice)
        (request,) = await asyncio.to_thread(
            partial(self._requests, prompt, messages, cancel, timeout, overrides, streams=True)
        )
        return self._astream_one(request, on_round)

    async def _astream_one(
        self, request: Request, on_round: RoundObserver | None
    ) -> AsyncGenerator[StreamEvent, None]:
        async with aclosing(self._astream_all([request], on_round)) as events:
            async for _, event in events:
                yield event

    async def _astream_all(
        self, requests: Sequence[Request], on_round: RoundObserver | None
    ) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        unfinished = len(requests)

        def deliver(index: int, event: Any) -> None:
            try:
                loop.call_soon_threadsafe(inbox.put_nowait, (index, event))
            except RuntimeError:  # the event loop is closed, so the caller no longer waits
                requests[index].abandoned.set()

        with self._running(requests, deliver):
            while unfinished:
                index, event = await inbox.get()
                self._observe(_raise_error(event), on_round)
                unfinished -= event.generation is not None
                yield index, event

    @property
    def closed(self) -> bool:
        """Whether the engine is closed and accepts no more requests."""
        return self._scheduler.closed

    def close(self, timeout: float | None = None) -> None:
        """End running requests and stop the threads. The engine then accepts no more requests.

        All requests end at once with `EngineClosedError`. A forward pass in this process cannot be
        interrupted, so this method waits until the current passes end. Members that the engine has
        loaded itself (with `from_pretrained`, `from_embedded` or `from_config`) are closed. So
        their processes end, even during a pass. Members that were passed to the constructor stay
        open.

        Args:
            timeout: maximum seconds to wait for passes in this process. If a pass takes longer,
                this method logs a warning that names its member. The pass's thread ends with the
                pass.

        Raises:
            InvalidOptionError: `timeout` is not a number of at least 0.
        """
        if timeout is not None and not (
            isinstance(timeout, (int, float)) and 0 <= timeout <= threading.TIMEOUT_MAX
        ):
            raise InvalidOptionError(
                f"close(timeout=...) must be a number of seconds, or None; got {timeout!r}"
            )
        self._scheduler.close(0)  # requests end before their members
        _close_members([each for each in self._owned if isinstance(each, RunsElsewhere)])
        busy = self._scheduler.close(timeout)
        _close_members([each for each in self._owned if each.name not in busy])
        if busy:
            logger.warning(
                "the engine is closed, but after %g seconds a forward pass still runs: %s",
                timeout,
                ", ".join(map(repr, busy)),
            )
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
        """Start requests, and on exit abandon those that are still running.

        Args:
            requests: the requests to start at the same time.
            deliver: called on the scheduler's thread with the index of a request and its next
                event, or the error that ended it.
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
        events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        unfinished = len(requests)
        with self._running(requests, lambda index, event: events.put((index, event))):
            while unfinished:
                index, event = events.get()
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

    def _requests(
        self,
        prompt: str | None,
        messages: Messages | None,
        cancel: threading.Event | None,
        timeout: float | None,
        overrides: Mapping[str, Any],
        *,
        streams: bool = False,
    ) -> list[Request]:
        """Check and encode all parts of the requests for one prompt, without computing anything.

        Args:
            prompt: the prompt, or None.
            messages: the messages, or None.
            cancel: as for `generate`.
            timeout: as for `generate`.
            overrides: options.
            streams: whether the caller streams, so that there can be only one response.
        """
        self._check_start(timeout, cancel)
        config = self.config.override(overrides)
        refuse_unused_options(self.strategy, config)
        self.strategy.check([backend for backend, _ in self._active_backends(config)])
        if streams and config.n > 1:
            raise InvalidOptionError(
                f"option 'n': a stream has one response; got {config.n}. Leave the option out, or "
                "make a call that does not stream."
            )
        self._check_sampling(config)
        configs = [config]
        if config.temperature:
            configs = [config.override({"seed": seed}) for seed in config.seeds()]
        return [self._request(each, prompt, messages, cancel, timeout) for each in configs]

    def _check_sampling(self, config: AdaFuseConfig) -> None:
        """Check that the members can draw responses, and prepare them for it.

        Raises:
            InvalidOptionError: they cannot.
        """
        config.check_n()
        if not config.temperature or config.choices is not None:
            return
        for backend, _ in self._active_backends(config):
            if not isinstance(backend, DrawsTokens):
                raise InvalidOptionError(
                    f"option 'temperature': member {backend.name!r} cannot draw tokens; got "
                    f"{config.temperature}. Leave the member out with use=[...], or leave the "
                    "option out."
                )
            backend.prepare_draws()

    def _request(
        self,
        config: AdaFuseConfig,
        prompt: str | None,
        messages: Messages | None,
        cancel: threading.Event | None,
        timeout: float | None,
    ) -> Request:
        """Encode a request. Its options are checked already."""
        members = self._members(config, prompt, messages)
        spare = self.strategy.max_extra_tokens(len(members), config)
        if config.choices is not None:
            spare = _check_choices(members, config)
            play: PlayRound = partial(choose, members, config.choices)
        else:
            _check_room(members, config)
            play = self.strategy.begin(StrategyContext(members, config, self._new_drafting))
        needs = self._budget.needs(members, config, spare)
        grammar = members[0].grammar
        transcript = Transcript(
            () if config.choices else config.stop, grammar.can_end if grammar else None
        )
        rounds: list[Round] = []
        return Request(
            members,
            needs,
            decode(members, play, transcript, rounds, config.counted_logprobs),
            cancelled=partial(cancelled, members, transcript, rounds),
            cancel=cancel,
            timeout=timeout,
        )

    def _batch_requests(
        self,
        number: int,
        prompt: str | None,
        messages: Messages | None,
        tools: Tools,
        tool_choice: str,
        *arguments: Any,
    ) -> list[Request]:
        """Like `_requests`, but errors name the input by its index."""
        try:
            return self._requests(prompt, _with_tools(messages, tools, tool_choice), *arguments)
        except InvalidOptionError:
            raise
        except InvalidInputError as error:
            raise type(error)(f"input {number} of the batch: {error}") from error

    def _check_start(self, timeout: float | None, cancel: threading.Event | None = None) -> None:
        """Check what does not depend on the prompt, before any work on the prompt.

        Raises:
            InvalidOptionError: `timeout` is not a positive number, or `cancel` is not an event.
            QueueFullError: too many requests wait.
        """
        if cancel is not None and not callable(getattr(cancel, "is_set", None)):
            raise InvalidOptionError(
                f"cancel must be a threading.Event, or None; got {short_repr(cancel)}"
            )
        if timeout is not None and not (
            isinstance(timeout, (int, float)) and 0 < timeout <= threading.TIMEOUT_MAX
        ):
            raise InvalidOptionError(
                f"timeout must be a positive number of seconds, or None; got {timeout!r}"
            )
        self._scheduler.check_room()

    def _members(
        self,
        config: AdaFuseConfig,
        prompt: str | None,
        messages: Messages | None,
        *,
        to_score: bool = False,
    ) -> list[Member]:
        """Return the active members with their encoded prompts.

        Args:
            config: the request's options.
            prompt: the prompt, or None.
            messages: the messages, or None.
            to_score: whether the members score given texts. The prompt may then be empty, and
                leading whitespace of the texts counts after messages, too.
        """
        active = self._active_backends(config)
        conversation = _check_input(config, prompt, messages, to_score=to_score)
        top = max(self.strategy.top(config), config.top_logprobs)
        sampling = None if to_score else _sampling(config)
        given = _plain_text(prompt, conversation)
        text = given.rstrip(" ")
        begun = given if conversation is None or conversation.continues else ""
        spaces = len(begun) - len(begun.rstrip(" "))
        grammar = None if to_score else Grammar.of(config)
        response = None if grammar is None else grammar.text()
        starts, prefix = self._start_replies(config, conversation, response, to_score=to_score)
        if response is not None:
            response = response.begun_with(prefix)
        is_exact = bool(begun) or to_score or (grammar and grammar.begins_with_space)
        opening = Opening(spaces, is_reply=not is_exact)
        members = []
        for backend, weight in active:
            space_tokens = self._space_tokens(backend, spaces) if spaces else None
            form = None
            if grammar is not None and response is not None:
                form, space_tokens = self._form(backend, grammar, response, opening, space_tokens)
            ids = _encode(
                backend, prompt, conversation, starts.get(backend.name), bare=bool(space_tokens)
            )
            if conversation is None and not text:
                ids = ids or sorted(backend.end_ids)[:1]
            if not ids:
                raise InvalidInputError(f"the prompt has no tokens for member {backend.name!r}")
            members.append(
                Member(
                    backend,
                    ids,
                    top,
                    weight,
                    text,
                    limit=config.max_new_tokens,
                    opening=opening,
                    space_tokens=space_tokens,
                    form=form,
                    reply_prefix=prefix,
                    sampling=sampling,
                    pass_times=self._pass_times[backend.name],
                )
            )
        _check_windows(members)
        return members

    def _start_replies(
        self,
        config: AdaFuseConfig,
        conversation: Conversation | None,
        response: GrammarText | None,
        *,
        to_score: bool,
    ) -> tuple[dict[str, ReplyStart], str]:
        """Return how the chat templates begin the reply, and the text that they began it with."""
        codecs = {b.name: b.codec for b, _ in self._active_backends(config)}
        given = config.chat_template_kwargs
        if conversation is None:
            check_variables(codecs, given, self.members)
            return {}, ""
        permits: Callable[[str], bool] | None = None if response is None else response.holds
        if config.choices is not None and not to_score:
            permits = _permits_nothing
        return start_replies(codecs, conversation, given, self.members, permits)

    def _space_tokens(self, backend: Backend, spaces: int) -> SpaceTokens | None:
        """Return a member's tokens that continue a prompt without its last spaces.

        Return None if the member cannot restrict its tokens to them.
        """
        if backend.name not in self._space_vocabularies:
            texts = backend.token_texts if isinstance(backend, RestrictsTokens) else None
            self._space_vocabularies[backend.name] = SpaceTokens(texts or (), backend.end_ids)
        tokens = self._space_vocabularies[backend.name]
        if tokens.can_write(spaces):
            return tokens
        if backend.name not in self._warned:
            self._warned.add(backend.name)
            logger.warning(
                "member %r reads the spaces at the end of a prompt (here %d) as a part of it, "
                "because it cannot restrict its next tokens to those that begin with spaces; its "
                "text after such a prompt may be worse",
                backend.name,
                spaces,
            )
        return None

    def _form(
        self,
        backend: Backend,
        grammar: Grammar,
        response: GrammarText,
        opening: Opening,
        space_tokens: SpaceTokens | None,
    ) -> tuple[Form, SpaceTokens | None]:
        """Return the form of a response, and the member's tokens for the spaces of the prompt.

        If no token of the member begins with these spaces as the grammar requires, the tokens are
        None, so that the member reads the spaces as a part of the prompt.
        """
        vocabulary = self._grammar_vocabulary(backend)
        if opening.spaces and space_tokens is not None:
            state = vocabulary.matcher(grammar, f'"{" " * opening.spaces}" ', response.begun)
            if not vocabulary.mask(state).is_empty:
                return Form(response, vocabulary, state), space_tokens
        lead = ONE_SPACE if opening.is_reply else NO_LEAD
        state = vocabulary.matcher(grammar, lead, response.begun)
        return Form(response, vocabulary, state), None

    def _grammar_vocabulary(self, backend: Backend) -> GrammarVocabulary:
        """Return a member's tokens for grammars.

        Raises:
            GrammarError: the member's tokens cannot follow a grammar.
        """
        with self._building:
            if backend.name not in self._grammar_vocabularies:
                self._grammar_vocabularies[backend.name] = _grammar_vocabulary(backend)
            return self._grammar_vocabularies[backend.name]

    def _new_drafting(self, members: Sequence[Member]) -> Drafting:
        if not self.runtime.drafting:
            return NoDrafts(members)
        return Drafts(members, self._is_crowded)

    def _is_crowded(self) -> bool:
        return self._scheduler.running > CROWD * len(self._backends)

    def _active_backends(self, config: AdaFuseConfig) -> list[tuple[Backend, float]]:
        """Return the backends of the members that decode, with their weights.

        Raises:
            InvalidOptionError: ``use`` or ``weights`` do not match the engine's members.
        """
        weights = config.member_weights(self.members)
        return [(b, weights[b.name]) for b in self._backends if b.name in weights]


def _close_members(members: Sequence[Backend]) -> None:
    """Close the members that have resources to close."""
    for member in members:
        if isinstance(member, SupportsClose):
            member.close()


def _split_batch(prompts: Any, messages: Any) -> list[tuple[str | None, Messages | None]]:
    """Return the prompt or the conversation of each request of a batch.

    Raises:
        InvalidInputError: neither argument is a list of the right things, or both are given.
    """
    given = prompts if messages is None else messages
    if (
        (prompts is None) == (messages is None)
        or isinstance(given, (str, bytes, Mapping))
        or not isinstance(given, Iterable)
    ):
        raise InvalidInputError("pass a list of prompts, or a list of conversations")
    batch = list(given)
    for each in batch:
        if messages is None and not isinstance(each, str):
            raise InvalidInputError(
                f"each prompt must be text; got {short_repr(each)}. Pass conversations as "
                "messages=[conversation, ...]."
            )
        if messages is not None and isinstance(each, Mapping):
            raise InvalidInputError(
                "messages must be a list of conversations, and each conversation a list of "
                "messages; got one conversation. Pass messages=[conversation]."
            )
    return [(each, None) if messages is None else (None, each) for each in batch]


def _raise_error(event: Any) -> Any:
    """Return an event of a request, or raise it if it is an error."""
    if isinstance(event, BaseException):
        raise event
    return event


def _with_tools(messages: Messages | None, tools: Tools, tool_choice: str) -> Messages | None:
    """Return messages with the tools that the reply can call.

    Raises:
        InvalidInputError: the messages or the tools are invalid, or tools come without messages.
    """
    if messages is not None:
        return check_conversation(messages, tools, tool_choice)
    if tools or tool_choice != "auto":
        raise InvalidInputError("tools and tool_choice need messages; got none")
    return None


def _check_input(
    config: AdaFuseConfig, prompt: str | None, messages: Messages | None, *, to_score: bool
) -> Conversation | None:
    """Check a prompt, or return the checked conversation."""
    if (prompt is None) == (messages is None):
        raise InvalidInputError("pass either a prompt or messages")
    if messages is not None:
        conversation = check_conversation(messages)
        return conversation.continued() if config.continue_final_message else conversation
    if not isinstance(prompt, str):
        raise InvalidInputError(f"prompt must be text; got {type(prompt).__name__}")
    check_text(prompt, "the prompt")
    if not prompt.strip(" ") and not to_score:
        raise InvalidInputError("the prompt is empty, or has only spaces: pass a text to continue")
    return None


def _permits_nothing(_: str) -> bool:
    return False


def _plain_text(prompt: str | None, conversation: Conversation | None) -> str:
    """Return the prompt as plain text."""
    if conversation is None:
        return prompt or ""
    return as_plain_text(conversation.flat(), continues=conversation.continues)


def _encode(
    backend: Backend,
    prompt: str | None,
    conversation: Conversation | None,
    start: ReplyStart | None,
    *,
    bare: bool,
) -> list[int]:
    """Encode a prompt with a member's tokenizer. Name the member in every error.

    Args:
        backend: the member.
        prompt: the prompt, or None.
        conversation: the conversation, or None.
        start: how the member's chat template begins the reply to the conversation.
        bare: whether to leave out the spaces at the end of the text that the response continues.
    """
    try:
        if conversation is not None and start is not None:
            if bare:
                conversation = conversation.with_last(lambda text: text.rstrip(" "))
            return encode_conversation(backend.codec, conversation, start)
        prompt = prompt or ""
        return backend.codec.encode_prompt(prompt.rstrip(" ") if bare else prompt)
    except InvalidInputError as error:
        raise InvalidInputError(f"member {backend.name!r}: {error}") from error
    except Exception as error:
        reason = f"its tokenizer failed ({type(error).__name__}: {error})"
        raise MemberError(backend.name, reason) from error


def _grammar_vocabulary(backend: Backend) -> GrammarVocabulary:
    reason = "its backend does not tell the bytes of its tokens"
    if isinstance(backend, FollowsGrammars):
        reason = "the bytes of its tokens are not known"
        if backend.follows_grammars:
            try:
                texts = backend.token_texts or ()
                tokenizer = backend.grammar_tokenizer()
                return GrammarVocabulary(backend.name, tokenizer, texts, backend.end_ids)
            except Exception as error:
                reason = f"llguidance cannot read its tokenizer: {error}"
    raise GrammarError(
        f"member {backend.name!r} cannot follow {', '.join(GRAMMARS[:-1])} or {GRAMMARS[-1]} "
        f"({reason}). Leave it out with use=[...], or use choices."
    )


def _check_choices(members: Sequence[Member], config: AdaFuseConfig) -> int:
    """Check that all choices fit the limits of all members. Return the number of their tokens."""
    choices = config.choices or ()
    if members[0].opening.is_reply and (spaced := [each for each in choices if each[0].isspace()]):
        raise InvalidOptionError(
            f"option 'choices': a reply to messages cannot begin with whitespace; got "
            f"{short_repr(spaced[0])}"
        )
    sizes = []
    for member in members:
        for text in choices:
            forms = (text, f" {text}") if member.opening.is_reply else (text,)
            for form in forms:
                owed = 0 if member.holds_spaces else member.opening.spaces
                sizes.append(member.size(" " * owed + form))
    _check_minimum(members, config, max(sizes), "the longest of the choices")
    return sum(sizes)


def _check_room(members: Sequence[Member], config: AdaFuseConfig) -> None:
    """Check that the members have room for a short response that fits the grammar."""
    grammar = members[0].grammar
    if grammar is None:
        return
    closing = grammar.closing()
    assert closing is not None, "a grammar has a text"
    sizes = []
    for member in members:
        owed = 0 if member.holds_spaces else member.opening.spaces
        sizes.append(member.size(" " * owed + closing))
    _check_minimum(members, config, max(sizes), "a short response of the required form")


def _check_minimum(
    members: Sequence[Member], config: AdaFuseConfig, minimum: int, what: str
) -> None:
    """Check that all members have room for `minimum` tokens.

    Raises:
        InvalidOptionError: ``max_new_tokens`` is lower.
        ContextWindowError: a context window has no room.
    """
    if config.max_new_tokens < minimum:
        raise InvalidOptionError(
            f"option 'max_new_tokens': {what} has {minimum} tokens; got {config.max_new_tokens}. "
            f"Allow at least {minimum}."
        )
    for member in members:
        if member.window is not None and member.prompt_tokens + minimum > member.window:
            raise ContextWindowError(
                f"the prompt has {member.prompt_tokens} tokens for member {member.name!r}, and "
                f"{what} has {minimum}; its context window holds {member.window}. Shorten the "
                "prompt, or leave this member out."
            )


def _with_choices(choices: Sequence[str], overrides: ChoiceOptions) -> DecodeOptions:
    if choices is None:
        raise InvalidOptionError("option 'choices': pass a list of texts; got None")
    options: DecodeOptions = {**overrides, "choices": choices}  # type: ignore[typeddict-item]
    return options


def _sampling(config: AdaFuseConfig) -> Sampling | None:
    """Return how a response is drawn. None if nothing is drawn."""
    if not config.temperature or config.seed is None or config.choices is not None:
        return None
    return Sampling(config.seed, config.temperature, config.top_p, config.top_k)


def _with_alternatives(generations: Sequence[Generation]) -> Generation:
    """Return the first of several responses, with the others as its alternatives."""
    first, *others = generations
    return first.model_copy(update={"alternatives": tuple(others)}) if others else first


def _choice(generation: Generation) -> Choice:
    """Return the result of a response with ``choices``."""
    (played,) = generation.rounds
    return Choice(
        text=generation.text,
        index=played.winner,
        probabilities=choice_probabilities(played) or (),
        nll={
            name: tuple(candidate.nll[name] for candidate in played.candidates)
            for name in played.candidates[0].nll
        },
        usage=generation.usage,
    )


def _check_windows(members: Sequence[Member]) -> None:
    """Check that the prompt leaves room for a response in every member's context window."""
    full = [member for member in members if member.is_full(member.tree.root)]
    if full:
        tokens = "; ".join(
            f"the prompt has {member.prompt_tokens} tokens for member {member.name!r}, whose "
            f"context window holds {member.window} tokens, including the response"
            for member in full
        )
        advice = "" if len(full) == len(members) else ", or leave these members out"
        raise ContextWindowError(f"{tokens}. Shorten the prompt{advice}.")
