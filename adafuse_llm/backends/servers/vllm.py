"""The API of vLLM (``vllm serve``)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from adafuse_llm.backends.servers.api import (
    WANTED_TOP,
    WORD_END,
    Known,
    Prompt,
    ServerFacts,
    chosen_model,
    finite,
    groups,
    together,
    tokens_of,
)
from adafuse_llm.backends.servers.connection import Connection
from adafuse_llm.errors import MemberError

GIVEN_LIMIT: Final = 128
"""Maximum number of given tokens in a call."""

MIXED: Final = (
    "it returned wrong likeliest tokens, as vLLM 0.32 does if another client asks for given tokens "
    "(logprob_token_ids) at the same time. Use a server of its own for every program"
)

_LIMIT = re.compile(r"max allowed: (\d+)")
_COMMON: Final = {
    "max_tokens": 1,
    "temperature": 0,
    "repetition_penalty": 1.0,
    "add_special_tokens": False,
    "return_tokens_as_token_ids": True,
}
_ENDS: Final = {"structured_outputs": {"regex": WORD_END}}

Numbered: TypeAlias = Sequence[tuple[int, Prompt]]
"""Prompts with their numbers in a pass."""


class VllmApi:
    """The API of vLLM.

    The likeliest tokens and the log-probabilities of given tokens take one call each, with all
    prompts. The calls run one after the other, because vLLM 0.32 returns wrong likeliest tokens for
    a batch that also has requests with `logprob_token_ids`. For the same reason, the members of a
    process on the same server take turns (`Connection.turn`). Ends of words take a call more, at
    the same time as the second one, with a regular expression. vLLM applies its mask before it
    computes the log-probabilities that it reports, also those that it calls raw.
    """

    def facts(self, server: Connection, model: str | None) -> ServerFacts:
        found = chosen_model(server, (server.find("/v1/models") or {}).get("data", ()), model)
        length = found.get("max_model_len")
        version = (server.find("/version") or {}).get("version", "of unknown version")
        name = found["id"]
        with server.turn:
            self._check_given(server, name, version)
            limit = self._listed_limit(server, name)
        return ServerFacts(
            model=name,
            source=found.get("root"),
            version=f"vLLM {version}",
            window=None if length is None else length - 1,
            listed_limit=limit,
        )

    def tokenize(self, server: Connection, model: str, text: str) -> list[int] | None:
        return tokens_of(server, model, text)

    def evaluate(
        self, server: Connection, facts: ServerFacts, prompts: Sequence[Prompt]
    ) -> list[Known]:
        known = [Known() for _ in prompts]
        numbered = list(enumerate(prompts))
        listing = [(number, prompt) for number, prompt in numbered if prompt.top]
        giving = [*groups(numbered, GIVEN_LIMIT)]
        limited = [part for part in map(_with_word_end, giving) if part]
        bodies = [_giving(facts.model, part) for part in giving]
        bodies += ({**_giving(facts.model, part), **_ENDS} for part in limited)
        if listing:
            answer = server.post("/v1/completions", _listing(facts.model, listing))
            for (number, prompt), found in zip(listing, _distributions(answer), strict=True):
                if -math.inf in found.values() or len(found) < prompt.top:
                    raise server.error(MIXED)
                known[number].listed = found
        answers = server.post_all("/v1/completions", bodies)
        for place, (part, answer) in enumerate(zip((*giving, *limited), answers, strict=True)):
            for (number, prompt), found in zip(part, _distributions(answer), strict=True):
                if place < len(giving):
                    known[number].given |= {token: found[token] for token in prompt.given}
                else:
                    known[number].ends |= found
        return known

    def _listed_limit(self, server: Connection, model: str) -> int:
        """Return how many likeliest tokens the server lists, `WANTED_TOP` at most."""
        try:
            server.post(
                "/v1/completions",
                {**_COMMON, "model": model, "prompt": [0], "logprobs": WANTED_TOP},
            )
        except MemberError as error:
            found = _LIMIT.search(error.reason)
            if found is None:
                raise
            return int(found[1])
        return WANTED_TOP

    def _check_given(self, server: Connection, model: str, version: str) -> None:
        """Check that the server returns log-probabilities of given tokens.

        Raises:
            MemberError: it does not.
        """
        body = _giving(model, [(0, Prompt((0,), given={0, 1, 2}))])
        (found,) = _distributions(server.post("/v1/completions", body))
        if not {0, 1, 2} <= found.keys():
            raise server.error(
                f"vLLM {version} does not return log-probabilities of given tokens "
                "(logprob_token_ids). Use vLLM 0.32 or newer"
            )


def _with_word_end(part: Numbered) -> Numbered:
    return [(number, prompt) for number, prompt in part if prompt.word_end]


def _listing(model: str, part: Numbered) -> dict[str, Any]:
    """Return a request for the likeliest tokens."""
    return {**_body(model, part), "logprobs": max(prompt.top for _, prompt in part)}


def _giving(model: str, part: Numbered) -> dict[str, Any]:
    """Return a request for given tokens."""
    return {**_body(model, part), "logprobs": 1, "logprob_token_ids": together(part)}


def _body(model: str, part: Numbered) -> dict[str, Any]:
    return {**_COMMON, "model": model, "prompt": [list(prompt.ids) for _, prompt in part]}


def _distributions(answer: Any) -> Iterator[dict[int, float]]:
    """Yield the log-probabilities after each prompt of a call, by token id."""
    for choice in sorted(answer["choices"], key=lambda each: each["index"]):
        (listed,) = choice["logprobs"]["top_logprobs"]
        yield {int(key.removeprefix("token_id:")): finite(value) for key, value in listed.items()}
