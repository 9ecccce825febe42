"""Results that were written as JSON Lines, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from adafuse_llm.errors import InvalidInputError

Result = TypeVar("Result", bound=BaseModel)


def read_json_lines(path: Path, kind: type[Result], writer: str) -> list[Result]:
    """The results of a file, in the order of their lines.

    A last line that was cut off is left out; a result that was written again takes the place of
    the earlier one.

    Args:
        path: of the file.
        kind: of a result; it has a field ``line``.
        writer: the command that writes such files.

    Raises:
        InvalidInputError: it is not such a file, or holds none.
    """
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    found: dict[int, Result] = {}
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
            found[said["line"]] = kind.model_validate(said)
        except (ValueError, TypeError, KeyError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidInputError(
                f"{path}, line {number}, is no result of {writer}: {reason}"
            ) from error
    if not found:
        raise InvalidInputError(f"{path} holds no results of {writer}")
    return [found[number] for number in sorted(found)]
