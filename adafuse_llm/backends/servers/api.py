"""What the APIs of all servers have in common: questions about distributions, and answers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from adafuse_llm.backends.servers.connection import Connection

WANTED_TOP: Final = 100
"""Maximum number of likeliest tokens to ask for. No strategy needs more by default."""

WORD_END: Final = r"([\t-\r\x1c-\x20](.|\n)*)?"
"""Regular expression for the text after a word: nothing, or ASCII whitespace and any text. Few
tokens begin with other whitespace, so questions list these by their ids."""

LOWEST: Final = -9999.0
"""Log-probability that some servers return for minus infinity, which JSON lacks."""


@dataclass(slots=True)
class Prompt:
    """A question about the distribution after the token ids `ids`, and its answer.

    Attributes:
        top: number of likeliest next tokens that the server lists; 0 for none.
        given: tokens whose log-probabilities the server returns.
        word_end: whether the server also returns `ends`.
        listed: the answer to `top`: log-probabilities of at least these tokens, by token id.
        logprobs: the answer to `given`: log-probabilities of at least these tokens, by token id.
        ends: the answer to `word_end`: log-probabilities if only text that fits `WORD_END` may
            follow. It has at least the tokens in `given` and the likeliest one; tokens that do not
            fit have minus infinity.
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
        source: folder, file or hub id that the server loaded; None if unknown.
        version: name and version of the server.
        window: maximum number of tokens in a prompt that the server continues; None if unknown.
        listed_limit: maximum number of likeliest tokens in an answer, at most `WANTED_TOP`.
        vocabulary_size, parameters: numbers of tokens and of weights; None if unknown.
        limits_tokens: False if the server never answers with `Prompt.ends`.
        drawn: id of the token that llama-server draws in every call.
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
        """Return facts about a model (default: the only one), or raise a `MemberError`."""

    @abstractmethod
    def evaluate(self, server: Connection, facts: ServerFacts, prompts: Sequence[Prompt]) -> None:
        """Ask the server, and set the answers in `prompts`."""

    def tokenize(self, server: Connection, model: str, text: str) -> list[int] | None:
        """Return a server's tokens of a text, without special ones; None if it cannot tokenize."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        answer = server.find("/tokenize", body)
        return None if answer is None else [int(token) for token in answer["tokens"]]


def chosen_model(server: Connection, name: str | None) -> Any:
    """Return a server's entry for a model (default: the only one), or raise a `MemberError`."""
    # find the model by its name or an alias
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
    """Return a server's log-probability. None and `LOWEST` stand for minus infinity."""
    return -math.inf if logprob is None or logprob <= LOWEST else float(logprob)
