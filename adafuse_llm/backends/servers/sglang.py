"""The API of SGLang (``python -m sglang.launch_server``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class SglangApi(ServerApi):
    """The API of SGLang. One call asks about all prompts, each with its own tokens to score."""

    def facts(self, server: Connection, model: str | None) -> ServerFacts:
        entry = chosen_model(server, model)
        loaded = server.find("/get_model_info") or {}
        version = (server.find("/get_server_info") or {}).get("version", "of unknown version")
        length = entry.get("max_model_len")
        return ServerFacts(
            model=entry["id"],
            source=loaded.get("tokenizer_path") or loaded.get("model_path") or entry.get("root"),
            version=f"SGLang {version}",
            window=None if length is None else length - 1,
            listed_limit=WANTED_TOP,
        )

    def evaluate(self, server: Connection, facts: ServerFacts, prompts: Sequence[Prompt]) -> None:
        # SGLang masks tokens by a regular expression before it computes log-probabilities
        limited = [prompt for prompt in prompts if prompt.word_end]
        asked = [*prompts, *limited]
        plain: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0}
        ending = {**plain, "regex": WORD_END}
        body = {
            "input_ids": [list(prompt.ids) for prompt in asked],
            "sampling_params": [plain] * len(prompts) + [ending] * len(limited),
            "return_logprob": True,
            # from the last token on: for earlier ones, SGLang could not reuse its prefix cache
            "logprob_start_len": [len(prompt.ids) - 1 for prompt in asked],
            "top_logprobs_num": [prompt.top for prompt in prompts] + [0] * len(limited),
            "token_ids_logprob": [sorted(prompt.given) for prompt in asked],
            "return_text_in_logprobs": False,
        }
        answers = [answer["meta_info"] for answer in server.post("/generate", body)]
        # read the answers: first those to all prompts, then those with the regular expression
        for prompt, answer in zip(prompts, answers, strict=False):
            if prompt.top:
                prompt.listed = _logprobs(answer["output_top_logprobs"][0])
            if prompt.given:
                prompt.logprobs = _logprobs(answer["output_token_ids_logprobs"][0])
        for prompt, answer in zip(limited, answers[len(prompts) :], strict=True):
            prompt.ends = {
                **_logprobs(answer["output_token_logprobs"]),
                **_logprobs(answer["output_token_ids_logprobs"][0]),
            }


def _logprobs(entries: Any) -> dict[int, float]:
    # an entry is a log-probability, an id and a text
    return {int(token): finite(logprob) for logprob, token, *_ in entries}
