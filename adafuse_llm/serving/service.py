"""What all routes share: the engine, the models' names, the limits, and the requests that run."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from adafuse_llm.config import GRAMMARS, AdaFuseConfig
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import (
    AdaFuseError,
    InvalidOptionError,
    RequestTimeoutError,
    nearest,
    short_repr,
)
from adafuse_llm.results import StreamEvent
from adafuse_llm.serving.access import note_outcome, request_id
from adafuse_llm.serving.errors import (
    BUSY,
    CONTEXT_CODE,
    FAILED,
    INVALID,
    LATE,
    ApiError,
    api_error,
    invalid,
    not_ready,
)
from adafuse_llm.serving.metrics import Metrics
from adafuse_llm.serving_config import ServingConfig
from adafuse_llm.strategies.registry import NAMED
from adafuse_llm.text.isolation import grammar_threads

logger = logging.getLogger(__name__)

SINGLE = "single"
"""The strategy of a member alone."""

TOKEN_CHARACTERS = 16
"""Characters of a prompt for each token of the context window, above which it is refused at once.
Tokens have three to five characters on average."""

MAX_VIEWS = 32
"""Maximum number of strategies that the server keeps ready."""

OUTCOMES = {INVALID: "refused", BUSY: "busy", LATE: "timeout", FAILED: "failed"}
"""Outcomes of requests that end with an error, by its type."""

T = TypeVar("T")
Events = AsyncGenerator[tuple[int, StreamEvent], None]
Open = Callable[[threading.Event, float | None], Awaitable[Events]]
"""Starts a decode with a flag that cancels it and a time limit, and returns its events."""


def _most_characters(engine: AdaFuseEngine, config: AdaFuseConfig) -> int | None:
    """Return the size above which a prompt is refused without encoding it; None for no limit."""
    active = config.use or engine.members
    windows = [each.context_window for each in engine.member_info if each.name in active]
    known = [window for window in windows if window is not None]
    return min(known) * TOKEN_CHARACTERS if known else None


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """Return the result of work that comes before a decode.

    Raises:
        RequestTimeoutError: it takes longer than `seconds`.
    """
    try:
        return await asyncio.wait_for(work, seconds)
    except RequestTimeoutError:
        raise
    except asyncio.TimeoutError:
        raise RequestTimeoutError(
            f"the request was stopped after {seconds:g} seconds, before it could start. Shorten "
            "the prompt, or try again later."
        ) from None


@dataclass
class RunningCall:
    """A request that runs.

    Attributes:
        cancel: flag that is set when the server ends the request.
        outcome: what became of it, as the access log and the metrics call it.
    """

    cancel: threading.Event = field(default_factory=threading.Event)
    outcome: str = "ok"


class Service:
    """An ensemble that is served, or will be once its members are loaded.

    Args:
        config: options of the server.

    Attributes:
        config: options of the server.
        metrics: what the server counts.
        created: when the server started, in seconds since 1970.
        failures: number of requests that have failed because of the server.
        streams: the flags that cancel the streams of `RemoteEngine`, by id.
        cancel_elsewhere: function that cancels a stream of another replica, and returns whether one
            has it; None for a server without replicas.
    """

    def __init__(self, config: ServingConfig) -> None:
        self.config = config
        self.metrics = Metrics(lambda: self._engine)
        self.created = int(time.time())
        self.failures = 0
        self.streams: dict[str, threading.Event] = {}
        self.cancel_elsewhere: Callable[[str], Awaitable[bool]] | None = None
        self._engine: AdaFuseEngine | None = None
        self._views: dict[str, AdaFuseEngine] = {}
        self._cancels: set[threading.Event] = set()
        self._lock = threading.Lock()
        self._stops = False
        self._cancelled = False

    # The engine --------------------------------------------------------------------------------

    def open(self, engine: AdaFuseEngine) -> None:
        """Serve an engine from now on. The caller closes it.

        Raises:
            InvalidOptionError: a member has the name of the ensemble.
        """
        if self.config.served_model_name in engine.members:
            raise InvalidOptionError(
                f"option 'served_model_name': a member has the name "
                f"{self.config.served_model_name!r}, too. Choose another name for the ensemble."
            )
        self._engine = engine

    @property
    def is_ready(self) -> bool:
        """Whether the server takes requests."""
        return self._engine is not None and not self._engine.closed and not self._stops

    @property
    def engine(self) -> AdaFuseEngine:
        """The engine.

        Raises:
            ApiError: the members are not loaded, or the server stops.
        """
        if self._stops:
            raise not_ready("the server stops")
        if self._engine is None:
            raise not_ready("the members are loading")
        return self._engine

    def view(self, strategy: str | None) -> AdaFuseEngine:
        """Return the engine with a strategy; None for its own.

        Raises:
            ApiError: the members are not loaded, the server stops, or the strategy is unknown.
        """
        engine = self.engine
        if strategy is None or strategy == engine.strategy.name:
            return engine
        if strategy not in self._views:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            try:
                self._views[strategy] = engine.with_strategy(strategy)
            except InvalidOptionError:
                raise invalid(
                    f"there is no strategy {short_repr(strategy)}.{nearest(strategy, NAMED)} "
                    f"Strategies: {', '.join(NAMED)}.",
                    "adafuse.strategy",
                ) from None
        return self._views[strategy]

    def resolve(
        self, model: str | None, strategy: str | None, options: Mapping[str, Any]
    ) -> tuple[AdaFuseEngine, dict[str, Any]]:
        """Return the engine and the options for a model's name.

        Args:
            model: name of the ensemble or of a member; None for the ensemble.
            strategy: name of a strategy; None for the ensemble's own, and for a member alone
                `SINGLE`.
            options: options of the request.

        Raises:
            ApiError: there is no such model or strategy, or the model contradicts the option
                ``use``.
            InvalidOptionError: an option is unknown or out of range.
        """
        if model is None or model == self.config.served_model_name:
            engine = self.view(strategy)
            members = engine.config.override(options).use or engine.members
            if strategy == SINGLE and len(members) > 1:
                raise invalid(
                    f"the strategy {SINGLE!r} decodes with one member. Ask the model "
                    f"{members[0]!r}, for example, or name one member in adafuse.use.",
                    "adafuse.strategy",
                )
            return engine, {**options}
        self.check_model(model)
        engine = self.view(strategy or SINGLE)
        used = options.get("use")
        if used is not None and engine.config.override(options).use != (model,):
            raise invalid(
                f"the model {model!r} is one member, so adafuse.use cannot name others; got "
                f"{short_repr(used)}. Leave one of them out.",
                "adafuse.use",
            )
        return engine, {**options, "use": (model,)}

    def check_model(self, model: str) -> None:
        """Check that a model exists.

        Raises:
            ApiError: it does not exist.
        """
        names = (self.config.served_model_name, *self.engine.members)
        if model not in names:
            raise ApiError(
                404,
                f"there is no model {short_repr(model)}.{nearest(model, names)} "
                f"Models: {', '.join(names)}.",
                param="model",
                code="model_not_found",
            )

    # Requests ----------------------------------------------------------------------------------

    def check_limits(
        self,
        engine: AdaFuseEngine,
        options: Mapping[str, Any],
        *,
        inputs: int,
        characters: int,
        length_option: str = "max_tokens",
    ) -> dict[str, Any]:
        """Check a request against the limits of the server.

        Args:
            engine: the engine of the request.
            options: options of the request.
            inputs: number of prompts or conversations.
            characters: size of the largest one.
            length_option: the client's name for ``max_new_tokens``.

        Returns:
            The options, with the server's limit of tokens if they have none.

        Raises:
            ApiError: a limit is exceeded.
            InvalidOptionError: an option is unknown or out of range.
        """
        config, limits = engine.config.override(options), self.config
        most = limits.max_prompt_characters or _most_characters(engine, config)
        if most is not None and characters > most:
            raise invalid(
                f"the prompt has {characters} characters; this server allows {most}. Shorten it.",
                code=CONTEXT_CODE,
            )
        for name, texts in (("choices", config.choices or ()), ("stop", config.stop)):
            if most is not None and (size := sum(map(len, texts))) > most:
                raise invalid(
                    f"option {name!r}: the texts have {size} characters together; this server "
                    f"allows {most}. Send fewer or shorter ones.",
                    name,
                )
        if inputs * config.n > limits.max_choices:
            raise invalid(
                f"the request asks for {inputs * config.n} responses; this server allows "
                f"{limits.max_choices}. Send several requests.",
                "n",
            )
        highest = limits.max_output_tokens
        if highest is None or config.max_new_tokens <= highest:
            return {**options}
        if "max_new_tokens" in options:
            raise invalid(
                f"{length_option} must be at most {highest} on this server; got "
                f"{config.max_new_tokens}",
                length_option,
            )
        return {**options, "max_new_tokens": highest}

    async def checked(
        self, work: Callable[[threading.Event], T], options: Mapping[str, Any], *, forms: bool
    ) -> T:
        """Check a request in a thread.

        Grammars have threads of their own, because a check can wait for the trial of a grammar.
        Requests without a grammar do not wait for it.

        Args:
            work: the check. It receives a flag that is set when its result is no longer awaited.
            options: options of the request.
            forms: whether the request has a form that can become a grammar.

        Raises:
            RequestTimeoutError: the check takes too long.
        """
        has_grammar = forms or any(options.get(name) is not None for name in GRAMMARS)
        threads = grammar_threads() if has_grammar else None
        left = threading.Event()
        try:
            done = asyncio.get_running_loop().run_in_executor(threads, work, left)
            return await within(self.time_limit(), done)
        finally:
            left.set()

    async def check_grammar(self, engine: AdaFuseEngine, options: Mapping[str, Any]) -> None:
        """Check the grammar that options set, so that the decode finds it compiled.

        Raises:
            InvalidInputError: the members cannot follow it.
            RequestTimeoutError: the check takes too long.
        """

        def check(left: threading.Event) -> None:
            engine.check_grammar(cancel=left, **options)

        await self.checked(check, options, forms=False)

    def time_limit(self, timeout: float | None = None) -> float | None:
        """Return the seconds that a request may take: its own limit, but at most the server's."""
        limits = [each for each in (timeout, self.config.request_timeout) if each is not None]
        return min(limits, default=None)

    @asynccontextmanager
    async def decoding(self, start: Open, *, timeout: float | None = None) -> AsyncIterator[Events]:
        """Run a decode, count its rounds, and end it with the server.

        Args:
            start: starts the decode.
            timeout: time limit of the request in seconds, if it has one of its own.

        Raises:
            ApiError: the server stops.
        """
        began = time.perf_counter()
        async with self.running_until_stopped() as call:
            limit = self.time_limit(timeout)
            events = await within(limit, start(call.cancel, limit))
            async with aclosing(self._observed(events, began, call)) as observed:
                yield observed

    @asynccontextmanager
    async def running_until_stopped(self) -> AsyncIterator[RunningCall]:
        """Register a request, so that the server can end it, and note its outcome.

        Raises:
            ApiError: the server stops.
        """
        call = RunningCall()
        try:
            self._register(call.cancel)
            yield call
        except (asyncio.CancelledError, GeneratorExit, ClientDisconnect):
            call.outcome = "cancelled"
            call.cancel.set()  # a thread may still check the request
            raise
        except BaseException as error:
            call.outcome = OUTCOMES[api_error(error).type]
            if call.outcome == OUTCOMES[FAILED]:
                self.failures += 1
                if isinstance(error, AdaFuseError):
                    logger.error("request %s failed: %s", request_id(), error)
            raise
        finally:
            with self._lock:
                self._cancels.discard(call.cancel)
            note_outcome(call.outcome)

    async def _observed(self, events: Events, began: float, call: RunningCall) -> Events:
        """Yield events, and count their rounds."""
        has_text = False
        async with aclosing(events):
            async for index, event in events:
                if event.round is not None:
                    self.metrics.round(event.round)
                if event.text and not has_text:
                    has_text = True
                    self.metrics.first_text(time.perf_counter() - began)
                if (generation := event.generation) is not None:
                    if self._cancelled and generation.finish_reason == "cancelled":
                        if not has_text:
                            raise not_ready("the server stops")
                        call.outcome = "stopped"
                    self.metrics.generation(generation)
                yield index, event

    def cancel_stream(self, stream: str) -> bool:
        """End a stream of `RemoteEngine`, and return whether it runs here."""
        cancel = self.streams.get(stream)
        if cancel is not None:
            cancel.set()
        return cancel is not None

    def _register(self, cancel: threading.Event) -> None:
        with self._lock:
            if self._stops:
                raise not_ready("the server stops")
            self._cancels.add(cancel)

    # The end -----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Number of requests that run or wait."""
        return len(self._cancels)

    def begin_drain(self) -> None:
        """Take no more requests, and end those that run after `ServingConfig.drain_seconds`."""
        with self._lock:
            if self._stops:
                return
            self._stops = True
        logger.info(
            "the server stops: %d requests may take %g seconds more",
            self.running,
            self.config.drain_seconds,
        )
        timer = threading.Timer(self.config.drain_seconds, self.cancel_all)
        timer.daemon = True
        timer.start()

    def cancel_all(self) -> None:
        """End the requests that run. Their responses are the text so far."""
        with self._lock:
            self._stops = self._cancelled = True
            for cancel in self._cancels:
                cancel.set()
