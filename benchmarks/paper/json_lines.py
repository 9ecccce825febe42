"""Reader of results in JSON Lines files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from adafuse_llm.errors import InvalidInputError

Result = TypeVar("Result", bound=BaseModel)


def read_json_lines(path: Path, kind: type[Result], writer: str) -> list[Result]:
    """Read the results of a file, ordered by the number in their field ``line``.

    An incomplete last line is ignored. A later result replaces an earlier one with the same number.

    Args:
        path: the file.
        kind: the model of a result. It has a field ``line``.
        writer: the command that writes such files, for error messages.

    Raises:
        InvalidInputError: a line is not a result of this model, or the file has no results.
    """
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    results: dict[int, Result] = {}
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            results[fields["line"]] = kind.model_validate(fields)
        except (ValueError, TypeError, KeyError, ValidationError) as error:
            reason = _explain(error) if isinstance(error, ValidationError) else str(error)
            raise InvalidInputError(
                f"{path}, line {number}, is not a result of {writer}: {reason}"
            ) from error
    if not results:
        raise InvalidInputError(f"{path} contains no results of {writer}")
    return [results[number] for number in sorted(results)]


def _explain(error: ValidationError) -> str:
    """Describe the first problem in one line: where it is and what is wrong."""
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"]))
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
