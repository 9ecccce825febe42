"""Options that users pass as keywords, under the names that frameworks use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adafuse_llm.config import AdaFuseConfig, advice
from adafuse_llm.errors import InvalidOptionError, nearest
from adafuse_llm.loading.specs import SETTINGS

ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "num_predict": "max_new_tokens",  # Ollama
    "num_return_sequences": "n",  # transformers
    "stop_sequences": "stop",
}

NULLABLE = ("weights", "use")
"""Options for which None is a valid value."""

USE_SERVER = "to use a server, pass engine=RemoteEngine(url) (from adafuse_llm)"
"""What to do with the address of a server."""

USE_MEMBERS = (
    "pass members=[...], a list of folders, GGUF files or hub ids, to load models, and "
    "use=[...] to choose among them"
)

INSTEAD = {
    **dict.fromkeys(
        ("llm", "model", "models", "model_id", "model_name", "model_path"), USE_MEMBERS
    ),
    **dict.fromkeys(("api_base", "base_url", "openai_api_base"), USE_SERVER),
    "do_sample": "pass temperature; at 0, nothing is drawn",
    "format": "pass json_schema=..., or call with_structured_output",
    "num_ctx": "members have their own windows; a GGUF member has the setting 'context'",
    "keep_alive": "members stay loaded until unload() or the end of the program",
    "reasoning": "pass chat_template_kwargs, such as {'enable_thinking': False}",
}
"""Keywords of other libraries, and what to do instead."""

SIMILARITY = 0.7
"""Lowest similarity of a suggested option. With 0.6, ``stop`` would be suggested for ``top_p``."""


def check_option_names(given: Mapping[str, Any], *, extra: Iterable[str] = ()) -> dict[str, Any]:
    """Return `given` with aliases replaced by the engine's option names.

    Options with the value None are dropped, except those in `NULLABLE`. The engine checks the other
    values.

    Args:
        given: options of `AdaFuseConfig`, and keywords in `ALIASES`.
        extra: other accepted keywords, returned unchanged.

    Raises:
        InvalidOptionError: a keyword is unknown, or two names of the same option have different
            values.
    """
    extra = tuple(extra)
    options = (*AdaFuseConfig.model_fields, *extra)
    checked: dict[str, Any] = {}
    keywords: dict[str, str] = {}  # maps options to their keywords in `given`
    for keyword, value in given.items():
        option = keyword if keyword in extra else ALIASES.get(keyword, keyword)
        if value is None and option not in (*NULLABLE, *extra):
            continue
        if option not in options:
            raise InvalidOptionError(f"unknown option {keyword!r}.{_advice(keyword, options)}")
        if option != keyword:
            _check_alias(keyword, option, value)
        if option in checked and checked[option] != value:
            raise InvalidOptionError(
                f"{keywords[option]}={checked[option]!r} and {keyword}={value!r} are the same "
                "option; pass only one of them"
            )
        checked[option], keywords[option] = value, keyword
    return checked


def _check_alias(keyword: str, option: str, value: Any) -> None:
    """Check a value under the name that the user knows."""
    try:
        AdaFuseConfig(**{option: value})
    except InvalidOptionError as error:
        raise InvalidOptionError(str(error).replace(repr(option), repr(keyword))) from None


def _advice(keyword: str, options: tuple[str, ...]) -> str:
    """Return what to use in place of an unknown option, as a sentence after a space."""
    if keyword in INSTEAD:
        return f" It does not exist here: {INSTEAD[keyword]}."
    if keyword in SETTINGS:
        return f" It is a setting of a member: members=[{{'path': ..., {keyword!r}: ...}}]."
    allowed = list(dict.fromkeys((*AdaFuseConfig.model_fields, *ALIASES, *options)))
    return (
        advice(keyword, ())
        or nearest(keyword, allowed, limit=3, similarity=SIMILARITY)
        or f" The options of decoding are: {', '.join(AdaFuseConfig.model_fields)}."
    )
