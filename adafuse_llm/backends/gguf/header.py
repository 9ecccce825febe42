"""Read facts about a model from the header of its GGUF file, without llama.cpp.

The format is described in ``docs/gguf.md`` of https://github.com/ggml-org/ggml. The reader of the
package ``gguf`` takes seconds for a vocabulary of 150,000 tokens. This one skips over values that
nobody asks for.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from adafuse_llm.errors import LoadError, UnsupportedModelError, short_repr

__all__ = [
    "CACHE_TYPES",
    "GGUFFacts",
    "chat_templates",
    "read_entries",
    "read_facts",
    "read_tokens",
]

T = TypeVar("T")

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
"""Versions of the format that llama.cpp reads."""

ALIGNMENT: Final = 32
"""Alignment of the weights in bytes, unless the header sets another one."""

MAX_DIMENSIONS: Final = 4

MAX_LAYERS: Final = 512
"""Maximum number of layers of a model in llama.cpp."""

SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Formats of ``struct`` by type of value."""

STRING: Final = 8
ARRAY: Final = 9


class TensorType(NamedTuple):
    """A type of tensors: its weights are stored in blocks of fixed size."""

    name: str
    weights: int
    size: int
    """Bytes of a block."""


TENSOR_TYPES: Final[Mapping[int, TensorType]] = {
    number: TensorType(*entry)
    for number, entry in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        9: ("Q8_1", 32, 40),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1),
        25: ("I16", 1, 2),
        26: ("I32", 1, 4),
        27: ("I64", 1, 8),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
    }.items()
}
"""Tensor types by their number in a file."""

FILE_TYPES: Final[Mapping[int | None, str]] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
}
"""Names of files, which say how most of their weights are quantized, by ``general.file_type``."""

CACHE_TYPES: Final[Mapping[str, float]] = {
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
}
"""Bytes of a number in a cache, by type of the cache."""

NOT_CAUSAL: Final = frozenset(
    {"bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed"}
    | {"modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe", "t5", "t5encoder", "wavtokenizer"}
)
"""Architectures that do not continue a text."""

NO_MODELS: Final = {
    "mmproj": "the vision or audio part of a model, not a language model. Pass the GGUF file of "
    "the language model, which reads text only. It stands in the same folder or hub repository, "
    "without 'mmproj' in its name",
    "adapter": "an adapter, not a whole model. Pass the GGUF file of a model with the adapter "
    "merged into it",
    "imatrix": "an importance matrix, which is used to quantize a model. Pass the GGUF file of "
    "the model",
}
"""What files that hold no model are, and what to use instead, by ``general.type``."""

TEMPLATE: Final = "tokenizer.chat_template"

PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""End of the name of a file that holds a part of a model."""


@dataclass(frozen=True)
class GGUFFacts:
    """What the header of a GGUF file says about its model.

    Attributes:
        files: the files of the model, in order.
        architecture: llama.cpp's name of the architecture, such as ``"qwen3"``.
        name: name of the model, or None.
        context_window: number of tokens that the model was trained for; None if the header has no
            number that can be right.
        vocabulary: number of tokens in the vocabulary.
        tokenizer: kind of the tokenizer, such as ``"gpt2"`` (byte-level BPE), ``"llama"``
            (SentencePiece) or ``"t5"`` (Unigram); ``"no_vocab"`` if the file has none.
        pre_tokenizer: llama.cpp's name of the rules that split a text first, or None.
        chat_template: the chat template as Jinja text, several templates by name, or None.
        end_ids: token ids that the header names as ends of a response or of a turn.
        key_value_heads: number of key/value heads of each layer.
        key_size: number of elements of a head's key.
        value_size: number of elements of a head's value.
        parameters: number of weights.
        tensor_types: number of tensors by type, such as ``{"Q8_0": 36, "F32": 21}``.
        file_type: how most weights are quantized, such as ``"Q4_K_M"``.
        weight_bytes: size of the weights in bytes.
    """

    files: tuple[Path, ...]
    architecture: str
    name: str | None
    context_window: int | None
    vocabulary: int
    tokenizer: str
    pre_tokenizer: str | None
    chat_template: str | dict[str, str] | None
    end_ids: frozenset[int]
    key_value_heads: tuple[int, ...]
    key_size: int
    value_size: int
    parameters: int
    tensor_types: Mapping[str, int]
    file_type: str
    weight_bytes: int

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.key_value_heads)

    @property
    def parts(self) -> int:
        """Number of files."""
        return len(self.files)

    def cache_bytes(self, tokens: int, cache_type: str = "f16") -> int:
        """Return the size of the keys and values of some tokens, in bytes.

        The result is an upper bound for models with sliding windows or recurrent layers.

        Args:
            tokens: number of tokens.
            cache_type: one of `CACHE_TYPES`.
        """
        elements = sum(self.key_value_heads) * (self.key_size + self.value_size)
        return math.ceil(tokens * elements * CACHE_TYPES[cache_type])


def read_facts(path: str | Path) -> GGUFFacts:
    """Read the headers of a model's files. Load no weights.

    Args:
        path: the file, or the first file of a model in several parts.

    Raises:
        LoadError: a file is missing, truncated or not a GGUF file, or has no weights.
        UnsupportedModelError: the model is not a causal language model.
    """
    header = _read_header(Path(path))
    files = _part_paths(Path(path), header.integer("split.count") or 1)
    headers = [header, *map(_read_header, files[1:])]
    architecture = _check_purpose(header, has_tensors=any(each.tensors for each in headers))
    tensors = [tensor for each in headers for tensor in each.tensors]
    types = Counter(tensor.type_name for tensor in tensors)
    heads, key_size, value_size = _attention(header, architecture)
    window = header.integer(f"{architecture}.context_length") or 0
    tokens = header.arrays.get("tokenizer.ggml.tokens")
    return GGUFFacts(
        files=files,
        architecture=architecture,
        name=header.text("general.name"),
        context_window=window if 0 < window < 2**31 else None,
        vocabulary=tokens.count
        if tokens is not None
        else header.integer(f"{architecture}.vocab_size") or 0,
        tokenizer=header.text("tokenizer.ggml.model") or "no_vocab",
        pre_tokenizer=header.text("tokenizer.ggml.pre"),
        chat_template=chat_templates(header.values),
        end_ids=frozenset(
            number
            for kind in ("eos", "eot", "eom")
            if (number := header.integer(f"tokenizer.ggml.{kind}_token_id")) is not None
        ),
        key_value_heads=heads,
        key_size=key_size,
        value_size=value_size,
        parameters=sum(tensor.weights for tensor in tensors),
        tensor_types=dict(types.most_common()),
        file_type=FILE_TYPES.get(header.integer("general.file_type"), _main_type(tensors)),
        weight_bytes=sum(each.weight_bytes for each in headers),
    )


def read_entries(path: str | Path) -> Mapping[str, Any]:
    """Return the entries of a GGUF file's header, without arrays.

    Raises:
        LoadError: the file is missing, truncated or not a GGUF file.
    """
    return _read_header(Path(path)).values


def read_tokens(path: str | Path) -> list[str]:
    """Return the tokens of a GGUF file as the file spells them, by id; empty without a vocabulary.

    Raises:
        LoadError: the file is missing, truncated or not a GGUF file.
    """
    header = _read_header(Path(path))
    tokens = header.arrays.get("tokenizer.ggml.tokens")
    if tokens is None or tokens.kind != STRING:
        return []
    with _open(Path(path)) as data:
        reader = _Reader(data, tokens.position)
        return [reader.string() for _ in range(tokens.count)]


def chat_templates(entries: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template of a file, several templates by name, or None.

    The only template of a file is its template, whatever its name. Of several templates, one must
    be the default.

    Args:
        entries: the entries of the file's header.
    """
    named = {
        key.removeprefix(f"{TEMPLATE}."): text
        for key, text in entries.items()
        if key.startswith(f"{TEMPLATE}.") and isinstance(text, str)
    }
    if (default := entries.get(TEMPLATE)) and isinstance(default, str):
        return {**named, "default": default} if named else default
    return next(iter(named.values())) if len(named) == 1 else None


