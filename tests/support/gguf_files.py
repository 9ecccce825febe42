"""Write folders of Hugging Face models as GGUF files, the embedded members among them."""

import atexit
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, LlamaFileType
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from adafuse_llm.embedded import member_paths
from tests.support.gguf_vocabularies import add_vocabulary, finish

FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
}

Array = npt.NDArray[Any]
Tensors = dict[str, Array]


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
    """Write the Qwen3 or StableLM model in `folder` as the GGUF file `path`.

    Without a tokenizer in `folder` the file gets no vocabulary. Vectors stay f32.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture, prepare = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_type("model")
    writer.add_name(folder.name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config)
    if any(folder.glob("tokenizer.*")):
        known = AutoTokenizer.from_pretrained(folder)
        add_vocabulary(writer, known, "qwen2", known.chat_template)
        for end in {*config["eos_token_id"]} - {known.eos_token_id}:
            writer.add_eot_token_id(end)  # the format has room for one more end
    else:
        writer.add_tokenizer_model("no_vocab")
    tensors = prepare(load_file(folder / "model.safetensors"))
    for name, tensor in _renamed(tensors, architecture, config["num_hidden_layers"]):
        _add_tensor(writer, name, tensor, kind)
    return finish(writer, path)


def rewrite_gguf(
    path: Path,
    out: Path,
    kind: str | None = None,
    *,
    entries: Mapping[str, Any] = MappingProxyType({}),
    without: Sequence[str] = (),
) -> Path:
    """Write the model of one GGUF file to another file.

    `kind` is one of `FILE_TYPES` for matrices; by default, all types stay. `entries` are new in the
    header, and entries and tensors in `without` are left out.
    """
    reader = gguf.GGUFReader(path)
    own = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, own)
    if kind is not None:
        entries = {**entries, "general.file_type": int(FILE_TYPES[kind])}
    for name, value in entries.items():
        is_count = type(value) is int and value >= 0
        writer.add_key_value(
            name, value, GGUFValueType.UINT32 if is_count else GGUFValueType.get_type(value)
        )
    left_out = {"general.architecture", *entries, *without}
    for name, field in reader.fields.items():
        if name not in left_out and not name.startswith("GGUF."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        if tensor.name in left_out:
            continue
        if kind is None:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            _add_tensor(writer, tensor.name, values, kind)
    return finish(writer, out)


def _add_shape(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config["rope_parameters"]
    assert rope["rope_type"] == "default", "others cannot be written"
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    heads = config["num_attention_heads"]
    writer.add_head_count(heads)
    size = int(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    writer.add_vocab_size(config["vocab_size"])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_parallel_residual(config["use_parallel_residual"])


def _with_stacked_norms(tensors: Tensors) -> Tensors:
    """Stack StableLM's norms of single heads into one tensor for each layer."""
    heads: dict[str, dict[int, Array]] = {}
    # llama.cpp does not share the embeddings of this architecture with its output layer
    kept: Tensors = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    for name, tensor in tensors.items():
        layer, found, head = name.partition(".norms.")
        if found:
            heads.setdefault(f"{layer}.weight", {})[int(head.split(".")[0])] = tensor
        else:
            kept[name] = tensor
    for name, weights in heads.items():
        kept[name] = np.stack([weights[head] for head in sorted(weights)])
    return kept


ARCHITECTURES: dict[str, tuple[gguf.MODEL_ARCH, Callable[[Tensors], Tensors]]] = {
    "Qwen3ForCausalLM": (gguf.MODEL_ARCH.QWEN3, dict),
    "StableLmForCausalLM": (gguf.MODEL_ARCH.STABLELM, _with_stacked_norms),
}
"""How a class of transformers is written."""


def _renamed(
    tensors: Tensors, architecture: gguf.MODEL_ARCH, layers: int
) -> Iterator[tuple[str, Array]]:
    names = gguf.get_tensor_name_map(architecture, layers)
    for name, tensor in tensors.items():
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, f"{name} has no name in a GGUF file"
        yield new, tensor


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Array, kind: str) -> None:
    plain = np.ascontiguousarray(tensor, dtype=np.float32)
    if kind == "f32" or tensor.ndim == 1 or "norm" in name:
        writer.add_tensor(name, plain)
        return
    quantized = GGMLQuantizationType[kind.upper()]
    writer.add_tensor(name, gguf.quants.quantize(plain, quantized), raw_dtype=quantized)
