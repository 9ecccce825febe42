"""Matchers of llguidance: how grammars are compiled, and within which limits."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from adafuse_llm.errors import GrammarError, MissingDependencyError, install_command

MAX_LEXER_STATES = 25_000
"""Maximum number of states of a compiled grammar's lexer, which arise while text is read. 25,000
states take from 5 to 95 MB."""

MAX_GRAMMAR_SIZE = 100_000
"""Maximum number of symbols in the rules of a compiled grammar."""


def is_available() -> bool:
    """Return whether llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


def llguidance() -> Any:
    """Return the library.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import llguidance as library
    except ImportError as error:
        raise MissingDependencyError(
            "json_schema, regex and grammar need the package llguidance: "
            f"{install_command('grammar')}"
        ) from error
    return library


class _Bytes:
    """A vocabulary whose tokens are the 256 bytes and an end."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def byte_tokenizer() -> Any:
    """Return a tokenizer whose tokens are the 256 bytes and an end."""
    library = llguidance()
    return library.LLTokenizer(library.TokenizerWrapper(_Bytes()), eos_token=256)


def compiled(tokenizer: Any, lark: str) -> Any:
    """Return a matcher at the start of a text. Its method ``is_error`` tells whether it failed.

    Args:
        tokenizer: the tokens that the matcher reads.
        lark: the grammar in llguidance's dialect of Lark.
    """
    library = llguidance()
    limits = library.LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        precompute_large_lexemes=False,
    )
    return library.LLMatcher(tokenizer, lark, log_level=0, limits=limits)


def is_usable(matcher: Any) -> bool:
    """Return whether a matcher can be copied and used. Its lexer may have reached a limit since.

    The lexer belongs to the matcher and all its copies.
    """
    copy = matcher.deep_copy()
    copy.compute_bitmask()
    return not copy.is_error()


def next_bytes(state: Any) -> bytes:
    """Return the bytes that may follow in a matcher over bytes.

    Raises:
        GrammarError: the grammar exceeds a limit of llguidance.
    """
    mask = state.compute_bitmask()[:32]  # without the bit of the end
    if state.is_error():
        if state.get_error().startswith("NoExtensionBias"):  # no text begins with the text so far
            return b""
        raise too_complex(state)
    return b"".join(_set_bits(place, bits) for place, bits in enumerate(mask) if bits)


def too_complex(state: Any) -> GrammarError:
    """Return the error for a matcher that exceeds a limit of llguidance."""
    reason = " ".join(state.get_error().split()).partition(" <state>")[0]
    return GrammarError(f"the grammar is too complex: {reason:.200}. Simplify it.")


@functools.cache
def _set_bits(place: int, bits: int) -> bytes:
    """Return the numbers of the bits that are set in one byte of a mask."""
    return bytes(8 * place + bit for bit in range(8) if bits >> bit & 1)
