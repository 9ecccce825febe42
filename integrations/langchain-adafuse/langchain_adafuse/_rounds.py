"""Chunks that carry rounds, so that LangChain hands them to its callbacks."""

from __future__ import annotations

from copy import copy
from typing import Any, Literal, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.outputs import ChatGenerationChunk, GenerationChunk
from langchain_core.tracers._streaming import _StreamingCallbackHandler
from pydantic import BaseModel, Field

from adafuse_llm import Generation as Response

ROUNDS_KEY = "adafuse_rounds"
"""Key of the round records in messages and generations."""

RoundDetail = Literal["none", "summary", "full"]

RoundRecords = list[dict[str, Any]]

Run = TypeVar("Run", CallbackManagerForLLMRun, AsyncCallbackManagerForLLMRun)


class Told(BaseModel):
    """What chunks tell callbacks.

    Attributes:
        rounds: the records of the rounds that wrote the chunk.
        number: the number of the response in its call.
        generation: the whole response, in its last chunk.
    """

    rounds: RoundRecords = Field(default_factory=list)
    number: int = 0
    generation: Response | None = Field(default=None, exclude=True, repr=False)


class ChatRoundChunk(Told, ChatGenerationChunk):
    """A chunk of a chat model."""


class RoundChunk(Told, GenerationChunk):
    """A chunk of a text model."""


def for_whole(run: Run | None) -> Run | None:
    """Return a run for the chunks of a call that does not stream.

    It omits the handlers that pass chunks on to a user. LangChain streams for these, unless the
    user turned that off or asked for several responses.
    """
    if run is None:
        return None
    run = copy(run)
    run.handlers = [
        each for each in run.handlers if not isinstance(each, _StreamingCallbackHandler)
    ]
    return run
