"""The LangChain decision model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core import decisions as lc
from langchain_core.messages import BaseMessage, UsageMetadata, is_data_content_block
from langchain_core.runnables import RunnableConfig
from pydantic import Field
from typing_extensions import Self

from adafuse_llm import Answer, Choice, Decision, Predicate, Score
from adafuse_llm.adapters.conversation import Turn, to_conversation
from adafuse_llm.adapters.ensembles import fields_from_config
from adafuse_llm.adapters.logprobs import openai_usage
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decisions import DecideOptions
from adafuse_llm.errors import InvalidInputError
from adafuse_llm.text.conversation import check_role, plain_json, to_json
from langchain_adafuse._calls import langchains_error
from langchain_adafuse._messages import to_turn
from langchain_adafuse._model import EnsembleRunnable


class AdaFuseResponse(lc.ClassifierResponse):
    """LangChain's answers, with those of the ensemble."""

    decision: Decision
    """The answers with the probabilities of each member, and with warnings."""


class AdaFuseDecisions(EnsembleRunnable, lc.BaseDecisionModel):
    """A LangChain decision model backed by an ensemble of local language models.

    For example::

        model = AdaFuseDecisions(members=["Qwen/Qwen2.5-7B-Instruct", "google/gemma-2-9b-it"])
        urgent = Noul(instructions="Does this need an answer today?")
        model.invoke({"state": "Production is down.", "questions": {"urgent": urgent}}).nouls

    The fields that select and load members are those of `ChatAdaFuse`. The options are those of
    `AdaFuseEngine.decide`, which also explains how answers come about; every call can override
    them. ``confidence`` is that of `adafuse_llm.Answer`.

    A state is text, JSON or messages, without images. Creating a model loads nothing. The first
    call, or `warmup`, loads the members.

    Raises:
        InvalidInputError: the state or a question cannot be used, such as a `Box`. In this case,
            nothing is computed.
        ContextOverflowError: state and question do not fit a member's context window. In this case,
            nothing is computed.
        RequestTimeoutError: the call takes longer than `timeout` seconds.
        MemberError: a member fails; the message names the member.
    """

    if TYPE_CHECKING:  # type checkers derive a constructor for each class that has none

        def __init__(self, **fields: Any) -> None: ...

    else:
        model: ClassVar[Any] = property(lambda self: self.model_name)

    orders: int | None = Field(default=None, ge=1)
    """Maximum number of orders in which members read the options of a question. Default: all cyclic
    ones of up to four options, and otherwise one and its reverse."""

    _per_call = (*EnsembleRunnable._per_call, "orders")

    @classmethod
    def from_config(cls, path: str | PathLike[str], **fields: Any) -> Self:
        """Create a model from a configuration file, without the options that decisions lack."""
        useless = AdaFuseConfig.model_fields.keys() - DecideOptions.__annotations__.keys()
        file = fields_from_config(path)
        kept: Any = {name: value for name, value in file.items() if name not in useless}
        if "decisions" in kept:  # weights of a call would disable the calibration
            kept.pop("weights", None)
        return cls(**{"members": "embedded", **kept, **fields})

    def invoke(
        self, input: lc.ClassifierRequest, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AdaFuseResponse:
        model: Any = super(AdaFuseDecisions, self._for_call(None, kwargs))
        return model.invoke(input, config)  # type: ignore[no-any-return]

    async def ainvoke(
        self, input: lc.ClassifierRequest, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AdaFuseResponse:
        model: Any = super(AdaFuseDecisions, self._for_call(None, kwargs))
        return await model.ainvoke(input, config)  # type: ignore[no-any-return]

    @property
    def _provider(self) -> str:
        return "adafuse"

    def _classify(self, state: lc.State, questions: dict[str, lc.Question]) -> AdaFuseResponse:
        asked = self._asked(state, questions)
        with langchains_error():
            return self._response(questions, self._loaded().decide(**asked))

    async def _aclassify(
        self, state: lc.State, questions: dict[str, lc.Question]
    ) -> AdaFuseResponse:
        asked = self._asked(state, questions)
        engine = await asyncio.to_thread(self._loaded)
        with langchains_error():
            return self._response(questions, await engine.adecide(**asked))

    def _asked(self, state: lc.State, questions: Mapping[str, lc.Question]) -> dict[str, Any]:
        return {
            "state": _to_state(state),
            "questions": {name: _to_question(name, asked) for name, asked in questions.items()},
            "orders": self.orders,
            "timeout": self.timeout,
            **self._options,
        }

    def _response(
        self, questions: Mapping[str, lc.Question], decision: Decision
    ) -> AdaFuseResponse:
        counts = openai_usage(decision.usage)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return AdaFuseResponse(
            model=self.model_name,
            answers={name: _to_answer(questions[name], decision[name]) for name in questions},
            usage=UsageMetadata(
                input_tokens=counts["prompt_tokens"],
                output_tokens=counts["completion_tokens"],
                total_tokens=counts["total_tokens"],
                input_token_details={"cache_read": cached},
            ),
            decision=decision,
        )


def _to_state(state: Any) -> Any:
    """Return a state as the engine takes it: a conversation, text, or JSON data."""
    messages = [state] if isinstance(state, BaseMessage) else state
    parts = messages if isinstance(messages, (list, tuple)) else ()
    if parts and all(isinstance(part, BaseMessage) for part in parts):
        return to_conversation(_to_turns(parts))
    return _to_plain(state)


def _to_turns(messages: Sequence[BaseMessage]) -> list[Turn]:
    turns = [*map(to_turn, messages)]
    for part in (part for turn in turns for part in turn["content"] or ()):
        if isinstance(part, Mapping):
            raise _only_text(part["type"])
    return turns


def _to_plain(value: Any) -> Any:
    """Return data without media, and with messages as JSON."""
    if isinstance(value, BaseMessage):
        turn: Any = _to_turns([value])[0]
        own = {"role": check_role(turn["role"], "a message"), "content": "".join(turn["content"])}
        return {name: part for name, part in {**turn, **own}.items() if part}
    if isinstance(value, Mapping):
        if is_data_content_block({**value}):
            raise _only_text(value["type"])
        return {name: _to_plain(part) for name, part in value.items()}
    return [*map(_to_plain, value)] if isinstance(value, (list, tuple)) else value


def _to_text(value: Any) -> str:
    """Return a part of a question as members read it: text, or JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return to_json(plain_json(_to_plain(value), "a question"))


def _to_question(name: str, asked: lc.Question) -> Predicate | Choice | Score:
    if isinstance(asked, lc.Noul):
        question, about = _to_text(asked.instructions), asked.criteria or lc.NoulCriteria()
        return Predicate(question, _to_text(about.true), _to_text(about.false))
    if isinstance(asked, lc.Choice):
        options = {label: _to_text(about) for label, about in asked.criteria.items()}
        return Choice(_to_text(asked.instructions), options)
    if isinstance(asked, lc.Score):
        return Score(_to_text(asked.instructions), [*map(_to_text, asked.criteria)])
    raise _only_text(f"a {type(asked).__name__} as question {name!r}, not a Noul, Choice or Score")


def _to_answer(asked: Any, answer: Answer) -> lc.Answer:
    if isinstance(asked, lc.Noul):
        return lc.NoulAnswer(type="noul", noul=answer.probability)
    probabilities, confidence = answer.probabilities, answer.confidence
    if isinstance(asked, lc.Choice):
        return lc.ChoiceAnswer(
            type="choice",
            choice=answer.choice,
            probabilities=probabilities,
            confidence=confidence,
        )
    return lc.ScoreAnswer(
        type="score",
        score=answer.score,
        legend=dict(enumerate(asked.criteria)),
        probabilities=dict(enumerate(probabilities.values())),
        confidence=confidence,
    )


def _only_text(found: str) -> InvalidInputError:
    return InvalidInputError(f"members read only text; got {found}")
