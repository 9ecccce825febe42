"""A whole JSON schema, and the parts of it to which its references point."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from adafuse_llm.errors import GrammarError
from adafuse_llm.text.schema.values import Path, refuse, refuse_value

_MAX_STEPS = 1_000_000
_MAX_REFERENCES = 20

_DRAFTS = {
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
}


class Document:
    """A whole JSON schema.

    Args:
        root: the schema as plain JSON values.

    Attributes:
        root: the same.
        draft: the year or number of the draft that ``$schema`` names.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self._name = root.get("$schema", "https://json-schema.org/draft/2020-12/schema")
        shown = self._name.rstrip("#").partition("://")[2] if isinstance(self._name, str) else ""
        if shown not in _DRAFTS:
            refuse_value(
                ("$schema",),
                "a draft from draft-06 to 2020-12",
                self._name,
                "Leave it out, or use 'https://json-schema.org/draft/2020-12/schema'.",
            )
        self.draft = _DRAFTS[shown]
        identifier = root.get("$id")
        self._address = identifier.rstrip("#") if isinstance(identifier, str) else ""
        self._steps = 0

    def step(self, steps: int = 1) -> None:
        """Count steps, and refuse the schema if there are too many."""
        self._steps += steps
        if self._steps > _MAX_STEPS:
            raise GrammarError(
                "the JSON schema is too complex to be checked. Use fewer 'oneOf' options, '$ref' "
                "references and patterns."
            )

    def find(self, ref: Any, path: Path) -> tuple[Path, Any]:
        """Return the path of the schema to which a reference points, and the schema.

        Args:
            ref: the reference.
            path: where it is.
        """
        address, _, pointer = ref.partition("#") if isinstance(ref, str) else ("?", "", "")
        if address not in ("", self._address):
            refuse_value(
                path,
                "'#', or '#/...' with the path to a part of the same schema",
                ref,
                "Copy the schema to '$defs' and use '#/$defs/NAME'.",
            )
        start, *keys = unquote(pointer).split("/")
        found = tuple(key.replace("~1", "/").replace("~0", "~") for key in keys)
        self.step(len(found))
        target: Any = None if start else self.root
        for end, key in enumerate(found, 1):
            target = _part(target, key)
            self.check_part(target, found[:end])
        if not isinstance(target, (dict, bool)):
            refuse_value(path, "the path to a schema", ref, "Use '#/$defs/NAME'.")
        return found, target

    def follow(self, schema: Any) -> Any:
        """Return the schema to which a schema refers, if it has only references."""
        for _ in range(_MAX_REFERENCES):
            self.step()
            if not (isinstance(schema, dict) and "$ref" in schema):
                return schema
            if self.draft > 7 and schema.keys() - {"$ref", "title", "description"}:
                return schema
            _, schema = self.find(schema["$ref"], ("$ref",))
        return True

    def check_part(self, part: Any, path: Path) -> None:
        """Refuse a part that is a schema of its own, so that its references mean something else."""
        if not path or not isinstance(part, dict):
            return
        if isinstance(part.get("$id"), str):
            refuse((*path, "$id"), "is supported only for the whole schema", "Remove it.")
        if part.get("$schema", self._name) != self._name:
            refuse((*path, "$schema"), "differs from the draft of the whole schema", "Remove it.")


def _part(value: Any, key: str) -> Any:
    """Return a part of a JSON value, or None if there is none."""
    if isinstance(value, dict):
        return value.get(key)
    is_index = isinstance(value, list) and key.isascii() and key.isdecimal() and len(key) < 10
    return value[int(key)] if is_index and int(key) < len(value) else None
