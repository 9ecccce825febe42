"""The API of SGLang (``python -m sglang.launch_server``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from adafuse_llm.backends.servers.api import (
    WANTED_TOP,
    WORD_END,
    Known,
    Prompt,
    ServerFacts,
    chosen_model,
    finite,
    tokens_of,
)
from adafuse_llm.backends.servers.connection import Connection


class SglangApi:
    """The API of SGLang. One call holds all prompts, each with its given tokens.

    Only log-probabilities after the last token of a prompt are asked for, so that the server can
    use its prefix cache. A prompt at whose end a word may end occurs a second time, with a regular
    expression. SGLang reports log-probabilities after the mask of a regular expression.
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
        limited = [number for number, prompt in enumerate(prompts) if prompt.word_end]
        asked = [*prompts, *(replace(prompts[number], top=0) for number in limited)]
        plain: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0}
        ending = {**plain, "regex": WORD_END}
        body = {
            "input_ids": [list(prompt.ids) for prompt in asked],
            "sampling_params": [plain] * len(prompts) + [ending] * len(limited),
            "return_logprob": True,
            "logprob_start_len": [len(prompt.ids) - 1 for prompt in asked],
            "top_logprobs_num": [prompt.top for prompt in asked],
            "token_ids_logprob": [sorted(prompt.given) for prompt in asked],
            "return_text_in_logprobs": False,
        }
        answers = [each["meta_info"] for each in server.post("/generate", body)]
        known = [_known(*each) for each in zip(answers[: len(prompts)], prompts, strict=True)]
        for number, answer in zip(limited, answers[len(prompts) :], strict=True):
            known[number].ends = {
                **_logprobs(answer["output_token_logprobs"]),
                **_logprobs(answer["output_token_ids_logprobs"][0]),
            }
        return known


def _known(told: Any, prompt: Prompt) -> Known:
    listed = _logprobs(told["output_top_logprobs"][0]) if prompt.top else {}
    given = _logprobs(told["output_token_ids_logprobs"][0]) if prompt.given else {}
    return Known(listed, {token: given[token] for token in prompt.given})


def _logprobs(entries: Any) -> dict[int, float]:
    """Return log-probabilities by token id. An entry is a log-probability, an id and a text."""
    return {int(token): finite(logprob) for logprob, token, *_ in entries}
