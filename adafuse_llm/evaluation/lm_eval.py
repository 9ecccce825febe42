r"""Use the engine as a model in all tasks of lm-evaluation-harness.

Importing this module registers the model "adafuse". Running the module starts the command line of
the harness with this model:

    python -m adafuse_llm.evaluation.lm_eval run --model adafuse \
        --model_args "models=path/one;path/two,max_words=3" --tasks gsm8k --batch_size 16

The log-likelihood of the ensemble is the weighted mean of the members' log-likelihoods of the whole
continuation in nats, as in equation 5. It equals the logarithm of a weighted geometric mean of the
members' probabilities. It is not the fused score F: that is a mean per token, and members split the
same text into different numbers of tokens. Members that cannot write exactly the continuation do
not count. If no member can write it, the log-likelihood is minus infinity.

`is_greedy` is true if the ensemble's response to the context, without sampling, begins with the
continuation (except for leading whitespace). The ensemble must decode the response, because scores
do not determine it: a round may reject a token that is the most likely one for every member.

If a context is too long for a member, the first words of the context are left out, with a warning.
With ``--apply_chat_template``, every member gets the whole conversation, in its own template.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from adafuse_llm.config import FREE_TOKENS, NO_LIMIT
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import (
    InvalidInputError,
    MissingDependencyError,
    RequestCancelledError,
    install_command,
)
from adafuse_llm.evaluation.parallel import in_order
from adafuse_llm.loading.config_file import ConfigFile, read_config
from adafuse_llm.tree.sampling import derived_seed

__all__ = ["AdaFuseLM"]

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as missing:
    raise MissingDependencyError(
        f"this module needs lm-evaluation-harness: {install_command('eval')}"
    ) from missing

logger = logging.getLogger(__name__)

CONVERSATION = "\x02adafuse messages\x03"
"""Prefix that marks a prompt as a conversation in JSON. The harness passes prompts as text."""


@register_model("adafuse")
class AdaFuseLM(LM):  # type: ignore[misc]
    """An ensemble as a model of lm-evaluation-harness.

    Args:
        engine: a loaded ensemble.
        config: path of a configuration file (`adafuse_llm.loading.config_file`). Default: the
            embedded members.
        batch_size: maximum number of simultaneous requests. "auto" stands for 16.
        device: the device of all members. Ignored with a `device_map`; "cuda" also without a GPU.
        trust_remote_code: as for `AdaFuseEngine.from_pretrained`.
        check_greedy: whether to compute `is_greedy`, which costs a round or more per context, and
            is otherwise always False. Multiple-choice tasks do not use it.
        **options: entries of a configuration file, such as ``models``, ``strategy``, ``dtype`` or
            ``max_words``; with an engine, only options of `AdaFuseConfig`. They override `config`.
            If ``models``, ``use`` or ``weights`` is a text, ";" separates its values.

    Raises:
        InvalidOptionError: an option is unknown or cannot be used.
        LoadError: a member cannot be loaded.
    """

    def __init__(
        self,
        engine: AdaFuseEngine | None = None,
        *,
        config: str | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        trust_remote_code: bool = False,
        check_greedy: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        if (device or "").startswith("cuda") and not torch.cuda.is_available():
            device = None  # "cuda:0" is the harness's default
        for name in ("models", "use", "weights"):
            if isinstance(options.get(name), str):
                options[name] = tuple(options[name].split(";"))
        self.requests = 16 if str(batch_size).startswith("auto") else int(batch_size)
        self.check_greedy = check_greedy
        self._cancel = threading.Event()  # Ctrl-C sets it
        self.options = options if engine is not None else {}
        if engine is not None:
            if config is not None:
                raise InvalidInputError("pass either a loaded engine, or a configuration file")
            engine.config.override(options)  # refuse unknown options at once
            self.engine = engine
            return
        file = ConfigFile() if config is None else read_config(config)
        given = {name: getattr(file, name) for name in file.model_fields_set}
        file = ConfigFile(**{"device_map": device, **given, **options})
        self.engine = AdaFuseEngine.from_pretrained(
            file.members,
            config=file.config,
            runtime=file.runtime.model_copy(update={"max_requests": self.requests}),
            trust_remote_code=trust_remote_code,
            **file.loading,
        )

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the response to each ``(context, options)``, without reasoning.

        With sampling, the seed of a response depends on the option ``seed`` (or the seed that the
        harness gave to torch), on the context, and on the number of equal requests before it.
        """

        def respond(numbered: tuple[Any, int]) -> str:
            request, repeat = numbered
            context, arguments = request.args
            options = {**self.options, **generation_options(arguments)}
            config = self.engine.config.override(options)
            if config.temperature > 0:
                seed = torch.initial_seed() if config.seed is None else config.seed
                options["seed"] = derived_seed(seed, f"repeat {repeat} of {context}")
            is_open = config.max_new_tokens == NO_LIMIT
            prompt = self._prompt(context, FREE_TOKENS if is_open else config.most_tokens())
            done = self.engine.generate(**{**options, **prompt}, cancel=self._cancel)
            if done.finish_reason == "cancelled":
                raise RequestCancelledError("the request was cancelled before its end")
            text = done.answer
            self.cache_hook.add_partial("generate_until", request.args, text)
            return text

        seen: Counter[str] = Counter()
        numbered = []
        for request in requests:
            key = repr(request.args)
            numbered.append((request, seen[key]))
            seen[key] += 1
        return list(self._all(respond, numbered, "responses", disable_tqdm))

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return a log-likelihood in nats and `is_greedy` for every ``(context, continuation)``."""
        by_context: dict[str, list[str]] = {}
        for request in requests:
            by_context.setdefault(request.args[0], []).append(request.args[1])

        def score(item: tuple[str, list[str]]) -> list[tuple[tuple[str, str], Any]]:
            context, texts = item
            likelihoods, greedy = self._loglikelihoods(*item), self._are_greedy(*item)
            scores = zip(likelihoods, greedy, strict=True)
            return [((context, text), each) for text, each in zip(texts, scores, strict=True)]

        results = {}
        for scores in self._all(score, [*by_context.items()], "contexts", disable_tqdm):
            for key, result in scores:
                results[key] = result
                self.cache_hook.add_partial("loglikelihood", key, result)
        return [results[request.args[:2]] for request in requests]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:  # noqa: ARG002
        """Refuse a task that measures perplexity, because an ensemble has none."""
        raise InvalidInputError(
            "an ensemble has no perplexity: the weighted means of its members' log-likelihoods are "
            "those of no probability distribution. Measure each member alone with the harness's "
            "own models."
        )

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as JSON after `CONVERSATION`. Members' own templates format it."""
        continues = {} if add_generation_prompt else {"continue_final_message": True}
        return CONVERSATION + json.dumps({"messages": chat_history, **continues})

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return what the harness records about the chat template."""
        if isinstance(chat_template, str):
            raise InvalidInputError(
                "a chat template cannot be chosen: every member uses its own; got "
                f"{chat_template!r}"
            )
        return "each member's own"

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness caches prompts for this ensemble."""
        return "adafuse:" + ",".join(self.engine.members)

    def _all(
        self, function: Any, items: Sequence[Any], unit: str, disable_tqdm: bool
    ) -> Iterator[Any]:
        self._cancel.clear()
        results = in_order(function, items, self.requests, self._cancel)
        yield from tqdm(results, total=len(items), unit=f" {unit}", disable=disable_tqdm)

    def _loglikelihoods(self, context: str, continuations: Sequence[str]) -> list[float]:
        room = max(map(self._tokens, continuations))
        prompt = self._prompt(context, room)
        given = {**self.options, **prompt, "cancel": self._cancel}
        scores = self.engine.score(continuations=continuations, **given).texts
        for each in scores:
            if each.loglikelihood is None:
                logger.warning("no member can write %r after the context", each.text[:80])
        known = (each.loglikelihood for each in scores)
        return [-math.inf if each is None else each for each in known]

    def _are_greedy(self, context: str, continuations: Sequence[str]) -> list[bool]:
        if not self.check_greedy or not context.strip():
            return [False] * len(continuations)
        room = max(map(self._tokens, continuations)) + 1
        prompt = self._prompt(context, room)
        options = {**self.options, "stop": (), "max_new_tokens": room, "temperature": 0.0}
        response, wanted = "", [each.lstrip() for each in continuations]
        for event in self.engine.stream(**{**options, **prompt}, cancel=self._cancel):
            response = (response + event.text).lstrip()
            if not any(each.startswith(response) and each != response for each in wanted):
                break
        return [bool(each) and response.startswith(each) for each in wanted]

    def _prompt(self, context: str, room: int) -> dict[str, Any]:
        """Return the arguments for a context. Cut a text so that `room` more tokens fit."""
        if not context.startswith(CONVERSATION):
            return {"prompt": self._shortened(context, room)}
        text = context.removeprefix(CONVERSATION)
        request, end = json.JSONDecoder().raw_decode(text)
        beginning = text[end:]
        if not beginning.strip():
            return dict(request)
        *messages, last = request["messages"]  # the harness has added the beginning of a reply
        if "continue_final_message" in request:
            last = {**last, "content": last["content"] + beginning}
        else:
            messages, last = [*messages, last], {"role": "assistant", "content": beginning}
        return {"messages": [*messages, last], "continue_final_message": True}

    def _shortened(self, context: str, room: int) -> str:
        if self._fits(context, room):
            return context
        starts = [*(match.start() for match in re.finditer(r"\S+", context)), len(context)]
        first = bisect_left(starts, True, key=lambda start: self._fits(context[start:], room))
        kept = context[starts[min(first, len(starts) - 1)] :]
        text = "a context of %d characters is too long; only the last %d are used"
        logger.warning(text, len(context), len(kept))
        return kept

    def _fits(self, context: str, room: int) -> bool:
        return all(
            backend.context_window is None
            or len(backend.codec.encode_prompt(context)) + room < backend.context_window
            for backend in self.engine.backends
        )

    def _tokens(self, text: str) -> int:
        """Return a continuation's number of tokens for the member that needs the most."""
        return max(
            len(backend.codec.encode_continuation((), text)[0]) for backend in self.engine.backends
        )


def generation_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert generation options of the harness to options of `AdaFuseConfig`.

    The rules are those of the harness's own Hugging Face model: responses are drawn only with a
    temperature above 0, or with ``do_sample=True``, which sets the default temperature to 1.
    """
    named = {name: value for name, value in given.items() if value is not None}
    rest: dict[str, Any] = dict(normalize_gen_kwargs(named, default_max_gen_toks=0))
    options: dict[str, Any] = {"stop": tuple(filter(None, rest.pop("until")))}
    if length := rest.pop("max_gen_toks"):
        options["max_new_tokens"] = length
    if rest.get("num_beams") == 1:
        del rest["num_beams"]
    temperature = rest.pop("temperature", 1.0)
    return {**options, "temperature": temperature if rest.pop("do_sample") else 0.0, **rest}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
