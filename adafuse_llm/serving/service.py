"""The shared state of all routes: the engine, names of models, limits, and running requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from typing import Any, TypeVar

import anyio.to_thread

from adafuse_llm import errors
from adafuse_llm.config import NO_LIMIT
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import AdaFuseError, InvalidOptionError, nearest, short_repr
from adafuse_llm.results import Scores, StreamEvent, smallest_window
from adafuse_llm.run import Run
from adafuse_llm.serving.access import CURRENT_REQUEST
from adafuse_llm.serving.errors import ApiError, api_error, invalid, not_ready
from adafuse_llm.serving.metrics import Metrics
from adafuse_llm.serving_config import ServingConfig
from adafuse_llm.strategies.registry import AUTO, NAMED

logger = logging.getLogger(__name__)

SINGLE = "single"
"""Name of the strategy with which a member decodes alone."""

THREADS = 16
"""The server checks at most so many requests with a grammar at once, and as many others."""

TOKEN_CHARACTERS = 16
"""Maximum characters of a prompt, its choices and `stop` for each token of the context window. The
server refuses more without encoding it. Tokens have three to five characters on average."""

T = TypeVar("T")
E = TypeVar("E", bound=StreamEvent | Scores)


class Service:
    """What all routes of a server share. The engine comes once its members are loaded.

    Attributes:
        config: options of the server.
        metrics: counters of the server.
        created: when the server started, in seconds since 1970.
    """

    def __init__(self, config: ServingConfig) -> None:
        self.config = config
        self.metrics = Metrics(lambda: self._engine)
        self.created = int(time.time())
        self._engine: AdaFuseEngine | None = None
        self._cancels: set[threading.Event] = set()
        self._lock = threading.Lock()
        # separate threads, so that requests without a grammar do not wait for grammars of others
        self._threads = [anyio.CapacityLimiter(THREADS) for _ in range(2)]
        self._stops = self._cancelled = False

    def open(self, engine: AdaFuseEngine) -> None:
        """Serve an engine from now on. The caller closes the engine."""
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

    def view(self, strategy: str | None = None) -> AdaFuseEngine:
        """Return the engine with the strategy of this name; None for the engine's own strategy."""
        if self._stops:
            raise not_ready("the server stops")
        if (engine := self._engine) is None:
            raise not_ready("the members are loading")
        if strategy is None or strategy == engine.strategy.name:
            return engine
        names = dict.fromkeys((engine.strategy.name, AUTO, *NAMED))
        if strategy not in names:  # such as the place of one, which the server would import
            raise invalid(
                f"this server has no strategy {short_repr(strategy)}.{nearest(strategy, names)} "
                f"Strategies: {', '.join(names)}.",
                "adafuse.strategy",
            )
        return engine.with_strategy(strategy)

    def resolve(
        self, model: str | None, strategy: str | None, options: Mapping[str, Any]
    ) -> tuple[AdaFuseEngine, dict[str, Any]]:
        """Return the engine and the options for a model, which is the ensemble or one member.

        The default model is the ensemble. The default strategy is the ensemble's own, and `SINGLE`
        for a member.
        """
        if model is None or model == self.config.served_model_name:
            return self.view(strategy), {**options}
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
        """Raise an `ApiError` if there is no model with this name."""
        names = (self.config.served_model_name, *self.view().members)
        if model not in names:
            raise ApiError(
                404,
                f"there is no model {short_repr(model)}.{nearest(model, names)} "
                f"Models: {', '.join(names)}.",
                param="model",
                code="model_not_found",
            )

    def check_limits(
        self,
        engine: AdaFuseEngine,
        options: Mapping[str, Any],
        *,
        inputs: int = 1,
        characters: int = 0,
        is_long: bool = False,
    ) -> dict[str, Any]:
        """Return a checked request's options. The server's limit replaces a higher default, and -1.

        The longest of the request's `inputs` prompts has `characters` characters. `is_long`:
        whether replies are long by default, as in a chat, because a cut-off reply helps nobody.
        """
        config, limits = engine.config.override(options), self.config
        window = smallest_window(engine.member_info, config.use or engine.members)
        characters += sum(map(len, (*(config.choices or ()), *config.stop)))
        if window is not None and characters > window * TOKEN_CHARACTERS:
            raise errors.ContextWindowError(
                f"the prompt, choices and stop have {characters} characters, which exceeds the "
                f"context window of {window} tokens. Shorten them."
            )
        if inputs * config.n > limits.max_choices:
            raise InvalidOptionError(
                f"option 'n': at most {limits.max_choices} responses on this server; got "
                f"{inputs * config.n}. Send several requests."
            )
        highest, asked = limits.max_output_tokens, config.most_tokens(has_form=is_long)
        if highest is None or asked <= highest:
            return {**options}
        if options.get("max_new_tokens") not in (None, NO_LIMIT):
            raise InvalidOptionError(
                f"option 'max_new_tokens': at most {highest} on this server; got {asked}"
            )
        return {**options, "max_new_tokens": highest}

    @asynccontextmanager
    async def admitted(
        self,
        work: Callable[[threading.Event], T],
        *,
        has_grammar: bool = False,
        limit: float | None = None,
    ) -> AsyncIterator[T]:
        """Serve a request: run `work` in a thread, and yield its result for the response.

        `work` receives an event, which is set as soon as nobody waits for the response, or the
        server ends the request. `work` may take `limit` seconds (default: the server's limit). With
        `has_grammar`, requests without a grammar do not wait for `work`.
        """
        cancel = threading.Event()
        limit = self.config.request_timeout if limit is None else limit
        try:
            with self._lock:
                if self._stops:
                    raise not_ready("the server stops")
                self._cancels.add(cancel)
            with anyio.move_on_after(limit) as scope:
                done = await anyio.to_thread.run_sync(
                    work, cancel, abandon_on_cancel=True, limiter=self._threads[has_grammar]
                )
            if scope.cancelled_caught:
                assert limit is not None
                raise errors.RequestTimeoutError(
                    f"the request was stopped after {limit:g} seconds, before it could start. "
                    "Shorten the prompt, or try again later."
                )
            yield done
            if self._cancelled and cancel.is_set():
                CURRENT_REQUEST.get().outcome = "stopped"
        except AdaFuseError as error:
            if api_error(error).status == 500:
                logger.error("request %s failed: %s", CURRENT_REQUEST.get().id, error)
            raise
        finally:
            with self._lock:
                self._cancels.discard(cancel)
            cancel.set()  # the thread may still be at work

    async def result(self, work: Callable[[threading.Event], T], *, has_grammar: bool = False) -> T:
        """Serve a request whose response needs only the result of `work`. Return this result."""
        async with self.admitted(work, has_grammar=has_grammar) as result:
            return result

    async def events(self, run: Run[E]) -> AsyncGenerator[tuple[int, E], None]:
        """Yield pairs: the number of a response and an event of it. Count events for metrics."""
        has_text = False
        with closing(run):
            async for index, event in run:
                if isinstance(event, StreamEvent):
                    if event.text and not has_text:
                        has_text = True
                        started = CURRENT_REQUEST.get().started
                        self.metrics.first_text.observe(time.perf_counter() - started)
                    whole = event.generation
                    is_cut = whole is not None and whole.finish_reason == "cancelled"
                    if is_cut and self._cancelled and not has_text:
                        raise not_ready("the server stops")
                    self.metrics.event(event)
                yield index, event

    @property
    def running(self) -> int:
        """Number of requests that run or wait for their turn."""
        return len(self._cancels)

    def begin_drain(self) -> None:
        """Refuse new requests, and end the running ones after `ServingConfig.drain_seconds`."""
        with self._lock:
            self._stops = True
        seconds = self.config.drain_seconds
        logger.info("the server stops: %d requests may take %g seconds more", self.running, seconds)
        timer = threading.Timer(seconds, self.cancel_all)
        timer.daemon = True
        timer.start()

    def cancel_all(self) -> None:
        """End all running requests. Those with text so far keep it, and others get an error."""
        with self._lock:
            self._stops = self._cancelled = True
            for cancel in self._cancels:
                cancel.set()
