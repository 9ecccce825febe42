"""Read and write configuration files.

A file sets members, loading arguments and options, like the flags of a command:

    models: [path/one, path/two]
    dtype: bfloat16
    margin_threshold: 0.6
    max_words: 2
    weights: {one: 1.0, two: 0.5}
    runtime: {max_requests: 8}
    serving: {port: 8080, max_output_tokens: 1000}

The section ``runtime`` sets fields of `RuntimeConfig`. The section ``serving`` sets fields of
`ServerConfig`, which only ``adafuse serve`` uses.

A model can also be a mapping of the settings of `TransformersMember`, `GGUFMember` or
`ServerMember`, such as ``{path: path/one.gguf, context: 4096}`` or ``{url: "http://host:8000/v1"}``.

The format is YAML, which includes JSON. `json_schema` is a mapping, or the path of a JSON file
relative to the configuration file; paths of models are relative to the folder in which the program
starts. A file cannot set `trust_remote_code`: only the person who starts the program can allow code
to run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final

from pydantic import Field, ValidationInfo, field_validator

from adafuse_llm.config import AdaFuseConfig, Options, RuntimeConfig
from adafuse_llm.embedded import member_paths
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, short_repr
from adafuse_llm.loading.specs import MemberSpec, as_spec
from adafuse_llm.serving_config import ServerConfig

__all__ = ["ConfigFile", "read_config", "read_schema", "write_config"]

LOADING = ("strategy", "dtype", "device_map", "revision")
"""Arguments of `AdaFuseEngine.from_pretrained` that a file may set besides ``models``."""

SECTIONS: Final[Mapping[str, type[Options]]] = {"runtime": RuntimeConfig, "serving": ServerConfig}


class ConfigFile(AdaFuseConfig):
    """The contents of a configuration file: options of decoding, and the members to load.

    The default members are the embedded ones.

    Raises:
        InvalidOptionError: a value is not valid.
    """

    strategy: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    revision: str | None = None
    models: tuple[str | dict[str, Any], ...] = ()
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    serving: ServerConfig = Field(default_factory=ServerConfig)

    @field_validator("models", mode="before")
    @classmethod
    def _one_model_or_many(cls, models: Any) -> Any:
        if not models:
            raise ValueError(
                "it names no model. Name at least one, or omit the option to use the small models "
                "that ship with adafuse-llm"
            )
        return (models,) if isinstance(models, (str, dict)) else models

    @field_validator("models")
    @classmethod
    def _usable_models(
        cls, models: tuple[str | dict[str, Any], ...], info: ValidationInfo
    ) -> tuple[str | dict[str, Any], ...]:
        for model in models:
            if isinstance(model, dict) and "trust_remote_code" in model:
                raise ValueError(
                    "a configuration file cannot set 'trust_remote_code', because this can run "
                    "code that comes with a model. Load the member in Python with "
                    "TransformersMember"
                )
            as_spec(model, info.data.get("revision"))
        return models

    @field_validator("runtime", "serving", mode="before")
    @classmethod
    def _section(cls, values: Any) -> Any:
        if isinstance(values, dict):  # YAML reads some names as numbers
            return {str(name): value for name, value in values.items()}
        return values or {}  # a section may be empty

    @property
    def loading(self) -> dict[str, Any]:
        """The file's keyword arguments for `AdaFuseEngine.from_pretrained` (`LOADING`)."""
        return {name: getattr(self, name) for name in LOADING}

    @property
    def options(self) -> dict[str, Any]:
        """The options of decoding that the file sets."""
        names = AdaFuseConfig.model_fields
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}

    @property
    def config(self) -> AdaFuseConfig:
        """The decoding options of the file. Options that it does not set have their defaults."""
        return AdaFuseConfig(**self.options)

    @property
    def members(self) -> list[MemberSpec]:
        """The members to load."""
        models = self.models or tuple(map(str, member_paths()))
        return [as_spec(model, self.revision) for model in models]


def read_config(path: str | PathLike[str]) -> ConfigFile:
    """Read a configuration file.

    Raises:
        InvalidInputError: the file or the file of its JSON schema is missing or cannot be used.
        InvalidOptionError: an option is unknown or out of range.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        root, values = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise InvalidInputError(f"configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())  # an invalid date, for example, is a ValueError
        raise InvalidInputError(f"configuration file {path} is not YAML: {reason}") from error
    if not isinstance(values, dict):
        raise InvalidInputError(
            f"configuration file {path} must contain names and values, such as 'max_words: 2'; "
            f"got {'an empty file' if values is None else type(values).__name__}"
        )
    # refuse a name that occurs twice, because YAML would silently drop its first value
    names = [name.value for name, _ in root.value]
    for name in names:
        if (count := names.count(name)) > 1:
            raise InvalidInputError(
                f"configuration file {path} has {short_repr(name)} {count} times. Keep one of "
                "them; several values stand in one list, such as 'models: [A, B]'."
            )
    try:
        return _parsed(values, Path(path).parent)
    except InvalidInputError as error:
        raise type(error)(f"configuration file {path}: {error}") from None


def _parsed(values: Mapping[Any, Any], folder: Path) -> ConfigFile:
    options = {str(name): value for name, value in values.items()}
    for name in options:
        for section, kind in SECTIONS.items():
            if name in kind.model_fields:
                raise InvalidOptionError(
                    f"unknown option {name!r}. It belongs to the section {section!r}."
                )
    schema = options.get("json_schema")
    if isinstance(schema, str):
        options["json_schema"] = read_schema(folder / schema)
    return ConfigFile(**options)


def read_schema(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a JSON schema from a file, or raise an InvalidInputError."""
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


def write_config(
    path: str | PathLike[str], values: Mapping[str, Any], *, comment: str = ""
) -> None:
    """Write or replace a configuration file, after a check that `read_config` accepts it.

    Args:
        path: the file.
        values: names and values, as plain data.
        comment: text for a comment at the beginning of the file.

    Raises:
        InvalidOptionError: an option is unknown or out of range.
    """
    import yaml

    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    _parsed(yaml.safe_load(text), Path(path).parent)
    Path(path).write_text("\n".join([*lines, text]), encoding="utf-8")
