"""Matchers of llguidance: how grammars are compiled, and within which limits."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from adafuse_llm.errors import GrammarError, MissingDependencyError, install_command

Encode = Callable[[bytes], list[int]]

MAX_LEXER_STATES = 25_000
"""Maximum number of states that a grammar's lexer adds as it reads. They take 5 to 95 MB."""

MAX_GRAMMAR_SIZE = 100_000
"""Maximum number of symbols in the rules of a grammar."""


def is_available() -> bool:
    """Return whether llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


def llguidance() -> Any:
    """Return the library, or raise a MissingDependencyError."""
    try:
        import llguidance as library
    except ImportError as error:
        raise MissingDependencyError(
            "json_schema, regex and grammar need the package llguidance: "
            f"{install_command('grammar')}"
        ) from error
    return library


class _Tokens:
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], end: int | None, special: Iterable[int], encode: Encode
    ) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self.special_token_ids = list(special)
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


def grammar_tokenizer(
    tokens: Sequence[bytes], end_ids: Iterable[int], special: Iterable[int], encode: Encode
) -> Any:
    """Return an ``llguidance.LLTokenizer``.

    Args:
        tokens: the bytes of each token, by id; empty for ids without a token.
        end_ids: ids of the end-of-sequence tokens.
        special: ids of the special tokens.
        encode: returns the tokens of UTF-8 text.

    Raises:
        ValueError: llguidance cannot read the tokens.
    """
    library, ends = llguidance(), sorted(end_ids)
    wrapped = library.TokenizerWrapper(_Tokens(tokens, next(iter(ends), None), special, encode))
    return library.LLTokenizer(wrapped, n_vocab=len(tokens), eos_token=ends)


@functools.cache
def byte_tokenizer() -> Any:
    """Return a tokenizer with 257 tokens: the 256 bytes, and one for the end of text."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    return grammar_tokenizer(tokens, [256], [256], list)


def compiled(tokenizer: Any, lark: str) -> Any:
    """Compile a grammar in Lark into a matcher. If it is invalid, ``is_error()`` returns True."""
    library = llguidance()
    limits = library.LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        precompute_large_lexemes=False,
    )
    return library.LLMatcher(tokenizer, lark, log_level=0, limits=limits)


def is_usable(matcher: Any) -> bool:
    """Return whether the lexer that a matcher shares with its copies is below its limit."""
    copy = matcher.deep_copy()
    copy.compute_bitmask()
    return not copy.is_error()


def next_bytes(state: Any) -> bytes:
    """Return the bytes that a matcher of `byte_tokenizer` permits. Errors: see `next_tokens`."""
    mask = int.from_bytes(next_tokens(state), "little")
    return bytes(byte for byte in range(256) if mask >> byte & 1)  # without the bit of the end


def next_tokens(state: Any, member: str | None = None) -> bytes:
    """Return the tokens that a matcher permits next, one bit per token. Empty if there are none.

    Raises:
        GrammarError: the grammar exceeds a limit of llguidance. The message names `member`.
    """
    mask = bytes(state.compute_bitmask())
    return b"" if _is_stuck(state, member) else mask


def after(state: Any, tokens: Sequence[int], member: str | None = None) -> Any | None:
    """Copy a matcher, let the copy read `tokens`, and return it; None if the grammar forbids them.

    `member` and the error are those of `next_tokens`.
    """
    copy = state.deep_copy()
    if copy.try_consume_tokens(list(tokens)) == len(tokens):
        return copy
    _is_stuck(copy, member)  # raises an error if it was a limit
    return None


def _is_stuck(state: Any, member: str | None) -> bool:
    # whether the grammar permits no more text; raises an error if llguidance has reached a limit
    if not state.is_error():
        return False
    if state.get_error().startswith("NoExtensionBias"):
        return True
    whose = "" if member is None else f"member {member!r}: "
    reason = " ".join(state.get_error().split()).partition(" <state>")[0]
    raise GrammarError(f"{whose}the grammar is too complex: {reason:.200}. Simplify it.")
