"""The engine: an ensemble that turns the requests of an application into responses."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import Unpack, override

from adafuse_llm.adjustment import NOTHING, Adjustment
from adafuse_llm.backends.base import (
    AdjustsTokens,
    Backend,
    DrawsTokens,
    FollowsGrammars,
    RunsElsewhere,
    SupportsClose,
)
from adafuse_llm.calls import (
    Call,
    CallInput,
    Decode,
    Messages,
    RoundObserver,
    Tools,
    check_continuations,
    check_input,
    check_input_text,
    check_waiting,
    with_tools,
)
from adafuse_llm.config import (
    ADJUSTMENTS,
    GRAMMARS,
    AdaFuseConfig,
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
    RequestCancelledError,
    short_repr,
)
from adafuse_llm.interface import Engine
from adafuse_llm.loading.config_file import ConfigFile, read_config
from adafuse_llm.results import MemberInfo, PassCost, Round, Scores, StreamEvent
from adafuse_llm.runtime.budget import CacheBudget
from adafuse_llm.runtime.heap import trim_heap
from adafuse_llm.runtime.job import Job
from adafuse_llm.runtime.scheduler import Scheduler
from adafuse_llm.runtime.vocabularies import Vocabularies
from adafuse_llm.sampling import Sampling
from adafuse_llm.strategies.base import (
    Strategy,
    StrategyContext,
    check_listed,
    refuse_unused_options,
    used_options,
)
from adafuse_llm.strategies.registry import find_strategy
from adafuse_llm.text.chat import as_plain_text
from adafuse_llm.text.codec import encode_conversation
from adafuse_llm.text.conversation import Conversation
from adafuse_llm.text.grammar import NO_LEAD, ONE_SPACE, Grammar, GrammarText
from adafuse_llm.text.isolation import check_isolation, isolated
from adafuse_llm.text.matchers import is_available
from adafuse_llm.text.opening import Opening, SpaceTokens
from adafuse_llm.text.prompt_warnings import PromptWarnings
from adafuse_llm.text.reply_start import check_variables, start_replies
from adafuse_llm.text.stops import TURNS, Transcript
from adafuse_llm.text.templates import ReplyStart

if TYPE_CHECKING:
    import torch

    from adafuse_llm.loading.specs import MemberSpec

logger = logging.getLogger(__name__)

CROWD = 2
"""Number of running requests per member above which all members propose at the same time. With so
many requests, sharing forward passes saves more than proposing one after another."""

BEFORE = "\n"
"""Text before a text whose tokens are counted, because the start of a prompt can differ."""


class AdaFuseEngine(Engine):
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
        super().__init__(on_round)
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
        active = self._active_backends(self.config)
        self._vocabularies = Vocabularies()
        self._pass_times = {name: PassTimes() for name in self.members}
        self.runtime = runtime or RuntimeConfig()
        if self.runtime.grammar_isolation:
            check_isolation()
        self._budget = CacheBudget(self.runtime.cache_bytes)
        self._owned: tuple[Backend, ...] = ()
        self._scheduler = Scheduler(self._backends, self.runtime, self._budget)
        self._warnings = PromptWarnings()
        self._warnings.check_members(
            {b.name: b.codec for b, _ in active}, self.config.chat_template_kwargs, self.members
        )

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
        path: str | PathLike[str] | ConfigFile,
        *,
        runtime: RuntimeConfig | None = None,
        trust_remote_code: bool = False,
        on_round: RoundObserver | None = None,
    ) -> AdaFuseEngine:
        """Load the ensemble that a configuration file describes.

        Args:
            path: a YAML or JSON file, such as one that ``adafuse tune`` wrote, or its contents. The
                module :mod:`adafuse_llm.loading.config_file` describes its format.
            runtime: as for `from_pretrained`. The default is the section ``runtime`` of the file.
            trust_remote_code: as for `from_pretrained`; the file cannot set it.
            on_round: as for `from_pretrained`.

        Raises:
            InvalidInputError: the file does not exist, or its contents cannot be used.
            LoadError: a member cannot be loaded, or cannot take part in an ensemble.
        """
        file = path if isinstance(path, ConfigFile) else read_config(path)
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

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backends of all members, in member order."""
        return self._backends

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that runs the requests; metrics read its state."""
        return self._scheduler

    @property
    @override
    def member_info(self) -> tuple[MemberInfo, ...]:
        return tuple(
            MemberInfo(
                name=backend.name,
                context_window=backend.context_window,
                has_chat_template=backend.codec.has_chat_template,
            )
            for backend in self._backends
        )

    @property
    @override
    def pass_costs(self) -> dict[str, PassCost]:
        costs = {name: times.cost for name, times in self._pass_times.items()}
        return {name: cost for name, cost in costs.items() if cost is not None}

    @property
    @override
    def can_enforce(self) -> bool:
        return (
            is_available()
            and self.strategy.options.issuperset(GRAMMARS)
            and all(
                isinstance(backend, FollowsGrammars) and backend.follows_grammars
                for backend in self._backends
            )
        )

    @override
    def check_grammar(
        self, *, cancel: threading.Event | None = None, **overrides: Unpack[DecodeOptions]
    ) -> None:
        config = self.config.override(overrides)
        refuse_unused_options(self.strategy, config)
        with isolated(self.runtime.grammar_isolation, cancel):
            if (grammar := Grammar.of(config)) is not None:
                for backend, _ in self._active_backends(config):
                    self._vocabularies.grammar(backend).matcher(grammar, NO_LEAD)

    def with_strategy(self, strategy: Strategy | str) -> AdaFuseEngine:
        """Return an engine with the same loaded members and another strategy.

        Both share the members, the limits of `runtime` and the observer. Closing one of them closes
        both. Options of `config` that the strategy does not use have their default values.

        Args:
            strategy: as for the constructor.

        Raises:
            InvalidOptionError: the strategy is unknown.
        """
        view = copy.copy(self)
        view.strategy = find_strategy(strategy)
        used = self.config.model_dump(include=used_options(view.strategy))
        view.config = AdaFuseConfig(**used)
        return view

    @override
    def encode_prompt(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Tools = (),
        tool_choice: str = "auto",
        **overrides: Unpack[DecodeOptions],
    ) -> dict[str, list[int]]:
        config = self.config.override(overrides)
        messages = with_tools(messages, tools, tool_choice)
        conversation = check_input(config, prompt, messages, to_score=True)
        starts, _ = self._start_replies(config, conversation, None, to_score=True)
        return {
            backend.name: _encode(
                backend, prompt, conversation, starts.get(backend.name), bare=False
            )
            for backend, _ in self._active_backends(config)
        }

    @override
    def encode_text(self, text: str, **overrides: Unpack[DecodeOptions]) -> dict[str, list[int]]:
        check_input_text(text)
        config = self.config.override(overrides)
        return {
            backend.name: _encode_inside(backend, text)
            for backend, _ in self._active_backends(config)
        }

    @property
    @override
    def closed(self) -> bool:
        return self._scheduler.closed

    @override
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

    @override
    def _prepare(self, call: Call) -> Decode[StreamEvent]:
        encoded = call.each_input(partial(self._requests, call))
        return _LocalDecode(self._scheduler, [request for each in encoded for request in each])

    @override
    def _prepare_scores(self, call: Call) -> Decode[Scores]:
        return _LocalDecode(self._scheduler, call.each_input(partial(self._request_to_score, call)))

    def _request_to_score(self, call: Call, given: CallInput) -> Job:
        """Check and encode a request that scores texts, without computing anything."""
        check_continuations(given.continuations)
        check_waiting(call.cancel, call.timeout)
        self._scheduler.check_room()
        config = self.config.override(call.overrides)
        messages = with_tools(given.messages, call.tools, call.tool_choice)
        members = self._members(config, given.prompt, messages, to_score=True)
        pool = pool_texts(members, given.continuations, stops=call.stops)
        room = max(sum(1 for _ in member.tree.nodes()) for member in members)
        return Job(
            members,
            self._budget.needs(members, config.override({"max_new_tokens": 1}), spare=room),
            score_texts(members, pool),
            cancelled=_refuse_cancelled,
            cancel=call.cancel,
            timeout=call.timeout,
        )

    def _requests(self, call: Call, given: CallInput) -> list[Job]:
        """Check and encode all parts of the requests for one input, without computing anything."""
        messages = with_tools(given.messages, call.tools, call.tool_choice)
        check_waiting(call.cancel, call.timeout)
        self._scheduler.check_room()
        config = self.config.override(call.overrides)
        refuse_unused_options(self.strategy, config)
        self.strategy.check([backend for backend, _ in self._active_backends(config)])
        self._check_sampling(config)
        configs = [config]
        if config.temperature:
            configs = [config.override({"seed": seed}) for seed in config.seeds()]
        with isolated(self.runtime.grammar_isolation, call.cancel, call.timeout):
            return [
                self._request(each, given.prompt, messages, call.cancel, call.timeout)
                for each in configs
            ]

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
    ) -> Job:
        """Encode a request. Its options are checked already."""
        members = self._members(config, prompt, messages)
        grammar = members[0].grammar
        is_free = config.choices is None and grammar is None
        turns = TURNS if is_free and prompt is None and _has_plain(members) else ()
        spare = self.strategy.max_extra_tokens(len(members), config)
        drafts = self._drafting(members)
        if config.choices is not None:
            spare = _check_choices(members, config)
            play: PlayRound = partial(choose, members, config.choices)
        else:
            _check_room(members, config)
            stops = {"stop": (*config.stop, *turns)} if turns else {}
            context = StrategyContext(members, config.override(stops), drafts)
            play = self.strategy.begin(context)
        needs = self._budget.needs(members, config, spare)
        transcript = Transcript(
            () if config.choices else config.stop, grammar.can_end if grammar else None, turns
        )
        rounds: list[Round] = []
        return Job(
            members,
            needs,
            drafts.around(decode(members, play, transcript, rounds, config.counted_logprobs)),
            cancelled=partial(cancelled, members, transcript, rounds),
            cancel=cancel,
            timeout=timeout,
        )

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
        conversation = check_input(config, prompt, messages, to_score=to_score)
        top = max(self.strategy.top(config), config.top_logprobs)
        check_listed([backend for backend, _ in active], top)
        sampling = None if to_score else _sampling(config)
        adjusts = not to_score and config.choices is None
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
            space_tokens = self._vocabularies.space_tokens(backend, spaces) if spaces else None
            form = None
            if grammar is not None and response is not None:
                form, space_tokens = self._form(backend, grammar, response, opening, space_tokens)
            ids = _encode(
                backend, prompt, conversation, starts.get(backend.name), bare=bool(space_tokens)
            )
            with _naming_member(backend):
                if conversation is not None:
                    self._warnings.check_conversation(
                        backend.name, backend.codec, ids, conversation
                    )
                else:
                    self._warnings.check_prompt(backend.name, backend.codec, ids, text)
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
                    adjustment=_adjustment(backend, config) if adjusts else None,
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
        vocabulary = self._vocabularies.grammar(backend)
        if opening.spaces and space_tokens is not None:
            state = vocabulary.matcher(grammar, f'"{" " * opening.spaces}" ', response.begun)
            if not vocabulary.mask(state).is_empty:
                return Form(response, vocabulary, state), space_tokens
        lead = ONE_SPACE if opening.is_reply else NO_LEAD
        state = vocabulary.matcher(grammar, lead, response.begun)
        return Form(response, vocabulary, state), None

    def _drafting(self, members: Sequence[Member]) -> Drafting:
        return Drafts(members, self._is_crowded) if self.runtime.drafting else NoDrafts()

    def _is_crowded(self) -> bool:
        return self._scheduler.running > CROWD * len(self._backends)

    def _active_backends(self, config: AdaFuseConfig) -> list[tuple[Backend, float]]:
        """Return the backends of the members that decode, with their weights.

        Raises:
            InvalidOptionError: ``use`` or ``weights`` do not match the engine's members.
        """
        weights = config.member_weights(self.members)
        active = [backend for backend in self._backends if backend.name in weights]
        if config.weights is None:
            return list(zip(active, self.strategy.weights(active), strict=True))
        return [(backend, weights[backend.name]) for backend in active]


class _LocalDecode(Decode[Any]):
    """Encoded requests, which the scheduler starts together.

    Args:
        scheduler: the scheduler.
        requests: the requests.
    """

    def __init__(self, scheduler: Scheduler, requests: Sequence[Job]) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self.size = len(requests)

    @override
    def start(self, deliver: Callable[[int, Any], None]) -> None:
        self._scheduler.submit(
            *((request, partial(deliver, index)) for index, request in enumerate(self._requests))
        )

    @override
    def stop(self) -> None:
        self._scheduler.abandon(self._requests)


def _refuse_cancelled() -> NoReturn:
    raise RequestCancelledError("the request was cancelled before its texts were scored")


def _close_members(members: Sequence[Backend]) -> None:
    """Close the members that have resources to close."""
    for member in members:
        if isinstance(member, SupportsClose):
            member.close()


def _permits_nothing(_: str) -> bool:
    return False


def _has_plain(members: Sequence[Member]) -> bool:
    """Return whether a member has no chat template, so that it reads messages as plain text."""
    return not all(member.codec.has_chat_template for member in members)


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
    with _naming_member(backend):
        if conversation is not None and start is not None:
            if bare:
                conversation = conversation.with_last(lambda text: text.rstrip(" "))
            return encode_conversation(backend.codec, conversation, start)
        prompt = prompt or ""
        return backend.codec.encode_prompt(prompt.rstrip(" ") if bare else prompt)


def _encode_inside(backend: Backend, text: str) -> list[int]:
    """Encode a text behind other text with a member's tokenizer."""
    with _naming_member(backend):
        return backend.codec.encode_continuation(backend.codec.encode_prompt(BEFORE), text)[0]


