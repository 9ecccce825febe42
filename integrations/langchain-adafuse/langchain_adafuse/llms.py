"""The LangChain text model."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models import BaseLLM
from langchain_core.language_models.base import LangSmithParams
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from typing_extensions import Unpack

from langchain_adafuse._calls import Place, Response, Start, Step
from langchain_adafuse._metadata import output_of, token_usage, usage_of
from langchain_adafuse._model import EnsembleModel, ModelFields
from langchain_adafuse._rounds import ROUNDS_KEY


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

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._tracing_params("llm", stop, kwargs)

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        *,
        tags: list[str] | list[list[str]] | None = None,
        metadata: dict[str, Any] | list[dict[str, Any]] | None = None,
        run_name: str | list[str] | None = None,
        run_id: uuid.UUID | list[uuid.UUID | None] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Generate as `BaseLLM.generate` does, but add the call's overrides to the cache key."""
        call = self._for_call(stop, kwargs)
        return super(AdaFuseLLM, call).generate(
            prompts,
            call._stops,
            callbacks,
            tags=tags,
            metadata=metadata,
            run_name=run_name,
            run_id=run_id,
        )

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        *,
        tags: list[str] | list[list[str]] | None = None,
        metadata: dict[str, Any] | list[dict[str, Any]] | None = None,
        run_name: str | list[str] | None = None,
        run_id: uuid.UUID | list[uuid.UUID | None] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Generate as `generate` does, without blocking the event loop."""
        call = self._for_call(stop, kwargs)
        return await super(AdaFuseLLM, call).agenerate(
            prompts,
            call._stops,
            callbacks,
            tags=tags,
            metadata=metadata,
            run_name=run_name,
            run_id=run_id,
        )

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._for_call(stop, kwargs)
        start = call._start()
        places = _places(len(prompts), start.config.n)
        responses = call._decode_all(start, run_manager, places, prompts=prompts)
        return call._result(responses, start.config.n)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._for_call(stop, kwargs)
        start = await call._astart()
        places = _places(len(prompts), start.config.n)
        requests = [
            {"prompt": prompt, **variant} for prompt in prompts for variant in start.variants()
        ]
        responses = await call._adecode_all(start, run_manager, places, requests)
        return call._result(responses, start.config.n)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self._for_call(stop, kwargs)
        call._check_one_response()
        start = call._start()
        with closing(call._decode(start, run_manager, _places(1, 1)[0], prompt=prompt)) as steps:
            for step in steps:
                chunk = call._chunk(start, step)
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
        call = self._for_call(stop, kwargs)
        call._check_one_response()
        start = await call._astart()
        decoded = call._adecode(start, run_manager, _places(1, 1)[0], prompt=prompt)
        async with aclosing(decoded) as steps:
            async for step in steps:
                chunk = call._chunk(start, step)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _chunk(self, start: Start, step: Step) -> GenerationChunk:
        info = {**({ROUNDS_KEY: step.records} if step.records else {}), **start.metadata(step)}
        if step.event.generation is not None:
            self._check_timeout([start.whole([step])], _text)
            info["usage_metadata"] = usage_of(step.event.generation)
        return GenerationChunk(text=step.event.text, generation_info=info or None)

    def _result(self, responses: Sequence[Response], n: int) -> LLMResult:
        """Return the result of a call.

        Args:
            responses: `n` responses to each prompt.
            n: the number of responses to each prompt.
        """
        self._check_timeout(responses, _text)
        usages = [usage_of(response.generation) for response in responses]
        generations = [
            Generation(
                text=_text(response),
                generation_info={
                    **({ROUNDS_KEY: response.records} if response.records else {}),
                    **response.metadata,
                    "usage_metadata": usage,
                },
            )
            for response, usage in zip(responses, usages, strict=True)
        ]
        first = range(0, len(responses), n)
        return LLMResult(
            generations=[generations[place : place + n] for place in first],
            llm_output=output_of(
                self.model_name, (token_usage(usages[place : place + n]) for place in first)
            ),
        )


def _places(prompts: int, n: int) -> list[Place]:
    """Return the places of `n` responses to each of the prompts."""
    return [
        Place(
            prompt * n + response,
            {"prompt": prompt, **({"response": response} if n > 1 else {})},
        )
        for prompt in range(prompts)
        for response in range(n)
    ]


def _text(response: Response) -> str:
    return response.generation.text
