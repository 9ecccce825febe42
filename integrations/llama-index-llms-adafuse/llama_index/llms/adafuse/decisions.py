"""A selector for routers and a filter for retrieval, which ask typed questions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.tools import ToolMetadata
from llama_index.llms.adafuse.base import AdaFuseLLM

from adafuse_llm import Answer, Choice, Predicate
from adafuse_llm.decisions import Question
from adafuse_llm.errors import InvalidInputError, InvalidOptionError


class AdaFuseSelector(BaseSelector):
    """A selector, such as for `RouterQueryEngine`. It chooses by the members' probabilities.

    Members read the query, and then the descriptions of the choices. The order of the choices does
    not matter. The ``reason`` of a selection has its probability.

    Args:
        llm: the LLM whose members choose. Its options for decisions and its `request_timeout`
            apply. Instead, you can pass `members=`, `engine=` or other fields of `AdaFuseLLM`.
        threshold: lowest probability at which a choice is selected in addition to the likeliest
            one. The probabilities of all choices sum to 1.
    """

    def __init__(
        self, llm: AdaFuseLLM | None = None, threshold: float = 1.0, **fields: Any
    ) -> None:
        if not 0 <= threshold <= 1:
            raise InvalidOptionError(f"threshold must be from 0 to 1; got {threshold!r}")
        self._llm = _model(llm, fields)
        self._threshold = threshold

    def _select(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        texts = [" ".join(choice.description.split()) for choice in choices]
        if not texts:
            raise InvalidInputError("there are no choices: pass at least one")
        if len(texts) == 1:
            return SelectorResult(selections=[SingleSelection(index=0, reason="the only choice")])
        # number the descriptions if some are equal, because the options of a question must differ
        if len({*texts}) < len(texts):
            texts = [f"{text} ({number})" for number, text in enumerate(texts, start=1)]
        question = Choice("Which of these helps to answer it?", texts)
        (likely,) = _answers(self._llm, [query.query_str], question)
        found = [likely.probabilities[text] for text in texts]
        order = sorted(range(len(texts)), key=found.__getitem__, reverse=True)
        number = max(1, sum(probability >= self._threshold for probability in found))
        selections = [
            SingleSelection(index=index, reason=f"probability {found[index]:.3f}")
            for index in order[:number]
        ]
        return SelectorResult(selections=selections)

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return await asyncio.to_thread(self._select, choices, query)

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        pass


class AdaFuseRelevance(BaseNodePostprocessor):
    """A filter for query engines. It keeps the passages that probably hold the answer.

    Members read each passage, and then the question. The new score of a passage is the probability
    that it holds the answer. The likeliest passage comes first. Passages without text are dropped.
    """

    llm: AdaFuseLLM
    """The LLM whose members read the passages. Its options apply as for `AdaFuseSelector`."""

    threshold: float = Field(default=0.5, ge=0, le=1)
    """Lowest probability at which a passage is kept. Small members rank passages better than
    they say yes or no, so choose the threshold with labeled examples."""

    top_n: int | None = Field(default=None, ge=1)
    """Maximum number of passages that are kept. None: all."""

    def __init__(self, llm: AdaFuseLLM | None = None, **fields: Any) -> None:
        own = {name: fields.pop(name) for name in type(self).model_fields if name in fields}
        own["llm"] = _model(llm, fields)
        super().__init__(**own)

    @classmethod
    def class_name(cls) -> str:
        return cls.__name__

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise InvalidInputError("AdaFuseRelevance needs a query: pass query_str=")
        question = Predicate(f"Does this text answer the question: {query_bundle.query_str}")
        nodes = [each for each in nodes if each.node.get_content(MetadataMode.LLM).strip()]
        texts = [each.node.get_content(MetadataMode.LLM) for each in nodes]
        scored = [
            NodeWithScore(node=each.node, score=answer.probability)
            for each, answer in zip(nodes, _answers(self.llm, texts, question), strict=True)
        ]
        kept = [each for each in scored if each.get_score() >= self.threshold]
        return sorted(kept, key=NodeWithScore.get_score, reverse=True)[: self.top_n]


def _model(llm: AdaFuseLLM | None, fields: dict[str, Any]) -> AdaFuseLLM:
    if not isinstance(llm, (AdaFuseLLM, type(None))):
        raise InvalidInputError("llm must be an AdaFuseLLM; pass an engine as engine=")
    if llm is not None and fields:
        raise InvalidInputError(
            f"{', '.join(fields)}: unknown here, or an option of the llm. Pass options to "
            "AdaFuseLLM, or leave out llm= and pass its fields."
        )
    return AdaFuseLLM(**fields) if llm is None else llm


def _answers(llm: AdaFuseLLM, states: Sequence[str], question: Question) -> list[Answer]:
    options: Any = {**llm._decide_options, "timeout": llm.request_timeout}
    decisions = llm.engine.decide_batch(states, {"": question}, **options)
    return [decision[""] for decision in decisions]
