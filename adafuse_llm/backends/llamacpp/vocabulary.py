"""The vocabulary of a GGUF file: the texts of its tokens, the tokens of texts, and its template."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adafuse_llm.backends.gguf.header import chat_templates, read_entries
from adafuse_llm.backends.llamacpp.encoder import SPACE, Encoder, UnigramEncoder, WordEncoder
from adafuse_llm.backends.llamacpp.library import LoadedFile, load_library
from adafuse_llm.errors import EngineClosedError, UnsupportedModelError
from adafuse_llm.text.codec import TokenizerCodec

SENTENCEPIECE, BPE, WORDPIECE, UNIGRAM = 1, 2, 3, 4
KINDS = (SENTENCEPIECE, BPE, WORDPIECE, UNIGRAM, 5, 6)
"""The kinds of vocabularies that can encode text, as llama.cpp numbers them (the last two are those
of RWKV and PLaMo-2)."""

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1 << 0, 1 << 3, 1 << 4, 1 << 5
"""Attributes of tokens, as llama.cpp numbers them."""

KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # the format GGUF spells it like this
    "mask_token": "mask_token_id",
}
"""The keys in the header of tokens that chat templates can read, by the templates' names."""

SPECIAL_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
"""The ids of special tokens in SentencePiece files, which may leave out the keys."""

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""The keys in the header of tokens that end a response."""

_CONTROL = re.compile(r"<\|.*\|>", re.DOTALL)


class LlamaTokenizer:
    """A vocabulary of llama.cpp as a tokenizer for `TokenizerCodec`. It is thread-safe.

    Args:
        file: the loaded file, which must stay open until `close`.

    Attributes:
        keeps_settings: whether calls change the tokenizer; always False.
        name_or_path: path of the file.
        kind: one of `KINDS`.
        pieces: the bytes of each token, by id.
        added_tokens_decoder: control tokens, and tokens that are found in a text before it is
            split into words, by id.
        unk_token_id: id of the token for text that has no other token, or None.
        end_ids: ids of the tokens that end a response.
        chat_template: the chat template, several templates by name, or None.
        special_tokens_map: spellings of special tokens by the names that chat templates use.

    Raises:
        UnsupportedModelError: the file has no vocabulary, or one without bytes that needs them.
    """

    keeps_settings = False

    def __init__(self, file: LoadedFile) -> None:
        self._file = file
        self._library = load_library()
        self._vocabulary: int = self._library.llama_model_get_vocab(file.pointer)
        self.name_or_path = str(file.path)
        self.kind = self._check_kind()
        self._entries = read_entries(file.path)
        ids = range(self._library.llama_vocab_n_tokens(self._vocabulary))
        self._attributes = self._of_tokens(self._library.llama_vocab_get_attr, ids)
        self._spellings = self._read_spellings(ids)
        self._check_bytes()
        self.pieces = self._read_pieces(ids)
        self.unk_token_id = next((i for i in ids if self._attributes[i] & UNKNOWN), None)
        self.added_tokens_decoder = self._read_added_tokens(ids)
        self.chat_template = chat_templates(self._entries)
        self.special_tokens_map = self._read_special_tokens()
        self.end_ids = self._read_end_ids(ids)
        self._open = _Open(f"the vocabulary of {self.name_or_path!r}")
        self._encoder = self._create_encoder()
        self._before, self._after = self._encoder.affixes()
        first = self._encoder.encode("a", parse_special=False)[:1]
        self._adds_space = any(self.pieces[token].startswith(b" ") for token in first)

    def __len__(self) -> int:
        return len(self.pieces)

    def close(self) -> None:
        """Wait for calls that run, and refuse later calls that need the model."""
        self._open.close()

    def get_vocab(self) -> dict[str, int]:
        """Return the token ids by spelling, as the file spells tokens."""
        return dict(self._spellings)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: the text.
            add_special_tokens: whether to add the tokens with which the file begins or ends texts.
            split_special_tokens: whether control tokens that the text spells out stay text.

        Raises:
            EngineClosedError: the vocabulary is closed.
        """
        with self._open.use():
            tokens = self._encoder.encode(text, parse_special=not split_special_tokens)
        return [*self._before, *tokens, *self._after] if add_special_tokens else tokens

    def decode(self, tokens: Sequence[int], **_options: bool) -> str:
        """Return the text of tokens, including control tokens.

        U+FFFD stands for an incomplete character. If the vocabulary adds a space to the start of
        every text, a space at the start of the tokens' text is removed. The options are those of
        Hugging Face tokenizers for text without control tokens or with other spaces. They must be
        False.
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
        """Render a conversation with the chat template, as transformers does.

        Args:
            messages: the messages.
            tools: tools, for templates that support them.
            tokenize: must be False.
            add_generation_prompt: whether the text ends where the reply begins.
            **variables: variables for the template.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize, "the codec encodes the text"
        rendered, _ = render_jinja_template(
            conversations=[[{k: v for k, v in each.items() if v is not None} for each in messages]],
            tools=tools,
            chat_template=self._template_for(tools),
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **variables},
        )
        return str(rendered[0])

    def _template_for(self, tools: object) -> str:
        template = self.chat_template
        assert template is not None, "the file has no chat template"
        if isinstance(template, str):
            return template
        return template["tool_use" if tools and "tool_use" in template else "default"]

    # Reading the file

    def _check_kind(self) -> int:
        kind = int(self._library.llama_vocab_type(self._vocabulary))
        if kind not in KINDS:
            raise UnsupportedModelError(
                f"{self.name_or_path!r} has no vocabulary that llama.cpp can encode text with. "
                "Pass a GGUF file with a vocabulary, or the Hugging Face tokenizer of the model."
            )
        return kind

    def _check_bytes(self) -> None:
        """Refuse a vocabulary with which llama.cpp ends the process at an unknown character."""
        if self.kind != SENTENCEPIECE:
            return
        known = self._spellings.keys()
        missing = [
            name
            for byte in range(256)
            if (name := f"<0x{byte:02X}>") not in known and not (byte < 0x80 and chr(byte) in known)
        ]
        if missing:
            raise UnsupportedModelError(
                f"the vocabulary of {self.name_or_path!r} has no token for {len(missing)} of the "
                f"256 bytes, such as {missing[0]}, so it cannot encode every text. Pass the "
                "Hugging Face tokenizer of the model."
            )

    def _of_tokens(self, function: Any, ids: Iterable[int]) -> list[Any]:
        return [function(self._vocabulary, token) for token in ids]

    def _read_spellings(self, ids: range) -> dict[str, int]:
        texts = self._of_tokens(self._library.llama_vocab_get_text, ids)
        return {
            text.decode("utf-8", errors="replace"): token
            for token, text in zip(reversed(ids), reversed(texts), strict=True)
        }

    def _read_pieces(self, ids: range) -> list[bytes]:
        buffer = ctypes.create_string_buffer(256)

        def read(token: int) -> bytes:
            nonlocal buffer
            arguments = (0, True)  # remove no spaces; write control tokens, too
            size = self._library.llama_token_to_piece(
                self._vocabulary, token, buffer, len(buffer), *arguments
            )
            if size >= 0:
                return buffer.raw[:size]
            buffer = ctypes.create_string_buffer(-size)
            return read(token)

        return [read(token) for token in ids]

    def _read_added_tokens(self, ids: range) -> dict[int, Any]:
        """Return the added tokens.

        llama.cpp makes some control tokens, such as ``<|start|>``, ordinary tokens. A text must not
        contain them either.
        """
        from tokenizers import AddedToken

        return {
            i: AddedToken(text, special=not self._is_ordinary(i) or bool(_CONTROL.fullmatch(text)))
            for i in ids
            if self._attributes[i] & (UNKNOWN | CONTROL | USER_DEFINED)
            for text in [self._piece_text(i)]
        }

    def _is_ordinary(self, token: int) -> bool:
        """Return whether llama.cpp finds an added token in every text."""
        return bool(self._attributes[token] & USER_DEFINED)

    def _read_end_ids(self, ids: range) -> frozenset[int]:
        """Return the tokens that end a response.

        These are the tokens that the file names, and the token with which its chat template ends a
        reply. Others that llama.cpp assumes can be any token.
        """
        named = {self._entries.get(f"tokenizer.ggml.{key}") for key in END_KEYS}
        if self.kind == SENTENCEPIECE and "tokenizer.ggml.eos_token_id" not in self._entries:
            named |= {SPECIAL_IDS["eos_token"]} & self.added_tokens_decoder.keys()
        return frozenset({i for i in ids if i in named} | self._reply_ends())

    def _reply_ends(self) -> set[int]:
        """Return the special token that follows a reply in the chat template, if there is one."""
        if self.chat_template is None:
            return set()
        reply = "Yes"
        messages = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": reply}]
        try:
            _, found, after = self.apply_chat_template(messages).rpartition(reply)
        except Exception:  # a template may raise any exception; the codec reports it
            return set()
        after = after.lstrip() if found else ""
        special = {str(t): i for i, t in self.added_tokens_decoder.items() if t.special}
        following = max((t for t in special if t and after.startswith(t)), key=len, default=None)
        return set() if following is None else {special[following]}

    def _read_special_tokens(self) -> dict[str, str]:
        """Return the special tokens by name."""
        found: dict[str, str] = {}
        for name, key in KEYS.items():
            default = SPECIAL_IDS.get(name) if self.kind == SENTENCEPIECE else None
            token = self._entries.get(f"tokenizer.ggml.{key}", default)
            if isinstance(token, int) and 0 <= token < len(self):
                found[name] = self._piece_text(token)
        return found

    def _create_encoder(self) -> Encoder:
        added = {str(t): not self._is_ordinary(i) for i, t in self.added_tokens_decoder.items()}
        if self.kind == BPE:
            return WordEncoder(self._vocabulary, added)
        bytes_ = {self.pieces[i][0]: i for i, has in enumerate(self._attributes) if has & BYTE}
        if self.kind != UNIGRAM or len(bytes_) < 256:
            return Encoder(self._vocabulary, added)
        characters = {spelling for spelling in self._spellings if len(spelling) == 1}
        has_prefix = self._entries.get("tokenizer.ggml.add_space_prefix") is True
        prefix = [self._spellings[SPACE]] if has_prefix and SPACE in characters else []
        known = {" "} | characters - {SPACE}
        return UnigramEncoder(self._vocabulary, added, known, bytes_, prefix)

    def _piece_text(self, token: int) -> str:
        return self.pieces[token].decode("utf-8", errors="replace")


