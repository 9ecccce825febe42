"""The ensemble as a LangChain text model."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from typing_extensions import Unpack

from adafuse_llm import Generation as Answer
from adafuse_llm import StreamEvent
from langchain_adafuse._model import EnsembleModel, ModelFields, Told, usage_of
from langchain_adafuse._rounds import ROUNDS_KEY

Kind = Literal["input_tokens", "output_tokens", "total_tokens"]


class AdaFuseLLM(EnsembleModel, BaseLLM):
    """A LangChain LLM whose every answer is written by an ensemble of local models.

    For example::

        llm = AdaFuseLLM(members=["Qwen/Qwen2.5-7B", "mistralai/Mistral-7B-v0.3"])
        for text in llm.stream("The capital of France is"):
            print(text, end="")

    Making one loads nothing; the first call does (or `warmup`). One chunk is streamed per committed
    span, and the records of the rounds are in ``generation_info["adafuse_rounds"]``. Prompts of a
    `batch` share forward passes; as LangChain hands on one run for all of them, their round events
    carry the number of their ``prompt``.

    Raises:
        ContextOverflowError: a prompt fits no member's window; nothing was computed.
        TimeoutError: `timeout` seconds have passed.
        MemberError: a member failed; its name is in the message.
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
        """As `BaseLLM.generate`; what a call overrides is part of its cache key, too."""
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
        """`generate` on an event loop."""
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
        for event, told in call._decode(run_manager, 0, prompt=prompt):
            chunk = call._chunk(event, told)
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
            async for event, told in events:
                chunk = call._chunk(event, told)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _chunk(self, event: StreamEvent, told: Told) -> GenerationChunk:
        info: dict[str, Any] = {ROUNDS_KEY: told} if told else {}
        if event.generation is not None:
            info |= self._information(event.generation)
        return GenerationChunk(text=event.text, generation_info=info or None)

    def _result(self, answers: list[tuple[Answer, Told]]) -> LLMResult:
        generations = [
            [
                Generation(
                    text=answer.text,
                    generation_info={
                        **({ROUNDS_KEY: told} if told else {}),
                        **self._information(answer),
                    },
                )
            ]
            for answer, told in answers
        ]
        usages = [usage_of(answer) for answer, _ in answers]
        kinds: tuple[Kind, ...] = ("input_tokens", "output_tokens", "total_tokens")
        total = {kind: sum(usage[kind] for usage in usages) for kind in kinds}
        return LLMResult(
            generations=generations,
            llm_output={"model_name": self.model_name, "token_usage": total},
        )

    def _information(self, answer: Answer) -> dict[str, Any]:
        return {**self._metadata(answer), "usage_metadata": usage_of(answer)}