def _part_paths(path: Path, count: int) -> tuple[Path, ...]:
    """Return the paths of all parts of a model.

    Args:
        path: the first part.
        count: number of parts.

    Raises:
        LoadError: `path` is not the first part, or parts are missing.
    """
    if count <= 1:
        return (path,)
    named = PART.search(path.name)
    if named is None or int(named[2]) != count:
        raise LoadError(
            f"{path} is one of {count} parts of a model, so its name must end with "
            f"-00001-of-{count:05}.gguf. Give all parts their original names."
        )
    paths = tuple(
        path.with_name(f"{path.name[: named.start()]}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    )
    if int(named[1]) != 1:
        raise LoadError(f"{path} is part {int(named[1])} of {count}. Pass part 1: {paths[0].name}.")
    if missing := [each.name for each in paths if not each.is_file()]:
        raise LoadError(
            f"{path} is the first of {count} parts; missing in its folder: {', '.join(missing)}. "
            "Download all parts into the same folder."
        )
    return paths


def _check_purpose(header: _Header, *, has_tensors: bool) -> str:
    """Return the architecture of a causal language model, and refuse all other files."""
    architecture, kind = header.text("general.architecture"), header.text("general.type")
    if instead := NO_MODELS.get("mmproj" if architecture == "clip" else kind or ""):
        raise UnsupportedModelError(f"{header.path} is {instead}.")
    if architecture is None:
        raise LoadError(f"{header.path} has no entry general.architecture. Download it again.")
    if architecture in NOT_CAUSAL:
        raise UnsupportedModelError(
            f"{header.path} has the architecture {architecture!r}; members must be causal "
            "(decoder-only) language models"
        )
    if not has_tensors:
        raise LoadError(
            f"{header.path} holds a vocabulary only, without weights. Pass the file of a model."
        )
    return architecture


def _attention(header: _Header, architecture: str) -> tuple[tuple[int, ...], int, int]:
    """Return the key/value heads of each layer, and the sizes of a head's key and value."""
    layers = header.integer(f"{architecture}.block_count") or 0
    if layers > MAX_LAYERS:
        raise LoadError(f"{header.path} has {layers:,} layers; at most {MAX_LAYERS} are allowed")
    heads = header.integers(f"{architecture}.attention.head_count", layers)
    pairs = header.integers(f"{architecture}.attention.head_count_kv", layers) or heads
    embedding = header.integer(f"{architecture}.embedding_length") or 0
    size = embedding // (max(heads, default=0) or 1)
    key_size = header.integer(f"{architecture}.attention.key_length")
    value_size = header.integer(f"{architecture}.attention.value_length")
    return (
        pairs or (0,) * layers,
        size if key_size is None else key_size,
        size if value_size is None else value_size,
    )


@dataclass(frozen=True)
class _Array:
    """An array in the file that has been skipped."""

    kind: int
    count: int
    position: int


class _Tensor(NamedTuple):
    """An entry of the list of tensors."""

    weights: int
    type_number: int
    offset: int

    @property
    def type_name(self) -> str:
        known = TENSOR_TYPES.get(self.type_number)
        return f"type {self.type_number}" if known is None else known.name

    @property
    def end(self) -> int:
        """End of the tensor in the data of the file; its start if the type is unknown."""
        known = TENSOR_TYPES.get(self.type_number)
        blocks = 0 if known is None else math.ceil(self.weights / known.weights)
        return self.offset + blocks * (0 if known is None else known.size)


@dataclass(frozen=True)
class _Header:
    """The header of one file."""

    path: Path
    values: Mapping[str, Any]
    arrays: Mapping[str, _Array]
    tensors: tuple[_Tensor, ...]
    weight_bytes: int

    def text(self, key: str) -> str | None:
        return self._value(key, str)

    def integer(self, key: str) -> int | None:
        return self._value(key, int)

    def integers(self, key: str, count: int) -> tuple[int, ...]:
        """Return an entry that has one value for all layers or a value for each."""
        if (value := self.integer(key)) is not None:
            return (value,) * count
        array = self.arrays.get(key)
        if array is None or array.kind not in SCALARS or array.count != count:
            return ()
        with _open(self.path) as data:
            reader = _Reader(data, array.position)
            return tuple(int(reader.scalar(array.kind)) for _ in range(count))

    def _value(self, key: str, kind: type[T]) -> T | None:
        value = self.values.get(key)
        return value if isinstance(value, kind) else None


class _Reader:
    """Reads values one after the other.

    Raises:
        struct.error: the file ends before the value.
        _NotGGUFError: a value has an unknown type.
    """

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data = data
        self.position = position

    def scalar(self, kind: int) -> Any:
        if kind not in SCALARS:
            raise _NotGGUFError(f"a value has the unknown type {kind}")
        (value,) = struct.unpack_from(f"<{SCALARS[kind]}", self.data, self.position)
        self.position += struct.calcsize(SCALARS[kind])
        return value

    def number(self) -> int:
        """Read a count, a length or an offset."""
        return int(self.scalar(10))

    def string(self) -> str:
        length = self.number()
        text = self.data[self.position : self.position + length]
        if len(text) < length:
            raise struct.error("the file ends in a text")
        self.position += length
        return text.decode("utf-8", errors="replace")

    def array(self) -> _Array:
        """Skip an array."""
        kind, count = int(self.scalar(4)), self.number()
        array = _Array(kind, count, self.position)
        if kind == STRING:
            self._skip_strings(count)
        elif kind in SCALARS:
            self.position += count * struct.calcsize(SCALARS[kind])
        else:
            raise _NotGGUFError(f"an array has elements of the unknown type {kind}")
        return array

    def _skip_strings(self, count: int) -> None:
        unpack, data, position = struct.Struct("<Q").unpack_from, self.data, self.position
        for _ in range(count):
            position += 8 + unpack(data, position)[0]
        self.position = position


class _NotGGUFError(Exception):
    """The file is not as the format says."""


def _open(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_header(path: Path) -> _Header:
    try:
        with _open(path) as data:
            return _parse(path, data)
    except _NotGGUFError as error:
        raise LoadError(f"{path} is not a usable GGUF file: {error}.") from None
    except (struct.error, OverflowError, ValueError):  # ValueError: the file is empty
        raise LoadError(
            f"{path} is truncated, or it is not a GGUF file. Download the file again."
        ) from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error


def _parse(path: Path, data: mmap.mmap) -> _Header:
    if data[:4] != MAGIC:
        raise _NotGGUFError(
            f"it begins with {short_repr(bytes(data[:4]))} instead of {MAGIC!r}. Download "
            "it again, for example with 'git lfs pull' in a clone, or pass the GGUF file of a model"
        )
    reader = _Reader(data, 4)
    if (version := int(reader.scalar(4))) not in VERSIONS:
        if version & 0xFFFF == 0:
            raise _NotGGUFError("its numbers are big-endian; convert it for little-endian machines")
        allowed = " and ".join(map(str, VERSIONS))
        raise _NotGGUFError(
            f"it has version {version} of the format; llama.cpp reads versions {allowed}"
        )
    tensor_count, entry_count = reader.number(), reader.number()
    values: dict[str, Any] = {}
    arrays: dict[str, _Array] = {}
    for key, value in _entries(reader, entry_count):
        (arrays if isinstance(value, _Array) else values)[key] = value
    tensors = tuple(_tensor(reader) for _ in range(tensor_count))
    return _Header(path, values, arrays, tensors, _weight_bytes(reader, values, tensors))


def _entries(reader: _Reader, count: int) -> Iterator[tuple[str, Any]]:
    for _ in range(count):
        key, kind = reader.string(), int(reader.scalar(4))
        if kind == STRING:
            yield key, reader.string()
        elif kind == ARRAY:
            yield key, reader.array()
        else:
            yield key, reader.scalar(kind)


def _tensor(reader: _Reader) -> _Tensor:
    reader.string()  # the name
    if (count := int(reader.scalar(4))) > MAX_DIMENSIONS:
        raise _NotGGUFError(
            f"a tensor has {count} dimensions; at most {MAX_DIMENSIONS} are allowed"
        )
    dimensions = [reader.number() for _ in range(count)]
    return _Tensor(math.prod(dimensions), int(reader.scalar(4)), reader.number())


def _weight_bytes(reader: _Reader, values: Mapping[str, Any], tensors: tuple[_Tensor, ...]) -> int:
    """Return the size of the weights; check that the file has all of them."""
    if not tensors:
        return 0
    alignment = values.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise _NotGGUFError(f"its alignment is {short_repr(alignment)}")
    start = -(-reader.position // alignment) * alignment
    missing = start + max(tensor.end for tensor in tensors) - len(reader.data)
    if missing > 0:
        raise struct.error(f"{missing} bytes are missing")
    return len(reader.data) - start


def _main_type(tensors: list[_Tensor]) -> str:
    """Return the type of most weights."""
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.type_name] += tensor.weights
    return weights.most_common(1)[0][0]
