"""Log-probabilities of committed tokens, and counts of tokens, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from adafuse_llm.results import Round, Usage

IMPOSSIBLE = -9999.0
"""Log-probability of a token to which the member gives a probability of 0, as in OpenAI's API."""


def openai_usage(usage: Usage) -> dict[str, Any]:
    """Return the counts of the member with the most tokens, as ``usage`` in OpenAI's API."""
    prompts, completions = usage.prompt_tokens, usage.completion_tokens
    totals = {member: prompts[member] + completions[member] for member in prompts}
    member = max(totals, key=totals.__getitem__)
    return {
        "prompt_tokens": prompts[member],
        "completion_tokens": completions[member],
        "total_tokens": totals[member],
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens[member]},
    }


def openai_logprobs(rounds: Iterable[Round]) -> dict[str, Any]:
    """Return the tokens of the member with the highest weight, as ``logprobs`` in OpenAI's API.

    The joined tokens are the committed text; in a reply to messages, more whitespace may precede
    it. If several tokens form one character, the last of them has the character's bytes.
    """
    rounds = list(rounds)
    member = next((name for done in rounds for name in done.logprobs), "")
    tokens = (token for done in rounds for token in done.logprobs.get(member, ()))
    return {
        "content": [
            {
                **_entry(token.text, token.logprob),
                "top_logprobs": [_entry(top.text, top.logprob) for top in token.top],
            }
            for token in tokens
        ]
    }


def _entry(text: str, logprob: float | None) -> dict[str, Any]:
    return {
        "token": text,
        "logprob": IMPOSSIBLE if logprob is None else logprob,
        "bytes": list(text.encode()),
    }