class LlamaText:
    """All that a member needs of the vocabulary of a GGUF file. It is thread-safe.

    Args:
        file: the loaded file, which must stay open until `close`.

    Attributes:
        tokenizer: the vocabulary.
        codec: the codec.
        end_ids: ids of the tokens that end a response.
        follows_grammars: whether the bytes of the tokens are known.

    Raises:
        UnsupportedModelError: the file has no vocabulary, or one without bytes that needs them.
    """

    def __init__(self, file: LoadedFile) -> None:
        self.tokenizer = LlamaTokenizer(file)
        self.codec = TokenizerCodec(self.tokenizer)
        self.end_ids = self.tokenizer.end_ids
        self.follows_grammars = self.tokenizer.kind != WORDPIECE
        self._own_file: LoadedFile | None = None

    @classmethod
    def from_file(cls, path: str | Path) -> LlamaText:
        """Load the vocabulary of a GGUF file, without its weights.

        Raises:
            LoadError: llama.cpp cannot read the file.
            UnsupportedModelError: the file has no vocabulary, or one that cannot encode every text.
            MissingDependencyError: llama.cpp is not installed.
        """
        params = load_library().llama_model_default_params()
        params.vocab_only = True
        file = LoadedFile(Path(path), params, f"the vocabulary of {str(path)!r}")
        try:
            text = cls(file)
        except BaseException:
            file.close()
            raise
        text._own_file = file
        return text

    @functools.cached_property
    def token_texts(self) -> Sequence[str]:
        """The text of each token in the middle of a text, by token id."""
        return [piece.decode("utf-8", errors="replace") for piece in self.tokenizer.pieces]

    def grammar_tokenizer(self, size: int, end_ids: Collection[int]) -> Any:
        """Return an ``llguidance.LLTokenizer`` with the tokens.

        Args:
            size: number of the model's logits.
            end_ids: ids of the tokens that end a response.

        Raises:
            ValueError: llguidance cannot read the tokens.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = sorted(end_ids)
        tokens = TokenizerWrapper(_GrammarTokens(self.tokenizer, size, ends))
        return LLTokenizer(tokens, n_vocab=size, eos_token=ends)

    def close(self) -> None:
        """Wait for calls that run, refuse later ones, and free what `from_file` loaded.

        Texts of tokens stay available. More calls of this method have no effect.
        """
        self.tokenizer.close()
        if self._own_file is not None:
            self._own_file.close()


class _GrammarTokens:
    """The tokens of a vocabulary, as llguidance reads them.

    Args:
        tokenizer: the vocabulary.
        size: number of the model's logits.
        ends: ids of the tokens that end a response.
    """

    bos_token_id = None

    def __init__(self, tokenizer: LlamaTokenizer, size: int, ends: Sequence[int]) -> None:
        added = tokenizer.added_tokens_decoder.items()
        self.eos_token_id = ends[0] if ends else None
        self.special_token_ids = [i for i, token in added if token.special]
        self.tokens = [*tokenizer.pieces, *[b""] * (size - len(tokenizer))]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special_tokens=False)


class _Open:
    """Whether a resource is open, and who uses it.

    Args:
        what: name of the resource, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._closed = False
        self._changed = threading.Condition()
        self._users = 0

    @contextmanager
    def use(self) -> Iterator[None]:
        """Keep the resource open for the time of a call.

        Raises:
            EngineClosedError: the resource is closed.
        """
        with self._changed:
            if self._closed:
                raise EngineClosedError(f"{self._what} is closed. Load the member again.")
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Refuse new users, and wait until there are none."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._users)
