"""The vocabulary of a GGUF file: the texts of its tokens, the tokens of texts, and its template."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adafuse_llm.backends.gguf.header import chat_templates, read_entries, read_tokens
from adafuse_llm.backends.llamacpp.library import Model, Settings, load_library
from adafuse_llm.backends.vocabulary import Vocabulary
from adafuse_llm.errors import EngineClosedError, UnsupportedModelError
from adafuse_llm.grammar.matchers import grammar_tokenizer
from adafuse_llm.text.codec import cached

SENTENCEPIECE, BPE, UNIGRAM = 1, 2, 4
"""The kinds of vocabularies that causal models with attention have, as llama.cpp numbers them."""

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1 << 0, 1 << 3, 1 << 4, 1 << 5
"""Attributes of tokens, as llama.cpp numbers them."""

TEMPLATE_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""The keys in the header of tokens that chat templates can read, by the templates' names."""

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""The keys in the header of tokens that end a response."""

WORD, TEXT = 1_000, 10_000
"""Numbers of characters after which texts are cut: of one class, and of any class but whitespace.
llama.cpp's regular expressions need stack for every character of a word, and a word of 40,000
letters would end the process."""

SHORT, CACHED = 64, 4_096
"""Length of texts whose tokens are cached, and number of these texts. For each text, llama.cpp
compiles the regular expressions of some vocabularies again, which takes up to a millisecond."""

_LONG = re.compile(rf"\w{{{WORD}}}|\s{{{WORD}}}|[^\w\s]{{{WORD}}}|\S{{{TEXT}}}")
_CONTROL = re.compile(r"<\|.*\|>", re.DOTALL)
_MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


class LlamaTokenizer:
    """A vocabulary of llama.cpp as a tokenizer for `TokenizerCodec`. It is thread-safe.

    Args:
        model: the loaded file, which must stay open until `close`.

    Attributes:
        pieces: the bytes of the tokens, by id.
        added_tokens_decoder: control tokens, and tokens that are found in a text before it is
            split into words, by id.
        unk_token_id: id of the token for text that has no other token, or None.
        prefix_ids: tokens that llama.cpp puts before every prompt, such as a BOS token. It may also
            put an end token behind it, which a prompt to be continued must not have.
        end_ids: ids of the tokens that end a response: those that the file names, and the one with
            which its chat template ends a reply. Others that llama.cpp assumes can be any token.

    Raises:
        UnsupportedModelError: the file has no vocabulary, or one that cannot encode every text.
    """

    def __init__(self, model: Model) -> None:
        self._model = model  # it must not be freed before the vocabulary
        self._library = load_library()
        self._vocabulary: int = self._library.llama_model_get_vocab(model.pointer)
        self.name_or_path = str(model.path)
        self.kind = int(self._library.llama_vocab_type(self._vocabulary))
        if self.kind not in (SENTENCEPIECE, BPE, UNIGRAM):
            raise UnsupportedModelError(
                f"{self.name_or_path!r} has no vocabulary with which llama.cpp can encode every "
                "text. Pass another GGUF file, or the transformers model."
            )
        # the tokens
        self._entries = read_entries(model.path)
        ids = range(model.vocabulary_size)
        self.pieces = list(self._read_pieces(ids))
        self._attributes = [self._library.llama_vocab_get_attr(self._vocabulary, i) for i in ids]
        self._check_bytes()
        self.unk_token_id = next((i for i in ids if self._attributes[i] & UNKNOWN), None)
        self.added_tokens_decoder = self._read_added_tokens()
        # what chat templates read, and what ends a response
        self.chat_template = chat_templates(self._entries)
        self.special_tokens_map = {
            name: self._spelling(token)
            for name, key in TEMPLATE_KEYS.items()
            if (token := self._named(key)) is not None
        }
        ends = {self._named(key) for key in END_KEYS} | {self._reply_end()}
        self.end_ids = frozenset(end for end in ends if end is not None)
        # the texts that llama.cpp looks for before it splits a text
        self._added: dict[bool, re.Pattern[str]] = {}
        for parses in (True, False):
            added = self.added_tokens_decoder.items()
            texts = [str(t) for i, t in added if parses or self._attributes[i] & USER_DEFINED]
            longest = sorted(filter(None, texts), key=len, reverse=True)
            self._added[parses] = re.compile(f"({'|'.join(map(re.escape, longest)) or '(?!)'})")
        self._closed = False
        self._lock = threading.Lock()
        self._tokenize_short = cached(self._tokenize, CACHED)
        # what llama.cpp puts before a text
        plain, whole = self._tokenize("a"), self._tokenize("a", add_special=True)
        start = next(i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain)
        self.prefix_ids = whole[:start]
        self._adds_space = any(self.pieces[token].startswith(b" ") for token in plain[:1])

    def __len__(self) -> int:
        return len(self.pieces)

    def close(self) -> None:
        with self._lock:  # waits for a call that runs
            self._closed = True

    def get_vocab(self) -> dict[str, int]:
        """Return the token ids by spelling, as the file spells tokens."""
        tokens = list(enumerate(read_tokens(self._model.path)))
        return {text: token for token, text in reversed(tokens)}

    def warning(self) -> str | None:
        """Return a warning if llama.cpp splits markers of the chat template, or None."""
        markers = {each.encode() for each in _MARKER.findall(str(self.chat_template or ""))}
        split = [
            repr(self._spelling(token))
            for token, piece in enumerate(self.pieces)
            if piece in markers
            and token not in self._tokenize(f"\n{piece.decode()}", parse_special=True)
        ]
        if not split:
            return None
        return (
            f"its header calls {', '.join(split)} of its chat template ordinary text, so llama.cpp "
            "splits it, and answers get worse. Download another conversion of the model, or "
            "convert it again"
        )

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        """Return the tokens of a text, as a Hugging Face tokenizer.

        Raises:
            EngineClosedError: the vocabulary is closed.
        """
        parts = self._parts(text, parse_special=not split_special_tokens)
        tokens: list[int] = []
        with self._lock:
            if self._closed:
                raise EngineClosedError(
                    f"the vocabulary of {self.name_or_path!r} is closed. Load the member again."
                )
            for part in parts:
                if isinstance(part, bytes):
                    tokens += [self._byte_tokens[byte] for byte in part]
                else:
                    tokenize = self._tokenize_short if len(part) <= SHORT else self._tokenize
                    tokens += tokenize(part, parse_special=not split_special_tokens)
        return [*self.prefix_ids, *tokens] if add_special_tokens else tokens

    def decode(self, tokens: Sequence[int], **_options: bool) -> str:
        """Return the text of tokens, including control tokens.

        U+FFFD stands for an incomplete character. A space that the vocabulary adds to the start of
        every text is removed. The options of Hugging Face tokenizers must be False.
        """
        data = b"".join([self.pieces[token] for token in tokens])
        if self._adds_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation with the chat template, as transformers does."""
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize, "the codec encodes the text"
        template = self.chat_template
        assert template is not None, "the file has no chat template"
        if not isinstance(template, str):
            template = template["tool_use" if tools and "tool_use" in template else "default"]
        turns = [{k: v for k, v in turn.items() if v is not None} for turn in messages]
        rendered, _ = render_jinja_template(
            conversations=[turns],
            tools=tools,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **variables},
        )
        return str(rendered[0])

    def _read_pieces(self, ids: range) -> Iterator[bytes]:
        buffer = ctypes.create_string_buffer(256)
        options = (0, True)  # remove no spaces; write control tokens, too
        read = functools.partial(self._library.llama_token_to_piece, self._vocabulary)
        for token in ids:
            size = read(token, buffer, len(buffer), *options)
            if size < 0:
                buffer = ctypes.create_string_buffer(-size)
                size = read(token, buffer, len(buffer), *options)
            yield buffer.raw[:size]

    def _check_bytes(self) -> None:
        """Refuse a vocabulary that cannot encode every text.

        llama.cpp would end the process at a character that SentencePiece does not know. Of Unigram,
        it does not use the tokens of bytes, so `_parts` does, unless a space precedes every text.
        """
        if self.kind not in (SENTENCEPIECE, UNIGRAM):
            return
        is_byte = [bool(attributes & BYTE) for attributes in self._attributes]
        self._byte_tokens = {
            piece[0]: i for i, piece in enumerate(self.pieces) if is_byte[i] and len(piece) == 1
        }
        spellings = (self._spelling(i) for i in range(len(self)) if not is_byte[i])
        known = {" ", *(text for text in spellings if len(text) == 1)}
        self._unknown = re.compile(f"([^{''.join(map(re.escape, sorted(known)))}]+)")
        missing = set(range(256)) - self._byte_tokens.keys()
        if self.kind == SENTENCEPIECE:
            missing -= {ord(character) for character in known if character.isascii()}
        has_prefix = self._entries.get("tokenizer.ggml.add_space_prefix") is True
        if missing or (self.kind == UNIGRAM and has_prefix):
            raise UnsupportedModelError(
                f"the vocabulary of {self.name_or_path!r} has no token for some bytes, or a space "
                "before each text, so llama.cpp cannot encode every text. Pass the transformers "
                "model."
            )

    def _read_added_tokens(self) -> dict[int, Any]:
        from tokenizers import AddedToken

        tokens = {}
        for token, attributes in enumerate(self._attributes):
            if attributes & (UNKNOWN | CONTROL | USER_DEFINED):
                # llama.cpp makes some control tokens, such as <|start|>, ordinary
                text = self._spelling(token)
                is_special = not attributes & USER_DEFINED or bool(_CONTROL.fullmatch(text))
                tokens[token] = AddedToken(text, special=is_special)
        return tokens

    def _named(self, key: str) -> int | None:
        token = self._entries.get(f"tokenizer.ggml.{key}")
        return token if isinstance(token, int) and 0 <= token < len(self) else None

    def _spelling(self, token: int) -> str:
        return self.pieces[token].decode("utf-8", errors="replace")

    def _reply_end(self) -> int | None:
        # the special token that follows a reply in the chat template
        if self.chat_template is None:
            return None
        reply = "Yes"
        messages = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": reply}]
        try:
            _, separator, after = self.apply_chat_template(messages).rpartition(reply)
        except Exception:  # a template may raise any exception; the codec reports it
            return None
        after = after.lstrip() if separator else ""
        special = {str(t): i for i, t in self.added_tokens_decoder.items() if t.special}
        following = [text for text in special if text and after.startswith(text)]
        return special[max(following, key=len)] if following else None

    def _parts(self, text: str, *, parse_special: bool) -> list[str | bytes]:
        """Cut a text outside added tokens. What llama.cpp cannot encode becomes bytes."""
        is_unigram = self.kind == UNIGRAM
        if not is_unigram and not (self.kind == BPE and _LONG.search(text)):
            return [text]
        parts: list[str | bytes] = []
        for number, part in enumerate(self._added[parse_special].split(text)):
            if number % 2 == 1:  # an added token
                parts.append(part)
            elif is_unigram:
                pieces = self._unknown.split(part)
                parts += [piece.encode() if i % 2 else piece for i, piece in enumerate(pieces)]
            else:
                ends = [0, *(match.end() for match in _LONG.finditer(part)), len(part)]
                parts += [part[start:end] for start, end in itertools.pairwise(ends)]
        return parts

    def _tokenize(
        self, text: str, *, parse_special: bool = False, add_special: bool = False
    ) -> tuple[int, ...]:
        data = text.encode()
        room = len(data) + 1
        while True:
            size = 1 << room.bit_length()  # few sizes, because ctypes makes a type for each
            buffer = (ctypes.c_int32 * size)()
            count = self._library.llama_tokenize(
                self._vocabulary, data, len(data), buffer, size, add_special, parse_special
            )
            if count >= 0:
                return tuple(buffer[:count])
            room = -count


