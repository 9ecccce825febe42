"""Options that users pass as keywords, under the names that frameworks and providers use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.errors import InvalidOptionError, nearest, short_repr
from adafuse_llm.option_errors import NOT_SUPPORTED as OF_OTHERS
from adafuse_llm.option_errors import hint

logger = logging.getLogger(__name__)

ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "num_predict": "max_new_tokens",  # Ollama
    "num_return_sequences": "n",  # transformers
    "stop_sequences": "stop",
}

NULLABLE = ("weights", "use")
"""Options for which None is a valid value."""

NO_EFFECT = ("api_key", "max_retries", "reuse_client")
"""Options of a connection that are accepted and dropped. No value of them affects a response."""

CHOOSES_MODELS = ("llm", "model", "model_id", "model_name")
"""Options of other providers that name the model. They are never dropped, because another model
would respond."""

CHOOSES_SERVER = ("api_base", "base_url", "openai_api_base")
"""Options of other providers that name the server. They are never dropped, because local members
would respond."""

USE_SERVER = "to use a server, pass engine=RemoteEngine(url) (from adafuse_llm)"
"""What to do with the address of a server."""

MEMBER_SETTINGS = {
    "cache_type": "cache_type",
    "context": "context",
    "end_tokens": "end_tokens",
    "file": "file",
    "flash_attention": "flash_attention",
    "gpu_layers": "gpu_layers",
    "repeatable": "repeatable",
    "threads": "threads",
    # of llama-cpp-python:
    "flash_attn": "flash_attention",
    "model_path": "path",
    "n_ctx": "context",
    "n_gpu_layers": "gpu_layers",
    "n_threads": "threads",
}
"""Unknown options, and the setting of `MemberSpec` that takes their place."""

SIMILARITY = 0.7
"""Lowest similarity of a suggested option. With 0.6, ``stop`` would be suggested for ``top_p``."""

Unsupported = Literal["error", "warn"]
"""What happens to an option in `REFUSED`: it is an error, or it is dropped with a warning."""

NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class Refusal:
    """Why an option of another provider is refused.

    Attributes:
        why: the rest of a sentence that begins with the option.
        neutral: values that are accepted, because they change nothing. None and empty texts,
            lists and dicts are always neutral.
    """

    why: str
    neutral: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Return whether a value changes nothing."""
        if value is None or (isinstance(value, (str, Mapping, list, tuple)) and not value):
            return True
        return isinstance(value, (str, list, dict, *NUMBERS)) and value in self.neutral


def _refusals(why: str, *names: str, **neutral: Any) -> dict[str, Refusal]:
    """Refuse options for the same reason: `names`, and keywords with their neutral value."""
    return {
        **{name: Refusal(why) for name in names},
        **{name: Refusal(why, (value,)) for name, value in neutral.items()},
    }


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "early_stopping": (False,),
    "length_penalty": (1,),
    "num_beams": (1,),
    "typical_p": (1,),
}
"""Values of transformers' options that change nothing."""

NOT_SUPPORTED = "is not supported"
NO_SERVER = "has no meaning here, because this class does not connect to a server"
NESTED = "is not supported: pass each option in it as a keyword argument of its own"
TOKENIZERS = "has no meaning here, because every member uses its own tokenizer"
JSON_FORM = "is not supported: pass json_schema, or request structured output from the framework"
TEMPLATE = (
    "is not supported: pass the variable of the members' chat templates in chat_template_kwargs"
)
STORES = "has no meaning here, because nothing is stored between calls"
TEXT_ONLY = "is not supported: the members read and write text only"
ENFORCE = "is not supported: pass enforce to choose whether tool calls and objects are enforced"
TOOLS = "is not supported: pass tools and tool_choice"

