"""Texts of a given form: JSON schemas, regular expressions and Lark grammars.

The library llguidance (extra ``grammar``) compiles a grammar and reads text byte by byte.
`GrammarState` follows the text of a response, and `GrammarVocabulary` knows which tokens of a
member may come next (`adafuse_llm.decoding.permits`).

If a member reads a prompt without its last spaces, it must write them before the response. In a
reply to messages, it may write one space first. This text is the *lead* of its grammar.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from adafuse_llm.errors import GrammarError
from adafuse_llm.grammar.matchers import (
    after,
    byte_tokenizer,
    compiled,
    is_usable,
    llguidance,
    next_bytes,
    next_tokens,
)
from adafuse_llm.grammar.schema import COMPILE_OPTIONS, enforceable
from adafuse_llm.grammar.trial import try_grammar
from adafuse_llm.text.words import REPLACEMENT

NO_LEAD = ""
ONE_SPACE = '" "? '
"""Lead of a reply, in Lark: one space or none."""

MAX_FORCED = 1_000
"""Maximum number of bytes that `GrammarState.forced` returns."""

MAX_GRAMMARS = 16
"""Maximum number of compiled grammars that this module keeps, and that each vocabulary keeps."""

OPTIONS = '%llguidance {"no_forcing": true, "allow_invalid_utf8": false}'
"""Last line of every grammar. Its options overrule earlier ones. ``no_forcing``: where only one
text can follow, a member may still choose among the tokens that write it."""

NEEDED_BYTES = (*b"\n", *range(0x20, 0x7F))
"""Bytes that a member needs as single tokens, because it could get stuck in a grammar otherwise."""

_ERROR = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*?)(?:\n +\d+ \|.*)?", re.DOTALL)
_REMEDIES = {
    "json_schema": "Leave this part out of the schema, and check the parsed response instead.",
    "regex": "Write the expression in Rust's syntax, without look-around or back-references.",
    "grammar": "The grammar must be in llguidance's dialect of Lark.",
}
_SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]


class Grammar:
    """A grammar that responses must fit: the rule ``start`` in the Lark grammar `body`.

    Attributes:
        option: name of the option of `AdaFuseConfig` that sets the grammar.
        begins_with_space: whether a response may begin with whitespace.
    """

    def __init__(self, option: str, body: str) -> None:
        llguidance()
        self.option = option
        self._body = body
        # a hostile grammar harms only the child process that tries it
        try_grammar(self.lark())
        # a harmless grammar can still be invalid, or no text fits it
        self._start = compiled(byte_tokenizer(), self.lark())
        if self._start.is_error():
            raise GrammarError(_reason(self._start.get_error(), option))
        if not (self._start.is_accepting() or next_bytes(self._start)):
            raise GrammarError(
                "no text fits it. Every repetition and recursion must be able to end."
            )
        # whitespace at the beginning belongs to the reply if the grammar allows it there
        start = self.text()
        self.begins_with_space = any(start.holds(space) for space in _SPACES)

    @classmethod
    def of(cls, config: Any) -> Grammar | None:
        """Return the grammar that an `AdaFuseConfig` sets, or None if it sets none.

        Raises:
            GrammarError: the grammar cannot be enforced.
            MissingDependencyError: llguidance is not installed.
        """
        for option in ("json_schema", "regex", "grammar"):
            source = getattr(config, option)
            if source is not None:
                text = source if isinstance(source, str) else json.dumps(source, ensure_ascii=False)
                try:
                    # a lexer grows while it reads, up to a limit; a new one then replaces it
                    if not is_usable(_grammar(option, text)._start):
                        _grammar.cache_clear()
                    return _grammar(option, text)
                except GrammarError as error:
                    raise GrammarError(f"option {option!r}: {error}") from None
        return None

    def text(self) -> GrammarState:
        """Return the state of an empty response."""
        return GrammarState(self._start)

    def lark(self, lead: str = NO_LEAD) -> str:
        """Return the whole grammar in Lark. It reads the `lead`, and then a response."""
        body = f"{self._body}\n{OPTIONS}\n"
        if not lead:
            return body
        return f"start: {lead}response\nresponse: %lark {{\n{body}}}\n{OPTIONS}\n"


@functools.lru_cache(MAX_GRAMMARS)
def _grammar(option: str, source: str) -> Grammar:
    library = llguidance()
    if option == "json_schema":
        source = f"start: {json_rule(json.loads(source))}"
    elif option == "regex":
        source = f"start: /{library.regex_to_lark(source, '')}/"
    return Grammar(option, source)


def json_rule(schema: dict[str, Any]) -> str:
    """Return the right side of a Lark rule: JSON that fits `schema`. Errors: see `enforceable`."""
    return f"%json {json.dumps({**enforceable(schema), 'x-guidance': dict(COMPILE_OPTIONS)})}"


def _reason(error: str, option: str) -> str:
    match = _ERROR.fullmatch(error)
    line, column, message = match.groups() if match else ("", "", error)
    message = " ".join(message.split()).removeprefix("failed to compile JSON schema: ")
    message = message.rpartition(" error: ")[2]
    # some errors need a remedy of their own; the others get that of the option
    remedy = _REMEDIES[option]
    if message.startswith("Unsatisfiable"):
        remedy = "No value fits this part. Correct it."
    elif message.startswith("Invalid type"):
        remedy = "Correct it."
    if option == "grammar" and line:
        message = f"line {line}, column {column}: {message}"
    return f"it cannot be enforced ({message}). {remedy}"


class GrammarState:
    """A response as its grammar reads it, byte by byte. Not thread-safe.

    `begun` is text that the chat templates wrote before the response. The grammar has read it.
    """

    def __init__(self, state: Any, begun: str = "") -> None:
        self.begun = begun
        self._first = state
        self._state = state.deep_copy()

    def commit(self, text: str) -> None:
        """Add text to the response. The grammar must allow it."""
        consumed = self._state.consume_tokens(list(text.encode()))
        assert consumed, f"the grammar does not allow {text!r}"

    def holds(self, text: str) -> bool:
        """Return whether `text` can follow the response."""
        return after(self._state, text.encode()) is not None

    def can_end(self, text: str) -> bool:
        """Return whether `text` alone is a complete response."""
        state = after(self._first, text.encode())
        return state is not None and bool(state.is_accepting())

    def ends_after(self, text: str) -> bool:
        """Return whether the response must end after `text`."""
        state = after(self._state, text.encode())
        return state is not None and bool(state.is_accepting()) and not next_bytes(state)

    def forced(self) -> str:
        """Return the whole words that must follow, because nothing else can."""
        state, forced = self._state.deep_copy(), bytearray()
        while not state.is_accepting() and len(forced) < MAX_FORCED:
            following = next_bytes(state)
            if len(following) != 1:
                break
            forced += following
            state.consume_token(following[0])
        # leave out the last character or word if the grammar forces only its beginning
        text = forced.decode(errors="ignore")
        if self.ends_after(text):  # the last word is whole, too
            return text
        words = re.match(r"(?s:.*\S)(?=\s)", text)
        return words[0] if words else ""

    def copy(self) -> GrammarState:
        """Return an empty response after the same `begun`."""
        return GrammarState(self._first, self.begun)

    def begun_with(self, text: str) -> GrammarState:
        """Return an empty response after `text`, or this one if the grammar forbids the text."""
        state = after(self._state, text.encode())
        return self if state is None else GrammarState(state, text)


class GrammarVocabulary:
    """The tokens of a member, as llguidance's `tokenizer` reads them. Thread-safe.

    Raises:
        GrammarError: the tokens lack one of the `NEEDED_BYTES`.
    """

    def __init__(
        self, name: str, tokenizer: Any, texts: Sequence[str], end_ids: Collection[int]
    ) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._size = (max(tokenizer.vocab_size, len(texts)) + 7) // 8
        self._ends = _bits(end_ids)
        # use only tokens that have the same text in llguidance and in the member's codec
        read = {
            token: self.read([token])
            for token, text in enumerate(texts[: tokenizer.vocab_size])
            if text and token not in end_ids and not tokenizer.is_special_token(token)
        }
        usable = {
            token: own
            for token, own in read.items()
            if own and (REPLACEMENT in texts[token] or own == texts[token].encode())
        }
        self._usable = _bits(usable)
        if missing := {bytes([byte]) for byte in NEEDED_BYTES}.difference(usable.values()):
            raise GrammarError(f"none of its tokens is {min(missing)!r}, which texts can hold")
        self._start = functools.lru_cache(MAX_GRAMMARS)(self._compiled)

    def matcher(self, grammar: Grammar, lead: str, begun: str = "") -> Any:
        """Return a new matcher of a lead and a response. It has read the text `begun`.

        Raises:
            GrammarError: the grammar is too complex for these tokens, or they cannot write `begun`.
        """
        # the tokens of the text that the chat templates have written
        tokens = self.encode(begun)
        if tokens is None:
            raise GrammarError(
                f"member {self.name!r} has no tokens for {begun!r:.80}, with which the response "
                "begins. Leave it out with use=[...], or begin the response with other text."
            )
        # copies share a lexer, which grows up to a limit; a new one then replaces it
        lark = grammar.lark(lead)
        if not is_usable(self._start(grammar.option, lark)):
            self._start.cache_clear()
        state = self._start(grammar.option, lark).deep_copy()
        consumed = state.consume_tokens(tokens)
        assert consumed, f"the grammar does not allow {begun!r}"
        return state

    def _compiled(self, option: str, lark: str) -> Any:
        matcher = compiled(self._tokenizer, lark)
        if matcher.is_error():
            reason = _reason(matcher.get_error(), option)
            raise GrammarError(f"option {option!r}, member {self.name!r}: {reason}")
        return matcher

    def encode(self, text: str) -> list[int] | None:
        """Return tokens with the bytes of `text`; None if a character has no tokens."""
        tokens = list(self._tokenizer.greedy_tokenize(text))
        return tokens if self.read(tokens) == text.encode() else None

    def is_usable(self, token: int) -> bool:
        """Return whether the token writes text, the same in llguidance and the member's codec."""
        return bool(self._usable >> token & 1)

    def read(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens."""
        return bytes(self._tokenizer.decode_bytes(list(tokens)))

    def mask(self, state: Any) -> Allowed | None:
        """Return the tokens that the matcher `state` permits next; None if it permits none."""
        bits = int.from_bytes(next_tokens(state, self.name), "little") & self._usable
        # all tokens that end the response count as one alternative
        may_end = not state.is_error() and bool(state.is_accepting())
        is_forced = bits & (bits - 1) == 0 and bool(bits) != may_end
        if may_end:
            bits |= self._ends
        return Allowed(bits.to_bytes(self._size, "little"), is_forced) if bits else None


def _bits(tokens: Collection[int]) -> int:
    bits = bytearray(max(tokens, default=0) // 8 + 1)
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return int.from_bytes(bits, "little")


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens that may follow a node.

    Attributes:
        mask: the tokens, in the format of ``Node.allowed``.
        is_forced: whether only one thing may follow: one token, or the end of the response.
    """

    mask: bytes
    is_forced: bool