@contextmanager
def _naming_member(backend: Backend) -> Iterator[None]:
    """Name the member in errors of its tokenizer."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"member {backend.name!r}: {error}") from error
    except Exception as error:
        reason = f"its tokenizer failed ({type(error).__name__}: {error})"
        raise MemberError(backend.name, reason) from error


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
    if closing is None:
        raise GrammarError("no short text that fits the grammar was found. Simplify the grammar.")
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


def _sampling(config: AdaFuseConfig) -> Sampling | None:
    """Return how a response is drawn. None if nothing is drawn."""
    if not config.temperature or config.seed is None or config.choices is not None:
        return None
    return Sampling(config.seed, config.temperature, config.top_p, config.top_k, config.min_p)


def _adjustment(backend: Backend, config: AdaFuseConfig) -> Adjustment | None:
    """Return how a request changes a member's distributions. None if it does not.

    Options that the request does not set are those of the member's checkpoint.

    Raises:
        InvalidOptionError: the member cannot change its distributions, or cannot write a text of
            ``logit_bias``; or ``min_new_tokens`` is above ``max_new_tokens``.
    """
    can_adjust = isinstance(backend, AdjustsTokens)
    own = backend.own_adjustment if isinstance(backend, AdjustsTokens) else NOTHING
    given: dict[str, Any] = {
        name: value for name in ADJUSTMENTS if (value := getattr(config, name)) is not None
    }
    if (texts := given.pop("logit_bias", None)) is not None:
        given["biases"] = tuple((_encode_bias(backend, each), bias) for each, bias in texts.items())
    adjustment = replace(own, **given)
    if adjustment == NOTHING:
        return None
    if not can_adjust:
        option = next(name for name in ADJUSTMENTS if getattr(config, name))
        raise InvalidOptionError(
            f"option {option!r}: member {backend.name!r} cannot change its distributions; got "
            f"{short_repr(getattr(config, option))}. Leave the member out with use=[...], or leave "
            "the option out."
        )
    if adjustment.min_new_tokens > config.max_new_tokens:
        raise InvalidOptionError(
            f"option 'min_new_tokens' must be at most max_new_tokens ({config.max_new_tokens}); "
            f"got {adjustment.min_new_tokens}"
        )
    return replace(adjustment, end_ids=tuple(sorted(backend.end_ids)))


def _encode_bias(backend: Backend, text: str) -> tuple[int, ...]:
    """Return a member's tokens for a text in the middle of a text."""
    with _naming_member(backend):
        context = backend.codec.encode_prompt(BEFORE)
        ids, exact = backend.codec.encode_continuation(context, text)
    if not exact or not ids:
        raise InvalidOptionError(
            f"option 'logit_bias': member {backend.name!r} cannot write the text "
            f"{short_repr(text)}. Leave the text out, or leave the member out with use=[...]."
        )
    return tuple(ids)


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
