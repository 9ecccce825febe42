"""Inference servers for tests: a tiny real model behind the APIs of vLLM, SGLang and llama-server.

They answer in the form of the real servers, with their limits and errors. The members meet a real
llama-server in ``tests/real/test_servers.py``, and a real vLLM in ``tests/real/test_vllm.py``.
"""

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer

from adafuse_llm.backends.huggingface.vocabulary import HuggingFaceVocabulary
from tests.support.models import Recipe, model, tokenizer

APIS = ("vllm", "sglang", "llama-server")
GIVEN_LIMIT = 128
LOWEST = torch.finfo(torch.float32).min  # what llama-server writes for a probability of 0
RECIPE = Recipe("llama", "bytelevel", seed=71)


class RefusedError(Exception):
    """A request that the server refuses with the status 400."""


@dataclass
class InferenceServer:
    """A server of one model.

    Attributes:
        recipe: the model, which may be replaced while the server runs.
        folder: folder of a model to run instead.
        source: what the server says that it has loaded.
        faults: responses for the next requests, instead of answers.
        ignores_given: whether vLLM does not know `logprob_token_ids`, as old versions do.
        leaks_bias: whether biases change what llama-server lists as before sampling.
        batch_seconds: seconds for which vLLM waits for other requests of a batch. As vLLM 0.32
            does, it lists wrong tokens for a batch that has requests with `logprob_token_ids`, too.
        counts: numbers of requests by path, and of ``prompts`` and ``tokens``.
    """

    api: str
    recipe: Recipe = RECIPE
    folder: Path | None = None
    name: str = "tiny"
    source: str | None = None
    key: str | None = None
    max_logprobs: int = 20
    window: int = 1024
    faults: list[Response] = field(default_factory=list)
    redirect: str | None = None
    ignores_given: bool = False
    ignores_bias: bool = False
    leaks_bias: bool = False
    ignores_regex: bool = False
    batch_seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    keys: set[str | None] = field(default_factory=set)
    _batch: list[Any] = field(default_factory=list)

    def app(self) -> Starlette:
        paths: dict[str, Any] = {"/v1/models": self.models, "/tokenize": self.tokenize}
        if self.api == "vllm":
            paths |= {"/version": lambda _: {"version": "0.32.0"}}
            paths |= {"/v1/completions": self.vllm}
        elif self.api == "sglang":
            paths |= {"/get_model_info": lambda _: {"model_path": self.source}}
            paths |= {"/get_server_info": lambda _: {"version": "0.5.9"}}
            paths |= {"/generate": self.sglang}
        elif self.api == "llama-server":
            paths |= {"/props": self.props, "/completion": self.llama_server}
        return Starlette(
            routes=[
                Route(path, self._answering(path, answer), methods=["GET", "POST"])
                for path, answer in paths.items()
            ]
        )

    def network(self) -> Any:
        return model(self.recipe) if self.folder is None else _loaded(self.folder)[0]

    def tokens(self) -> Any:
        return tokenizer(self.recipe.kind) if self.folder is None else _loaded(self.folder)[1]

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """The log-probabilities of all tokens after a prompt, from a plain forward pass."""
        with torch.inference_mode():
            row = self.network()(torch.tensor([list(ids)])).logits[0, -1]
        return row.double().log_softmax(-1)

    def _answering(self, path: str, answer: Any) -> Any:
        async def endpoint(request: Request) -> Response:
            given = request.headers.get("authorization")
            self.keys.add(given)
            if self.redirect is not None:
                return RedirectResponse(self.redirect + path)
            if self.key is not None and given != f"Bearer {self.key}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            if self.faults and request.method == "POST":
                return self.faults.pop(0)
            self.counts[path] += 1
            try:
                body = await request.json() if request.method == "POST" else {}
                self._batch.append(body)
                try:
                    await asyncio.sleep(self.batch_seconds)
                    return JSONResponse(answer(body))
                finally:
                    self._batch.remove(body)
            except RefusedError as error:
                message = {"message": str(error), "type": "BadRequestError", "code": 400}
                return JSONResponse({"error": message}, 400)

        return endpoint

    def _limited(self, row: torch.Tensor, regex: str | None) -> torch.Tensor:
        """Log-probabilities relative to the tokens with which a text of `regex` can begin."""
        if regex is None or self.ignores_regex:
            return row
        mask = _mask(self.recipe.kind, self.folder, regex, len(row))
        return row.masked_fill(~mask, -math.inf).log_softmax(-1)

    def _rows(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        size = self.network().config.vocab_size
        for ids in prompts:
            if not ids or len(ids) >= self.window:
                raise RefusedError(f"This model's maximum context length is {self.window} tokens.")
            if max(ids) >= size:
                raise RefusedError(f"Token id {max(ids)} is out of vocabulary")
        self.counts["prompts"] += len(prompts)
        self.counts["tokens"] += sum(map(len, prompts))
        return [self.logprobs(ids) for ids in prompts]

    def models(self, _: Any) -> Any:
        entry: dict[str, Any] = {"id": self.name, "object": "model"}
        if self.api == "llama-server":
            entry |= {"aliases": [], "meta": {"n_vocab": self.network().config.vocab_size}}
        else:
            entry |= {"root": self.source, "max_model_len": self.window}
        return {"object": "list", "data": [entry]}

    def tokenize(self, body: Any) -> Any:
        text = body["content"] if self.api == "llama-server" else body["prompt"]
        return {"tokens": self.tokens().encode(text, add_special_tokens=False)}

    def props(self, _: Any) -> Any:
        return {
            "default_generation_settings": {"n_ctx": self.window},
            "model_path": self.source,
            "build_info": "b11549",
        }

    def vllm(self, body: Any) -> Any:
        assert body["max_tokens"] == 1
        assert body["temperature"] == 0
        assert body["return_tokens_as_token_ids"]
        if body["model"] != self.name:
            raise RefusedError(f"The model `{body['model']}` does not exist.")
        if body["logprobs"] > self.max_logprobs:
            raise RefusedError(
                f"Requested sample logprobs of {body['logprobs']}, which is greater than max "
                f"allowed: {self.max_logprobs}"
            )
        given = None if self.ignores_given else body.get("logprob_token_ids")
        if given is not None and len(given) > GIVEN_LIMIT:
            raise RefusedError("logprob_token_ids has too many ids")
        prompts = body["prompt"]
        rows = self._rows(prompts if isinstance(prompts[0], list) else [prompts])
        if given is not None and max(given) >= len(rows[0]):
            raise RefusedError("logprob_token_ids has an id that is out of vocabulary")
        choices = []
        regex = body.get("structured_outputs", {}).get("regex")
        is_mixed = any(other.get("logprob_token_ids") for other in self._batch)
        for index, full in enumerate(rows):
            row = self._limited(full, regex)
            first = int(row.argmax())
            ids = row.topk(body["logprobs"]).indices.tolist() if given is None else given
            if given is None and is_mixed:  # what fills the row up to the length of the other
                row, ids = row.clone(), [0] if first else [1]
                row[ids] = -math.inf
            listed = {
                f"token_id:{token}": max(float(row[token]), -9999.0)
                for token in dict.fromkeys([first, *ids])
            }
            logprobs = {"tokens": [f"token_id:{first}"], "top_logprobs": [listed]}
            choices.append({"index": index, "logprobs": logprobs, "finish_reason": "length"})
        return {"choices": choices[::-1], "usage": {"prompt_tokens": 0}}

    def sglang(self, body: Any) -> Any:
        assert body["return_logprob"]
        answers = []
        for ids, start, top, given, settings, full in zip(
            *(body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]),
            *(body["token_ids_logprob"], body["sampling_params"], self._rows(body["input_ids"])),
            strict=True,
        ):
            assert (settings["max_new_tokens"], settings["temperature"]) == (1, 0)
            row = self._limited(full, settings.get("regex")).clamp(min=torch.finfo().min)
            assert start == len(ids) - 1, "anything less keeps the server from its prefix cache"
            if given and max(given) >= len(row):
                raise RefusedError("token_ids_logprob has an id that is out of vocabulary")
            likely = row.topk(top).indices.tolist() if top else []
            meta: dict[str, Any] = {"output_token_logprobs": _entries(row, [int(row.argmax())])}
            meta |= {"input_token_logprobs": [[None, ids[-1], None]], "cached_tokens": 0}
            meta |= {"output_top_logprobs": [_entries(row, likely)] if top else [None]}
            meta |= {"output_token_ids_logprobs": [_entries(row, given)] if given else [None]}
            answers.append({"text": "", "meta_info": meta})
        return answers

    def llama_server(self, body: Any) -> Any:
        assert body["n_predict"] == 1
        assert body["samplers"] == []
        is_after = body["post_sampling_probs"]
        answers = []
        for index, plain in enumerate(self._rows(body["prompt"])):
            row = plain.clone()
            for token, bias in body.get("logit_bias", ()):
                if token >= len(row):
                    raise RefusedError("logit_bias has an id that is out of vocabulary")
                row[token] += 0.0 if self.ignores_bias else bias
            drawn = int(row.argmax())  # a real server draws at random
            found = row.log_softmax(-1) if is_after or self.leaks_bias else plain
            chances = found.exp().float()
            entries = [
                {"id": token, "prob": float(chances[token])}
                if is_after
                else {"id": token, "logprob": max(float(found[token]), LOWEST)}
                for token in found.topk(min(body["n_probs"], len(found))).indices.tolist()
            ]
            first = {"id": drawn, "top_probs" if is_after else "top_logprobs": entries}
            answer = {"index": index, "completion_probabilities": [first]}
            if self.tokens().decode([drawn]).endswith("\ufffd"):  # it ends within a character
                del answer["completion_probabilities"]
            answers.append(answer)
        return answers[::-1] if len(answers) > 1 else answers[0]


@functools.cache
def _mask(kind: Any, folder: Path | None, regex: str, size: int) -> torch.Tensor:
    """Whether each token can begin a text of a regular expression, from llguidance."""
    from llguidance import LLMatcher

    tokens = tokenizer(kind) if folder is None else _loaded(folder)[1]
    matcher = LLMatcher(
        HuggingFaceVocabulary(tokens).grammar_tokenizer(size, {tokens.eos_token_id}),
        LLMatcher.grammar_from_regex(regex),
    )
    packed = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
    return (packed[:, None] >> torch.arange(8)).bitwise_and(1).flatten()[:size].bool()


@functools.cache
def _loaded(folder: Path) -> tuple[Any, Any]:
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return made, AutoTokenizer.from_pretrained(folder)


def _entries(row: torch.Tensor, tokens: Sequence[int]) -> list[Any]:
    return [[float(row[token]), token, None] for token in tokens]
