"""Decoding options that users pass as keywords, under the names that frameworks use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adafuse_llm.config import AdaFuseConfig, hint
from adafuse_llm.errors import InvalidOptionError, nearest

ALIASES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}

NULLABLE = ("weights", "use")
"""Options for which None is a valid value."""

SIMILARITY = 0.7
"""Lowest similarity of a suggested option. With 0.6, ``stop`` would be suggested for ``top_p``."""


def check_option_names(given: Mapping[str, Any], *, extra: Iterable[str] = ()) -> dict[str, Any]:
    """Return `given` with aliases replaced by the engine's option names.

    Options with the value None are dropped, except those in `NULLABLE`. The engine checks the
    values.

    Args:
        given: options of `AdaFuseConfig`, ``temperature``, or keywords in `ALIASES`.
        extra: other accepted keywords, returned unchanged.

    Raises:
        InvalidOptionError: a keyword is unknown, or two names of the same option have different
            values.
    """
    extra = tuple(extra)
    options = (*AdaFuseConfig.model_fields, "temperature")
    checked: dict[str, Any] = {}
    keywords: dict[str, str] = {}  # maps options to their keywords in `given`
    for keyword, value in given.items():
        option = keyword if keyword in extra else ALIASES.get(keyword, keyword)
        if option not in (*options, *extra):
            allowed = list(dict.fromkeys((*options, *ALIASES, *extra)))
            advice = (
                hint(keyword, ())
                or nearest(keyword, allowed, limit=3, similarity=SIMILARITY)
                or f" The options of decoding are: {', '.join(AdaFuseConfig.model_fields)}."
            )
            raise InvalidOptionError(f"unknown option {keyword!r}.{advice}")
        if value is None and option not in (*NULLABLE, *extra):
            continue
        if option in checked and checked[option] != value:
            raise InvalidOptionError(
                f"{keywords[option]}={checked[option]!r} and {keyword}={value!r} are the same "
                "option; pass only one of them"
            )
        checked[option], keywords[option] = value, keyword
    return checked
