"""The API of SGLang (``python -m sglang.launch_server``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adafuse_llm.backends.servers.api import (
    WANTED_TOP,
    Known,
    Prompt,
    ServerFacts,
    chosen_model,
    tokens_of,
)
from adafuse_llm.backends.servers.connection import Connection


class SglangApi:
    """The API of SGLang. One call holds all prompts, each with its given tokens.

    Only log-probabilities after the last token of a prompt are asked for, so that the server can
    use its prefix cache.
    """

    def facts(self, server: Connection, model: str | None) -> ServerFacts:
        found = chosen_model(server, (server.find("/v1/models") or {}).get("data", ()), model)
        loaded = server.find("/get_model_info") or {}
        told = server.find("/get_server_info") or {}
        length = found.get("max_model_len")
        return ServerFacts(
            model=found["id"],
            source=loaded.get("tokenizer_path") or loaded.get("model_path") or found.get("root"),
            version=f"SGLang {told.get('version', 'of unknown version')}",
            window=None if length is None else length - 1,
            listed_limit=WANTED_TOP,
        )

    def tokenize(self, server: Connection, model: str, text: str) -> list[int] | None:
        return tokens_of(server, model, text)

    def evaluate(
        self, server: Connection, facts: ServerFacts, prompts: Sequence[Prompt]
    ) -> list[Known]:
        body = {
            "input_ids": [list(prompt.ids) for prompt in prompts],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": [len(prompt.ids) - 1 for prompt in prompts],
            "top_logprobs_num": [prompt.top for prompt in prompts],
            "token_ids_logprob": [sorted(prompt.given) for prompt in prompts],
            "return_text_in_logprobs": False,
        }
        return [
            _known(each["meta_info"], prompt)
            for each, prompt in zip(server.post("/generate", body), prompts, strict=True)
        ]


def _known(told: Any, prompt: Prompt) -> Known:
    listed = _logprobs(told["output_top_logprobs"][0]) if prompt.top else {}
    given = _logprobs(told["output_token_ids_logprobs"][0]) if prompt.given else {}
    return Known(listed, {token: given[token] for token in prompt.given})


def _logprobs(entries: Any) -> dict[int, float]:
    """Return log-probabilities by token id. An entry is a log-probability, an id and a text."""
    return {int(token): float(logprob) for logprob, token, *_ in entries}
