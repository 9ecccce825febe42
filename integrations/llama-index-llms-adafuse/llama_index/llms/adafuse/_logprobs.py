"""Log-probabilities of committed tokens, in LlamaIndex's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import LogProb

from adafuse_llm import Round
from adafuse_llm.adapters.logprobs import openai_logprobs


def token_logprobs(rounds: Sequence[Round], member: str) -> list[list[LogProb]]:
    """Return the log-probabilities of a member's committed tokens.

    Each list belongs to one token. The committed token is first, followed by the other likeliest
    tokens in descending order of probability.
    """
    return [_candidates(token) for token in openai_logprobs(rounds, member)["content"]]


def _candidates(token: Mapping[str, Any]) -> list[LogProb]:
    others = [top for top in token["top_logprobs"] if not _is_same(top, token)]
    return [
        LogProb(token=each["token"], logprob=each["logprob"], bytes=each["bytes"])
        for each in (token, *others)
    ]


def _is_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return all(first[key] == second[key] for key in ("token", "logprob"))
