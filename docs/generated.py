"""Generated parts of the documentation: options from their models, flags from the command line,
the model card.

    python -m docs.generated

writes them into the pages, between markers. `tests/docs/test_generated.py` fails if a page has an
older text.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
REPOSITORY = re.findall('^Repository = "(.+)"$', PYPROJECT.read_text("utf-8"), re.MULTILINE)[0]
"""The address of the repository."""

PLACE = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
"""A generated text in a page, between its markers."""


def copy_cookbooks(source: Path, target: Path) -> None:
    """Copy the notebooks into the site's pages and adjust their links.

    The navigation lists them below their README, in its order.
    """
    target.mkdir(exist_ok=True)
    for copy in target.iterdir():
        if copy.is_file() and not (source / copy.name).exists():
            copy.unlink()  # of a notebook that has been renamed or removed
    for path in [*source.glob("*.ipynb"), *source.glob("*.md")]:
        text = path.read_text(encoding="utf-8").replace("](../docs/", "](../")
        if path.name == "README.md":
            names = dict.fromkeys(re.findall(r"\]\((\w+)\.ipynb\)", text))
            text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"
        (target / path.name).write_text(text, encoding="utf-8")


def pages() -> Iterator[Path]:
    """Yield the pages of the documentation."""
    for path in sorted(Path(__file__).parent.rglob("*.md")):
        if path.parent.name != "cookbooks":
            yield path


def filled(markdown: str) -> str:
    """Return a page with its generated texts as they are now."""

    def text(found: re.Match[str]) -> str:
        return f"<!-- generated: {found[1]} -->\n\n{GENERATORS[found[1]]()}\n\n<!-- end -->"

    return PLACE.sub(text, markdown)


def for_site(name: str, markdown: str) -> str:
    """Return a page as the site needs it: with links to its notebooks, and navigation.

    GitHub shows the same files, so the pages named ``index`` list their pages as plain links.
    """
    up = "../" * name.count("/")
    markdown = markdown.replace(f"]({up}../cookbooks/", f"]({up}cookbooks/")
    if name.endswith("index"):
        for section in markdown.split("\n## "):
            linked = re.findall(r"\]\((?!http)([\w/-]+)\.md\)", section)
            caption = section.partition("\n")[0]
            tree = [":hidden:", *([f":caption: {caption}"] if name == "index" else []), ""]
            if linked:
                markdown += "\n" + "\n".join(["```{toctree}", *tree, *linked, "```", ""])
    return markdown


def configuration() -> str:
    """Return the options, with one table per model."""
    from adafuse_llm import AdaFuseConfig, RuntimeConfig
    from adafuse_llm.serving_config import ServerConfig

    return "\n\n".join(
        f"## {model.__name__}\n\n{_summary(model)}\n\n{_options(model)}"
        for model in (AdaFuseConfig, RuntimeConfig, ServerConfig)
    )


def members() -> str:
    """Return the settings of members: those of all kinds, then those of each kind."""
    from adafuse_llm.loading.specs import MemberSpec

    kinds = get_args(MemberSpec)
    shared = set.intersection(*(set(kind.model_fields) for kind in kinds))
    others = set(kinds[0].model_fields) - shared
    tables = [f"All of them have these settings:\n\n{_options(kinds[0], without=others)}"]
    tables += [
        f"## {kind.__name__}\n\n{_summary(kind)}\n\n{_options(kind, without=shared)}"
        for kind in kinds
    ]
    return "\n\n".join(tables)


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")


def _options(model: type[BaseModel], without: Container[str] = ()) -> str:
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    kinds = get_type_hints(model)  # without the bounds of inner types
    for name, field in model.model_fields.items():
        if name in without:
            continue
        kind = re.sub(r"(typing|collections\.abc)\.|<class '(\w+)'>", r"\2", str(kinds[name]))
        kind = re.sub(r"Union\[(.*), NoneType\]", r"\1 | None", kind).replace("int, L", "int | L")
        bounds = ", ".join(_bounds(field.metadata))
        kind = f"`{kind}`{f' ({bounds})' if bounds else ''}".replace("|", "\\|")
        default = (
            "" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        )
        rows.append(f"| `{name}` | {kind} | {default} | {field.description} |")
    return "\n".join(rows)


def _bounds(metadata: list[Any]) -> Iterator[str]:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    for bound in metadata:
        for name, sign in signs.items():
            if hasattr(bound, name):
                yield f"{sign} {getattr(bound, name):g}"


def command_line() -> str:
    """Return the commands, each with a table of its own flags, after a table of common flags."""
    from adafuse_llm.cli import COMMANDS, load

    parsers = {name: load(name).parser() for name in COMMANDS}
    rows = {name: _flags(parser) for name, parser in parsers.items()}
    counts = Counter(row for each in rows.values() for row in each)
    common = [row for row, count in counts.items() if count > len(rows) / 2]
    parts = ["## Flags of most commands", _table(common)]
    for name, parser in parsers.items():
        usage = (parser.usage or "").replace("%(prog)s", parser.prog)
        own = [row for row in rows[name] if row not in common]
        parts += [f"## adafuse {name}", parser.description or "", f"```text\n{usage}\n```"]
        parts += [_table(own)] if own else []
    return "\n\n".join(parts)


def _flags(parser: ArgumentParser) -> list[str]:
    """Return a row of a table for each flag of a command."""
    rows = []
    for flag in parser._actions:
        if flag.dest == "help" or not flag.option_strings:
            continue
        usage = " ".join([flag.option_strings[0], *([str(flag.metavar)] * bool(flag.metavar))])
        text = (flag.help or "").replace("|", "\\|")
        rows.append(f"| `{usage}` | {text} |")
    return rows


def _table(rows: Iterable[str]) -> str:
    return "\n".join(["| flag | meaning |", "|---|---|", *rows])


def model_card() -> str:
    """Return the model card of the embedded members, which ships with them."""
    from adafuse_llm.embedded import member_paths

    card = member_paths()[0].parents[1] / "MODEL_CARD.md"
    return card.read_text(encoding="utf-8").strip()


GENERATORS: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "command_line": command_line,
    "members": members,
    "model_card": model_card,
}


def main() -> None:
    """Write the generated texts into the pages."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text), encoding="utf-8")


if __name__ == "__main__":
    main()
