"""What a loaded member cannot work with: a broken chat template, or a tokenizer that loses text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from adafuse_llm.backends.base import Backend
from adafuse_llm.errors import InvalidInputError, UnsupportedModelError
from adafuse_llm.loading.problems import describe
from adafuse_llm.text.exactness import change_of

PLAIN: Final = "\nTwo  spaces, 3.5 lines."
"""A text that every tokenizer must preserve."""

MESSAGES: Final = tuple(
    {"role": role, "content": text} for role, text in (("system", "Be brief."), ("user", "Hello!"))
)
"""A conversation that every chat template must accept, at least in one turn of the user."""


def check_member(backend: Backend, label: str) -> None:
    """Refuse a member that cannot work.

    Raises:
        UnsupportedModelError: the member has a problem, which the message names.
    """
    if (problem := next(_problems(backend), None)) is not None:
        raise UnsupportedModelError(f"{label} cannot be used: {problem}")


def _problems(backend: Backend) -> Iterator[str]:
    if change := change_of(backend.codec, PLAIN):
        yield f"its tokenizer loses plain text ({change}), so it cannot score the others' words"
    try:
        backend.codec.encode_messages(MESSAGES)
    except InvalidInputError as error:
        cause = describe(error.__cause__ or error).rstrip(".")
        yield f"its chat template fails ({cause}). Mend or delete the template in the model's files"
