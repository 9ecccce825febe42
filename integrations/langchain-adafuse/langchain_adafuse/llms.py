"""The LangChain text model."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from typing_extensions import Self, Unpack

from adafuse_llm import Request
from langchain_adafuse._calls import Call, Step
from langchain_adafuse._metadata import output_of, token_usage, usage_of
from langchain_adafuse._model import EnsembleModel, ModelFields
from langchain_adafuse._rounds import ROUNDS_KEY, ModelRun

RUN_KEYWORDS = ("tags", "metadata", "run_name", "run_id")
"""Keywords of `BaseLLM.generate` that describe the run."""


class AdaFuseLLM(EnsembleModel, BaseLLM):
    """A LangChain LLM backed by an ensemble of local language models.

    For example::

        llm = AdaFuseLLM(members=["Qwen/Qwen2.5-7B", "mistralai/Mistral-7B-v0.3"])
        for text in llm.stream("The capital of France is"):
            print(text, end="")

    Creating a model loads nothing. The first call, or `warmup`, loads the members. A stream has one
    chunk per committed span. ``generation_info["adafuse_summary"]`` summarizes the rounds. With
    ``round_detail="full"``, ``generation_info["adafuse_rounds"]`` has a record of each round. The
    prompts of a `batch` share forward passes. They also share one LangChain run, so each round
    event has the key ``prompt``, the number of its prompt.

    Raises:
        ContextOverflowError: a prompt does not fit a member's context window. In this case,
            nothing is decoded.
        CallTimeoutError: the call takes longer than `timeout` seconds. The error has the texts so
            far.
        MemberError: a member fails; the message names the member.
    """

    if TYPE_CHECKING:  # type checkers derive a constructor for each class that has none

        def __init__(self, **fields: Unpack[ModelFields]) -> None: ...

    _logger = logging.getLogger(__name__)

    @property
    def _llm_type(self) -> str:
        return "adafuse"

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Generate as `BaseLLM.generate` does, but add the call's overrides to the cache key."""
        call, run = self._for_run(stop, kwargs)
        return super(AdaFuseLLM, call).generate(prompts, call._stops, callbacks, **run)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Generate as `generate` does, without blocking the event loop."""
        call, run = self._for_run(stop, kwargs)
        return await super(AdaFuseLLM, call).agenerate(prompts, call._stops, callbacks, **run)

    def _for_run(
        self, stop: list[str] | None, keywords: dict[str, Any]
    ) -> tuple[Self, dict[str, Any]]:
        """Return the model with the options in the keywords, and the other keywords."""
        run = {name: keywords.pop(name) for name in RUN_KEYWORDS if name in keywords}
        return self._for_call(stop, keywords), run

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._call(stop, run_manager, kwargs)
        steps = list(call.steps([Request(prompt=prompt) for prompt in prompts]))
        return _result(call, call.wholes(steps, _text), len(prompts))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._call(stop, run_manager, kwargs)
        async with aclosing(call.asteps([Request(prompt=prompt) for prompt in prompts])) as steps:
            wholes = call.wholes([step async for step in steps], _text)
        return _result(call, wholes, len(prompts))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self._call(stop, run_manager, kwargs, streams=True)
        with closing(call.steps([Request(prompt=prompt)])) as steps:
            for step in steps:
                chunk = _chunk(call, step)
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        call = self._call(stop, run_manager, kwargs, streams=True)
        async with aclosing(call.asteps([Request(prompt=prompt)])) as steps:
            async for step in steps:
                chunk = _chunk(call, step)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _call(
        self,
        stop: Sequence[str] | None,
        run: ModelRun | None,
        overrides: Mapping[str, Any],
        *,
        streams: bool = False,
    ) -> Call:
        """Begin a call of the model with overrides."""
        model = self._for_call(stop, overrides)
        if streams:
            model._check_one_response()
        return Call(model, run, numbers_prompts=True)


def _chunk(call: Call, step: Step) -> GenerationChunk:
    info = {**({ROUNDS_KEY: step.records} if step.records else {}), **call.metadata(step)}
    if step.event.generation is not None:
        call.wholes([step], _text)  # raises an error if the response is not complete
        info["usage_metadata"] = usage_of(step.event.generation)
    return GenerationChunk(text=step.event.text, generation_info=info or None)


def _result(call: Call, responses: Sequence[Step], prompts: int) -> LLMResult:
    """Return the result of a call with the responses to its prompts."""
    usages, generations = [], []
    for each in responses:
        assert each.event.generation is not None, "it is a whole response"
        usages.append(usage_of(each.event.generation))
        info = {
            **({ROUNDS_KEY: each.records} if each.records else {}),
            **each.metadata,
            "usage_metadata": usages[-1],
        }
        generations.append(Generation(text=each.event.text, generation_info=info))
    n = len(responses) // prompts if prompts else 1
    first = range(0, len(responses), n)
    return LLMResult(
        generations=[generations[place : place + n] for place in first],
        llm_output=output_of(
            call.model.model_name, (token_usage(usages[place : place + n]) for place in first)
        ),
    )


def _text(response: Step) -> str:
    return response.event.text
