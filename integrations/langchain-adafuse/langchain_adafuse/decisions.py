"""The LangChain decision model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core import decisions as lc
from langchain_core.messages import BaseMessage, is_data_content_block
from langchain_core.runnables import RunnableConfig
from pydantic import Field
from typing_extensions import Self

from adafuse_llm import Decision
from adafuse_llm.adapters.conversation import to_conversation
from adafuse_llm.adapters.options import TRANSPORT
from adafuse_llm.adapters.questions import to_answer, to_question
from adafuse_llm.decisions import Question, check_options, state_text
from adafuse_llm.errors import InvalidInputError
from langchain_adafuse._calls import langchains_error, usage_metadata
from langchain_adafuse._messages import to_turn
from langchain_adafuse._model import EnsembleRunnable


class AdaFuseResponse(lc.ClassifierResponse):
    """LangChain's response, with the answers in adafuse-llm's form, too."""

    decision: Decision
    """The answers with the probabilities of each member, and with warnings."""


class AdaFuseDecisions(EnsembleRunnable, lc.BaseDecisionModel):
    """A LangChain decision model backed by an ensemble of local language models.

    The fields for members are those of `ChatAdaFuse`. The options are those of
    `AdaFuseEngine.decide`, which also explains the answers and the errors. Other fields have no
    effect. Every call can override the options. `decisions` override the model's `weights`, but the
    `weights` of a call override `decisions`. A state is text, JSON or messages, without images.
    """

    if TYPE_CHECKING:  # type checkers derive a constructor for each class that has none

        def __init__(self, **fields: Any) -> None: ...

    else:
        model: ClassVar[Any] = property(lambda self: self.model_name)

    orders: int | None = Field(default=None, ge=1)
    """Maximum number of orders in which members read the options of a question. Default: all cyclic
    orders if there are up to four options; otherwise one order and its reverse."""

    _per_call = (*EnsembleRunnable._per_call, "orders")

    @property
    def _provider(self) -> str:
        return "adafuse"

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

    @langchains_error()
    def _for_call(self, stop: Sequence[str] | None, overrides: Mapping[str, Any]) -> Self:
        given = {name for name, value in overrides.items() if value is not None}
        check_options(given - {"model", *TRANSPORT})
        model = super()._for_call(stop, overrides)
        # a call's weights override a calibration, which has weights of its own
        return model.model_copy(update={"decisions": None}) if "weights" in given else model

    def _classify(self, state: lc.State, questions: dict[str, lc.Question]) -> AdaFuseResponse:
        asked = self._asked(state, questions)
        with langchains_error():
            return self._response(asked["questions"], self._loaded().decide(**asked))

    async def _aclassify(
        self, state: lc.State, questions: dict[str, lc.Question]
    ) -> AdaFuseResponse:
        asked = self._asked(state, questions)
        engine = await asyncio.to_thread(self._loaded)
        with langchains_error():
            return self._response(asked["questions"], await engine.adecide(**asked))

    def _asked(self, state: lc.State, questions: Mapping[str, Any]) -> dict[str, Any]:
        sent = {
            name: each if isinstance(each, Question) else to_question(_to_plain(each.model_dump()))
            for name, each in questions.items()
        }
        more = {"orders": self.orders, "timeout": self.timeout}
        return {**self._decide_options, **more, "state": _to_plain(state), "questions": sent}

    def _response(self, asked: Mapping[str, Question], decision: Decision) -> AdaFuseResponse:
        answers: Any = {name: to_answer(asked[name], decision[name]) for name in asked}
        usage = usage_metadata(decision.usage)
        return AdaFuseResponse(
            model=self.model_name, answers=answers, usage=usage, decision=decision
        )


def _to_plain(value: Any) -> Any:
    """Return data with its messages as text. Raise an error if it has media."""
    if isinstance(value, BaseMessage):
        value = [value]
    if isinstance(value, Mapping):
        if is_data_content_block({**value}):
            raise InvalidInputError(f"members read only text; got {value['type']}")
        return {name: _to_plain(part) for name, part in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    if not value or not all(isinstance(part, BaseMessage) for part in value):
        return [*map(_to_plain, value)]
    for message in value:
        _to_plain(message.content_blocks)  # refuses media
    return state_text(to_conversation(map(to_turn, value)), "the state")
