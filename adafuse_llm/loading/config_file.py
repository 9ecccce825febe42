"""One file that says what the flags of the command line say: members, how to load them, options.

    models: [path/one, path/two]
    dtype: bfloat16
    margin_threshold: 0.6
    max_words: 2
    weights: {one: 1.0, two: 0.5}

YAML, and so JSON. What it leaves out has its default. `trust_remote_code` is not among it: letting
code run is for whoever starts the program, not for a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from adafuse_llm.config import AdaFuseConfig, Options
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, nearest

__all__ = ["ConfigFile", "read_config", "write_config"]


class ConfigFile(Options):
    """What a configuration file says.

    Raises:
        InvalidOptionError: a value cannot be used.
    """

    models: tuple[str, ...] = Field(
        default=(), description="Folders or hub ids. Default: the embedded."
    )
    strategy: str = Field(default="adafuse", description="How the next piece of text is chosen.")
    dtype: str = Field(default="auto", description="Data type of the weights.")
    device_map: str | None = Field(default=None, description="Where accelerate places the weights.")
    revision: str | None = Field(default=None, description="Revision of hub models.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of `AdaFuseConfig`, as far as they are said."
    )

    @field_validator("models", mode="before")
    @classmethod
    def _one_model_or_many(cls, models: Any) -> Any:
        return (models,) if isinstance(models, str) else models or ()

    @property
    def config(self) -> AdaFuseConfig:
        """The options, and the defaults of the others."""
        return AdaFuseConfig(**self.options)


LOADING = ("strategy", "dtype", "device_map", "revision")
"""What a file may say besides models, and options of `AdaFuseConfig`."""


def read_config(path: str | PathLike[str]) -> ConfigFile:
    """Read a configuration file.

    Raises:
        InvalidInputError: it is missing, or not a mapping in YAML or JSON.
        InvalidOptionError: it says something unknown, or out of range.
    """
    import yaml

    try:
        said = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidInputError(f"configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError(f"configuration file {path} is not YAML: {reason}") from error
    return _parsed(path, said)


def write_config(
    path: str | PathLike[str], said: Mapping[str, Any], *, comment: str = ""
) -> ConfigFile:
    """Write a configuration file, if it can be read back.

    Args:
        path: where to; what is there is replaced.
        said: plain names and values, as a file may say them.
        comment: text that comes first.

    Raises:
        InvalidOptionError: something in it is unknown, or out of range.
    """
    import yaml

    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    text = yaml.safe_dump(dict(said), sort_keys=False, allow_unicode=True)
    found = _parsed(path, yaml.safe_load(text))
    Path(path).write_text("\n".join([*lines, text]), encoding="utf-8")
    return found


def _parsed(path: str | PathLike[str], said: Any) -> ConfigFile:
    """What a file says, checked."""
    if not isinstance(said, dict):
        raise InvalidInputError(
            f"configuration file {path} must say names and values, such as 'max_words: 2'; "
            f"got {type(said).__name__}"
        )
    own = ("models", *LOADING)
    allowed = [*own, *AdaFuseConfig.model_fields]
    for name in said:
        if name not in allowed:
            raise InvalidOptionError(
                f"configuration file {path}: unknown option {name!r}."
                f"{nearest(str(name), allowed)} The options are: {', '.join(allowed)}."
            )
    try:
        found = ConfigFile(
            **{name: value for name, value in said.items() if name in own},
            options={name: value for name, value in said.items() if name not in own},
        )
        _ = found.config
    except InvalidOptionError as error:
        raise InvalidOptionError(f"configuration file {path}: {error}") from None
    return found
