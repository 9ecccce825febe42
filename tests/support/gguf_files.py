"""Write folders of Hugging Face models as GGUF files, the embedded members among them.

``python -m tests.support.gguf_files OUT`` writes every embedded member to the folder ``OUT``, once
with 32-bit weights and once as Q8_0.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, LlamaFileType, TokenType
from safetensors.numpy import load_file
from sentencepiece import SentencePieceProcessor

from adafuse_llm.embedded import member_paths

KINDS = ("f32", "q8_0")
FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
}

Array = npt.NDArray[Any]
Tensors = dict[str, Array]


@dataclass(frozen=True)
class Vocabulary:
    """The entries of a GGUF file that describe a tokenizer."""

    model: str
    tokens: Sequence[str]
    types: Sequence[TokenType]
    scores: Sequence[float] | None = None
    merges: Sequence[str] | None = None
    pre: str | None = None
    unknown: int | None = None


def write_members(folder: Path, kinds: Sequence[str] = KINDS) -> list[Path]:
    """Write every embedded member to `folder`, as ``wren-f32.gguf`` and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_gguf(member, folder / f"{member.name}-{kind}.gguf", kind)
        for member in member_paths()
        for kind in kinds
    ]


@functools.cache
def embedded_gguf(name: str, kind: str = "f32") -> Path:
    """Return the GGUF file of an embedded member, which is written once for all tests."""
    member = next(path for path in member_paths() if path.name == name)
    return write_gguf(member, _folder() / f"{name}-{kind}.gguf", kind)


@functools.cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def write_gguf(folder: Path, path: Path, kind: str = "f32") -> Path:
    """Write the model in `folder` as the GGUF file `path`.

    `folder` holds ``config.json`` and ``model.safetensors`` of a Qwen3, OLMo 2 or StableLM
    model. Without a tokenizer in `folder` the file gets no vocabulary, only its size. `kind` is one
    of `FILE_TYPES`; vectors, such as the weights of norms, stay f32.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture.id])
    writer.add_type("model")
    writer.add_name(folder.name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config)
    architecture.add_settings(writer, config)
    _add_tokenizer(writer, folder, config)
    tensors = architecture.prepare(load_file(folder / "model.safetensors"), config)
    for name, tensor in _renamed(tensors, architecture.id, config["num_hidden_layers"]):
        _add_tensor(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rewrite_gguf(
    path: Path,
    out: Path,
    kind: str | None = None,
    *,
    architecture: str | None = None,
    entries: Mapping[str, Any] = MappingProxyType({}),
    without: Sequence[str] = (),
    first: Sequence[str] = (),
    split: int = 0,
) -> Path:
    """Write the model of one GGUF file to another file.

    As F32, the weights stay as they are. As another `kind`, they are rounded once more, so the file
    is not the one that the model's author would publish.

    Args:
        path: a GGUF file in one part.
        out: the new file, or for a file in parts, the name without the number of the part.
        kind: one of `FILE_TYPES` for matrices. Vectors become F32. By default, all types stay.
        architecture: another architecture.
        entries: new entries of the header. Whole numbers of 0 or more become UINT32.
        without: entries and tensors to leave out.
        first: tensors to write before the others.
        split: tensors in each part of the file, or 0 for one part.
    """
    reader = gguf.GGUFReader(path)
    own = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture or own, split_max_tensors=split)
    if kind is not None:
        entries = {**entries, "general.file_type": FILE_TYPES[kind]}
    for name, value in entries.items():
        is_count = isinstance(value, int) and value >= 0
        writer.add_key_value(
            name, value, GGUFValueType.UINT32 if is_count else GGUFValueType.get_type(value)
        )
    left_out = {"general.architecture", *entries, *without}
    for name, field in reader.fields.items():
        if name not in left_out and not name.startswith("GGUF."):
            inner = field.types[1] if len(field.types) > 1 else None
            new = name.replace(f"{own}.", f"{architecture or own}.")
            writer.add_key_value(new, field.contents(), field.types[0], inner)
    for tensor in sorted(reader.tensors, key=lambda each: each.name not in first):
        if tensor.name in left_out:
            continue
        if kind is None:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            _add_tensor(writer, tensor.name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def rewritten(path: Path, folder: Path, kind: str) -> Path:
    """Return a model with weights of another kind, from a folder that keeps it for later runs."""
    out = folder / f"{path.stem}-{kind}.gguf"
    if not out.is_file():
        print(f"writing {out.name}", file=sys.stderr, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        rewrite_gguf(path, out.with_suffix(".new"), kind).replace(out)
    return out


def _add_shape(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config["rope_parameters"]
    if rope["rope_type"] != "default":
        raise ValueError(f"rope_type {rope['rope_type']!r} cannot be written, only 'default'.")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0)))
    writer.add_vocab_size(config["vocab_size"])


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_rms_norm(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_layer_norm(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_parallel_residual(config["use_parallel_residual"])


def _unchanged(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    return tensors


def _with_output(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Llama.cpp does not share these architectures' embeddings with their output layer."""
    return {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}