class LlamaVocabulary(Vocabulary):
    """The tokens of a loaded GGUF file, which must stay open until `close`."""

    def __init__(self, model: Model) -> None:
        super().__init__(LlamaTokenizer(model))
        self.end_ids: frozenset[int] = self.tokenizer.end_ids

    @classmethod
    def from_file(cls, path: str | Path) -> LlamaVocabulary:
        """Load the vocabulary of a GGUF file, without its weights."""
        label = f"the vocabulary of {str(path)!r}"
        return cls(Model(Path(path), label, Settings(vocabulary_only=True)))

    @functools.cached_property
    def token_texts(self) -> Sequence[str]:
        # as the codec's texts, in a tenth of the time
        return [piece.decode("utf-8", errors="replace") for piece in self.tokenizer.pieces]

    def grammar_tokenizer(self, size: int, end_ids: Collection[int]) -> Any:
        tokenizer: LlamaTokenizer = self.tokenizer

        def encode(text: bytes) -> list[int]:
            return tokenizer.encode(text.decode(), add_special_tokens=False)

        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        tokens = [*tokenizer.pieces, *[b""] * (size - len(tokenizer))]
        return grammar_tokenizer(tokens, end_ids, special, encode)

    def close(self) -> None:
        """Refuse later calls that need the file. Texts of tokens stay available."""
        self.tokenizer.close()
