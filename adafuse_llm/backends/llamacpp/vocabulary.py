"""The vocabulary of a GGUF file, which encodes and decodes texts, and its chat template."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from adafuse_llm.backends.gguf.header import GGUFFacts
from adafuse_llm.backends.llamacpp.library import Model, load_library
from adafuse_llm.backends.vocabulary import Vocabulary
from adafuse_llm.errors import EngineClosedError, UnsupportedModelError

SENTENCEPIECE, BPE = 1, 2
"""llama.cpp's numbers of the kinds of vocabularies that can encode every text."""

UNKNOWN, CONTROL, USER_DEFINED = 1 << 0, 1 << 3, 1 << 4
"""Bits of a token's attributes in llama.cpp."""

TEMPLATE_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""By variable of chat templates: the header key of the token that it stands for."""

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Header keys of the tokens that end a response."""

WORD, TEXT = 1_000, 10_000
"""Maximum length of a run of characters of one class, such as letters, and of a run without
whitespace. Longer runs are split, as llama.cpp's regular expressions need stack memory for every
character of a word: a word of 40,000 letters would end the process."""

_LONG = re.compile(rf"\w{{{WORD}}}|\s{{{WORD}}}|[^\w\s]{{{WORD}}}|\S{{{TEXT}}}")
_CONTROL = re.compile(r"<\|.*\|>", re.DOTALL)
_MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


