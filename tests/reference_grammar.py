"""Responses of a given form, for the reference: every rule by trial, byte by byte.

A language is what a grammar over the 256 bytes allows. Whether a token may follow is tried with
every token of the vocabulary. The bytes of tokens are read from the tokenizer's own tables.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from adafuse_llm import AdaFuseConfig
from adafuse_llm.grammar.grammar import Grammar

FORMS = ("json_schema", "regex", "grammar")
"""Options that a grammar enforces token by token."""


class _Bytes:
    """A vocabulary of the 256 bytes and an end."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def _vocabulary() -> Any:
    return LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=_Bytes.eos_token_id)


class Language:
    """The texts that a response may be.

    The compiled grammar is the engine's. What a grammar accepts has tests of its own.
    """

    def __init__(self, **form: Any) -> None:
        grammar = Grammar.of(AdaFuseConfig(**form))
        assert grammar is not None
        self._start = LLMatcher(_vocabulary(), grammar.lark(), log_level=0)
        assert not self._start.is_error(), self._start.get_error()
        self._states: dict[bytes, Any] = {}
        self.allowed: dict[tuple[Any, ...], dict[bytes, tuple[list[int], bool]]] = {}
        """What may follow a text, found so far: by tokenizer, ends and lead."""

    def state(self, text: bytes) -> Any | None:
        """A matcher that has read `text`, or None if no text begins with it."""
        if text not in self._states:
            self._states[text] = self._read(text)
        known = self._states[text]
        return None if known is None else known.deep_copy()

    def begins(self, text: bytes) -> bool:
        """Whether some text of the language begins with `text`."""
        return self._read(text) is not None

    def _read(self, text: bytes) -> Any | None:
        sizes = range(len(text), -1, -1)
        size = next((size for size in sizes if text[:size] in self._states), 0)
        known = self._states.get(text[:size], self._start)
        if known is None:
            return None
        matcher = known.deep_copy()
        rest = list(text[size:])
        consumed = matcher.try_consume_tokens(rest)
        if consumed == len(rest):
            return matcher
        self._states[text[: size + consumed + 1]] = None  # no text begins with these bytes
        return None

    def holds(self, text: bytes) -> bool:
        """Whether `text` is in the language."""
        state = self.state(text)
        return state is not None and bool(state.is_accepting())

    def following(self, text: bytes) -> list[int]:
        """The bytes that can follow `text`."""
        state = self.state(text)
        assert state is not None
        return [byte for byte in range(256) if state.deep_copy().try_consume_tokens([byte]) == 1]

    def is_final(self, text: bytes) -> bool:
        """Whether `text` is in the language, and nothing can follow it."""
        return self.holds(text) and not self.following(text)

    @functools.cached_property
    def begins_with_whitespace(self) -> bool:
        whitespace = [chr(code) for code in range(0x10000) if chr(code).isspace()]
        return any(self.begins(space.encode()) for space in whitespace)

    def forced(self, response: str) -> str:
        """What every text that begins with `response` goes on with: whole words, or all of it."""
        found = b""
        while not self.holds(response.encode() + found):
            following = self.following(response.encode() + found)
            if len(following) != 1:
                break
            found += bytes(following)
        text = found.decode(errors="ignore")
        if self.is_final(response.encode() + found):
            return text
        ends = [
            end
            for end in range(1, len(text))
            if not text[end - 1].isspace() and text[end].isspace()
        ]
        return text[: max(ends, default=0)]


@functools.lru_cache(16)
def _language(form: str) -> Language:
    return Language(**json.loads(form))


def language(**form: Any) -> Language:
    """The language of a form. It remembers what it found in earlier responses."""
    return _language(json.dumps(form))


@functools.cache
def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """The bytes of every token, from the tokenizer's tables; special tokens have none."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    is_byte_level = core is not None and '"ByteLevel"' in json.dumps(
        json.loads(core.to_str())["decoder"]
    )
    letters = _letters()
    extra = {int(i): t for i, t in tokenizer.added_tokens_decoder.items()}
    found: dict[int, bytes] = {}
    for piece, token in tokenizer.get_vocab().items():
        if token in extra or token in tokenizer.all_special_ids:
            if token in extra and not extra[token].special:
                found[token] = str(extra[token].content).encode()
        elif is_byte_level:
            if all(letter in letters for letter in piece):
                found[token] = bytes(letters[letter] for letter in piece)
        elif len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            found[token] = bytes([int(piece[3:5], 16)])
        else:
            found[token] = piece.replace("\u2581", " ").encode()
    return found


def _letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies spell bytes: printable ones for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + at): byte for at, byte in enumerate(others)
    }


@functools.cache
def usable_tokens(tokenizer: Any, end_ids: frozenset[int]) -> dict[int, bytes]:
    """The tokens whose text in the middle of a text is what their bytes say."""
    before = tokenizer.encode("a", add_special_tokens=False)
    return {
        token: data
        for token, data in token_bytes(tokenizer).items()
        if data
        and token not in end_ids
        and _shown(tokenizer, [*before, token])
        == _shown(tokenizer, before) + data.decode(errors="replace")
    }


def _shown(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


class Lead:
    """What a member writes before the response: `spaces`, or one space or none if it is free."""

    def __init__(self, spaces: int, *, free: bool) -> None:
        self.spaces = spaces
        self.free = free

    def rests(self, written: bytes) -> list[bytes]:
        """What of `written` may belong to the response, for every form of the lead.

        Nothing of it does where the lead is incomplete.
        """
        if self.free:
            return [written, written[1:]] if written[:1] == b" " else [written]
        owed = b" " * self.spaces
        if written.startswith(owed):
            return [written[len(owed) :]]
        return [b""] if owed.startswith(written) else []

    def is_complete(self, written: bytes) -> bool:
        return self.free or len(written) >= self.spaces


class Follower:
    """The tokens of one member that may follow what it has written after its prompt."""

    def __init__(self, language: Language, member: Any, lead: Lead) -> None:
        self._language = language
        self._lead = lead
        self._member = member
        self._usable = usable_tokens(member.tokenizer, member.end_ids)
        key = (member.tokenizer, member.end_ids, lead.spaces, lead.free)
        self._allowed = language.allowed.setdefault(key, {})

    def written(self, before: Sequence[int], tokens: Sequence[int]) -> bytes:
        """The bytes of `tokens` after the tokens `before`."""
        found = b""
        for at, token in enumerate(tokens):
            if token in self._usable:
                found += self._usable[token]
            else:
                found += self._member.text([*before, *tokens[:at]], [token]).encode()
        return found

    def allowed(self, written: bytes) -> tuple[list[int], bool]:
        """The tokens that may follow, and whether there is one alternative only."""
        if written not in self._allowed:
            here = [self._language.state(rest) for rest in self._lead.rests(written)]
            tokens = [
                token
                for token, data in self._usable.items()
                if any(map(self._language.begins, self._lead.rests(written + data)))
            ]
            may_end = self._lead.is_complete(written) and any(
                state is not None and state.is_accepting() for state in here
            )
            ends = sorted(self._member.end_ids) if may_end else []
            self._allowed[written] = (sorted([*tokens, *ends]), len(tokens) + may_end == 1)
        return self._allowed[written]
