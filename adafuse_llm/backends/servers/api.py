"""Questions about the distributions of a model on a server, and their answers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from adafuse_llm.backends.servers.connection import Connection

WANTED_TOP: Final = 100
"""Number of likeliest tokens that no strategy exceeds by default."""

WORD_END: Final = r"([\t-\r\x1c-\x20](.|\n)*)?"
"""Regular expression of what follows a word: nothing, or whitespace of ASCII with any text. Tokens
that begin with other whitespace are few, so they are asked for by their ids."""

LOWEST: Final = -9999.0
"""The log-probability that stands for minus infinity, if a server's JSON has no infinity."""


@dataclass(slots=True)
class Prompt:
    """A question about the distribution after token ids, and its answer.

    Attributes:
        top: number of likeliest next tokens that the server lists; 0 for none.
        given: tokens whose log-probabilities the server returns.
        word_end: whether the server also returns `ends`.
        listed: answer: log-probabilities of at least `top` likeliest tokens, by token id.
        logprobs: answer: log-probabilities of at least the given tokens, by token id.
        ends: answer: as `logprobs`, with the likeliest token, if only tokens are permitted with
            which `WORD_END` can begin. Others have minus infinity.
    """

    ids: tuple[int, ...]
    top: int = 0
    given: set[int] = field(default_factory=set)
    word_end: bool = False
    listed: dict[int, float] = field(default_factory=dict)
    logprobs: dict[int, float] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts about a model on a server.

    Attributes:
        model: the model's name on the server.
        source: folder, file or hub id that the server loaded; None if it is not known.
        version: name and version of the server.
        window: maximum number of tokens of a prompt, for which one more token is generated.
        listed_limit: maximum number of likeliest tokens, at most `WANTED_TOP`.
        vocabulary_size, parameters: numbers of tokens and of weights; None if they are not known.
        limits_tokens: whether the server returns `Prompt.ends`.
        drawn: token that llama-server draws in every call.
    """

    model: str
    source: str | None
    version: str
    window: int | None
    listed_limit: int
    vocabulary_size: int | None = None
    parameters: int | None = None
    limits_tokens: bool = True
    drawn: int = 0


class ServerApi(ABC):
    """The API of one kind of server. It keeps no state of requests."""

    @abstractmethod
    def facts(self, server: Connection, model: str | None) -> ServerFacts:
        """Return facts about a model, by default the only one, or raise a `MemberError`."""

    @abstractmethod
    def evaluate(self, server: Connection, facts: ServerFacts, prompts: Sequence[Prompt]) -> None:
        """Set the answers of prompts."""

    def tokenize(self, server: Connection, model: str, text: str) -> list[int] | None:
        """Return the server's tokens of a text without special tokens; None if it has no API."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        answer = server.find("/tokenize", body)
        return None if answer is None else [int(token) for token in answer["tokens"]]


def chosen_model(server: Connection, name: str | None) -> Any:
    """Return a server's entry of a model, by default of its only one, or raise a `MemberError`."""
    # by its name or an alias, or the only one
    listed = (server.find("/v1/models") or {}).get("data", ())
    for entry in listed:
        if name == entry["id"] or name in entry.get("aliases", ()):
            return entry
    if name is None and len(listed) == 1:
        return listed[0]
    problem = "runs several models" if name is None else f"has no model {name!r}"
    names = ", ".join(entry["id"] for entry in listed)
    raise server.error(f"it {problem}; its models are: {names or 'none'}")


def finite(logprob: float | None) -> float:
    """Return a server's log-probability, with minus infinity for what stands for it."""
    return -math.inf if logprob is None or logprob <= LOWEST else float(logprob)
