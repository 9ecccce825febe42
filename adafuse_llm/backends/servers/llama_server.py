"""The API of llama.cpp's server (``llama-server``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from adafuse_llm.backends.servers.api import (
    WANTED_TOP,
    Known,
    Prompt,
    ServerFacts,
    chosen_model,
    together,
)
from adafuse_llm.backends.servers.connection import Connection

BIAS: Final = 40.0
"""What is added to the logits of given tokens, so that they are among the likeliest.

It is below the logarithm of the largest float32, which is 88.
"""

DRAWN_TEXT: Final = " the"
"""Text whose last token the server draws in every call. It is likely in most places."""

DRAWN_BIAS: Final = 75.0
"""What is added to the logit of the token to draw, so that it is likelier than those with `BIAS`.

A float32 can still represent the probabilities of tokens without a bias, except of very rare ones.
"""

LEAST: Final = 1e-37
"""Smallest probability after a bias that is used. Those below 1.2e-38 are imprecise in float32."""

WHOLE: Final = 2**20
"""Number of likeliest tokens that no vocabulary exceeds."""

PROBED: Final = 8
BIAS_TOLERANCE: Final = 0.01
"""Number of likeliest tokens whose log-probabilities are compared, and their maximum difference."""

_COMMON: Final = {"n_predict": 1, "cache_prompt": True, "samplers": [], "temperature": 1.0}


class LlamaServerApi:
    """The API of llama-server.

    The server has no parameter for the log-probabilities of given tokens. So a second call, which
    runs at the same time as the first, adds `BIAS` to their logits and lists the likeliest tokens
    after this change. The likeliest token without a bias is in both lists, so that the ratio of the
    probabilities in the second list gives the probabilities without a bias. Tokens that are too
    unlikely for the second list are read from a list of the whole vocabulary.

    The server draws a token at random, and returns no list if this token ends within a character.
    So all calls have a bias by which it draws a token of whole characters. The first list does not
    show it, because it is that before sampling.
    """

    def facts(self, server: Connection, model: str | None) -> ServerFacts:
        found = chosen_model(server, (server.find("/v1/models") or {}).get("data", ()), model)
        told = server.find("/props") or {}
        length = told.get("default_generation_settings", {}).get("n_ctx")
        drawn = self.tokenize(server, found["id"], DRAWN_TEXT)[-1]
        self._check_biases(server, drawn)
        return ServerFacts(
            model=found["id"],
            source=told.get("model_path"),
            version=f"llama-server {told.get('build_info', 'of unknown build')}",
            window=None if not length else length - 1,
            listed_limit=WANTED_TOP,
            vocabulary=(found.get("meta") or {}).get("n_vocab"),
            parameters=(found.get("meta") or {}).get("n_params"),
            limits_tokens=False,
            drawn=drawn,
        )

    def tokenize(self, server: Connection, model: str, text: str) -> list[int]:
        body = {"content": text, "add_special": False, "parse_special": False}
        return [int(token) for token in server.post("/tokenize", body)["tokens"]]

    def evaluate(
        self, server: Connection, facts: ServerFacts, prompts: Sequence[Prompt]
    ) -> list[Known]:
        asking = [(number, prompt) for number, prompt in enumerate(prompts) if prompt.given]
        biases = _biases(facts.drawn, together(asking))
        top = max(2, *(prompt.top for prompt in prompts)) + len(biases)
        bodies = [_listing(prompts, top, facts.drawn)]
        if asking:
            bodies.append(_biased([prompt for _, prompt in asking], biases))
        plain, *biased = server.post_all("/completion", bodies)
        known = [Known(_listed(each)) for each in _ordered(plain)]
        if biased:
            for (number, prompt), answer in zip(asking, _ordered(biased[0]), strict=True):
                changed = _changed(answer, biases, known[number].listed)
                changed |= known[number].listed
                known[number].given = {t: changed[t] for t in prompt.given if t in changed}
        lacking = [(n, prompt) for n, prompt in asking if prompt.given - known[n].given.keys()]
        if lacking:
            size = facts.vocabulary or WHOLE
            body = _listing([prompt for _, prompt in lacking], size, facts.drawn)
            answer = server.post("/completion", body)
            for (number, prompt), each in zip(lacking, _ordered(answer), strict=True):
                every = _listed(each)
                known[number].given = {t: every.get(t, -math.inf) for t in prompt.given}
        return known

    def _check_biases(self, server: Connection, drawn: int) -> None:
        """Check that a bias changes the probabilities in its own call, and in no other call.

        It must not change the likeliest tokens before sampling either.

        Raises:
            MemberError: it does not. Some versions of llama.cpp have such faults.
        """
        prompt = Prompt((1, 2, 3))
        listing = _listing([prompt], PROBED, drawn)
        plain = _listed(server.post("/completion", listing))
        given = list(plain)[:2]
        biases = _biases(drawn, given)
        changed = _changed(server.post("/completion", _biased([prompt], biases)), biases, plain)
        again = _listed(server.post("/completion", listing))
        if not all(
            math.isclose(found.get(token, math.inf), plain[token], abs_tol=BIAS_TOLERANCE)
            for found, tokens in ((changed, given), (again, list(plain)[: PROBED // 2]))
            for token in tokens
        ):
            raise server.error(
                "its biases of tokens (logit_bias) do not work, so the probabilities of given "
                "tokens are not known. Use another version of llama.cpp"
            )


def _biases(drawn: int, given: Sequence[int]) -> dict[int, float]:
    """Return what is added to the logits of given tokens and of the token to draw."""
    return {**dict.fromkeys(given, BIAS), drawn: DRAWN_BIAS}


def _listing(prompts: Sequence[Prompt], top: int, drawn: int) -> dict[str, Any]:
    """Return a request for the likeliest tokens, from the logits as they are."""
    return {
        **_COMMON,
        "prompt": [list(prompt.ids) for prompt in prompts],
        "n_probs": top,
        "post_sampling_probs": False,
        "logit_bias": [[drawn, DRAWN_BIAS]],
    }


def _biased(prompts: Sequence[Prompt], biases: dict[int, float]) -> dict[str, Any]:
    """Return a request for the likeliest tokens after biases."""
    return {
        **_COMMON,
        "prompt": [list(prompt.ids) for prompt in prompts],
        "n_probs": len(biases) + 1,
        "post_sampling_probs": True,
        "logit_bias": [list(bias) for bias in biases.items()],
    }


def _ordered(answer: Any) -> list[Any]:
    """Return the answers to the prompts of a call, in order. That to one prompt is no list."""
    return sorted(answer if isinstance(answer, list) else [answer], key=lambda each: each["index"])


def _listed(answer: Any) -> dict[int, float]:
    (first,) = answer["completion_probabilities"]
    return {each["id"]: each["logprob"] for each in first["top_logprobs"]}


def _changed(answer: Any, biases: dict[int, float], plain: dict[int, float]) -> dict[int, float]:
    """Return the log-probabilities of biased tokens without their biases, by token id.

    The result is empty if the server drew another token, which ends within a character, or if no
    token without a bias has a probability above `LEAST`.
    """
    (first,) = answer.get("completion_probabilities") or [{"top_probs": ()}]
    chances = {each["id"]: each["prob"] for each in first["top_probs"] if each["prob"] > LEAST}
    base = next((token for token in chances if token not in biases and token in plain), None)
    if base is None:
        return {}
    shift = plain[base] - math.log(chances[base])
    return {t: math.log(chances[t]) + shift - biases[t] for t in chances if t in biases}
