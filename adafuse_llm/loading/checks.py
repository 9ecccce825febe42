"""What a loaded member cannot work with: a template that fails, a tokenizer that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from adafuse_llm.backends.base import Backend
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.errors import InvalidInputError, UnsupportedModelError, short_list
from adafuse_llm.loading.problems import describe
from adafuse_llm.text.codec import change_of

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
    ids: list[int] = []
    try:
        ids = backend.codec.encode_messages(MESSAGES)
    except InvalidInputError as error:
        cause = describe(error.__cause__ or error).rstrip(".")
        yield f"its chat template fails ({cause}). Mend or delete the template in the model's files"
    if not isinstance(backend, HuggingFaceBackend):
        return
    # other special tokens beyond the rows do no harm, because no text becomes one
    rows, tokenizer = backend.vocabulary_size, backend.tokenizer
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    known = sorted((i, token) for token, i in tokenizer.get_vocab().items())
    beyond = [token for i, token in known if i >= rows and (i not in special or i in ids)]
    if beyond:
        yield (
            f"its tokenizer has tokens for which the model has no row: {short_list(beyond)}. Pass "
            "the tokenizer of the model, or train the model with these tokens "
            "(resize_token_embeddings)"
        )
