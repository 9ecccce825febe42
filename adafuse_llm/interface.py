"""What every engine offers to applications and adapters, wherever its members run."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from contextvars import copy_context
from functools import partial

from typing_extensions import Self, Unpack

from adafuse_llm.calls import (
    Call,
    CallInput,
    Decode,
    E,
    Messages,
    RoundObserver,
    Tools,
    running,
    split_batch,
)
from adafuse_llm.config import GRAMMARS, AdaFuseConfig, ChoiceOptions, DecodeOptions
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.results import (
    Choice,
    Generation,
    MemberInfo,
    PassCost,
    Scores,
    StreamEvent,
)
from adafuse_llm.summary import choice_probabilities
from adafuse_llm.text.isolation import grammar_threads

__all__ = ["Engine"]

logger = logging.getLogger(__name__)


class Engine(ABC):
    """An ensemble of language models that decode one response together.

    `AdaFuseEngine` has the members in this process, and `RemoteEngine` uses those of a server.
    Both give the same results. An engine is thread-safe. It is also a context manager that closes
    it.

    Args:
        on_round: function that the engine calls with every round of every request, in the thread
            or event loop that consumes the events. If the function raises an exception, the engine
            logs it and continues to decode.

    Attributes:
        members: names of the members.
        config: default options, which every call can override.
    """

    members: tuple[str, ...]
    config: AdaFuseConfig

    def __init__(self, on_round: RoundObserver | None = None) -> None:
        self._on_round = on_round

    @property
    @abstractmethod
    def member_info(self) -> tuple[MemberInfo, ...]:
        """What applications need to know about each member, in member order."""

    @property
    def context_window(self) -> int | None:
        """The smallest context window of all members, in tokens. None if no member has a limit."""
        windows = (each.context_window for each in self.member_info)
        return min((window for window in windows if window is not None), default=None)

    @property
    @abstractmethod
    def pass_costs(self) -> dict[str, PassCost]:
        """What a forward pass of each member costs, measured in the passes of recent requests.

        The engine drafts fewer tokens with a member whose tokens are expensive. A member without
        enough passes of different sizes is missing.
        """

    @property
    @abstractmethod
    def can_enforce(self) -> bool:
        """Whether responses can be made to fit a JSON schema, an expression or a grammar.

        This needs the extra ``grammar``, members whose tokens can follow a grammar, and a strategy
        that uses these options.
        """

    @abstractmethod
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

    @abstractmethod
    def encode_prompt(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        **overrides: Unpack[DecodeOptions],
    ) -> dict[str, list[int]]:
        """Return the tokens of a whole prompt, by active member. Pass either a prompt or messages.

        The tokens include the special tokens with which a member begins every prompt, and the
        markers of its chat template. A prompt may be empty, or too long for a response.

        Args:
            prompt: text to continue.
            messages: a conversation to answer.
            tools: as for `generate`.
            tool_choice: as for `generate`.
            **overrides: ``use``, ``chat_template_kwargs`` and ``continue_final_message``, as in
                `AdaFuseConfig`.

        Raises:
            InvalidInputError: prompt, messages or options cannot be used.
            MemberError: a member's tokenizer failed.
        """

    @abstractmethod
    def encode_text(self, text: str, **overrides: Unpack[DecodeOptions]) -> dict[str, list[int]]:
        """Return the tokens of a text inside a prompt, by active member.

        Args:
            text: a text. The tokens are those behind other text, without special tokens.
            **overrides: ``use``, as in `AdaFuseConfig`.

        Raises:
            InvalidInputError: the text or the options cannot be used.
            MemberError: a member's tokenizer failed.
        """

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
                The result then has the text so far and ``finish_reason="cancelled"``. If the
                event's ``is_set`` raises an exception, this request ends with it.
            timeout: maximum seconds that the request waits and decodes. The time that it takes to
                encode the prompt does not count.
            **overrides: any option of `AdaFuseConfig`.

        Raises:
            InvalidInputError: prompt, messages or options cannot be used; nothing was computed.
            MemberError: a member failed; the engine stays usable.
            RequestTimeoutError: the request took longer than `timeout`.
            QueueFullError: too many requests wait; nothing was computed.
        """
        call = Call([CallInput(prompt, messages)], tools, tool_choice, cancel, timeout, overrides)
        decode = self._prepare(call)
        with closing(self._events(decode, on_round)) as events:
            done = {index: event.generation for index, event in events if event.generation}
        return _with_alternatives([done[index] for index in range(decode.size)])

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
        self.config.override(overrides).check_one_response()
        call = Call([CallInput(prompt, messages)], tools, tool_choice, cancel, timeout, overrides)
        return self._responses_of_one(self._prepare(call), on_round)

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
        call = Call(
            split_batch(prompts, messages),
            tools,
            tool_choice,
            cancel,
            timeout,
            overrides,
            is_batch=True,
        )
        return self._events(self._prepare(call), on_round)

    def score(
        self,
        prompt: str | None = None,
        continuations: Sequence[str] = (),
        *,
        messages: Messages | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        stops: bool = False,
        cancel: threading.Event | None = None,
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
            cancel: an event that any thread can set to end the request.
            timeout: maximum seconds, as for `generate`.
            **overrides: any option of `AdaFuseConfig`.

        Raises:
            InvalidInputError: prompt, continuations or options cannot be used.
            MemberError: a member failed; the engine stays usable.
            RequestCancelledError: `cancel` was set. There are no scores so far.
            RequestTimeoutError: the request took longer than `timeout`.
            QueueFullError: too many requests wait; nothing was computed.
        """
        inputs = [CallInput(prompt, messages, continuations)]
        call = Call(inputs, tools, tool_choice, cancel, timeout, overrides, stops=stops)
        (scores,) = self._scores(self._prepare_scores(call))
        return scores

    async def ascore(
        self,
        prompt: str | None = None,
        continuations: Sequence[str] = (),
        *,
        messages: Messages | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        stops: bool = False,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> Scores:
        """Like `score`, but does not block the event loop.

        Cancelling the task ends the request.
        """
        inputs = [CallInput(prompt, messages, continuations)]
        call = Call(inputs, tools, tool_choice, cancel, timeout, overrides, stops=stops)
        (scores,) = await self._ascores(await self._aprepare_scores(call))
        return scores

    def score_batch(
        self,
        prompts: Sequence[str] | None = None,
        continuations: Sequence[Sequence[str]] = (),
        *,
        messages: Sequence[Messages] | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        stops: bool = False,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> list[Scores]:
        """Score the texts of many prompts (or conversations) at the same time.

        ``continuations`` has a list of texts for each prompt. Otherwise the arguments and errors
        are the same as for `score`. The results are in order. The engine checks all inputs before
        it computes anything. If one request fails, the engine stops the others and raises the
        error.
        """
        given = split_batch(prompts, messages, continuations)
        call = Call(
            given, tools, tool_choice, cancel, timeout, overrides, is_batch=True, stops=stops
        )
        return self._scores(self._prepare_scores(call))

    async def ascore_batch(
        self,
        prompts: Sequence[str] | None = None,
        continuations: Sequence[Sequence[str]] = (),
        *,
        messages: Sequence[Messages] | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        stops: bool = False,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **overrides: Unpack[DecodeOptions],
    ) -> list[Scores]:
        """Like `score_batch`, but does not block the event loop."""
        given = split_batch(prompts, messages, continuations)
        call = Call(
            given, tools, tool_choice, cancel, timeout, overrides, is_batch=True, stops=stops
        )
        return await self._ascores(await self._aprepare_scores(call))

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
        call = Call([CallInput(prompt, messages)], tools, tool_choice, cancel, timeout, overrides)
        decode = await self._aprepare(call)
        async with aclosing(self._aevents(decode, on_round)) as events:
            done = {index: event.generation async for index, event in events if event.generation}
        return _with_alternatives([done[index] for index in range(decode.size)])

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
        self.config.override(overrides).check_one_response()
        events = await self.open_stream(
            prompt,
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            on_round=on_round,
            cancel=cancel,
            timeout=timeout,
            **overrides,
        )
        async with aclosing(events):
            async for _, event in events:
                yield event

    async def open_stream(
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
    ) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        """Check and encode a request now, and return an iterator over its events.

        The arguments and errors are the same as for `generate`. The iterator yields each event
        with the number of its response, which is from 0 to ``n - 1``. In other respects it is like
        the iterator of `astream`.
        """
        call = Call([CallInput(prompt, messages)], tools, tool_choice, cancel, timeout, overrides)
        return self._aevents(await self._aprepare(call), on_round)

    async def open_stream_batch(
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
    ) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        """Check and encode many requests now, and return an iterator over their events.

        The arguments, errors and indices are the same as for `stream_batch`. The iterator does not
        block the event loop.
        """
        call = Call(
            split_batch(prompts, messages),
            tools,
            tool_choice,
            cancel,
            timeout,
            overrides,
            is_batch=True,
        )
        return self._aevents(await self._aprepare(call), on_round)

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the engine is closed and accepts no more requests."""

    @abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """End running requests. The engine then accepts no more requests.

        All requests end at once with `EngineClosedError`.

        Args:
            timeout: maximum seconds to wait for work that cannot be interrupted.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(members=[{', '.join(self.members)}])"

    @abstractmethod
    def _prepare(self, call: Call) -> Decode[StreamEvent]:
        """Check and encode the inputs of a call, without decoding anything."""

    async def _aprepare(self, call: Call) -> Decode[StreamEvent]:
        """Like `_prepare`, but do not block the event loop, nor calls that have no grammar."""
        has_grammar = any(call.overrides.get(name) is not None for name in GRAMMARS)
        threads = grammar_threads() if has_grammar else None
        prepare = partial(copy_context().run, self._prepare, call)
        return await asyncio.get_running_loop().run_in_executor(threads, prepare)

    @abstractmethod
    def _prepare_scores(self, call: Call) -> Decode[Scores]:
        """Check and encode the inputs of a call that scores, without computing anything."""

    async def _aprepare_scores(self, call: Call) -> Decode[Scores]:
        """Like `_prepare_scores`, but do not block the event loop."""
        return await asyncio.to_thread(self._prepare_scores, call)

    def _scores(self, decode: Decode[Scores]) -> list[Scores]:
        with closing(self._events(decode)) as events:
            done = dict(events)
        return [done[index] for index in range(decode.size)]

    async def _ascores(self, decode: Decode[Scores]) -> list[Scores]:
        async with aclosing(self._aevents(decode)) as events:
            done = {index: scores async for index, scores in events}
        return [done[index] for index in range(decode.size)]

    def _events(
        self, decode: Decode[E], on_round: RoundObserver | None = None
    ) -> Generator[tuple[int, E], None, None]:
        events: queue.SimpleQueue[tuple[int, E | BaseException]] = queue.SimpleQueue()
        unfinished = decode.size
        with running(decode, lambda index, event: events.put((index, event))):
            while unfinished:
                index, event = self._observed(*events.get(), on_round)
                unfinished -= _is_last(event)
                yield index, event

    async def _aevents(
        self, decode: Decode[E], on_round: RoundObserver | None = None
    ) -> AsyncGenerator[tuple[int, E], None]:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[tuple[int, E | BaseException]] = asyncio.Queue()
        unfinished = decode.size

        def deliver(index: int, event: E | BaseException) -> None:
            try:
                loop.call_soon_threadsafe(inbox.put_nowait, (index, event))
            except RuntimeError:  # the event loop is closed, so the caller no longer waits
                decode.stop()

        with running(decode, deliver):
            while unfinished:
                index, event = self._observed(*await inbox.get(), on_round)
                unfinished -= _is_last(event)
                yield index, event

    def _responses_of_one(
        self, decode: Decode[StreamEvent], on_round: RoundObserver | None
    ) -> Generator[StreamEvent, None, None]:
        with closing(self._events(decode, on_round)) as events:
            for _, event in events:
                yield event

    def _observed(
        self, index: int, event: E | BaseException, on_round: RoundObserver | None
    ) -> tuple[int, E]:
        """Call the observers with the round of an event. Return the event, or raise the error."""
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, StreamEvent) and event.round is not None:
            for observer in (self._on_round, on_round):
                if observer is None:
                    continue
                try:
                    observer(event.round)
                except Exception:
                    logger.exception("an on_round observer failed in round %d", event.round.index)
        return index, event


def _is_last(event: StreamEvent | Scores) -> bool:
    """Return whether an event is the last one of its request."""
    return isinstance(event, Scores) or event.generation is not None


def _with_choices(choices: Sequence[str], overrides: ChoiceOptions) -> DecodeOptions:
    if choices is None:
        raise InvalidOptionError("option 'choices': pass a list of texts; got None")
    options: DecodeOptions = {**overrides, "choices": choices}  # type: ignore[typeddict-item]
    return options


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
