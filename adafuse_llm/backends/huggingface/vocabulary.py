"""The tokens of a Hugging Face tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from adafuse_llm.backends.vocabulary import Vocabulary

BYTE_DECODERS = frozenset({"ByteLevel", "ByteFallback", "Metaspace"})
"""Decoders of tokenizers whose tokens have known bytes."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class HuggingFaceVocabulary(Vocabulary):
    """The tokens of a member with a transformers tokenizer."""

    @property
    def follows_grammars(self) -> bool:
        return not BYTE_DECODERS.isdisjoint(decoder["type"] for decoder in self._decoders())

    def grammar_tokenizer(self, size: int, end_ids: Collection[int]) -> Any:
        from llguidance.hf import from_tokenizer

        tokenizer = self.tokenizer
        size = max(size, len(tokenizer))
        spaces = [d["replacement"] for d in self._decoders() if d["type"] == "Metaspace"]
        if not spaces:
            return from_tokenizer(tokenizer, n_vocab=size, eos_token=sorted(end_ids))
        # llguidance does not read the pieces of Unigram vocabularies as their decoder does
        added = set(map(int, tokenizer.added_tokens_decoder))
        tokens = [b""] * size
        for piece, token in tokenizer.get_vocab().items():
            byte = _BYTE.fullmatch(piece)
            text = piece if token in added else piece.replace(spaces[0], " ")
            tokens[token] = bytes([int(byte[1], 16)]) if byte else text.encode()
        return self._with_bytes(tokens, end_ids)

    def _decoders(self) -> Iterator[Mapping[str, Any]]:
        """Yield the decoder of a fast tokenizer, and all decoders inside it, as dicts."""
        if not getattr(self.tokenizer, "is_fast", False):
            return
        decoder = self.tokenizer.backend_tokenizer.decoder
        pending = [] if decoder is None else [json.loads(decoder.__getstate__())]
        while pending:
            part = pending.pop()
            yield part
            pending += part.get("decoders", ())
