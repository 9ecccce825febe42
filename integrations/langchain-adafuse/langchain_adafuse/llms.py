"""The LangChain text model."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from typing_extensions import Unpack

from adafuse_llm import Generation as AdaFuseGeneration
from adafuse_llm import StreamEvent
from langchain_adafuse._model import (
    EnsembleModel,
    ModelFields,
    RoundRecords,
    output_of,
    usage_of,
)
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
        TimeoutError: the call takes longer than `timeout` seconds.
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
        return call._result(call._decode_all(run_manager, prompts))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._for_call(stop, kwargs)
        return call._result(await call._adecode_all(run_manager, prompts))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self._for_call(stop, kwargs)
        for event, records in call._decode(run_manager, 0, prompt=prompt):
            chunk = call._chunk(event, records)
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
        async with aclosing(call._adecode(run_manager, 0, prompt=prompt)) as events:
            async for event, records in events:
                chunk = call._chunk(event, records)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _chunk(self, event: StreamEvent, records: RoundRecords) -> GenerationChunk:
        info: dict[str, Any] = {ROUNDS_KEY: records} if records else {}
        if event.generation is not None:
            info |= self._generation_info(event.generation)
        return GenerationChunk(text=event.text, generation_info=info or None)

    def _result(self, responses: list[tuple[AdaFuseGeneration, RoundRecords]]) -> LLMResult:
        generations = [
            [
                Generation(
                    text=response.text,
                    generation_info={
                        **({ROUNDS_KEY: records} if records else {}),
                        **self._generation_info(response),
                    },
                )
            ]
            for response, records in responses
        ]
        usages = [usage_of(response) for response, _ in responses]
        return LLMResult(generations=generations, llm_output=output_of(self.model_name, usages))

    def _generation_info(self, response: AdaFuseGeneration) -> dict[str, Any]:
        return {**self._metadata(response), "usage_metadata": usage_of(response)}
