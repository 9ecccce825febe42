r"""The engine as a model of lm-evaluation-harness, so that its whole catalogue of tasks works.

Importing this module registers the model "adafuse"; run as a module, it is the harness's own
command line with that model in it:

    python -m adafuse_llm.evaluation.lm_eval run --model adafuse \
        --model_args "models=path/one;path/two,max_words=3" --tasks gsm8k --batch_size 16

What the harness asks for, and what it gets:

generate_until         the ensemble's response, up to the first stop sequence.
loglikelihood          `ScoredText.loglikelihood`: equation 6 over whole log-likelihoods, the
                       weighted mean over members of each one's log-likelihood of the continuation
                       in nats. It is the log of a weighted geometric mean of the members'
                       probabilities. (F itself is a mean per token, and members cut the same text
                       into different numbers of tokens, so it could not be summed.) Members that
                       cannot write exactly this text are left out of its mean; where none can it is
                       minus infinity.
is_greedy              whether the ensemble, continuing the context by its rounds, writes the
                       continuation: its response begins with it, leading whitespace aside. Another
                       member, or the pool, may overrule a token that is everyone's likeliest, so
                       this is decoded, not read off the scores; decoding ends as soon as the
                       response has parted from all continuations of the context.
loglikelihood_rolling  the sum over pieces of a text, each of half the smallest context window at
                       most and after as much of the text before it as fits. The first comes after
                       the special tokens that a member's prompts begin with, or its
                       end-of-sequence token.

A context that is too long for a member is cut at its beginning, between words, and that is logged.
With ``--apply_chat_template`` every member gets the conversation in its own template.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from adafuse_llm.config import AdaFuseConfig, RuntimeConfig
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, MissingDependencyError
from adafuse_llm.evaluation.runner import in_order
from adafuse_llm.loading.config_file import ConfigFile, read_config

__all__ = ["AdaFuseLM"]

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as missing:
    raise MissingDependencyError(
        'this needs lm-evaluation-harness: pip install "adafuse-llm[eval]"'
    ) from missing

logger = logging.getLogger(__name__)

CONVERSATION = "\x02adafuse messages\x03"
"""Before the JSON of a conversation: the harness passes prompts on as text."""

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The harness's names for `max_new_tokens`."""

OF_SAMPLING = frozenset({"top_p", "top_k", "min_p", "typical_p"})
"""Settings of sampling, which say nothing about decoding without it."""

AUTOMATIC = 16
"""Requests at the same time for a batch size of "auto"."""