def _with_stacked_norms(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Stack StableLM's norms of single heads into one tensor for each layer."""
    heads: dict[str, dict[int, Array]] = {}
    kept: Tensors = {}
    for name, tensor in _with_output(tensors, config).items():
        layer, found, head = name.partition(".norms.")
        if found:
            heads.setdefault(f"{layer}.weight", {})[int(head.split(".")[0])] = tensor
        else:
            kept[name] = tensor
    for name, weights in heads.items():
        kept[name] = np.stack([weights[head] for head in sorted(weights)])
    return kept


@dataclass(frozen=True)
class Architecture:
    """How a class of transformers is written."""

    id: gguf.MODEL_ARCH
    add_settings: Callable[[gguf.GGUFWriter, Mapping[str, Any]], None]
    prepare: Callable[[Tensors, Mapping[str, Any]], Tensors]


ARCHITECTURES = {
    "Qwen3ForCausalLM": Architecture(gguf.MODEL_ARCH.QWEN3, _add_rms_norm, _unchanged),
    "Olmo2ForCausalLM": Architecture(gguf.MODEL_ARCH.OLMO2, _add_rms_norm, _with_output),
    "StableLmForCausalLM": Architecture(
        gguf.MODEL_ARCH.STABLELM, _add_layer_norm, _with_stacked_norms
    ),
}


def _renamed(
    tensors: Tensors, architecture: gguf.MODEL_ARCH, layers: int
) -> Iterator[tuple[str, Array]]:
    names = gguf.get_tensor_name_map(architecture, layers)
    for name, tensor in tensors.items():
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise ValueError(f"The tensor {name!r} has no name in a GGUF file.")
        yield new, tensor


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Array, kind: str) -> None:
    plain = np.ascontiguousarray(tensor, dtype=np.float32)
    if kind == "f32" or tensor.ndim == 1 or "norm" in name:
        writer.add_tensor(name, plain)
        return
    quantized = GGMLQuantizationType[kind.upper()]
    writer.add_tensor(name, gguf.quants.quantize(plain, quantized), raw_dtype=quantized)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: Mapping[str, Any]) -> None:
    vocabulary = _vocabulary(folder)
    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
        return
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pre is not None:
        writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.scores is not None:
        writer.add_token_scores(list(vocabulary.scores))
        writer.add_add_space_prefix(settings.get("add_prefix_space", False))
        writer.add_remove_extra_whitespaces(False)
    if vocabulary.merges is not None:
        writer.add_token_merges(list(vocabulary.merges))
    if vocabulary.unknown is not None:
        writer.add_unk_token_id(vocabulary.unknown)
    _add_special_tokens(writer, vocabulary.tokens, settings, config)
    if template := settings.get("chat_template"):
        writer.add_chat_template(template)


def _add_special_tokens(
    writer: gguf.GGUFWriter,
    tokens: Sequence[str],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
) -> None:
    adders = {
        "bos_token": writer.add_bos_token_id,
        "eos_token": writer.add_eos_token_id,
        "pad_token": writer.add_pad_token_id,
    }
    for name, add in adders.items():
        if token := settings.get(name):
            add(tokens.index(token))
    ends = config["eos_token_id"]
    for end in ends if isinstance(ends, list) else [ends]:
        if tokens[end] != settings["eos_token"]:
            writer.add_eot_token_id(end)  # the format has room for one more end
    writer.add_add_bos_token(settings.get("add_bos_token", False))
    writer.add_add_eos_token(settings.get("add_eos_token", False))


def _vocabulary(folder: Path) -> Vocabulary | None:
    if (folder / "tokenizer.json").is_file():
        return _of_tokenizer_json(json.loads((folder / "tokenizer.json").read_text()))
    if (folder / "tokenizer.model").is_file():
        return _of_sentencepiece(folder)
    return None


def _of_tokenizer_json(tokenizer: Mapping[str, Any]) -> Vocabulary:
    model = tokenizer["model"]
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    if model["type"] == "BPE":
        numbers = dict(model["vocab"])
        numbers.update((token["content"], token["id"]) for token in tokenizer["added_tokens"])
        tokens = sorted(numbers, key=lambda token: int(numbers[token]))
        return Vocabulary(
            model="gpt2",
            tokens=tokens,
            types=[_type(token, number in special) for number, token in enumerate(tokens)],
            merges=[" ".join(pair) for pair in model["merges"]],
            pre="qwen2",  # splits the embedded members' texts as their own pattern does
        )
    if model["type"] == "Unigram":
        tokens = [token for token, _ in model["vocab"]]
        types = [_type(token, number in special) for number, token in enumerate(tokens)]
        types[model["unk_id"]] = TokenType.UNKNOWN
        return Vocabulary(
            model="t5",
            tokens=tokens,
            types=types,
            scores=[score for _, score in model["vocab"]],
            unknown=model["unk_id"],
        )
    raise ValueError(f"A tokenizer of type {model['type']!r} cannot be written.")


def _type(token: str, special: bool) -> TokenType:
    if special:
        return TokenType.CONTROL
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return TokenType.BYTE if is_byte else TokenType.NORMAL


def _of_sentencepiece(folder: Path) -> Vocabulary:
    model = SentencePieceProcessor(str(folder / "tokenizer.model"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = {settings.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    special.update(settings.get("extra_special_tokens", ()))
    tokens = [model.id_to_piece(number) for number in range(model.vocab_size())]

    def type_of(number: int, token: str) -> TokenType:
        if model.is_unknown(number):
            return TokenType.UNKNOWN
        if model.is_control(number) or token in special:
            return TokenType.CONTROL
        return TokenType.BYTE if model.is_byte(number) else TokenType.NORMAL

    return Vocabulary(
        model="llama",
        tokens=tokens,
        types=[type_of(number, token) for number, token in enumerate(tokens)],
        scores=[model.get_score(number) for number in range(len(tokens))],
        unknown=model.unk_id(),
    )


def main() -> None:
    """Write the embedded members to the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Write the embedded members as GGUF files.")
    parser.add_argument("out", type=Path, help="folder for the files")
    for path in write_members(parser.parse_args().out):
        print(path)


if __name__ == "__main__":
    main()
