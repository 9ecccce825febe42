"""Encode text with a vocabulary of llama.cpp, and avoid what llama.cpp cannot encode."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from adafuse_llm.backends.llamacpp.library import load_library

WORD, TEXT = 1_000, 10_000
"""Numbers of characters after which texts are cut: of one class, and of any class but whitespace.

llama.cpp splits a text into words with regular expressions that need stack for each character of a
word. Without a cut, a word of 40,000 letters ends the process.
"""

SHORT, CACHED = 64, 4_096
"""Length of texts whose tokens are cached, and number of these texts. For each text, llama.cpp
compiles the regular expressions of some vocabularies again, which takes up to a millisecond."""

ANCHORS = ("\n", "a", ".", " a")
"""Texts to put before a part of a text, so that it is not encoded as the start of a text. The first
of these texts that does not change the tokens before it is used."""

SPACE = "\u2581"
"""The character that stands for a space in the pieces of Unigram vocabularies."""


class Encoder:
    """A function from text to tokens, without tokens that the file adds to every text.

    Args:
        vocabulary: a ``llama_vocab_p``.
        added: spellings of the tokens that are found in a text before it is split into words, and
            whether each of them is a control token.
    """

    def __init__(self, vocabulary: int, added: Mapping[str, bool]) -> None:
        self._call = functools.partial(_tokenize, vocabulary)
        self._call_cached = functools.lru_cache(CACHED)(self._call)
        ordinary = (spelling for spelling, is_control in added.items() if not is_control)
        self._added = {True: _any_of(added), False: _any_of(ordinary)}

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: the text.
            parse_special: whether control tokens that the text spells out become tokens.
        """
        if not self._is_difficult(text):
            return self._tokenize(text, parse_special=parse_special)
        tokens: list[int] = []
        for number, part in enumerate(self._added[parse_special].split(text)):
            is_added = number % 2 == 1
            tokens += (
                self._tokenize(part, parse_special=parse_special)
                if is_added
                else self._encode_difficult(part)
            )
        return tokens

    def affixes(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the file adds before and after every text."""
        plain, whole = self._tokenize("a"), self._tokenize("a", add_special=True)
        starts = range(len(whole) - len(plain) + 1)
        start = next(i for i in starts if whole[i : i + len(plain)] == plain)
        return whole[:start], whole[start + len(plain) :]

    def _is_difficult(self, _text: str) -> bool:
        """Return whether a text must not go to llama.cpp as a whole."""
        return False

    def _encode_difficult(self, part: str) -> list[int]:
        """Encode the part of a difficult text between two added tokens."""
        return self._tokenize(part)

    def _tokenize(
        self, text: str, *, parse_special: bool = False, add_special: bool = False
    ) -> list[int]:
        call = self._call_cached if len(text) <= SHORT else self._call
        return list(call(text, add_special, parse_special))


class WordEncoder(Encoder):
    """An encoder for vocabularies that split texts into words, which must not be too long."""

    _LONG = re.compile(rf"\w{{{WORD}}}|\s{{{WORD}}}|[^\w\s]{{{WORD}}}|\S{{{TEXT}}}")

    def _is_difficult(self, text: str) -> bool:
        return len(text) >= WORD and self._LONG.search(text) is not None

    def _encode_difficult(self, part: str) -> list[int]:
        cuts = [0, *(match.end() for match in self._LONG.finditer(part)), len(part)]
        pieces = [part[start:end] for start, end in itertools.pairwise(cuts)]
        return [token for piece in pieces for token in self._tokenize(piece)]


class UnigramEncoder(Encoder):
    """An encoder for Unigram vocabularies with bytes, which llama.cpp does not use.

    Args:
        vocabulary: a ``llama_vocab_p``.
        added: as for `Encoder`.
        characters: the characters that have a token of their own.
        byte_tokens: ids of the tokens of the 256 bytes.
        prefix: the tokens that stand before a text. llama.cpp adds them only before a known
            character.
    """

    def __init__(
        self,
        vocabulary: int,
        added: Mapping[str, bool],
        characters: Collection[str],
        byte_tokens: Mapping[int, int],
        prefix: Sequence[int],
    ) -> None:
        super().__init__(vocabulary, added)
        self._prefix = prefix
        self._byte_tokens = byte_tokens
        known = "".join(re.escape(character) for character in sorted(characters) if character)
        self._unknown = re.compile(f"([^{known}]+)" if known else "(.+)", re.DOTALL)
        encoded = [(anchor, self._tokenize(anchor)) for anchor in ANCHORS]
        self._anchors = [
            (anchor, before) for anchor, before in encoded if not self._unknown.search(anchor)
        ]

    def _is_difficult(self, text: str) -> bool:
        return self._unknown.search(text) is not None or not text.strip(" ")

    def _encode_difficult(self, part: str) -> list[int]:
        if not part:
            return []
        pieces = self._unknown.split(part)
        tokens = [] if pieces[0].strip(" ") else [*self._prefix]
        for number, piece in enumerate(pieces):
            if number % 2 == 1:
                tokens += (self._byte_tokens[byte] for byte in piece.encode())
            elif piece:
                tokens += self._continue(piece) if number else self._tokenize(piece)
        return tokens

    def _continue(self, piece: str) -> list[int]:
        """Encode a piece that is not at the start of a text."""
        for anchor, before in self._anchors:
            whole = self._tokenize(anchor + piece)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self._tokenize(piece)


def _tokenize(
    vocabulary: int, text: str, add_special: bool, parse_special: bool
) -> tuple[int, ...]:
    """Call llama.cpp's function from text to tokens, with the order of its arguments."""
    library, data = load_library(), text.encode()
    room = len(data) + 1
    while True:
        size = 1 << room.bit_length()  # few sizes, because ctypes makes a type for each
        buffer = (ctypes.c_int32 * size)()
        count = library.llama_tokenize(
            vocabulary, data, len(data), buffer, size, add_special, parse_special
        )
        if count >= 0:
            return tuple(buffer[:count])
        room = -count


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern whose only group is one of the spellings, the longest that matches."""
    longest = sorted(filter(None, spellings), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest))})" if longest else "((?!))")