class LlamaTokenizer:
    """A vocabulary of llama.cpp as a tokenizer for `TokenizerCodec`. It is thread-safe.

    Args:
        model: the loaded file, which must stay open until `close`.
        facts: facts from its header.

    Attributes:
        pieces: the bytes of the tokens, by id.
        added_tokens_decoder: by id, control tokens, the unknown token, and tokens that llama.cpp
            takes out of a text before it splits the rest into words.
        unk_token_id: id of the token for text that no other token can write, or None.
        prefix_ids: tokens that llama.cpp puts before every prompt, such as a BOS token. An end
            token that llama.cpp puts after a prompt is left out, because members continue prompts.
        end_ids: ids of the tokens that end a response: those that the file names, and the one with
            which its chat template ends a reply. Guesses of llama.cpp are left out, because it may
            take any token for an end token.
        warnings: defects of the file that make the model's answers worse.

    Raises:
        UnsupportedModelError: the file has no vocabulary, or one that cannot encode every text.
    """

    def __init__(self, model: Model, facts: GGUFFacts) -> None:
        self._model = model  # Python must not free it before the vocabulary
        self._entries = facts.entries
        self._library = load_library()
        self._vocabulary: int = self._library.llama_model_get_vocab(model.pointer)
        self._kind = self._library.llama_vocab_type(self._vocabulary)
        # read the tokens, which must be able to write every text
        ids = range(model.vocabulary_size if self._kind in (SENTENCEPIECE, BPE) else 0)
        self.pieces = list(self._read_pieces(ids))
        lacking = {bytes([byte]) for byte in range(256)}.difference(self.pieces, [b" "])
        if not ids or (self._kind == SENTENCEPIECE and lacking):
            raise UnsupportedModelError(
                f"{model.label} cannot be used: llama.cpp cannot encode every text with its "
                f"tokenizer ({facts.tokenizer!r}), which must be byte-level BPE ('gpt2'), or "
                "SentencePiece ('llama') with a token for every byte. Pass the transformers model."
            )
        attributes = [self._library.llama_vocab_get_attr(self._vocabulary, i) for i in ids]
        self.unk_token_id = next((i for i in ids if attributes[i] & UNKNOWN), None)
        self.added_tokens_decoder = _added_tokens(self.pieces, attributes)
        # find the tokens that chat templates read, and those that end a response
        self.chat_template = facts.chat_template
        self.special_tokens_map = {
            name: _text(self.pieces[token])
            for name, key in TEMPLATE_KEYS.items()
            if (token := self._named(key)) is not None
        }
        ends = {self._named(key) for key in END_KEYS} | {self._reply_end()}
        self.end_ids = frozenset(end for end in ends if end is not None)
        self._closed = False
        self._lock = threading.Lock()
        # find the tokens that llama.cpp puts before a text
        plain, whole = self._tokenize("a"), self._tokenize("a", add_special=True)
        start = next(i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain)
        self.prefix_ids = whole[:start]
        self._adds_space = any(self.pieces[token].startswith(b" ") for token in plain[:1])
        self.warnings = (*facts.warnings, *self._split_markers())

    def __len__(self) -> int:
        return len(self.pieces)

    def close(self) -> None:
        """Refuse all later calls that need the file."""
        with self._lock:  # wait for a running call
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"{self._model.label} is closed. Load it again.")

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        """Return the tokens of a text, as a Hugging Face tokenizer does."""
        tokens: list[int] = []
        with self._lock:
            self._check_open()
            for part in self._parts(text):
                tokens += self._tokenize(part, parse_special=not split_special_tokens)
        return [*self.prefix_ids, *tokens] if add_special_tokens else tokens

    def decode(self, tokens: Sequence[int], **_options: bool) -> str:
        """Return the text of tokens, control tokens included. All `_options` must be False."""
        data = b"".join([self.pieces[token] for token in tokens])
        if self._adds_space:
            data = data.removeprefix(b" ")
        return _text(data)

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
        # choose the template
        template = self.chat_template
        assert template is not None, "the file has no chat template"
        if not isinstance(template, str):
            template = template["tool_use" if tools and "tool_use" in template else "default"]
        # leave out keys whose value is None, because a template may test whether a key exists
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
        options = (0, True)  # remove no spaces, and write control tokens, too
        read = functools.partial(self._library.llama_token_to_piece, self._vocabulary)
        for token in ids:
            size = read(token, buffer, len(buffer), *options)
            # if `size` is negative, the token needs a buffer of `-size` bytes
            if size < 0:
                buffer = ctypes.create_string_buffer(-size)
                size = read(token, buffer, len(buffer), *options)
            yield buffer.raw[:size]

    def _named(self, key: str) -> int | None:
        token = self._entries.get(f"tokenizer.ggml.{key}")
        return token if isinstance(token, int) and 0 <= token < len(self) else None

    def _reply_end(self) -> int | None:
        # find the special token that follows a reply in the chat template
        if self.chat_template is None:
            return None
        reply = "Yes"
        messages = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": reply}]
        try:
            _, separator, after = self.apply_chat_template(messages).rpartition(reply)
        except Exception:  # a template may raise any exception; the codec reports it
            return None
        after = after.lstrip() if separator else ""
        special = {str(token): i for i, token in self.added_tokens_decoder.items() if token.special}
        following = [text for text in special if text and after.startswith(text)]
        return special[max(following, key=len)] if following else None

    def _split_markers(self) -> Iterator[str]:
        # find markers of the chat template that are tokens, but that llama.cpp splits
        markers = {marker.encode() for marker in _MARKER.findall(str(self.chat_template or ""))}
        split = [
            repr(_text(piece))
            for token, piece in enumerate(self.pieces)
            if piece in markers
            and token not in self._tokenize(f"\n{piece.decode()}", parse_special=True)
        ]
        if split:
            yield (
                f"its header calls {', '.join(split)} of its chat template ordinary text, so "
                "llama.cpp splits it, and answers get worse. Download another conversion of the "
                "model, or convert it again"
            )

    def _parts(self, text: str) -> list[str]:
        if self._kind != BPE or not _LONG.search(text):
            return [text]
        # split long words, but no added tokens
        added = sorted(filter(None, map(str, self.added_tokens_decoder.values())), key=len)
        token = re.compile(f"({'|'.join(map(re.escape, reversed(added))) or '(?!)'})")
        parts = []
        for number, part in enumerate(token.split(text)):
            ends = [match.end() for match in _LONG.finditer(part)] if number % 2 == 0 else []
            parts += [part[i:k] for i, k in itertools.pairwise([0, *ends, len(part)])]
        return parts

    def _tokenize(
        self, text: str, *, parse_special: bool = False, add_special: bool = False
    ) -> tuple[int, ...]:
        # if `count` is negative, the buffer needs room for `-count` tokens
        data = text.encode()
        room = len(data) + 1
        while True:
            size = 1 << room.bit_length()  # few sizes, as ctypes makes a type for each
            buffer = (ctypes.c_int32 * size)()
            count = self._library.llama_tokenize(
                self._vocabulary, data, len(data), buffer, size, add_special, parse_special
            )
            if count >= 0:
                return tuple(buffer[:count])
            room = -count


class LlamaVocabulary(Vocabulary):
    """The tokens of a loaded GGUF file, which must stay open until `close`."""

    tokenizer: LlamaTokenizer

    def __init__(self, model: Model, facts: GGUFFacts) -> None:
        super().__init__(LlamaTokenizer(model, facts))

    @functools.cached_property
    def token_texts(self) -> Sequence[str]:
        # return the same texts as the codec, in a tenth of its time
        return [*map(_text, self.tokenizer.pieces)]

    def grammar_tokenizer(self, size: int, end_ids: Collection[int]) -> Any:
        tokens = [*self.tokenizer.pieces, *[b""] * (size - len(self.tokenizer))]
        return self._with_bytes(tokens, end_ids)


def _added_tokens(pieces: Sequence[bytes], attributes: Sequence[int]) -> dict[int, Any]:
    from tokenizers import AddedToken

    tokens = {}
    for token, (piece, attribute) in enumerate(zip(pieces, attributes, strict=True)):
        if attribute & (UNKNOWN | CONTROL | USER_DEFINED):
            # llama.cpp calls some control tokens, such as <|start|>, user-defined
            text = _text(piece)
            is_special = not attribute & USER_DEFINED or bool(_CONTROL.fullmatch(text))
            tokens[token] = AddedToken(text, special=is_special)
    return tokens


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
