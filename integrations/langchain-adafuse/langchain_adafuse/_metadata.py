"""What messages and generations tell about a response: its end, its cost and its durations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.messages.ai import UsageMetadata

from adafuse_llm import Generation
from adafuse_llm.summary import Summary
from langchain_adafuse._rounds import SUMMARY_KEY, RoundDetail

PROVIDER = "adafuse"

FINISH_REASONS = {"stop_sequence": "stop"}

CLOSING_KEY = "adafuse_closing"
"""Key in the ``response_metadata``, with `Generation.closing`."""

TOKEN_KINDS = ("prompt_tokens", "completion_tokens", "total_tokens")


def metadata_of(
    generation: Generation, *, model_name: str, detail: RoundDetail, durations: Mapping[str, int]
) -> dict[str, Any]:
    """Return the metadata of a response, without its log-probabilities."""
    reason: str = generation.finish_reason
    usage = generation.usage.model_dump()
    summary = Summary.of(generation.rounds).model_dump(mode="json")
    return {
        **({} if detail == "none" else {SUMMARY_KEY: summary}),
        **({CLOSING_KEY: generation.closing} if generation.closing else {}),
        "finish_reason": FINISH_REASONS.get(reason, reason),
        "model_name": model_name,
        "model_provider": PROVIDER,
        **({} if generation.seed is None else {"seed": generation.seed}),
        "strategy": generation.strategy,
        "token_usage": token_usage([usage_of(generation)]),
        "usage_by_member": {
            member: {kind: counts[member] for kind, counts in usage.items()}
            for member in generation.usage.prompt_tokens
        },
        **durations,
    }


def usage_of(generation: Generation) -> UsageMetadata:
    """Return the token counts of the first active member, in LangChain's form."""
    usage = generation.usage
    first = next(iter(usage.prompt_tokens))
    prompt, completion = usage.prompt_tokens[first], usage.completion_tokens[first]
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=completion,
        total_tokens=prompt + completion,
        input_token_details={"cache_read": usage.cached_tokens[first]},
    )


def token_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the tokens of all responses to one prompt, in OpenAI's form. The prompt counts once.

    Args:
        usages: the token counts of each response, in LangChain's form.
    """
    prompt = usages[0].get("input_tokens", 0) if usages else 0
    completion = sum(usage.get("output_tokens", 0) for usage in usages)
    counts = (prompt, completion, prompt + completion)
    return dict(zip(TOKEN_KINDS, counts, strict=True))


def output_of(model_name: str, usages: Iterable[Mapping[str, int]]) -> dict[str, Any]:
    """Return LangChain's ``llm_output``: the model's name and the total of token counts.

    Args:
        model_name: the name.
        usages: the token counts of each prompt, in OpenAI's form.
    """
    usages = list(usages)
    total = {kind: sum(usage[kind] for usage in usages) for kind in TOKEN_KINDS}
    return {"model_name": model_name, "token_usage": total}
