"""Tokenizers that the tests make, and real ones where their files are present."""

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from tests.support.models import TEXT, byte_level, train_sentencepiece
from tests.support.paths import TOKENIZERS

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"]


def _llama2() -> Any:
    folder = TOKENIZERS / "llama2-sentencepiece"
    if not folder.is_dir():
        pytest.skip("the Llama 2 tokenizer is not here")
    return transformers.LlamaTokenizer.from_pretrained(folder)


def _llama3() -> Any:
    pytest.importorskip("tiktoken")
    ranks = TOKENIZERS / "llama3-tiktoken" / "tokenizer.model"
    if not ranks.is_file():
        pytest.skip("the Llama 3 tokenizer is not here")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    core = TikTokenConverter(
        vocab_file=str(ranks), pattern=LLAMA3_PATTERN, extra_special_tokens=LLAMA3_SPECIAL
    ).converted()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"
    )


def _word_piece() -> PreTrainedTokenizerFast:
    core = Tokenizer(tokenizer_models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    special = ["[UNK]", "[END]"]
    core.train_from_iterator(
        [TEXT],
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="[UNK]",
        eos_token="[END]",
        clean_up_tokenization_spaces=False,
    )


def _byte_fallback(*, dummy_prefix: bool) -> PreTrainedTokenizerFast:
    bpe = tokenizer_models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    core = Tokenizer(bpe)
    spaces = [normalizers.Replace(" ", "\u2581")]
    ahead = [normalizers.Prepend("\u2581")] if dummy_prefix else []
    core.normalizer = normalizers.Sequence([*ahead, *spaces])
    core.pre_tokenizer = pre_tokenizers.Split(Regex("\n+|\u2581*[^\u2581\n]+"), "isolated")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    ascii_text = TEXT.encode("ascii", "ignore").decode()
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=special, show_progress=False)
    core.train_from_iterator([ascii_text, "    \n        \n\n"], trainer)
    data = json.loads(core.to_str())
    del data["added_tokens"][3:]  # bytes are plain pieces of the vocabulary
    made = Tokenizer.from_str(json.dumps(data))
    if dummy_prefix:
        made.pre_tokenizer = None  # as in Llama 2's file, where spaces stay within a word
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if dummy_prefix else []),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def _slow() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        train_sentencepiece(folder, model_type="unigram", vocab_size=360)
        return transformers.BertGenerationTokenizer(f"{folder}/tokenizer.model", unk_token="<unk>")


MAKERS: Mapping[str, Callable[[], Any]] = {
    "gemma": functools.partial(_byte_fallback, dummy_prefix=False),
    "legacy": functools.partial(_byte_fallback, dummy_prefix=True),
    "prefixed": functools.partial(byte_level, add_prefix_space=True),
    "slow": _slow,
    "wordpiece": _word_piece,
    "llama2": _llama2,
    "llama3": _llama3,
}
"""Kinds of tokenizers that `tests.support.models` does not make.

``gemma``      BPE with byte fallback; spaces become "\u2581", without a dummy prefix
``legacy``     BPE with byte fallback and a dummy prefix, as Llama 2's first fast tokenizer
``prefixed``   byte-level BPE that adds a space to the start of every text, as RoBERTa
``slow``       a sentencepiece model that transformers reads in Python
``wordpiece``  WordPiece, as uncased BERT: it loses capital letters, accents and whitespace
``llama2``, ``llama3``  the real ones; where their files are absent, the test skips
"""
