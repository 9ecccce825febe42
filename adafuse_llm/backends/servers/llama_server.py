"""The API of llama.cpp's server (``llama-server``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from adafuse_llm.backends.servers.api import (
    WANTED_TOP,
    Prompt,
    ServerApi,
    ServerFacts,
    chosen_model,
    finite,
)
from adafuse_llm.backends.servers.connection import Connection

BIAS: Final = 40.0
"""Bias on the logits of given tokens, which makes them the likeliest. Its exponential must fit into
a float32, at most e^88."""

DRAWN_TEXT: Final = " the"
"""Text whose last token the server draws in every call. This token is likely in most texts."""

DRAWN_BIAS: Final = 75.0
"""Bias on the logit of the token to draw, which makes it likelier than tokens with `BIAS`. The
probabilities of all but very rare tokens still fit into a float32."""

LEAST: Final = 1e-37
"""A lower probability does not count where the server adds biases, because a float32 below 1.2e-38
is imprecise."""

WHOLE: Final = 2**20
"""Number of likeliest tokens that covers every vocabulary."""

PROBED: Final = 8
BIAS_TOLERANCE: Final = 0.01
"""`_check_biases` lists `PROBED` likely tokens, and accepts errors up to `BIAS_TOLERANCE` nats."""

PATH: Final = "/completion"


class LlamaServerApi(ServerApi):
    """The API of llama-server, which cannot be asked for the log-probabilities of given tokens.

    So a second call adds `BIAS` to the logits of these tokens, which makes them the likeliest, and
    `unbiased` computes their log-probabilities without it. The server also draws a token, and
    returns no log-probabilities if this token ends within a character. So `DRAWN_BIAS` makes it
    draw a token of whole characters.
    """

    def facts(self, server: Connection, model: str | None) -> ServerFacts:
        entry = chosen_model(server, model)
        props = server.find("/props") or {}
        length = props.get("default_generation_settings", {}).get("n_ctx")
        # find the token to draw
        drawn = self.tokenize(server, entry["id"], DRAWN_TEXT)[-1]
        _check_biases(server, drawn)
        return ServerFacts(
            model=entry["id"],
            source=props.get("model_path"),
            version=f"llama-server {props.get('build_info', 'of unknown build')}",
            window=None if not length else length - 1,
            listed_limit=WANTED_TOP,
            vocabulary_size=(entry.get("meta") or {}).get("n_vocab"),
            parameters=(entry.get("meta") or {}).get("n_params"),
            limits_tokens=False,
            drawn=drawn,
        )

    def tokenize(self, server: Connection, model: str, text: str) -> list[int]:
        body = {"content": text, "add_special": False, "parse_special": False}
        return [int(token) for token in server.post("/tokenize", body)["tokens"]]

    def evaluate(self, server: Connection, facts: ServerFacts, prompts: Sequence[Prompt]) -> None:
        # ask for the likeliest tokens, without and with biases on given tokens
        asking = [prompt for prompt in prompts if prompt.given]
        biases = _biases(set().union(*(prompt.given for prompt in asking)), facts.drawn)
        top = max(2, *(prompt.top for prompt in prompts)) + len(biases)
        bodies = [_listing(prompts, top, facts.drawn)]
        if asking:
            bodies.append(_biased(asking, biases))
        plain, *biased = server.post_all(PATH, bodies)
        # read both answers
        for prompt, answer in zip(prompts, _ordered(plain), strict=True):
            prompt.listed = _listed(answer)
        for prompt, answer in zip(asking, *map(_ordered, biased), strict=True):
            chances = _after_biases(answer)
            prompt.logprobs = unbiased(chances, biases, prompt.listed) | prompt.listed
        # list all tokens for prompts with given tokens that are too unlikely even with a bias
        lacking = [prompt for prompt in asking if prompt.given - prompt.logprobs.keys()]
        if lacking:
            top = facts.vocabulary_size or WHOLE
            answers = server.post(PATH, _listing(lacking, top, facts.drawn))
            for prompt, answer in zip(lacking, _ordered(answers), strict=True):
                prompt.logprobs = dict.fromkeys(prompt.given, -math.inf) | _listed(answer)


def unbiased(
    chances: Mapping[int, float], biases: Mapping[int, float], plain: Mapping[int, float]
) -> dict[int, float]:
    """Return log-probabilities of biased tokens as they would be without biases.

    Args:
        chances: probabilities q of the likeliest tokens with the biases, the likeliest first.
        biases: bias b of each biased token, in nats.
        plain: log p of the likeliest tokens without biases.
    """
    known = {token: math.log(chance) for token, chance in chances.items() if chance > LEAST}
    # log p(t) = z(t) - Z and log q(t) = z(t) + b(t) - Z', so a token without a bias gives Z' - Z
    u = next((token for token in known if token not in biases and token in plain), None)
    if u is None:
        return {}
    return {t: known[t] - biases[t] + plain[u] - known[u] for t in known if t in biases}


def _check_biases(server: Connection, drawn: int) -> None:
    # some versions of llama.cpp ignore biases, or also apply them to other calls or plain listings
    prompt = Prompt((1, 2, 3))
    listing = _listing([prompt], PROBED, drawn)
    plain = _listed(server.post(PATH, listing))
    biases = _biases(list(plain)[:2], drawn)
    chances = _after_biases(server.post(PATH, _biased([prompt], biases)))
    computed = unbiased(chances, biases, plain)
    again = _listed(server.post(PATH, listing))
    if not all(
        math.isclose(logprobs.get(token, math.inf), plain[token], abs_tol=BIAS_TOLERANCE)
        for logprobs, tokens in ((computed, list(plain)[:2]), (again, list(plain)[: PROBED // 2]))
        for token in tokens
    ):
        raise server.error(
            "its biases of tokens (logit_bias) do not work, so the probabilities of given tokens "
            "are not known. Use another version of llama.cpp"
        )


def _biases(given: Iterable[int], drawn: int) -> dict[int, float]:
    return {**dict.fromkeys(given, BIAS), drawn: DRAWN_BIAS}


def _listing(prompts: Sequence[Prompt], top: int, drawn: int) -> dict[str, Any]:
    return {
        "prompt": [list(prompt.ids) for prompt in prompts],
        "n_predict": 1,
        "cache_prompt": True,
        "samplers": [],
        "temperature": 1.0,
        "logit_bias": [[drawn, DRAWN_BIAS]],
        "n_probs": top,
        "post_sampling_probs": False,
    }


def _biased(prompts: Sequence[Prompt], biases: Mapping[int, float]) -> dict[str, Any]:
    of_biases = {"logit_bias": [*map(list, biases.items())], "post_sampling_probs": True}
    return {**_listing(prompts, len(biases) + 1, 0), **of_biases}


def _ordered(answer: Any) -> list[Any]:
    # the answer to a single prompt is not in a list
    return sorted(answer if isinstance(answer, list) else [answer], key=lambda one: one["index"])


def _listed(answer: Any) -> dict[int, float]:
    (first,) = answer["completion_probabilities"]
    return {token["id"]: finite(token["logprob"]) for token in first["top_logprobs"]}


def _after_biases(answer: Any) -> dict[int, float]:
    # the list is missing if the server drew a part of a character
    (first,) = answer.get("completion_probabilities") or [{"top_probs": ()}]
    return {token["id"]: token["prob"] for token in first["top_probs"]}
