"""The decoding options of a framework's model, also under their names in other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import BaseModel, Field, create_model

from adafuse_llm.calibration import Calibration, DecisionCalibration
from adafuse_llm.config import AdaFuseConfig, DecodeOptions, advice
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.loading.specs import SETTINGS

ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "num_predict": "max_new_tokens",  # Ollama
    "num_return_sequences": "n",  # transformers
    "stop_sequences": "stop",
}

NULLABLE = ("weights", "use", "calibration", "decisions")
"""Options that can be set to None. For all others, None means that the option is not set."""

USE_SERVER = "to use a server, pass engine=RemoteEngine(url) (from adafuse_llm)"
"""Advice for users who pass the address of a server."""

INSTEAD = {
    **dict.fromkeys(
        ("model", "model_name", "model_path"),
        "pass members=[...], a list of folders, GGUF files or hub ids, to load models, and "
        "use=[...] to choose among them",
    ),
    "base_url": USE_SERVER,
}
"""Keywords of other libraries that do not exist here, and what to do instead."""

TRANSPORT = (
    "api_key",
    "default_headers",
    "extra_body",
    "extra_headers",
    "extra_query",
    "http_client",
    "max_retries",
    "stream",
    "stream_options",
    "stream_usage",
    "user",
)
"""Keywords that frameworks pass to every model, and that mean nothing without a connection."""

if TYPE_CHECKING:  # type checkers cannot read fields that are derived

    class OptionFields(BaseModel):
        """A mixin with a field for each option of `AdaFuseConfig`. None: the engine's value."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _TYPES = {
        **get_type_hints(DecodeOptions),
        "json_schema": dict[str, Any],
        "calibration": Calibration,
        "decisions": DecisionCalibration,
    }
    OptionFields = create_model(
        "OptionFields",
        __doc__="A mixin with one field for each option of `AdaFuseConfig`.",
        __module__=__name__,
        **{
            name: (_TYPES[name] | None, Field(default=None, description=field.description))
            for name, field in AdaFuseConfig.model_fields.items()
        },
    )


def check_option_names(given: Mapping[str, Any], *, extra: Iterable[str] = ()) -> dict[str, Any]:
    """Return keywords under the names of the engine's options. The engine checks the values.

    Keywords in `extra` stay as they are. Keywords in `TRANSPORT` are left out, and so are options
    with the value None, unless they are in `NULLABLE`.

    Raises:
        InvalidOptionError: a keyword is unknown, or two names of the same option have different
            values.
    """
    extra = tuple(extra)
    checked: dict[str, Any] = {}
    names: dict[str, str] = {}
    for keyword, value in given.items():
        option = keyword if keyword in extra else ALIASES.get(keyword, keyword)
        if value is None and option not in (*NULLABLE, *extra):
            continue
        if option in TRANSPORT and option not in extra:
            continue
        if option not in extra and option not in AdaFuseConfig.model_fields:
            raise InvalidOptionError(f"unknown option {keyword!r}.{_advice(keyword, extra)}")
        first = names.setdefault(option, keyword)
        if checked.setdefault(option, value) != value:
            raise InvalidOptionError(
                f"{first}={checked[option]!r} and {keyword}={value!r} are the same option; pass "
                "only one of them"
            )
    return checked


def _advice(keyword: str, extra: Iterable[str]) -> str:
    """Return what to use in place of an unknown option, as a sentence after a space."""
    if keyword in INSTEAD:
        return f" It does not exist here: {INSTEAD[keyword]}."
    if keyword in SETTINGS:
        return f" It is a setting of a member: members=[{{'path': ..., {keyword!r}: ...}}]."
    names = (*AdaFuseConfig.model_fields, *ALIASES, *extra)
    # a lower similarity would suggest `branching_factor` for ``reasoning_effort``
    return advice(keyword, names, limit=3, similarity=0.7)
