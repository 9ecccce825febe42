"""The LangChain text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, LLMResult
from typing_extensions import Self

from adafuse_llm import Request, StreamEvent
from langchain_adafuse._calls import ROUNDS_KEY, ModelCall, ResponseChunks, RoundChunk
from langchain_adafuse._model import EnsembleModel

RUN_KEYWORDS = ("tags", "metadata", "run_name", "run_id")
"""Keywords of `BaseLLM.generate` that describe the run."""


class AdaFuseLLM(EnsembleModel, BaseLLM):  # type: ignore[misc]  # prompts are `given`
    """A LangChain LLM backed by an ensemble of local language models.

    LlamaIndex's class in `llama_index.llms.adafuse` has the same name.

    For example::

        llm = AdaFuseLLM(members=["Qwen/Qwen2.5-7B", "mistralai/Mistral-7B-v0.3"])
        for text in llm.stream("The capital of France is"):
            print(text, end="")

    The first call, or `warmup`, loads the members. A stream has one chunk per committed span. The
    metadata is in the ``generation_info`` of a response and of a stream's last chunk.
    """

    def __init__(self, **fields: Any) -> None:  # else type checkers derive one without options
        super().__init__(**fields)

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
        return super(AdaFuseLLM, call).generate(prompts, None, callbacks, **run)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Generate as `generate` does, without blocking the event loop."""
        call, run = self._for_run(stop, kwargs)
        return await super(AdaFuseLLM, call).agenerate(prompts, None, callbacks, **run)

    def _for_run(
        self, stop: list[str] | None, keywords: dict[str, Any]
    ) -> tuple[Self, dict[str, Any]]:
        run = {name: keywords.pop(name) for name in RUN_KEYWORDS if name in keywords}
        return self._for_call(stop, keywords), run

    def _call(
        self, given: str | list[str], stop: list[str] | None, keywords: Mapping[str, Any]
    ) -> ModelCall:
        prompts = [given] if isinstance(given, str) else given
        requests = [Request(prompt=prompt) for prompt in prompts]
        return ModelCall(self._for_call(stop, keywords), requests, TextResponseChunks)

    def _result(self, call: ModelCall, generations: list[Any]) -> LLMResult:
        n = call.config.n
        starts = range(0, len(generations), n)
        return LLMResult(generations=[generations[start : start + n] for start in starts])


class TextResponseChunks(ResponseChunks):
    """A response with its metadata in its last chunk."""

    def read(self, event: StreamEvent) -> list[RoundChunk]:
        (records, info), whole = self.records(event), event.generation
        if whole is not None:
            metadata, usage = self.metadata(whole)
            info |= {**metadata, "usage_metadata": usage}
        chunk = RoundChunk(text=event.text, generation_info=info or None, rounds=records)
        self.chunks.append(chunk)
        return [chunk]

    def generation(self) -> Generation:
        info = {**(self.chunks[-1].generation_info or {})}
        if self.rounds and self.call.model.round_detail == "full":
            info[ROUNDS_KEY] = self.rounds
        return Generation(text="".join(chunk.text for chunk in self.chunks), generation_info=info)
