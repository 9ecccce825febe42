"""A selector for routers and a filter for retrieval, which ask typed questions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.tools import ToolMetadata
from llama_index.llms.adafuse.base import AdaFuseLLM, Members

from adafuse_llm import Choice, Decision, Engine, Predicate
from adafuse_llm.decisions import DecideOptions, Question
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, short_repr

QUERY = "{query_str}"
"""What stands for the query in the question of `AdaFuseRelevance`."""


class AdaFuseSelector(BaseSelector):
    """A selector for `RouterQueryEngine`, whose members answer with probabilities.

    They read the query, and then the descriptions of the choices. The order of the choices does not
    count. The ``reason`` of a selection has its probability.

    Args:
        llm: an `AdaFuseLLM`, whose options for decisions and `request_timeout` apply.
        members, engine: as for `AdaFuseLLM`, instead of `llm`.
        threshold: None to select the likeliest choice. With a number, members say of each choice
            alone whether it helps, and all are selected whose probability is at least this number,
            the likeliest first. If there are none, the likeliest is selected.
        question: what members are asked about the query. With a threshold, the description of a
            choice follows.

    Raises:
        InvalidInputError: not exactly one of `llm`, `members` and `engine` is given.
    """

    def __init__(
        self,
        llm: AdaFuseLLM | None = None,
        *,
        members: Members = None,
        engine: Engine | None = None,
        threshold: float | None = None,
        question: str = "",
    ) -> None:
        self._llm = _one_of(llm, members, engine)
        self._threshold = threshold
        together, alone = "Which of these helps to answer it?", "Does this help to answer it?"
        self._question = question or (together if threshold is None else alone)

    def _select(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        asked = self._questions(texts := _descriptions(choices))
        decision = self._llm.engine.decide(query.query_str, asked, **_options(self._llm))
        return self._selected(texts, decision)

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        asked = self._questions(texts := _descriptions(choices))
        engine = (await asyncio.to_thread(self._llm.warmup)).engine
        decision = await engine.adecide(query.query_str, asked, **_options(self._llm))
        return self._selected(texts, decision)

    def _questions(self, texts: Sequence[str]) -> dict[str, Question]:
        if self._threshold is None:
            return {"which": Choice(self._question, texts)}
        return {text: Predicate(f"{self._question} {text}") for text in texts}

    def _selected(self, texts: Sequence[str], decision: Decision) -> SelectorResult:
        if self._threshold is None:
            least, found = 1.0, [decision["which"].probabilities[text] for text in texts]
        else:
            least, found = self._threshold, [decision[text].probability for text in texts]
        order = sorted(range(len(texts)), key=found.__getitem__, reverse=True)
        number = max(1, sum(probability >= least for probability in found))
        selections = [
            SingleSelection(index=index, reason=f"probability {found[index]:.3f}")
            for index in order[:number]
        ]
        return SelectorResult(selections=selections)

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        pass


class AdaFuseRelevance(BaseNodePostprocessor):
    """A filter for query engines, which keeps the passages that members say to hold the answer.

    Members read each passage, and then the question. The score of a passage becomes its
    probability, and the likeliest comes first.

    Args:
        llm, members, engine: as for `AdaFuseSelector`.
        threshold: lowest probability of the passages that are kept. Small members rank passages
            better than they say yes or no, so choose it with labeled examples.
        top_n: maximum number of passages that are kept. None: all.
        question: what members are asked about a passage, with ``{query_str}`` for the query.

    Raises:
        InvalidInputError: not exactly one of `llm`, `members` and `engine` is given.
        InvalidOptionError: `question` has no ``{query_str}``.
    """

    threshold: float
    top_n: int | None = Field(ge=1)
    question: str
    _llm: AdaFuseLLM = PrivateAttr()

    def __init__(
        self,
        llm: AdaFuseLLM | None = None,
        *,
        members: Members = None,
        engine: Engine | None = None,
        threshold: float = 0.5,
        top_n: int | None = None,
        question: str = f"Does this text answer the question: {QUERY}",
    ) -> None:
        if QUERY not in question:
            raise InvalidOptionError(f"question must contain {QUERY}; got {question!r}")
        fields: Any = {"threshold": threshold, "top_n": top_n, "question": question}
        super().__init__(**fields)
        self._llm = _one_of(llm, members, engine)

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise InvalidInputError("AdaFuseRelevance needs a query: pass query_str=")
        asked = {"": Predicate(self.question.replace(QUERY, query_bundle.query_str))}
        texts = [each.node.get_content(MetadataMode.LLM) for each in nodes]
        decisions = self._llm.engine.decide_batch(texts, asked, **_options(self._llm))
        scored = [
            NodeWithScore(node=each.node, score=decision[""].probability)
            for each, decision in zip(nodes, decisions, strict=True)
        ]
        kept = [each for each in scored if each.get_score() >= self.threshold]
        return sorted(kept, key=NodeWithScore.get_score, reverse=True)[: self.top_n]


def _one_of(llm: AdaFuseLLM | None, members: Members, engine: Engine | None) -> AdaFuseLLM:
    if llm is None:
        return AdaFuseLLM(members, engine=engine)
    if not isinstance(llm, AdaFuseLLM) or members is not None or engine is not None:
        raise InvalidInputError(
            f"pass only one of llm= (an AdaFuseLLM), members= and engine=; got {short_repr(llm)}"
        )
    return llm


def _options(llm: AdaFuseLLM) -> dict[str, Any]:
    known = DecideOptions.__annotations__
    options = {name: value for name, value in llm._options.items() if name in known}
    if "decisions" in options:  # weights of a call would disable the calibration
        options.pop("weights", None)
    return {**options, "timeout": llm.request_timeout}


def _descriptions(choices: Sequence[ToolMetadata]) -> list[str]:
    return [" ".join(choice.description.split()) for choice in choices]
