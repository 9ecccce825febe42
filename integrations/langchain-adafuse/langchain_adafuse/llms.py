"""The LangChain text model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
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
from langchain_adafuse._calls import Call, Step, output_of, token_usage, usage_of
from langchain_adafuse._model import EnsembleModel, ModelFields
from langchain_adafuse._rounds import RoundChunk, RoundRecords, for_whole

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
    prompts of a `batch` share forward passes. They also share one LangChain run, so the record of
    each round has the key ``prompt``, the number of its prompt.

    Raises:
        ContextOverflowError: a prompt does not fit a member's context window. In this case,
            nothing is decoded.
        RequestTimeoutError: the call takes longer than `timeout` seconds.
        MemberError: a member fails; the message names the member.
    """

    if TYPE_CHECKING:  # type checkers derive a constructor for each class that has none

        def __init__(self, **fields: Unpack[ModelFields]) -> None: ...

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
        call, run = Call(self._for_call(stop, kwargs)), for_whole(run_manager)
        steps = []
        with closing(call.steps([Request(prompt=prompt) for prompt in prompts])) as every:
            for step in every:
                steps.append(step)
                if run:
                    run.on_llm_new_token(_token(step), chunk=_chunk(call, step))
        return _result(call, steps, len(prompts))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call, run = Call(self._for_call(stop, kwargs)), for_whole(run_manager)
        steps = []
        async with aclosing(call.asteps([Request(prompt=prompt) for prompt in prompts])) as every:
            async for step in every:
                steps.append(step)
                if run:
                    await run.on_llm_new_token(_token(step), chunk=_chunk(call, step))
        return _result(call, steps, len(prompts))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = Call(self._for_call(stop, kwargs), streams=True)
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
        call = Call(self._for_call(stop, kwargs), streams=True)
        async with aclosing(call.asteps([Request(prompt=prompt)])) as steps:
            async for step in steps:
                chunk = _chunk(call, step)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk


def _token(step: Step) -> str:
    """Return what handlers print of a step: the first response only, because all run at once."""
    return "" if step.number else step.event.text


def _chunk(call: Call, step: Step) -> RoundChunk:
    info = {**call.kept(step.rounds), **call.metadata(step)}
    if step.event.generation is not None:
        info["usage_metadata"] = usage_of(step.event.generation)
    return RoundChunk(
        text=step.event.text,
        generation_info=info or None,
        rounds=step.rounds,
        number=step.number,
        generation=step.event.generation,
    )


def _result(call: Call, steps: Sequence[Step], prompts: int) -> LLMResult:
    """Return the result of a call with the responses to its prompts."""
    rounds: defaultdict[int, RoundRecords] = defaultdict(list)
    ends: dict[int, Step] = {}
    for step in steps:
        rounds[step.number] += step.rounds
        ends[step.number] = step
    usages, generations = [], []
    for number, end in sorted(ends.items()):
        whole = end.event.generation
        assert whole is not None, "a response ends with its generation or an error"
        usages.append(usage_of(whole))
        info = {
            **call.kept(rounds[number]),
            **end.metadata,
            **call.logprobs(whole.rounds),
            "usage_metadata": usages[-1],
        }
        generations.append(Generation(text=whole.text, generation_info=info))
    n = len(generations) // prompts if prompts else 1
    first = range(0, len(generations), n)
    return LLMResult(
        generations=[generations[place : place + n] for place in first],
        llm_output=output_of(
            call.model.model_name, (token_usage(usages[place : place + n]) for place in first)
        ),
    )
