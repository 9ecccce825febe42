"""Read and write configuration files.

A file sets members, loading arguments and options, as the flags of a command do:

    models: [path/one, path/two]
    dtype: bfloat16
    margin_threshold: 0.6
    max_words: 2
    weights: {one: 1.0, two: 0.5}
    runtime: {max_requests: 8}
    serving: {port: 8080, max_output_tokens: 1000}

The section ``runtime`` sets fields of `RuntimeConfig`. The section ``serving`` sets fields of
`ServerConfig`, which only ``adafuse serve`` uses.

A model can also be a mapping of the fields of `MemberSpec`, such as
``{path: path/one.gguf, context: 4096, threads: 2}``.

The format is YAML, which includes JSON. Values that the file does not set have their defaults.
`json_schema` is a mapping, or the path of a JSON file relative to the configuration file. A file
cannot set `trust_remote_code` or `allow_pickle`: only the person who starts the program can allow
code to run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final

from pydantic import Field, field_validator

from adafuse_llm.config import AdaFuseConfig, Options, RuntimeConfig
from adafuse_llm.embedded import member_paths
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, nearest, short_repr
from adafuse_llm.loading.specs import MemberSpec, as_spec
from adafuse_llm.serving_config import ServerConfig

__all__ = ["ConfigFile", "read_config", "read_schema", "write_config"]


class ConfigFile(Options):
    """The contents of a configuration file.

    Raises:
        InvalidOptionError: a value is not valid.
    """

    models: tuple[str | dict[str, Any], ...] = Field(
        default=(),
        description="Folders or hub ids of members, or mappings of the fields of `MemberSpec`. "
        "Default: the embedded members.",
    )
    strategy: str = Field(
        default="auto", description="Name of the strategy that chooses the next piece of text."
    )
    dtype: str = Field(default="auto", description="Data type of the weights.")
    device_map: str | None = Field(
        default=None, description="Devices on which accelerate places the weights."
    )
    revision: str | None = Field(default=None, description="Revision of hub models.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of `AdaFuseConfig` that the file sets."
    )
    runtime: RuntimeConfig = Field(
        default_factory=RuntimeConfig, description="How the engine runs requests."
    )
    serving: ServerConfig = Field(
        default_factory=ServerConfig, description="How `adafuse serve` runs the server."
    )

    @field_validator("models", mode="before")
    @classmethod
    def _one_model_or_many(cls, models: Any) -> Any:
        if not models:
            raise ValueError(
                "it names no model. Name at least one, or omit the option to use the small models "
                "that ship with adafuse-llm"
            )
        return (models,) if isinstance(models, (str, dict)) else models

    @property
    def config(self) -> AdaFuseConfig:
        """The file's options as an `AdaFuseConfig`; other options have their defaults."""
        return AdaFuseConfig(**self.options)

    @property
    def members(self) -> list[str | MemberSpec]:
        """The members to load."""
        models = self.models or tuple(map(str, member_paths()))
        return [each if isinstance(each, str) else as_spec(each) for each in models]


CODE_FIELDS = ("trust_remote_code", "allow_pickle")
"""Fields of `MemberSpec` that allow code to run."""

MAX_ALIASES = 20
"""Maximum number of YAML aliases in a file. Nested aliases multiply the size of the contents."""

MAX_DEPTH = 20
"""Maximum number of lists and mappings inside each other. PyYAML is slow with deeper ones."""

LOADING = ("strategy", "dtype", "device_map", "revision")
"""Names that a file may set in addition to ``models`` and the options of `AdaFuseConfig`."""

SECTIONS: Final[Mapping[str, type[Options]]] = {
    "runtime": RuntimeConfig,
    "serving": ServerConfig,
}
"""Names of sections, which are mappings, with the classes of their contents."""


