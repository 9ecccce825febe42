"""The members to measure, and prompts of a given length.

Embedded members agree and disagree as trained models do, but their answers are short. For long
responses the benchmark makes them *endless*: in every system, a bias on the output layer gives
their special tokens almost no probability. Random-weight members rarely agree; they show what a
forward pass costs. A similar bias restricts them to printable words.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, RuntimeConfig
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.embedded import member_paths
from training.world import Names, draw_scene

NEVER: Final = -1e4
SPACE_BIAS: Final = 0.5  # with this bias, words have about three tokens
NOISE: Final = 0.02  # standard deviation of the noise, relative to that of the matrix


@dataclass(frozen=True)
class Shape:
    """Sizes of a random-weight Llama-like member."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    window: int = 4096
    vocabulary: int | None = None  # None: size of the tokenizer's vocabulary


SHAPES: Final[Mapping[str, Shape]] = {
    "tiny": Shape(2, 32, 48, 4, 2, window=16_384),
    "5M": Shape(4, 320, 864, 10, 2, window=16_384),
    "25M": Shape(8, 512, 1376, 8, 8, window=16_384),
    "135M": Shape(30, 576, 1536, 9, 3, vocabulary=49_152),
}


class Meter:
    """A counter of a model's forward passes and of the tokens in them."""

    def __init__(self, model: Any) -> None:
        self.passes = self.tokens = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: Any, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> None:
        ids = inputs["input_ids"] if "input_ids" in inputs else args[0]
        self.passes += 1
        self.tokens += ids.numel()

    def read(self) -> tuple[int, int]:
        """Return the numbers of passes and tokens since the last call."""
        counts = self.passes, self.tokens
        self.passes = self.tokens = 0
        return counts


@dataclass(frozen=True)
class Member:
    """A model with its tokenizer, its backend for the engine, and a meter."""

    name: str
    model: Any
    tokenizer: Any
    backend: HuggingFaceBackend
    meter: Meter

    def encode(self, prompt: str) -> list[int]:
        """Encode a prompt, in the same way for every system."""
        return self.backend.codec.encode_prompt(prompt)


Members = tuple[Member, ...]


def make_member(name: str, model: Any, tokenizer: Any, *, prefix_cache_bytes: int = 0) -> Member:
    """Make a member. By default, its backend keeps nothing between requests.

    The meter does not count the test passes that a new backend runs on the model.
    """
    backend = HuggingFaceBackend(model, tokenizer, name, prefix_cache_bytes=prefix_cache_bytes)
    return Member(name, model, tokenizer, backend, Meter(model))


def make_engine(
    members: Sequence[Member],
    *,
    drafting: bool = True,
    max_requests: int | None = None,
    **options: Any,
) -> AdaFuseEngine:
    """Make an engine with the members; `options` are those of `AdaFuseConfig`."""
    runtime: dict[str, Any] = {"drafting": drafting}
    if max_requests is not None:
        runtime["max_requests"] = max_requests
    return AdaFuseEngine(
        [member.backend for member in members],
        AdaFuseConfig(**options),
        runtime=RuntimeConfig(**runtime),
    )


@functools.cache
def embedded(count: int = 3, *, endless: bool = True, prefix_cache_bytes: int = 0) -> Members:
    """Load `count` embedded members. A fourth one is a copy of the first with noisy weights."""
    members = []
    for index in range(count):
        path = member_paths()[index % 3]
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        if index >= 3:
            _add_noise(model, seed=index)
        if endless:
            _add_bias(model, dict.fromkeys(_special_tokens(model, tokenizer), NEVER))
        name = path.name + (f"-{index}" if index >= 3 else "")
        members.append(make_member(name, model, tokenizer, prefix_cache_bytes=prefix_cache_bytes))
    return tuple(members)


@functools.cache
def random_weights(shape: str, count: int = 2) -> Members:
    """Make Llama-like members with random float32 weights and the embedded tokenizers."""
    members = []
    for index in range(count):
        tokenizer = transformers.AutoTokenizer.from_pretrained(member_paths()[index % 3])
        model = llama(SHAPES[shape], len(tokenizer), seed=index)
        _add_bias(model, _printable_word_biases(tokenizer, model.config.vocab_size))
        members.append(make_member(f"{shape}-{index}", model, tokenizer))
    return tuple(members)


def chosen_members(name: str) -> Members:
    """Return the embedded members, or the two random-weight members of a shape."""
    return embedded() if name == "embedded" else random_weights(name)


def llama(shape: Shape, vocabulary: int, seed: int) -> Any:
    """Make a Llama-like model with random weights."""
    config = transformers.LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.window,
        vocab_size=shape.vocabulary or vocabulary,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).eval()


def pieces(tokenizer: Any) -> list[str | None]:
    """Return the text that each token adds, or None for special tokens and partial characters."""
    anchor = tokenizer.encode("a", add_special_tokens=False)
    before = tokenizer.decode(anchor)
    special = set(tokenizer.all_special_ids)
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts: list[str | None] = []
    for token in range(len(tokenizer)):
        text = tokenizer.decode([*anchor, token], clean_up_tokenization_spaces=False)
        whole = token not in special and text.startswith(before) and "\ufffd" not in text
        texts.append(text[len(before) :] or None if whole else None)
    return texts


@functools.cache
def prompt_of(tokens: int, seed: int = 0) -> str:
    """Write prose about the embedded members' world, with about `tokens` tokens for wren."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(member_paths()[0])
    names = Names(random.Random(f"speed {seed}"), "heldout")
    text = ""
    ids: list[int] = []
    while len(ids) <= tokens:
        scene = draw_scene(names, 4, (4, 6))
        text += "".join(passage.text + "\n\n" for passage in scene.passages)
        ids = tokenizer.encode(text, add_special_tokens=False)
    return str(tokenizer.decode(ids[:tokens])).rsplit(" ", 1)[0].rstrip()


def _special_tokens(model: Any, tokenizer: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    known = set(tokenizer.all_special_ids) | set(ends if isinstance(ends, list) else [ends])
    known |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {token for token in known if token is not None}


def _printable_word_biases(tokenizer: Any, vocabulary: int) -> dict[int, float]:
    """Return biases that restrict a random-weight member to printable words of a few tokens."""
    biases = dict.fromkeys(range(vocabulary), NEVER)
    for token, text in enumerate(pieces(tokenizer)):
        if text and text.isascii() and (text.isprintable() or text == "\n"):
            biases[token] = SPACE_BIAS if text[0].isspace() else 0.0
    return biases


def _add_bias(model: Any, biases: Mapping[int, float]) -> None:
    head = model.get_output_embeddings()
    bias = torch.zeros(head.weight.shape[0], dtype=head.weight.dtype)
    bias[list(biases)] = torch.tensor(list(biases.values()), dtype=bias.dtype)
    head.bias = torch.nn.Parameter(bias, requires_grad=False)


@torch.no_grad()
def _add_noise(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std() * NOISE)
