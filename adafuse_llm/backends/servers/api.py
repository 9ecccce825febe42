"""What a backend asks a server, and what it gets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from adafuse_llm.backends.servers.connection import Connection

WANTED_TOP: Final = 100
"""Number of likeliest tokens that no strategy exceeds by default."""

WORD_END: Final = r"([\t-\r\x1c-\x20](.|\n)*)?"
"""Regular expression of what follows a word: whitespace with any text, or nothing.

Its whitespace is that of ASCII. Tokens that begin with other whitespace are few, so they are asked
for by their ids.
"""

LOWEST: Final = -9999.0
"""The log-probability that stands for minus infinity, if a server's JSON has no infinity."""


@dataclass(slots=True)
class Prompt:
    """A question about the distribution after a sequence of tokens.

    Attributes:
        ids: the tokens.
        top: number of likeliest next tokens that the server lists; 0 for none.
        given: tokens whose log-probabilities the server returns.
        word_end: whether the server also returns `Known.ends`.
    """

    ids: tuple[int, ...]
    top: int = 0
    given: set[int] = field(default_factory=set)
    word_end: bool = False


@dataclass(slots=True)
class Known:
    """What a server tells about the distribution after a sequence of tokens.

    Attributes:
        listed: log-probabilities of at least ``Prompt.top`` likeliest tokens, by token id.
        given: log-probabilities of the tokens of ``Prompt.given``, by token id.
        ends: the same, and that of the likeliest token, if only tokens with which `WORD_END` can
            begin are permitted. It is minus infinity for other tokens.
    """

    listed: dict[int, float] = field(default_factory=dict)
    given: dict[int, float] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts about a model on a server.

    Attributes:
        model: the model's name on the server.
        source: folder, file or hub id that the server loaded; None if it does not tell.
        version: name and version of the server.
        window: maximum number of tokens of a prompt, for which one more token is generated.
        listed_limit: maximum number of likeliest tokens, at most `WANTED_TOP`.
        vocabulary: number of tokens of the model; None if the server does not tell.
        parameters: number of the model's parameters; None if it is not known.
        limits_tokens: whether the server returns `Known.ends`.
        drawn: token that llama-server draws in every call.
    """

    model: str
    source: str | None
    version: str
    window: int | None
    listed_limit: int
    vocabulary: int | None = None
    parameters: int | None = None
    limits_tokens: bool = True
    drawn: int = 0


class ServerApi(Protocol):
    """The API of one kind of server. It keeps no state of requests."""

    def facts(self, server: Connection, model: str | None) -> ServerFacts:
        """Return facts about a model, by default about the only one of the server.

        Raises:
            MemberError: the server does not have the model, or cannot be used.
        """
        ...

    def tokenize(self, server: Connection, model: str, text: str) -> list[int] | None:
        """Return the server's tokens of a text without special tokens; None if it does not tell."""
        ...

    def evaluate(
        self, server: Connection, facts: ServerFacts, prompts: Sequence[Prompt]
    ) -> list[Known]:
        """Return what the server tells about each prompt, in order.

        Calls run at the same time, except where the server mixes up their results.
        """
        ...


def chosen_model(server: Connection, listed: Sequence[dict[str, Any]], name: str | None) -> Any:
    """Return the entry of a model in the list of a server.

    Raises:
        MemberError: the server does not have the model, or has several.
    """
    names = [each["id"] for each in listed]
    for each in listed:
        if name == each["id"] or name in each.get("aliases", ()):
            return each
    if name is None and len(listed) == 1:
        return listed[0]
    problem = "runs several models" if name is None else f"has no model {name!r}"
    raise server.error(f"it {problem}; its models are: {', '.join(names) or 'none'}")


def tokens_of(server: Connection, model: str, text: str) -> list[int] | None:
    """Return a server's tokens of a text without special tokens; None if it does not tell them."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    told = server.find("/tokenize", body)
    return None if told is None else [int(token) for token in told["tokens"]]


def groups(prompts: Iterable[tuple[int, Prompt]], limit: int) -> Iterator[list[tuple[int, Prompt]]]:
    """Divide numbered prompts into groups with at most `limit` different given tokens.

    A prompt with more given tokens occurs in several groups.
    """
    group: list[tuple[int, Prompt]] = []
    tokens: set[int] = set()
    for number, prompt in prompts:
        given = sorted(prompt.given)
        for start in range(0, len(given), limit):
            part = set(given[start : start + limit])
            if group and len(tokens | part) > limit:
                yield group
                group, tokens = [], set()
            group.append((number, Prompt(prompt.ids, given=part, word_end=prompt.word_end)))
            tokens |= part
    if group:
        yield group


def together(prompts: Iterable[tuple[int, Prompt]]) -> list[int]:
    """Return the different given tokens of prompts, in order."""
    return sorted({token for _, prompt in prompts for token in prompt.given})


def finite(logprob: float | None) -> float:
    """Return a log-probability of a server. What stands for minus infinity becomes it."""
    return -math.inf if logprob is None or logprob <= LOWEST else float(logprob)