REFUSED: dict[str, Refusal] = {
    **_refusals(
        NOT_SUPPORTED,
        *("mirostat_eta", "mirostat_tau", "moderation", "prediction", "web_search_options"),
        mirostat=0,
        repeat_last_n=0,
        tfs_z=1,
    ),
    **{
        name: Refusal(f"is not supported: {reason}", NEUTRAL.get(name, ()))
        for name, reason in OF_OTHERS.items()
    },
    **_refusals(
        "is not supported, because it would also count the prompt's tokens: pass min_new_tokens",
        min_length=0,
    ),
    **_refusals(
        "is not supported, because it covers the last tokens only: pass repetition_penalty",
        repeat_penalty=1,
    ),
    **_refusals(
        NO_SERVER,
        *("api_version", "async_client", "async_client_kwargs", "async_http_client"),
        *("async_openai_client", "client", "client_kwargs", "default_headers", "default_query"),
        *("disabled_params", "extra_headers", "extra_query", "http_async_client", "http_client"),
        *("http_socket_options", "openai_api_key", "openai_client", "openai_organization"),
        *("openai_proxy", "organization", "root_async_client", "root_client", "safety_identifier"),
        *("service_tier", "stream_chunk_timeout", "sync_client_kwargs", "user"),
        include_response_headers=False,
        use_responses_api=False,
    ),
    **_refusals(
        NESTED,
        *("additional_kwargs", "extra_body", "generate_kwargs", "options", "pipeline_kwargs"),
    ),
    **_refusals(
        TOKENIZERS,
        *("tiktoken_model_name", "tokenizer", "tokenizer_kwargs", "tokenizer_name"),
        "tokenizer_outputs_to_remove",
    ),
    **_refusals(
        STORES,
        *("context_management", "previous_response_id", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention"),
        store=False,
        use_previous_response_id=False,
    ),
    **_refusals(JSON_FORM, "format", "response_format"),
    **_refusals(TEMPLATE, "reasoning", "reasoning_effort", "verbosity"),
    **_refusals(TEXT_ONLY, "audio", "audio_config", modalities=["text"]),
    **_refusals(
        ENFORCE, "is_function_calling_model", strict=False, should_use_structured_outputs=False
    ),
    **_refusals(TOOLS, "function_call", "functions"),
    "include": Refusal("is not supported: responses contain all that is known about them"),
    "keep_alive": Refusal(
        "is not supported: the members stay loaded until unload() is called", neutral=(-1,)
    ),
    "max_length": Refusal(
        "is not supported, because it would also count the prompt's tokens: pass max_new_tokens"
    ),
    "model_kwargs": Refusal(
        "is not supported: pass options of decoding as keyword arguments, and options for loading "
        "a model in its MemberSpec"
    ),
    "num_ctx": Refusal(
        "is not supported: for a GGUF member, pass MemberSpec(path=..., context=...); transformers "
        "models have context windows of their own"
    ),
    "num_gpu": Refusal(
        "is not supported: pass device_map to place transformers models, or for a GGUF member "
        "MemberSpec(path=..., gpu_layers=...)"
    ),
    "num_thread": Refusal(
        "is not supported: call torch.set_num_threads, or for a GGUF member, pass "
        "MemberSpec(path=..., threads=...)"
    ),
    "request_timeout": Refusal(
        "is not supported under this name: the classes for LangChain have timeout"
    ),
    "skip_prompt": Refusal("is not supported: responses never repeat the prompt", neutral=(True,)),
    "stop_strings": Refusal(
        "is not supported, because it would keep the stop sequence in the text: pass stop, which "
        "removes it"
    ),
    "stopping_ids": Refusal("is not supported, because the members' tokens differ: pass stop"),
    "stream_options": Refusal(
        "is not supported: the last chunk of a stream always has the token counts",
        neutral=({"include_usage": True},),
    ),
    "stream_usage": Refusal(
        "is not supported: the last chunk of a stream always has the token counts", neutral=(True,)
    ),
    "timeout": Refusal("is not supported in this class, so its calls have no time limit"),
    "truncation": Refusal(
        "is not supported: a prompt that is too long is an error", neutral=("disabled",)
    ),
    "validate_model_on_init": Refusal(
        "is not supported: call warmup() to load the members", neutral=(False,)
    ),
}
"""Options of other providers that exist here neither under their name nor under another one."""


def check_option_names(
    given: Mapping[str, Any],
    *,
    extra: Iterable[str] = (),
    unsupported: Unsupported = "error",
    warn: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Return `given` with aliases replaced by the engine's option names.

    Options with the value None are dropped, except those in `NULLABLE`. Options in `NO_EFFECT`,
    and neutral values of options in `REFUSED`, are dropped. ``do_sample=False`` becomes
    ``temperature=0``. The engine checks the other values.

    Args:
        given: options of `AdaFuseConfig`, keywords in `ALIASES`, and options of other providers.
        extra: other accepted keywords, returned unchanged.
        unsupported: ``"error"`` to refuse options in `REFUSED`, ``"warn"`` to drop them.
        warn: function that receives a message about each option that ``unsupported="warn"`` drops.
            The message does not depend on the option's value. Default: a warning of this module's
            logger.

    Raises:
        InvalidOptionError: a keyword is unknown or refused, or two names of the same option have
            different values.
    """
    if unsupported not in ("error", "warn"):
        raise InvalidOptionError(
            f"option 'unsupported' must be 'error' or 'warn'; got {short_repr(unsupported)}"
        )
    extra = tuple(extra)
    options = (*AdaFuseConfig.model_fields, *extra)
    checked: dict[str, Any] = {}
    keywords: dict[str, str] = {}  # maps options to their keywords in `given`
    if "do_sample" in given and "do_sample" not in extra:
        given = _without_do_sample(given)
    for keyword, value in given.items():
        option = keyword if keyword in extra else ALIASES.get(keyword, keyword)
        if option not in options:
            _check_other_provider(keyword, value, options, unsupported, warn or logger.warning)
            continue
        if value is None and option not in (*NULLABLE, *extra):
            continue
        if option in checked and checked[option] != value:
            raise InvalidOptionError(
                f"{keywords[option]}={checked[option]!r} and {keyword}={value!r} are the same "
                "option; pass only one of them"
            )
        checked[option], keywords[option] = value, keyword
    return checked


def _check_other_provider(
    keyword: str,
    value: Any,
    options: tuple[str, ...],
    unsupported: Unsupported,
    warn: Callable[[str], object],
) -> None:
    """Return if a keyword that is no option can be dropped; warn if it would have an effect.

    Raises:
        InvalidOptionError: the keyword is unknown or refused.
    """
    if keyword in CHOOSES_SERVER and value:
        raise InvalidOptionError(f"option {keyword!r} does not exist here: {USE_SERVER}")
    if keyword in CHOOSES_MODELS and value is not None:
        raise InvalidOptionError(
            f"option {keyword!r} does not exist here: pass members=[...], a list of folders, hub "
            "ids or MemberSpec objects, to load models, and use=[...] to choose among them"
        )
    if keyword in (*NO_EFFECT, *CHOOSES_MODELS, *CHOOSES_SERVER):
        return
    if (refusal := REFUSED.get(keyword)) is None:
        raise InvalidOptionError(f"unknown option {keyword!r}.{_advice(keyword, options)}")
    if refusal.accepts(value):
        return
    if unsupported == "error":
        raise InvalidOptionError(
            f"option {keyword!r} {refusal.why}; leave it out, or pass unsupported='warn' to drop it"
        )
    warn(f"option {keyword!r} {refusal.why}; it is dropped")


def _advice(keyword: str, options: tuple[str, ...]) -> str:
    if (setting := MEMBER_SETTINGS.get(keyword)) is not None:
        rest = "" if setting == "path" else f", {setting!r}: ..."
        return f" It is a setting of a member: members=[{{'path': ...{rest}}}]."
    allowed = list(dict.fromkeys((*AdaFuseConfig.model_fields, *ALIASES, *options)))
    return (
        hint(keyword, ())
        or nearest(keyword, allowed, limit=3, similarity=SIMILARITY)
        or f" The options of decoding are: {', '.join(AdaFuseConfig.model_fields)}."
    )


def _without_do_sample(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the option ``do_sample`` of transformers by ``temperature``.

    Raises:
        InvalidOptionError: ``do_sample`` contradicts ``temperature``, or the temperature is
            missing. A default would override the temperature of the model, which is unknown here.
    """
    rest = {name: value for name, value in given.items() if name != "do_sample"}
    do_sample, temperature = given.get("do_sample"), given.get("temperature")
    if do_sample is None:
        return rest
    if not isinstance(do_sample, bool):
        raise InvalidOptionError(
            f"option 'do_sample' must be True or False; got {short_repr(do_sample)}"
        )
    if do_sample and temperature is None:
        raise InvalidOptionError(
            "do_sample=True needs a temperature: pass temperature=1, the default of transformers, "
            "instead"
        )
    if temperature is not None and do_sample == (temperature == 0):
        raise InvalidOptionError(
            f"do_sample={do_sample} contradicts temperature={short_repr(temperature)}; pass only "
            "temperature, which is 0 where nothing is drawn"
        )
    return rest if do_sample else {**rest, "temperature": 0}
