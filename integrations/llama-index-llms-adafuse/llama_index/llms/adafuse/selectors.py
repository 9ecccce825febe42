"""A selector of LlamaIndex, such as for routers, that scores the choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.base_selector import (
    BaseSelector,
    SelectorResult,
    SingleSelection,
)
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import QueryBundle
from llama_index.core.settings import Settings
from llama_index.core.tools.types import ToolMetadata
from llama_index.llms.adafuse.base import AdaFuseLLM
from llama_index.llms.adafuse.errors import adapter_errors

from adafuse_llm import Choice, InvalidInputError

SELECT_PROMPT = PromptTemplate(
    "Choices, one in a line, each with its name:\n"
    "{choices}\n\n"
    "Question: {query_str}\n\n"
    "Reply with the name of the choice that fits the question best, and with nothing else.\n"
    "Answer: "
)
"""The default prompt of `AdaFuseSelector`."""


class ScoredSelection(SingleSelection):
    """A selection with its probability among all choices.

    Attributes:
        index: the index of the choice, from 0.
        reason: the name of the choice and its probability, as text.
        probability: the probability of the choice among all choices.
    """

    probability: float


class ScoredSelectorResult(SelectorResult):
    """The result of `AdaFuseSelector`.

    Attributes:
        selections: the selected choices, with the most probable first.
        probabilities: the probability of each choice, in the order of the choices. They add up
            to 1.
    """

    probabilities: tuple[float, ...]


class AdaFuseSelector(BaseSelector):
    """A selector that asks an ensemble which choice fits a query best, and scores all choices.

    The members do not write an answer, so there is nothing to parse: the result is always one of
    the choices, with probabilities. A choice has the name in its metadata if all choices have
    different names there. Otherwise, the names are the numbers of the choices, from 1.

    Args:
        llm: the LLM. Default: that of LlamaIndex's ``Settings``.
        prompt: a template with the variables ``choices`` and ``query_str``. It asks for the name of
            one choice.
        max_outputs: how many choices to select: the most probable ones.

    Raises:
        InvalidInputError: `llm` is not an `AdaFuseLLM`, or `max_outputs` is below 1.
    """

    def __init__(
        self,
        llm: AdaFuseLLM | None = None,
        prompt: BasePromptTemplate = SELECT_PROMPT,
        *,
        max_outputs: int = 1,
    ) -> None:
        self._llm = require_adafuse(llm)
        self._prompt = prompt
        if max_outputs < 1:
            raise InvalidInputError(f"max_outputs must be at least 1; got {max_outputs}")
        self._max_outputs = max_outputs

    @classmethod
    def from_defaults(
        cls,
        llm: AdaFuseLLM | None = None,
        prompt_template_str: str | None = None,
        *,
        max_outputs: int = 1,
    ) -> AdaFuseSelector:
        """Create a selector, as with the constructor, from the text of a prompt."""
        prompt = (
            SELECT_PROMPT if prompt_template_str is None else PromptTemplate(prompt_template_str)
        )
        return cls(llm, prompt, max_outputs=max_outputs)

    def _get_prompts(self) -> dict[str, Any]:
        return {"prompt": self._prompt}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._prompt = prompts.get("prompt", self._prompt)

    def _select(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        with adapter_errors():
            names = _names(choices)
            question = self._question(choices, names, query)
        return self._result(names, self._llm.choose(question, names))

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        with adapter_errors():
            names = _names(choices)
            question = self._question(choices, names, query)
        return self._result(names, await self._llm.achoose(question, names))

    def _question(
        self, choices: Sequence[ToolMetadata], names: Sequence[str], query: QueryBundle
    ) -> str:
        lines = [
            f"{name}: {' '.join((choice.description or '').split())}"
            for name, choice in zip(names, choices, strict=True)
        ]
        return self._prompt.format(choices="\n".join(lines), query_str=query.query_str)

    def _result(self, names: Sequence[str], choice: Choice) -> ScoredSelectorResult:
        probabilities = choice.probabilities
        ranked = sorted(range(len(names)), key=lambda index: -probabilities[index])
        return ScoredSelectorResult(
            selections=[
                ScoredSelection(
                    index=index,
                    reason=f"{names[index]}: probability {probabilities[index]:.3f}",
                    probability=probabilities[index],
                )
                for index in ranked[: self._max_outputs]
            ],
            probabilities=probabilities,
        )


def require_adafuse(llm: Any) -> AdaFuseLLM:
    """Return an LLM, by default that of ``Settings``, if it is an `AdaFuseLLM`.

    Raises:
        InvalidInputError: it is another LLM, which cannot score choices.
    """
    llm = Settings.llm if llm is None else llm
    if not isinstance(llm, AdaFuseLLM):
        raise InvalidInputError(
            f"llm must be an AdaFuseLLM, which can score choices; got {type(llm).__name__}"
        )
    return llm


def _names(choices: Sequence[ToolMetadata]) -> list[str]:
    """Return the choices' own names if they differ, or else their numbers."""
    if not choices:
        raise InvalidInputError("a selector needs at least one choice; got none")
    names = [choice.name.strip() for choice in choices if choice.name and choice.name.strip()]
    if len({*names}) == len(choices):
        return names
    return [str(number) for number in range(1, len(choices) + 1)]
