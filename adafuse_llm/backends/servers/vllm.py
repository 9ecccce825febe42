"""The API of vLLM (``vllm serve``)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from adafuse_llm.backends.servers.api import (
    WANTED_TOP,
    WORD_END,
    Prompt,
    ServerApi,
    ServerFacts,
    chosen_model,
    finite,
)
from adafuse_llm.backends.servers.connection import Connection
from adafuse_llm.errors import MemberError

GIVEN_LIMIT: Final = 128
"""Maximum number of given tokens in a call."""

MIXED: Final = (
    "it returned wrong likeliest tokens, as vLLM 0.32 does if another client asks for given tokens "
    "(logprob_token_ids) at the same time. Use a server of its own for every program"
)

PATH: Final = "/v1/completions"


class VllmApi(ServerApi):
    """The API of vLLM, whose members on one server take turns (`Connection.turn`).

    vLLM 0.32 returns wrong likeliest tokens if a batch also has requests for given tokens
    (`logprob_token_ids`). So calls for likeliest tokens end before those for given ones begin.
    """

    def facts(self, server: Connection, model: str | None) -> ServerFacts:
        entry = chosen_model(server, model)
        length = entry.get("max_model_len")
        version = (server.find("/version") or {}).get("version", "of unknown version")
        # find out whether the server supports given tokens, and how many tokens it lists
        with server.turn:
            body = _giving(entry["id"], [Prompt((0,))], [0, 1, 2])
            (given,) = _distributions(server.post(PATH, body))
            if not {0, 1, 2} <= given.keys():
                raise server.error(
                    f"vLLM {version} does not return log-probabilities of given tokens "
                    "(logprob_token_ids). Use vLLM 0.32 or newer"
                )
            limit = _listed_limit(server, entry["id"])
        return ServerFacts(
            model=entry["id"],
            source=entry.get("root"),
            version=f"vLLM {version}",
            window=None if length is None else length - 1,
            listed_limit=limit,
        )

    def evaluate(self, server: Connection, facts: ServerFacts, prompts: Sequence[Prompt]) -> None:
        # ask for the likeliest tokens
        if listing := [prompt for prompt in prompts if prompt.top]:
            top = max(prompt.top for prompt in listing)
            answer = server.post(PATH, {**_body(facts.model, listing), "logprobs": top})
            for prompt, listed in zip(listing, _distributions(answer), strict=True):
                if -math.inf in listed.values() or len(listed) < prompt.top:
                    raise server.error(MIXED)
                prompt.listed = listed
        # ask for given tokens and, for ends of words, once more with a regular expression, by which
        # vLLM masks tokens before it computes log-probabilities
        calls: list[tuple[list[Prompt], dict[str, Any]]] = []
        for group, tokens in _groups(prompts):
            calls.append((group, _giving(facts.model, group, tokens)))
            if limited := [prompt for prompt in group if prompt.word_end]:
                regex = {"structured_outputs": {"regex": WORD_END}}
                calls.append((limited, _giving(facts.model, limited, tokens) | regex))
        # read the answers, with and without the regular expression
        answers = server.post_all(PATH, [body for _, body in calls])
        for (group, body), answer in zip(calls, answers, strict=True):
            for prompt, logprobs in zip(group, _distributions(answer), strict=True):
                (prompt.ends if "structured_outputs" in body else prompt.logprobs).update(logprobs)


def _listed_limit(server: Connection, model: str) -> int:
    # if the server lists fewer tokens than `WANTED_TOP`, its error names the limit
    try:
        server.post(PATH, {**_body(model, [Prompt((0,))]), "logprobs": WANTED_TOP})
    except MemberError as error:
        allowed = re.search(r"max allowed: (\d+)", error.reason)
        if allowed is None:
            raise
        return int(allowed[1])
    return WANTED_TOP


def _groups(prompts: Sequence[Prompt]) -> Iterator[tuple[list[Prompt], list[int]]]:
    # a call can have only `GIVEN_LIMIT` given tokens, so a prompt can be in several groups
    group: list[Prompt] = []
    tokens: set[int] = set()
    for prompt in prompts:
        given = sorted(prompt.given)
        for start in range(0, len(given), GIVEN_LIMIT):
            part = given[start : start + GIVEN_LIMIT]
            if len(tokens.union(part)) > GIVEN_LIMIT:
                yield group, sorted(tokens)
                group, tokens = [], set()
            group.append(prompt)
            tokens.update(part)
    if group:
        yield group, sorted(tokens)


def _giving(model: str, prompts: Sequence[Prompt], tokens: Sequence[int]) -> dict[str, Any]:
    return {**_body(model, prompts), "logprobs": 1, "logprob_token_ids": tokens}


def _body(model: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": [list(prompt.ids) for prompt in prompts],
        "max_tokens": 1,
        "temperature": 0,
        "repetition_penalty": 1.0,
        "add_special_tokens": False,
        "return_tokens_as_token_ids": True,
    }


def _distributions(answer: Any) -> Iterator[dict[int, float]]:
    # the server names tokens by their ids, and may answer in any order
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        (listed,) = choice["logprobs"]["top_logprobs"]
        yield {int(key.removeprefix("token_id:")): finite(value) for key, value in listed.items()}