@register_model("adafuse")
class AdaFuseLM(LM):  # type: ignore[misc]
    """An ensemble for lm-evaluation-harness.

    Args:
        engine: a loaded ensemble; or
        models: paths or hub ids, in a list or separated by ";". Where nothing names any, the
            embedded members answer.
        config: a configuration file (`adafuse_llm.loading.config_file`); other
            arguments come before it.
        strategy: how loaded members decode, by name; likelihoods do not depend on it.
        batch_size: requests at the same time, which share forward passes; "auto" for 16.
        max_batch_size: the same where `batch_size` is "auto".
        device_map, dtype, revision, trust_remote_code: as for `AdaFuseEngine.from_pretrained`.
        device: what the harness says ("cuda:0" where the user says nothing); where there is no
            `device_map` and torch sees such a device, all members go there.
        check_greedy: whether `is_greedy` is found out, which costs a round or more per context;
            without it, it is always False. Tasks of multiple choice do not look at it.
        **options: of `AdaFuseConfig`; several members or weights separated by ";".

    Raises:
        InvalidOptionError: an option is unknown or cannot be used.
        LoadError: a member cannot be loaded.
    """

    def __init__(
        self,
        engine: AdaFuseEngine | None = None,
        *,
        models: str | Sequence[str] = (),
        config: str | None = None,
        strategy: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        device_map: str | None = None,
        dtype: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        check_greedy: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        options = {name: _typed(name, value) for name, value in options.items()}
        if str(batch_size).startswith("auto"):
            batch_size = max_batch_size or AUTOMATIC
        self.requests = int(batch_size)
        self.check_greedy = check_greedy
        if engine is not None:
            if models or config:
                raise InvalidInputError("pass either a loaded engine, or models or a configuration")
            engine.config.override(options)
            self.engine, self.options = engine, options
            return
        from adafuse_llm.embedded import member_paths

        said = ConfigFile() if config is None else read_config(config)
        paths = models.split(";") if models and isinstance(models, str) else list(models)
        self.options = {}
        self.engine = AdaFuseEngine.from_pretrained(
            paths or said.models or [str(path) for path in member_paths()],
            config=AdaFuseConfig(**{**said.options, **options}),
            strategy=strategy or said.strategy,
            runtime=RuntimeConfig(max_requests=self.requests),
            dtype=dtype or said.dtype,
            device_map=device_map or said.device_map or _present(device),
            revision=revision or said.revision,
            trust_remote_code=trust_remote_code,
        )

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Responses to ``(context, generation options)``, without the stop sequence."""

        def respond(request: Any) -> str:
            context, given = request.args
            options = {**self.options, **generation_options(given)}
            room = self.engine.config.override(options).max_new_tokens
            text = self.engine.generate(**self._asked(context, room), **options).text
            self.cache_hook.add_partial("generate_until", request.args, text)
            return text

        return list(self._all(respond, requests, "responses", disable_tqdm))

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood in nats, and `is_greedy`, of ``(context, continuation)``."""
        by_context: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_context.setdefault(request.args[0], []).append(number)
        found: dict[int, tuple[float, bool]] = {}

        def score(numbers: list[int]) -> list[tuple[float, bool]]:
            context = requests[numbers[0]].args[0]
            continuations = [requests[number].args[1] for number in numbers]
            likely = self._loglikelihoods(context, continuations)
            return list(zip(likely, self._written(context, continuations), strict=True))

        groups = list(by_context.values())
        scored = self._all(score, groups, "contexts", disable_tqdm)
        for numbers, results in zip(groups, scored, strict=True):
            for number, result in zip(numbers, results, strict=True):
                found[number] = result
                self.cache_hook.add_partial("loglikelihood", requests[number].args, result)
        return [found[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of whole texts."""

        def score(request: Any) -> float:
            (text,) = request.args
            total, before = 0.0, ""
            for piece in self._pieces(text):
                total += self._loglikelihoods(before, [piece])[0]
                before += piece
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            return total

        return list(self._all(score, requests, "texts", disable_tqdm))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text that only this model reads: members have different templates.

        Raises:
            InvalidInputError: the last message is to be continued, which members' templates differ
                too much for.
        """
        if not add_generation_prompt:
            raise InvalidInputError(
                "an ensemble cannot continue a message of the assistant in its members' own "
                "templates: leave out gen_prefix, or --apply_chat_template"
            )
        return CONVERSATION + json.dumps(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """What the harness notes about the template."""
        if isinstance(chat_template, str):
            raise InvalidInputError("every member has its own chat template; it cannot be chosen")
        return "each member's own"

    @property
    def tokenizer_name(self) -> str:
        """Tells prompts of this ensemble from others in the harness's caches."""
        return "adafuse:" + ",".join(self.engine.members)

    def _all(
        self, function: Any, items: Sequence[Any], unit: str, disable_tqdm: bool
    ) -> Iterator[Any]:
        results = in_order(function, items, self.requests)
        yield from tqdm(results, total=len(items), unit=f" {unit}", disable=disable_tqdm)

    def _loglikelihoods(self, context: str, continuations: Sequence[str]) -> list[float]:
        room = max(map(self._tokens, continuations))
        asked = self._asked(context, room)
        scores = self.engine.score(**asked, continuations=continuations, **self.options)
        for text in scores.texts:
            if text.loglikelihood is None:
                logger.warning("no member can write %r after its context", text.text[:80])
        return [
            -math.inf if text.loglikelihood is None else text.loglikelihood for text in scores.texts
        ]

    def _written(self, context: str, continuations: Sequence[str]) -> list[bool]:
        """Which continuations the ensemble's own response begins with."""
        if not self.check_greedy or not context.strip():
            return [False] * len(continuations)
        room = max(map(self._tokens, continuations)) + 1
        asked = self._asked(context, room)
        options = {**self.options, "stop": (), "max_new_tokens": room}
        response = ""
        for event in self.engine.stream(**asked, **options):
            response += event.text
            if not any(_is_open(each, response) for each in continuations):
                break
        return [_begins(response, each) for each in continuations]

    def _asked(self, context: str, room: int) -> dict[str, Any]:
        """A prompt, cut so that `room` tokens fit after it, or a conversation."""
        if not context.startswith(CONVERSATION):
            return {"prompt": self._fitting(context, room)}
        text = context.removeprefix(CONVERSATION)
        messages, end = json.JSONDecoder().raw_decode(text)
        if text[end:].strip():
            raise InvalidInputError(
                f"{text[end:]!r} follows the conversation; a reply cannot be begun for members "
                "with different chat templates. Leave out gen_prefix, or --apply_chat_template."
            )
        return {"messages": messages}

    def _fitting(self, context: str, room: int) -> str:
        if self._fits(context, room):
            return context
        starts = [found.start() for found in re.finditer(r"\S+", context)]
        low, high = 0, len(starts)  # the first start that fits; with none of the words it does
        while low < high:
            middle = (low + high) // 2
            if self._fits(context[starts[middle] :], room):
                high = middle
            else:
                low = middle + 1
        kept = context[starts[low] :] if low < len(starts) else ""
        logger.warning(
            "a context of %d characters does not fit; its last %d are kept", len(context), len(kept)
        )
        return kept

    def _fits(self, context: str, room: int) -> bool:
        return all(
            backend.context_window is None
            or len(backend.codec.encode_prompt(context)) + room < backend.context_window
            for backend in self.engine.backends
        )

    def _tokens(self, text: str) -> int:
        """Tokens of a continuation, at the member that needs most."""
        return max(
            len(backend.codec.encode_continuation((), text)[0]) for backend in self.engine.backends
        )

    def _pieces(self, text: str) -> Iterator[str]:
        """A text in pieces of whole words, of half the smallest window at most."""
        window = self.engine.context_window
        limit = math.inf if window is None else window // 2
        piece, tokens = "", 0
        for word in re.findall(r"\s*\S+|\s+$", text):
            more = self._tokens(word) if window is not None else 0
            if piece and tokens + more > limit:
                yield piece
                piece, tokens = "", 0
            piece, tokens = piece + word, tokens + more
        if piece:
            yield piece


def generation_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's generation options as those of `AdaFuseConfig`.

    Raises:
        InvalidOptionError: they ask for sampling, or for what does not exist here.
    """
    left = {name: value for name, value in given.items() if name not in OF_SAMPLING}
    until = left.pop("until", None) or ()
    options: dict[str, Any] = {
        "stop": tuple(each for each in ([until] if isinstance(until, str) else until) if each)
    }
    lengths = [left.pop(name, None) for name in LENGTHS]
    length = next((each for each in lengths if each is not None), None)
    if length is not None:
        options["max_new_tokens"] = int(length)
    if left.pop("do_sample", False):
        raise InvalidOptionError(
            "AdaFuse decoding is deterministic and cannot sample; got do_sample=True. Run the task "
            "with --gen_kwargs do_sample=False,temperature=0"
        )
    left.pop("temperature", None)  # of sampling, which is off
    if left:
        raise InvalidOptionError(
            f"generation options that AdaFuse does not have: {', '.join(sorted(left))}. Allowed: "
            f"until, do_sample=False, {', '.join(LENGTHS)}."
        )
    return options


def _present(device: str | None) -> str | None:
    import torch

    if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
        return None
    return device


def _typed(name: str, value: Any) -> Any:
    """Several values in one text, as the harness's ``--model_args`` have it."""
    if not isinstance(value, str) or name not in ("use", "weights"):
        return value
    parts = value.split(";")
    return tuple(parts) if name == "use" else tuple(map(float, parts))


def _begins(text: str, beginning: str) -> bool:
    """Whether a text begins with another, leading whitespace aside where there is more."""
    if not beginning.strip():
        return text.startswith(beginning)
    return text.lstrip().startswith(beginning.lstrip())


def _is_open(continuation: str, response: str) -> bool:
    """Whether a response may still come to begin with a continuation."""
    if not response.strip():
        return True
    return continuation.lstrip().startswith(response.lstrip()) and response != continuation


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
