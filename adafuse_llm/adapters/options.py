"""Options of decoding that are given with a call, under the names that frameworks use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adafuse_llm.config import AdaFuseConfig, hint
from adafuse_llm.errors import InvalidOptionError

ALIASES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}

NULLABLE = ("weights", "use")
"""Options of which None is a value."""


def check_option_names(given: Mapping[str, Any], *, also: Iterable[str] = ()) -> dict[str, Any]:
    """Options for a call of `AdaFuseEngine`; None stands for one that was not given, but for those
    of which it is a value (weights, use). Values are checked by the engine.

    Args:
        given: keywords: options of `AdaFuseConfig`, ``temperature``, or one of `ALIASES`.
        also: keywords that are the caller's own; they are returned as given.

    Raises:
        TypeError: a keyword is none of these.
        InvalidOptionError: an option is given twice under different names, with different values.
    """
    also = tuple(also)
    options = (*AdaFuseConfig.model_fields, "temperature")
    checked: dict[str, Any] = {}
    said: dict[str, str] = {}  # option to the keyword it was given as
    for keyword, value in given.items():
        option = keyword if keyword in also else ALIASES.get(keyword, keyword)
        if option not in (*options, *also):
            allowed = [*options, *ALIASES, *also]
            raise TypeError(
                f"unknown option {keyword!r}.{hint(keyword, allowed)} The options are: "
                f"{', '.join(allowed)}."
            )
        if value is None and option not in (*NULLABLE, *also):
            continue
        if option in checked and checked[option] != value:
            raise InvalidOptionError(
                f"{said[option]}={checked[option]!r} and {keyword}={value!r} are the same option; "
                "leave one of them out"
            )
        checked[option], said[option] = value, keyword
    return checked
