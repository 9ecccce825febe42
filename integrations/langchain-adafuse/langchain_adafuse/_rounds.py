"""Chunks that carry rounds, so that LangChain hands them to its callbacks."""

from __future__ import annotations

from copy import copy
from typing import Any, Literal, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.outputs import ChatGenerationChunk, GenerationChunk
from langchain_core.tracers._streaming import _StreamingCallbackHandler
from pydantic import Field

ROUNDS_KEY = "adafuse_rounds"
"""Key of the round records in messages and generations."""

SUMMARY_KEY = "adafuse_summary"
"""Key of the summary of the rounds in the metadata of messages and generations."""

RoundDetail = Literal["none", "summary", "full"]

RoundRecords = list[dict[str, Any]]

Run = TypeVar("Run", CallbackManagerForLLMRun, AsyncCallbackManagerForLLMRun)


class ChatRoundChunk(ChatGenerationChunk):
    """A chunk of a chat model, with the records of the rounds that wrote it."""

    rounds: RoundRecords = Field(default_factory=list)


class RoundChunk(GenerationChunk):
    """A chunk of a text model, with the records of the rounds that wrote it."""

    rounds: RoundRecords = Field(default_factory=list)


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
