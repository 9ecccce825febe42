"""A judge of faithfulness, for LlamaIndex's evaluation, that scores YES and NO."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.evaluation.base import BaseEvaluator, EvaluationResult
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.llms.adafuse.base import AdaFuseLLM
from llama_index.llms.adafuse.errors import aadapter_errors
from llama_index.llms.adafuse.selectors import require_adafuse

from adafuse_llm import InvalidInputError

YES, NO = "YES", "NO"

FAITHFULNESS_PROMPT = PromptTemplate(
    "Context:\n{context_str}\n\n"
    "Statement: {query_str}\n\n"
    f"Does the context support the statement? Reply with {YES} or {NO}, and with nothing else.\n"
    "Answer: "
)
"""The default prompt of `AdaFuseFaithfulnessEvaluator`."""


class AdaFuseFaithfulnessEvaluator(BaseEvaluator):
    """A judge of whether a response is supported by its contexts, with a probability.

    The members score ``YES`` and ``NO`` as replies. The score of an evaluation is the probability
    of ``YES`` among the two. The contexts are packed into as few prompts as fit the members. If
    there are several prompts, the highest score counts.

    Args:
        llm: the LLM. Default: that of LlamaIndex's ``Settings``.
        raise_error: whether to raise an error if a response does not pass.
        eval_template: a template with the variables ``context_str`` and ``query_str`` (the
            response), or its text. It asks for ``YES`` or ``NO``.
        threshold: the lowest score of a response that passes, from 0 to 1.

    Raises:
        InvalidInputError: `llm` is not an `AdaFuseLLM`, or `threshold` is out of range.
    """

    def __init__(
        self,
        llm: AdaFuseLLM | None = None,
        raise_error: bool = False,
        eval_template: str | BasePromptTemplate = FAITHFULNESS_PROMPT,
        *,
        threshold: float = 0.5,
    ) -> None:
        self._llm = require_adafuse(llm)
        self._raise_error = raise_error
        template = (
            PromptTemplate(eval_template) if isinstance(eval_template, str) else eval_template
        )
        self._eval_template: BasePromptTemplate = template
        if not 0 <= threshold <= 1:
            raise InvalidInputError(f"threshold must be from 0 to 1; got {threshold}")
        self._threshold = threshold

    def _get_prompts(self) -> PromptDictType:
        return {"eval_template": self._eval_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._eval_template = prompts.get("eval_template", self._eval_template)

    @aadapter_errors
    async def aevaluate(
        self,
        query: str | None = None,
        response: str | None = None,
        contexts: Sequence[str] | None = None,
        sleep_time_in_seconds: int = 0,
        **kwargs: Any,
    ) -> EvaluationResult:
        """Return whether the contexts support the response.

        Args:
            query: the question; it is only copied to the result.
            response: the response to judge.
            contexts: the texts that must support it.
            sleep_time_in_seconds: seconds to wait first.
            **kwargs: ignored, as in other evaluators.

        Raises:
            AdaFuseLLMError: `response` or `contexts` is missing or cannot be used, or the response
                does not pass and `raise_error` is true.
        """
        if not contexts or response is None:
            raise InvalidInputError("pass response=... and contexts=[...] with at least one text")
        await asyncio.sleep(sleep_time_in_seconds)
        prompts = await asyncio.to_thread(self._prompts, response, contexts)
        scores = [(await self._llm.achoose(each, [YES, NO])).probabilities[0] for each in prompts]
        score = max(scores)
        passing = score >= self._threshold
        if self._raise_error and not passing:
            raise InvalidInputError(
                f"the contexts do not support the response: the probability of {YES} is "
                f"{score:.3f}, below {self._threshold}"
            )
        return EvaluationResult(
            query=query,
            response=response,
            contexts=contexts,
            passing=passing,
            score=score,
            feedback=YES if passing else NO,
        )

    def _prompts(self, response: str, contexts: Sequence[str]) -> list[str]:
        """Return prompts that contain all contexts and fit the members."""
        template = self._eval_template.partial_format(query_str=response)
        packed = self._llm.prompt_helper().repack(template, list(contexts), llm=self._llm)
        return [template.format(context_str=text) for text in packed or [""]]
