"""The engine: an ensemble that turns the requests of an application into responses."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from typing_extensions import Unpack, override

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import (
    FREE_TOKENS,
    GRAMMARS,
    NO_LIMIT,
    AdaFuseConfig,
    DecodeOptions,
    RuntimeConfig,
)
from adafuse_llm.decoding.draft import Drafts, NoDrafts
from adafuse_llm.decoding.member import MemberState
from adafuse_llm.decoding.rounds import PlayRound, Response, choose, decode, pool_texts, score_texts
from adafuse_llm.encoding import Active, Encoder, check_choices, check_distributions, text_tokens
from adafuse_llm.errors import InvalidInputError, RequestCancelledError, short_repr
from adafuse_llm.grammar.grammar import NO_LEAD, Grammar
from adafuse_llm.grammar.matchers import is_available
from adafuse_llm.interface import Engine
from adafuse_llm.loading.config_file import read_config
from adafuse_llm.request import Checked, Request, converted
from adafuse_llm.results import MemberInfo
from adafuse_llm.run import Run
from adafuse_llm.runtime.job import Job
from adafuse_llm.runtime.scheduler import Scheduler
from adafuse_llm.strategies.base import (
    ALWAYS_USED,
    Strategy,
    StrategyContext,
    refuse_unused_options,
)
from adafuse_llm.strategies.registry import AUTO, find_strategy
from adafuse_llm.text.conversation import CALL_CLOSES
from adafuse_llm.text.stops import TURNS, Transcript

if TYPE_CHECKING:
    import torch

    from adafuse_llm.loading.specs import MemberSpec

logger = logging.getLogger(__name__)

CROWD = 2
"""If more than this many requests per member run, all members propose at the same time, because
shared passes then save more than drafts."""


class EngineOptions(TypedDict, total=False):
    """Types of the keyword arguments of `AdaFuseEngine`, and of the methods that load an engine."""

    config: AdaFuseConfig | None
    strategy: Strategy | str
    runtime: RuntimeConfig | None


class AdaFuseEngine(Engine):
    """An ensemble of language models that decode one response together (`Engine`).

    Requests that run at the same time share forward passes. Each model runs in only one thread.
    Members on different devices, and members on servers, run at the same time.

    Args:
        members: at least one backend, each with a different name.
        config: default options, which every call can override.
        strategy: a `Strategy`, or its name. ``auto`` stands for ``mixture`` if the largest member
            has at least twice the parameters of the smallest, and otherwise for ``adafuse``, the
            rule of the AdaFuse paper.
        runtime: options for how requests run. They change results at most by rounding.

    Attributes:
        backends: the backends of all members, in member order.
        scheduler: runs the requests. Metrics read its state.

    Raises:
        InvalidInputError: ``members`` is empty, or two members have the same name.
        InvalidOptionError: the strategy is unknown, or ``config`` does not fit it or the members.
    """

    def __init__(
        self,
        members: Sequence[Backend],
        config: AdaFuseConfig | None = None,
        *,
        strategy: Strategy | str = AUTO,
        runtime: RuntimeConfig | None = None,
    ) -> None:
        members = tuple(members)
        if not all(isinstance(member, Backend) for member in members):
            raise InvalidInputError(
                "members must be loaded backends. To load models by path or hub id, use "
                "AdaFuseEngine.from_pretrained([...])."
            )
        if not members:
            raise InvalidInputError("an ensemble needs at least one member; got none")
        for value, kind in ((config, AdaFuseConfig), (runtime, RuntimeConfig)):
            if value is not None and not isinstance(value, kind):
                name = kind.__name__
                raise InvalidInputError(f"pass {name}(...), or None; got {short_repr(value)}")
        self.backends: tuple[Backend, ...] = members
        self.members: tuple[str, ...] = tuple(backend.name for backend in members)
        if len(set(self.members)) != len(self.members):
            raise InvalidInputError(
                f"members need different names; got {', '.join(self.members)}. "
                "Set the name of a backend when you create it."
            )

        # check that the options fit the strategy and the members
        self.config = config or AdaFuseConfig()
        self.strategy = self._find(strategy)
        refuse_unused_options(self.strategy, self.config)
        active = self._active_backends(self.config)
        names = [backend.name for backend, _ in active]
        if self.config.calibration is not None:
            self.config.calibration.check(self.strategy.name, names)
        if self.config.decisions is not None:
            self.config.decisions.check(names)

        self._encoder = Encoder()
        self.runtime = runtime or RuntimeConfig()
        self._owned: tuple[Backend, ...] = ()
        self.scheduler = Scheduler(self.backends, self.runtime)
        self._encoder.warn_of_members(active, self.config)

    @classmethod
    def from_pretrained(
        cls,
        members: Sequence[str | MemberSpec | Mapping[str, Any]],
        *,
        dtype: str | torch.dtype = "auto",
        device_map: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        **options: Unpack[EngineOptions],
    ) -> AdaFuseEngine:
        """Load models, or connect to models on servers, as an ensemble.

        The arguments `dtype`, `device_map` and `trust_remote_code` are for transformers members.

        Args:
            members: at least one folder, GGUF file, hub id or address of a server. To set options
                of a member, pass a `TransformersMember`, `GGUFMember` or `ServerMember`, or a
                mapping of its settings.
            dtype: dtype of the weights, or ``"auto"`` for the dtype of the checkpoint.
            device_map: a device, ``"auto"``, or another device map of transformers.
            trust_remote_code: whether code that comes with a model may run.
            revision: revision of models from the hub.
            **options: those of the constructor.

        Raises:
            LoadError: a member cannot be loaded, or cannot take part in an ensemble.
            InvalidInputError: ``members`` is empty, two members have the same explicit name, or
                a setting of a member is not valid.
            MissingDependencyError: a package that a member needs is not installed.
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
            config = options.get("config") or AdaFuseConfig()
            if config.weights is None and weights is not None:
                options["config"] = config.override({"weights": weights})
            engine = cls(loaded, **options)
        except BaseException:
            _close_members(loaded)
            raise
        engine._owned = tuple(loaded)
        return engine

    @classmethod
    def from_embedded(cls, **options: Unpack[EngineOptions]) -> AdaFuseEngine:
        """Load the three small models that ship with this package, for experiments and tests."""
        from adafuse_llm.embedded import member_paths

        return cls.from_pretrained([str(path) for path in member_paths()], **options)

    @classmethod
    def from_config(
        cls, path: str | PathLike[str], *, trust_remote_code: bool = False
    ) -> AdaFuseEngine:
        """Load the ensemble that a configuration file describes.

        Args:
            path: a YAML or JSON file (:mod:`adafuse_llm.loading.config_file`), such as one that
                ``adafuse tune`` has written.
            trust_remote_code: as for `from_pretrained`; the file cannot set it.

        Raises:
            InvalidInputError: the file does not exist, or its contents cannot be used.
            LoadError: a member cannot be loaded, or cannot take part in an ensemble.
        """
        file = read_config(path)
        return cls.from_pretrained(
            file.members,
            config=file.config,
            runtime=file.runtime,
            trust_remote_code=trust_remote_code,
            **file.loading,
        )

    @property
    @override
    def member_info(self) -> tuple[MemberInfo, ...]:
        return tuple(
            MemberInfo(
                name=backend.name,
                context_window=backend.context_window,
                has_chat_template=backend.codec.has_chat_template,
                parameters=backend.parameters,
            )
            for backend in self.backends
        )

    @property
    @override
    def can_enforce(self) -> bool:
        return (
            is_available()
            and self.strategy.options.issuperset(GRAMMARS)
            and all(backend.follows_grammars for backend in self.backends)
        )

    @override
    def check_grammar(self, **overrides: Unpack[DecodeOptions]) -> None:
        config = self.config.override(overrides)
        refuse_unused_options(self.strategy, config)
        if (grammar := Grammar.of(config)) is not None:
            for backend, _ in self._active_backends(config):
                backend.grammar_vocabulary().matcher(grammar, NO_LEAD)

    def with_strategy(self, strategy: Strategy | str) -> AdaFuseEngine:
        """Return an engine with the same loaded members and another strategy.

        Both engines share everything else, and closing one closes both. Options of this engine that
        the new strategy does not use get their default values.

        Raises:
            InvalidOptionError: the strategy is unknown.
        """
        view = copy.copy(self)
        view.strategy = self._find(strategy)
        used = self.config.model_dump(include={*ALWAYS_USED, *view.strategy.options})
        view.config = AdaFuseConfig(**used)
        return view

    @override
    def _tokens(self, checked: Checked, *, inside: bool) -> dict[str, list[int]]:
        active = self._active_backends(checked.config)
        if not inside:
            return self._encoder.prompt_tokens(checked, active)
        text = checked.request.prompt or ""
        return {backend.name: text_tokens(backend, text)[0] for backend, _ in active}

    @property
    @override
    def closed(self) -> bool:
        return self.scheduler.closed

    @override
    def close(self, timeout: float | None = None) -> None:
        """End running requests and stop the threads. The engine then accepts no more requests.

        All requests end at once with `EngineClosedError`. Forward passes in this process cannot be
        interrupted, so this method waits for them. Then it closes the members that the engine has
        loaded itself; those that were passed to the constructor stay open.

        Args:
            timeout: maximum seconds to wait. If a pass takes longer, this method logs a warning.
        """
        self.scheduler.close(0)  # requests end before their members
        _close_members([member for member in self._owned if member.is_remote])
        busy = self.scheduler.close(timeout)
        _close_members([member for member in self._owned if member.name not in busy])
        if busy:
            logger.warning(
                "the engine is closed, but after %g seconds a forward pass still runs: %s",
                timeout,
                ", ".join(map(repr, busy)),
            )

    @override
    def open(self, requests: Sequence[Request]) -> Run[Any]:
        jobs = [*itertools.chain.from_iterable(converted(requests, self._jobs))]
        start, stop = partial(self.scheduler.submit, jobs), partial(self.scheduler.abandon, jobs)
        return Run(len(jobs), start, stop)

    def _jobs(self, request: Request) -> list[Job]:
        """Check and encode a request. Return a job per response, or one that scores its texts."""
        checked = request.checked(self.config)
        self.scheduler.check_accepts()
        if request.texts is not None:
            return [self._scoring(checked, request.texts)]

        # check that the strategy and the members can follow the options
        config = checked.config
        refuse_unused_options(self.strategy, config)
        active = self._active_backends(config)
        own = request.options.keys()  # with `use`, the response has no confidence instead
        if config.calibration is not None and "calibration" in own and "use" not in own:
            config.calibration.check(self.strategy.name, [backend.name for backend, _ in active])
        self.strategy.check([backend for backend, _ in active])
        config.check_n()

        # encode the prompt, and make a job for every response
        seeds: Sequence[int | None] = (None,)
        if config.temperature and config.choices is None:
            seeds = config.seeds()
            for backend, _ in active:
                check_distributions(backend, "temperature", config)
        top = max(self.strategy.top(config), config.top_logprobs)
        responses = self._encoder.members(checked, active, top, seeds)
        return [
            self._decoding(checked, members, seed)
            for members, seed in zip(responses, seeds, strict=True)
        ]

    def _decoding(self, checked: Checked, members: Sequence[MemberState], seed: int | None) -> Job:
        config = checked.config.model_copy(update={"seed": seed})
        talk = checked.conversation

        # choose how to play a round
        spare = self.strategy.max_extra_tokens(len(members), config)
        drafts = NoDrafts()
        if self.runtime.drafting:
            most, scheduler = CROWD * len(self.backends), self.scheduler
            drafts = Drafts(members, lambda: scheduler.running > most)
        if config.choices is not None:
            spare = check_choices(members, config)
            play: PlayRound = partial(choose, members, config.choices)
        else:
            play = self.strategy.begin(StrategyContext(members, config, drafts))

        # find the memory that the response needs; if memory is short, lower the limit of tokens
        least = FREE_TOKENS if config.max_new_tokens in (None, NO_LIMIT) else None
        needs, limit = self.scheduler.cache_needs(members, checked.limit, spare, least)
        for member in members:
            member.limit = limit

        # what ends the response; members without a template may write the user's next turn
        grammar = members[0].grammar
        is_free = config.choices is None and grammar is None
        has_plain = not all(member.codec.has_chat_template for member in members)
        transcript = Transcript(
            () if config.choices else config.stop,
            grammar.can_end if grammar else None,
            TURNS if is_free and talk is not None and has_plain else (),
            calls=CALL_CLOSES in (config.grammar or "") or bool(talk and talk.tools),
            prefix=members[0].reply_prefix,
        )
        has_default = config.max_new_tokens is None
        name = self.strategy.name
        response = Response(members, name, transcript, config.calibration, has_default)
        return Job(
            members,
            needs,
            drafts.wrap(decode(response, play, config.counted_logprobs)),
            cancelled=partial(response.event, "", "cancelled"),
            cancel=checked.request.cancel,
            timeout=checked.request.timeout,
        )

    def _scoring(self, checked: Checked, texts: Sequence[str]) -> Job:
        config = checked.config
        top = max(self.strategy.top(config), config.top_logprobs)
        active = self._active_backends(config)
        (members,) = self._encoder.members(checked, active, top, to_score=True)
        pool = pool_texts(members, texts, ends=checked.request.ends)
        room = max(sum(1 for _ in member.tree.nodes()) for member in members)
        needs, _ = self.scheduler.cache_needs(members, 1, room)
        return Job(
            members,
            needs,
            score_texts(members, pool),
            cancelled=_refuse_cancelled,
            cancel=checked.request.cancel,
            timeout=checked.request.timeout,
        )

    def _find(self, strategy: Strategy | str) -> Strategy:
        chosen = self.config.member_weights(self.members)
        members = [backend for backend in self.backends if backend.name in chosen]
        return find_strategy(strategy, members, self.config)

    def _active_backends(self, config: AdaFuseConfig) -> Active:
        """Return the backends of the members that decode, with their weights."""
        weights = config.member_weights(self.members)
        active = [backend for backend in self.backends if backend.name in weights]
        if config.weights is None:
            return list(zip(active, self.strategy.weights(active), strict=True))
        return [(backend, weights[backend.name]) for backend in active]


def _refuse_cancelled() -> NoReturn:
    raise RequestCancelledError("the request was cancelled before its texts were scored")


def _close_members(members: Sequence[Backend]) -> None:
    for member in members:
        member.close()