def read_config(path: str | PathLike[str]) -> ConfigFile:
    """Read a configuration file.

    Raises:
        InvalidInputError: the file is missing, is not a mapping in YAML or JSON, has more than
            `MAX_ALIASES` aliases, or is nested deeper than `MAX_DEPTH`; or `read_schema` cannot
            read the file of its JSON schema.
        InvalidOptionError: an option is unknown or out of range.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if reason := _excess(text):
            raise InvalidInputError(f"configuration file {path} {reason}")
        values = yaml.safe_load(text)
    except OSError as error:
        raise InvalidInputError(f"configuration file {path}: {error.strerror}") from error
    except InvalidInputError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: an invalid date
        reason = " ".join(str(error).split())
        raise InvalidInputError(f"configuration file {path} is not YAML: {reason}") from error
    return _parse(path, values)


def read_schema(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a JSON schema from a JSON file.

    Raises:
        InvalidInputError: the file is missing, is not JSON, or does not contain an object.
    """
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidInputError(f"JSON schema {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # ValueError includes text that is not UTF-8
        raise InvalidInputError(f"JSON schema {path} is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidInputError(
            f'JSON schema {path} must contain an object, such as {{"type": "object"}}; got '
            f"{short_repr(schema)}"
        )
    return schema


def _inline_schema(folder: Path, value: Any) -> Any:
    """Return the JSON schema that a configuration file gives as a mapping or as a path.

    Raises:
        InvalidInputError: the path is not that of a JSON file with an object.
        InvalidOptionError: the mapping contains a value that JSON does not have, such as a date.
    """
    if isinstance(value, str):
        return read_schema(folder / value)
    if (problem := _not_json(value)) is not None:
        raise InvalidOptionError(
            f"option 'json_schema': {short_repr(problem)} is a YAML value that JSON does not have. "
            "Put it in quotes."
        )
    return value


def _not_json(value: Any) -> object | None:
    """Return the first part of a YAML value that JSON does not have, or None."""
    if isinstance(value, dict):
        names = [name for name in value if not isinstance(name, str)]
        parts = list(value.values())
        if names:
            return names[0] if names[0] is not None else "null"
    elif isinstance(value, list):
        parts = value
    else:
        known = value is None or isinstance(value, (str, bool, int, float))
        finite = not isinstance(value, float) or math.isfinite(value)
        return None if known and finite else value
    return next((found for each in parts if (found := _not_json(each)) is not None), None)


def _excess(text: str) -> str | None:
    """Return why a YAML text may be too large to read, or None. Do not expand aliases."""
    import yaml

    aliases = depth = 0
    for event in yaml.parse(text):
        aliases += isinstance(event, yaml.AliasEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if aliases > MAX_ALIASES:
            return f"has more than {MAX_ALIASES} YAML aliases; write the values out"
        if depth > MAX_DEPTH:
            return f"is nested more than {MAX_DEPTH} levels deep"
    return None


def write_config(
    path: str | PathLike[str], values: Mapping[str, Any], *, comment: str = ""
) -> ConfigFile:
    """Write a configuration file, after a check that `read_config` can read it.

    Args:
        path: the file to write; an existing file is replaced.
        values: names and values to write, as plain data.
        comment: text at the beginning of the file.

    Raises:
        InvalidOptionError: an option is unknown or out of range.
    """
    import yaml

    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    file = _parse(path, yaml.safe_load(text))
    Path(path).write_text("\n".join([*lines, text]), encoding="utf-8")
    return file


def _parse(path: str | PathLike[str], values: Any) -> ConfigFile:
    """Check the contents of a file and return them."""
    if not isinstance(values, dict):
        raise InvalidInputError(
            f"configuration file {path} must contain names and values, such as 'max_words: 2'; "
            f"got {'an empty file' if values is None else type(values).__name__}"
        )
    own = ("models", *LOADING, *SECTIONS)
    allowed = [*own, *AdaFuseConfig.model_fields]
    try:
        for name in values:
            if name not in allowed:
                raise _unknown(name, allowed)
        if values.get("json_schema") is not None:
            schema = _inline_schema(Path(path).parent, values["json_schema"])
            values = {**values, "json_schema": schema}
        sections: dict[str, Any] = {
            name: _section(name, values[name]) for name in SECTIONS if values.get(name) is not None
        }
        file = ConfigFile(
            **{name: values[name] for name in values if name in own and name not in SECTIONS},
            **sections,
            options={name: value for name, value in values.items() if name not in own},
        )
        _ = file.config
        _check_models(file.models)
    except InvalidInputError as error:
        raise type(error)(f"configuration file {path}: {error}") from None
    return file


def _unknown(name: Any, allowed: Iterable[str]) -> InvalidOptionError:
    """Return the error for a name that a file cannot set."""
    hint = nearest(str(name), allowed)
    for section, kind in SECTIONS.items():
        if name in kind.model_fields:
            hint = f" It belongs to the section {section!r}."
    return InvalidOptionError(
        f"unknown option {short_repr(name)}.{hint} The options are: {', '.join(allowed)}."
    )


def _section(name: str, values: Any) -> Options:
    """Return the contents of a section.

    Raises:
        InvalidInputError: the section is not a mapping.
        InvalidOptionError: an option of the section is unknown or out of range.
    """
    if not isinstance(values, dict):
        raise InvalidInputError(
            f"section {name!r} must contain names and values; got {short_repr(values)}"
        )
    try:
        return SECTIONS[name](**{str(option): value for option, value in values.items()})
    except InvalidOptionError as error:
        raise InvalidOptionError(f"section {name!r}: {error}") from None


def _check_models(models: Sequence[str | Mapping[str, Any]]) -> None:
    """Check the mappings among the models of a file.

    Raises:
        InvalidInputError: a mapping has no path.
        InvalidOptionError: a field is unknown, out of range, or not allowed in a file.
    """
    for model in models:
        if isinstance(model, str):
            continue
        if refused := [name for name in CODE_FIELDS if name in model]:
            raise InvalidOptionError(
                f"a configuration file cannot set {refused[0]!r}, because this can run code that "
                "comes with a model. Load the member in Python with MemberSpec."
            )
        as_spec(model)
