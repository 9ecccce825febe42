"""What every engine offers to applications and adapters, wherever its members run."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from typing_extensions import Self, Unpack

from adafuse_llm.config import AdaFuseConfig, DecodeOptions
from adafuse_llm.decisions import DecideOptions, Question, ask
from adafuse_llm.errors import InvalidOptionError, RequestCancelledError
from adafuse_llm.request import Checked, Given, GivenBatch, Messages, Request, requests_of
from adafuse_llm.results import (
    Chosen,
    Decision,
    Generation,
    MemberInfo,
    Scores,
    StreamEvent,
    smallest_window,
)
from adafuse_llm.run import Run, check_one_response, with_alternatives


class Engine(ABC):
    """An ensemble of language models that decode one response together.

    `AdaFuseEngine` runs in this process, and `RemoteEngine` uses the engine of a server.
    Both give the same results. An engine is thread-safe. A ``with`` statement closes it.

    Attributes:
        members: names of the members.
        config: default options, which every call can override.
    """

    members: tuple[str, ...]
    config: AdaFuseConfig

    @property
    @abstractmethod
    def member_info(self) -> tuple[MemberInfo, ...]:
        """What applications need to know about each member, in member order."""

    @property
    def context_window(self) -> int | None:
        """The smallest context window of all members, in tokens. None if no member has a limit."""
        return smallest_window(self.member_info, self.members)

    @property
    @abstractmethod
    def can_enforce(self) -> bool:
        """Whether strategy and members follow grammars, and the extra ``grammar`` is installed."""

    @abstractmethod
    def check_grammar(self, **overrides: Unpack[DecodeOptions]) -> None:
        """Check that a grammar or schema can be enforced, without decoding anything.

        A member's first check takes seconds if its vocabulary is large.

        Raises:
            GrammarError: the members cannot follow the JSON schema, expression or grammar.
            InvalidOptionError: an option is invalid, or the strategy does not use it.
            MissingDependencyError: llguidance is not installed.
        """

    def encode_prompt(
        self, prompt: str | None = None, **given: Unpack[Given]
    ) -> dict[str, list[int]]:
        """Return a whole prompt's tokens, by decoding member. Pass arguments as for `generate`.

        The tokens include the special ones with which a member begins every prompt, and the markers
        of its chat template. The prompt may be empty, or too long for a response.

        Raises:
            InvalidInputError: prompt, messages or options cannot be used.
            MemberError: a member's tokenizer failed.
        """
        request = Request.of(given, prompt=prompt)
        return self._tokens(request.checked(self.config, to_encode=True), inside=False)

    def encode_text(self, text: str, **overrides: Unpack[DecodeOptions]) -> dict[str, list[int]]:
        """Return the tokens of a text that follows other text, by decoding member.

        The errors are those of `encode_prompt`.
        """
        request = Request(prompt=text, options=overrides)
        return self._tokens(request.checked(self.config, to_encode=True), inside=True)

    @abstractmethod
    def _tokens(self, checked: Checked, *, inside: bool) -> dict[str, list[int]]:
        """Return the tokens of a prompt, or of a text inside a prompt, by decoding member."""

    @abstractmethod
    def open(self, requests: Sequence[Request]) -> Run[Any]:
        """Check and encode requests now, and return the run that gives their events.

        All other methods that decode, choose or score are built on this one. The requests run at
        the same time, and can have different options. A request without `texts` gives `StreamEvent`
        objects, and one with `texts` gives its `Scores`. If one request fails, the run stops the
        others and raises the error. An error about one request's input names this request.

        The requests start, and their ``timeout`` begins, when the caller asks for the first event.
        Reading slowly does not slow the requests.

        Raises:
            InvalidInputError: a request cannot be used; nothing was computed.
            MemberError: a member's tokenizer failed.
            QueueFullError: too many requests wait; nothing was computed.
        """

    async def aopen(self, requests: Sequence[Request]) -> Run[Any]:
        """Like `open`, but does not block the event loop."""
        return await asyncio.to_thread(self.open, requests)

    def generate(self, prompt: str | None = None, **given: Unpack[Given]) -> Generation:
        """Decode a whole response. Pass either a prompt or messages.

        Args:
            prompt: text to continue.
            **given: any option of `AdaFuseConfig`; and ``messages``, ``tools``, ``tool_choice``,
                ``timeout`` and ``cancel`` as in `Request`.

        Raises:
            InvalidInputError: prompt, messages or options cannot be used; nothing was computed.
            MemberError: a member failed; the engine stays usable.
            RequestTimeoutError: the request took longer than ``timeout``.
            QueueFullError: too many requests wait; nothing was computed.
        """
        return with_alternatives(self.open([Request.of(given, prompt=prompt)]).results())

    async def agenerate(self, prompt: str | None = None, **given: Unpack[Given]) -> Generation:
        """Like `generate`, but does not block the event loop.

        Cancelling the task stops the decode.
        """
        run = await self.aopen([Request.of(given, prompt=prompt)])
        return with_alternatives(await run.aresults())

    def stream(
        self, prompt: str | None = None, **given: Unpack[Given]
    ) -> Generator[StreamEvent, None, None]:
        """Decode span by span. The arguments and errors are the same as for `generate`.

        The iterator yields one event per committed span, and the last event has the whole result.
        The call checks the arguments, and asking for the first event starts the decode. Closing the
        iterator, or leaving a loop over it, stops the decode after at most one more round.
        """
        run = self.open([Request.of(given, prompt=prompt)])
        check_one_response(run)
        return _spans(run)

    async def astream(
        self, prompt: str | None = None, **given: Unpack[Given]
    ) -> AsyncGenerator[StreamEvent, None]:
        """Like `stream`, but does not block the event loop.

        Cancelling the task, or closing the iterator, stops the decode.
        """
        with closing(await self.aopen([Request.of(given, prompt=prompt)])) as run:
            check_one_response(run)
            async for _, event in run:
                yield event

    def generate_batch(
        self,
        prompts: Sequence[str] | None = None,
        *,
        messages: Sequence[Messages] | None = None,
        **given: Unpack[GivenBatch],
    ) -> list[Generation]:
        """Decode many prompts (or conversations) at the same time; return the results in order.

        The engine checks all inputs first. If one decode fails, this method stops the others and
        raises the error. To read events as they arrive, use `open`.
        """
        requests = requests_of(prompts, messages, given)
        responses = self.open(requests).results()
        size = len(responses) // (len(requests) or 1)
        starts = range(0, len(responses), size or 1)
        return [with_alternatives(responses[start : start + size]) for start in starts]

    def score(
        self,
        prompt: str | None = None,
        continuations: Sequence[str] = (),
        *,
        ends: bool = False,
        **given: Unpack[Given],
    ) -> Scores:
        """Compute how likely each of several texts is as a continuation of the prompt.

        Pass either a prompt or messages. Each member reads the prompt once, and then all
        continuations in one forward pass. Leading whitespace of a continuation counts, and spaces
        at the end of the prompt count as the beginning of every continuation. Only the options
        ``weights``, ``use``, ``chat_template_kwargs`` and ``continue_final_message`` affect the
        scores. If all members reason before they answer, a continuation is the start of reasoning.

        Args:
            prompt: text before the continuations. If it is empty, a continuation follows the
                special tokens with which the member begins every prompt, or else its
                end-of-sequence token.
            continuations: texts of at least one character.
            ends: whether to include the probability that the response ends after each text.
            **given: as for `generate`.

        Raises:
            InvalidInputError: prompt, continuations or options cannot be used.
            RequestCancelledError: ``cancel`` was set before there were scores.
            MemberError, RequestTimeoutError, QueueFullError: as for `generate`.
        """
        run = self.open([Request.of(given, prompt=prompt, texts=continuations, ends=ends)])
        scores: list[Scores] = run.results()
        return scores[0]

    async def ascore(
        self,
        prompt: str | None = None,
        continuations: Sequence[str] = (),
        *,
        ends: bool = False,
        **given: Unpack[Given],
    ) -> Scores:
        """Like `score`, but does not block the event loop."""
        run = await self.aopen([Request.of(given, prompt=prompt, texts=continuations, ends=ends)])
        scores: list[Scores] = await run.aresults()
        return scores[0]

    def choose(self, prompt: str | None = None, **given: Unpack[Given]) -> Chosen:
        """Choose one of several texts as the response. Pass either a prompt or messages.

        Each member scores all texts, with the end of the response, in one forward pass. A member
        that cannot score all of them takes no part in the choice.

        Args:
            prompt: text to continue.
            **given: ``choices``, a list of different texts; otherwise as for `generate`.

        Raises:
            InvalidInputError: prompt, messages, choices or options cannot be used.
            DecodingError: no member can score all texts.
            MemberError, RequestTimeoutError, QueueFullError: as for `generate`.
        """
        return _chosen(self.generate(prompt, **_choosing(given)))

    async def achoose(self, prompt: str | None = None, **given: Unpack[Given]) -> Chosen:
        """Like `choose`, but does not block the event loop."""
        return _chosen(await self.agenerate(prompt, **_choosing(given)))

    def decide(
        self, state: Any, questions: Mapping[str, Question], **given: Unpack[DecideOptions]
    ) -> Decision:
        """Answer typed questions about a state with probabilities (:mod:`adafuse_llm.decisions`).

        By default, the member with the most parameters answers. With ``weights`` or a calibration
        (``decisions``), several members answer together (`Decision.strategy`). No answer depends on
        other questions, or on the order of the options of a `Choice`.

        Args:
            state: what the questions are about: text, messages as for `generate`, or another list
                or mapping, which members read as JSON.
            questions: 1 to 400 questions by name, each a `Predicate`, `Choice` or `Score`.
            **given: the options ``use``, ``weights``, ``decisions`` and ``chat_template_kwargs``;
                ``timeout`` and ``cancel`` as in `Request`; and ``orders``, the maximum number of
                orders in which members read the options. Default: all rotations of up to four
                options; for more, one order and its reverse. With 1, members favor some positions.

        Raises:
            InvalidInputError: state, questions or options cannot be used; nothing was computed.
            ContextWindowError: state and question exceed a context window; nothing was computed.
            DecodingError: no member can answer a question.
            RequestCancelledError: ``cancel`` was set before there were answers.
            MemberError, RequestTimeoutError, QueueFullError: as for `generate`.
        """
        return self.decide_batch([state], questions, **given)[0]

    async def adecide(
        self, state: Any, questions: Mapping[str, Question], **given: Unpack[DecideOptions]
    ) -> Decision:
        """Like `decide`, but does not block the event loop."""
        requests, decisions = await asyncio.to_thread(ask, self, [state], questions, given)
        run = await self.aopen(requests)
        return decisions(await run.aresults())[0]

    def decide_batch(
        self,
        states: Sequence[Any],
        questions: Mapping[str, Question],
        **given: Unpack[DecideOptions],
    ) -> list[Decision]:
        """Answer the same questions about many states at the same time, each as `decide` does."""
        requests, decisions = ask(self, states, questions, given)
        return decisions(self.open(requests).results())

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the engine is closed and accepts no more requests."""

    @abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """End running requests with `EngineClosedError`, and accept no more.

        Args:
            timeout: maximum seconds to wait for work that cannot be interrupted.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(members=[{', '.join(self.members)}])"


def _spans(run: Run[StreamEvent]) -> Generator[StreamEvent, None, None]:
    with closing(run):
        for _, event in run:
            yield event


def _choosing(given: Given) -> Given:
    if given.get("choices") is None:
        raise InvalidOptionError("option 'choices': pass a list of texts; got None")
    return given


def _chosen(generation: Generation) -> Chosen:
    if not generation.rounds:
        raise RequestCancelledError("the request was cancelled before a text was chosen")
    (played,) = generation.rounds
    return Chosen(
        text=generation.text,
        index=played.winner,
        probabilities=played.choice_probabilities or (),
        nll={
            name: tuple(candidate.nll[name] for candidate in played.candidates)
            for name in played.candidates[0].nll
        },
        usage=generation.usage,
    )
