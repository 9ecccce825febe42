"""What flags become: values of options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from adafuse_llm import AdaFuseConfig, InvalidInputError, InvalidOptionError, RuntimeConfig
from adafuse_llm.config import advice
from adafuse_llm.errors import short_repr
from adafuse_llm.evaluation.files import read_text
from adafuse_llm.loading.config_file import read_schema
from adafuse_llm.serving_config import ServerConfig

FIELDS = {**AdaFuseConfig.model_fields, **RuntimeConfig.model_fields, **ServerConfig.model_fields}
"""The options that commands can set, by name."""


def parse_option(text: str, allowed: Sequence[str]) -> tuple[str, Any]:
    """Return the name and the value of ``NAME=VALUE``. The value is YAML, unless it must be text.

    Raises:
        InvalidOptionError: the text has another form, or the name is not allowed.
    """
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals:
        raise InvalidOptionError(
            f"-o takes NAME=VALUE, such as max_words=2; got {short_repr(text)}"
        )
    if name not in allowed:
        raise InvalidOptionError(
            f"unknown option {name!r}.{advice(name, allowed)} The options are: "
            f"{', '.join(allowed)}."
        )
    kind = FIELDS[name].annotation if name in FIELDS else str
    if kind in (str, str | None):
        return name, value
    import yaml

    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        return name, value


def parse_stops(values: Sequence[str]) -> tuple[str, ...]:
    r"""Parse stop sequences: replace the escapes ``\n``, ``\t``, ``\\``; drop empty sequences."""
    escapes = {"n": "\n", "t": "\t", "\\": "\\"}
    return tuple(
        re.sub(r"\\([nt\\])", lambda match: escapes[match[1]], value) for value in values if value
    )


def parse_weights(values: Sequence[str]) -> dict[str, float] | tuple[float, ...] | None:
    """Parse weights from repeated flags, each with one or more weights separated by commas.

    A weight has the form ``NAME=1.5``, or ``1.5`` if the weights are in member order.

    Raises:
        InvalidOptionError: a weight is not a number, or the two forms are mixed.
    """
    given = [part.strip().rpartition("=") for value in values for part in value.split(",")]
    try:
        numbers = [(name, float(number)) for name, _, number in given]
    except ValueError:
        numbers = []
    named = {bool(equals) for _, equals, _ in given}
    if given and (not numbers or len(named) > 1):
        raise InvalidOptionError(
            "--weights takes NAME=NUMBER for every member, or one NUMBER per member in order; "
            f"got {', '.join(values)}"
        )
    if not given:
        return None
    return dict(numbers) if named == {True} else tuple(number for _, number in numbers)


def parse_members(values: Sequence[str]) -> tuple[str, ...] | None:
    """Parse names of members from repeated flags, each with one or more names separated by commas.

    Return None, which means all members, if no names are given.
    """
    return tuple(name.strip() for value in values for name in value.split(",")) or None


def parse_schema(path: Path) -> dict[str, Any]:
    """Read the file of ``--json-schema``."""
    with naming_flag("--json-schema"):
        return read_schema(path)


def parse_grammar(path: Path) -> str:
    """Read the file of ``--grammar``."""
    with naming_flag("--grammar"):
        try:
            return read_text(path)
        except OSError as error:
            raise InvalidInputError(f"{path}: {error.strerror}") from error


@contextmanager
def naming_flag(flag: str) -> Iterator[None]:
    """Add the flag to errors of the ``with`` block."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"{flag}: {error}") from None


class Parser(NamedTuple):
    """How a flag becomes the value of an option.

    Attributes:
        parse: function that returns the option's value from the flag's.
        metavar: name of the value in the help.
        hint: text after the option's description in the help.
        kind: type of the flag's value.
        flag: name of the flag; None for the name of the option.
    """

    parse: Callable[[Any], Any]
    metavar: str
    hint: str
    kind: Any = list[str]
    flag: str | None = None


PARSERS = {
    "stop": Parser(
        parse_stops, "TEXT", r"Repeatable. \n and \t are escapes. '' means no stop sequences."
    ),
    "weights": Parser(parse_weights, "NAME=NUMBER", "Repeatable, or separated by commas."),
    "use": Parser(parse_members, "NAME", "Repeatable, or separated by commas."),
    "json_schema": Parser(parse_schema, "FILE", "A JSON file.", Path | None),
    "grammar": Parser(parse_grammar, "FILE", "A text file.", Path | None),
    "choices": Parser(tuple, "TEXT", "Repeatable: pass one text at a time.", flag="--choice"),
}
"""The options whose flags need their own parser."""
