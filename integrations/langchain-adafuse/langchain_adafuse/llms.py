"""The ensemble as a LangChain text model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import ConfigDict, Field

from adafuse_llm import AdaFuseEngine, StreamEvent


class AdaFuseLLM(BaseLLM):
    """A LangChain LLM whose every answer is decoded by an AdaFuse ensemble.

    Args:
        engine: the ensemble.
        options: options of `AdaFuseConfig` for every call; a call's own keyword arguments
            override them.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    engine: AdaFuseEngine
    options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def from_embedded(cls, **options: Any) -> AdaFuseLLM:
        """The three small models that ship with adafuse-llm."""
        return cls(engine=AdaFuseEngine.from_embedded(), options=options)

    @property
    def _llm_type(self) -> str:
        return "adafuse"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        config = self.engine.config.override(self.options)
        return {"members": list(self.engine.members), **config.model_dump()}

    def _call_options(self, stop: list[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**self.options, **({"stop": tuple(stop)} if stop else {}), **kwargs}

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = self._call_options(stop, kwargs)
        generations = self.engine.generate_batch(prompts, **options)
        return LLMResult(
            generations=[
                [
                    Generation(
                        text=result.text,
                        generation_info={
                            "finish_reason": result.finish_reason,
                            "usage": result.usage.model_dump(),
                        },
                    )
                ]
                for result in generations
            ]
        )

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        for event in self.engine.stream(prompt, **self._call_options(stop, kwargs)):
            chunk = _chunk(event)
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
        async for event in self.engine.astream(prompt, **self._call_options(stop, kwargs)):
            chunk = _chunk(event)
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


def _chunk(event: StreamEvent) -> GenerationChunk:
    info = {"finish_reason": event.generation.finish_reason} if event.generation else None
    return GenerationChunk(text=event.text, generation_info=info)
