"""Decoding options that users pass as keywords, under the names that frameworks use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adafuse_llm.config import AdaFuseConfig, hint
from adafuse_llm.errors import InvalidOptionError

ALIASES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}

NULLABLE = ("weights", "use")
"""Options for which None is a valid value."""


def check_option_names(given: Mapping[str, Any], *, extra: Iterable[str] = ()) -> dict[str, Any]:
    """Return `given` with aliases replaced by the engine's option names.

    Options with the value None are dropped, except those in `NULLABLE`. The engine checks the
    values.

    Args:
        given: options of `AdaFuseConfig`, ``temperature``, or keywords in `ALIASES`.
        extra: other accepted keywords, returned unchanged.

    Raises:
        TypeError: a keyword is unknown.
        InvalidOptionError: two names of the same option have different values.
    """
    extra = tuple(extra)
    options = (*AdaFuseConfig.model_fields, "temperature")
    checked: dict[str, Any] = {}
    keywords: dict[str, str] = {}  # maps options to their keywords in `given`
    for keyword, value in given.items():
        option = keyword if keyword in extra else ALIASES.get(keyword, keyword)
        if option not in (*options, *extra):
            allowed = list(dict.fromkeys((*options, *ALIASES, *extra)))
            raise TypeError(
                f"unknown option {keyword!r}.{hint(keyword, allowed)} The options are: "
                f"{', '.join(allowed)}."
            )
        if value is None and option not in (*NULLABLE, *extra):
            continue
        if option in checked and checked[option] != value:
            raise InvalidOptionError(
                f"{keywords[option]}={checked[option]!r} and {keyword}={value!r} are the same "
                "option; pass only one of them"
            )
        checked[option], keywords[option] = value, keyword
    return checked
