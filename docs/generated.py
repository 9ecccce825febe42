"""Pages of the site that are generated: options from their models, flags from the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel

PLACE = re.compile(r"<!-- generated: (\w+) -->")


def fill(markdown: str) -> str:
    """Put what is generated where a page asks for it."""
    return PLACE.sub(lambda found: GENERATORS[found[1]](), markdown)


def configuration() -> str:
    """The options, a table per model."""
    from adafuse_llm import AdaFuseConfig, RuntimeConfig

    return "\n\n".join(
        f"## {model.__name__}\n\n{_summary(model)}\n\n{_options(model)}"
        for model in (AdaFuseConfig, RuntimeConfig)
    )


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")


def _options(model: type[BaseModel]) -> str:
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        kind = re.sub(r"typing\.|<class '(\w+)'>", r"\1", str(field.annotation))
        bounds = ", ".join(_bounds(field.metadata))
        kind = f"`{kind}`{f' ({bounds})' if bounds else ''}".replace("|", "\\|")
        rows.append(f"| `{name}` | {kind} | `{field.default!r}` | {field.description} |")
    return "\n".join(rows)


def _bounds(metadata: list[Any]) -> Iterator[str]:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    for bound in metadata:
        for name, sign in signs.items():
            if hasattr(bound, name):
                yield f"{sign} {getattr(bound, name):g}"


def command_line() -> str:
    """The commands, a table of flags each."""
    import typer

    from adafuse_llm.cli import create_app

    root = typer.main.get_command(create_app())
    commands: dict[str, Any] = root.commands  # type: ignore[attr-defined]
    return "\n\n".join(_command(name, command) for name, command in commands.items())


def _command(name: str, command: Any) -> str:
    arguments, flags = [], []
    for parameter in command.params:
        (arguments if parameter.param_type_name == "argument" else flags).append(parameter)
    usage = " ".join(
        ["adafuse", name, *((each.metavar or each.name).upper() for each in arguments)]
    )
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for flag in flags:
        default = flag.default if flag.default not in (None, [], (), False) else ""
        names = ", ".join(f"`{each}`" for each in flag.opts)
        text = (getattr(flag, "help", None) or "").replace("|", "\\|")
        rows.append(f"| {names} | {f'`{default}`' if default != '' else ''} | {text} |")
    return f"## adafuse {name}\n\n{command.help}\n\n```text\n{usage} [flags]\n```\n\n" + "\n".join(
        rows
    )


GENERATORS: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "command_line": command_line,
}
