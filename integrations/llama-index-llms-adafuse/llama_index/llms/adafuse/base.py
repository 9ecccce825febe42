"""The ensemble as a LlamaIndex LLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from adafuse_llm import AdaFuseEngine, Generation


class AdaFuseLLM(CustomLLM):
    """A LlamaIndex LLM whose every answer is decoded by an AdaFuse ensemble.

    Args:
        engine: the ensemble.
        options: options of `AdaFuseConfig` for every call; a call's own keyword arguments
            override them.
    """

    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of AdaFuseConfig for every call."
    )
    _engine: AdaFuseEngine = PrivateAttr()

    def __init__(
        self, engine: AdaFuseEngine, options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(options=options or {}, **kwargs)
        self._engine = engine

    @classmethod
    def from_embedded(cls, **options: Any) -> AdaFuseLLM:
        """The three small models that ship with adafuse-llm."""
        return cls(AdaFuseEngine.from_embedded(), options)

    @classmethod
    def class_name(cls) -> str:
        return "AdaFuseLLM"

    @property
    def engine(self) -> AdaFuseEngine:
        """The ensemble."""
        return self._engine

    @property
    def metadata(self) -> LLMMetadata:
        config = self._engine.config.override(self.options)
        return LLMMetadata(
            context_window=self._engine.context_window or LLMMetadata().context_window,
            num_output=config.max_new_tokens,
            is_chat_model=all(b.codec.has_chat_template for b in self._engine.backends),
            model_name="+".join(self._engine.members),
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        if not formatted and self.completion_to_prompt is not None:
            prompt = self.completion_to_prompt(prompt)
        generation = self._engine.generate(prompt, **{**self.options, **kwargs})
        return CompletionResponse(text=generation.text, raw=_raw(generation))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        if not formatted and self.completion_to_prompt is not None:
            prompt = self.completion_to_prompt(prompt)
        events = self._engine.stream(prompt, **{**self.options, **kwargs})

        def responses() -> CompletionResponseGen:
            text = ""
            for event in events:
                text += event.text
                raw = _raw(event.generation) if event.generation else None
                yield CompletionResponse(text=text, delta=event.text, raw=raw)

        return responses()

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        turns = [
            {"role": message.role.value, "content": message.content or ""} for message in messages
        ]
        generation = self._engine.generate(messages=turns, **{**self.options, **kwargs})
        reply = ChatMessage(role="assistant", content=generation.text)
        return ChatResponse(message=reply, raw=_raw(generation))


def _raw(generation: Generation) -> dict[str, Any]:
    return generation.model_dump(mode="json", exclude={"rounds"})
