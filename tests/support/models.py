"""Tiny random models and tokenizers made in code, for tests that need no download.

Every model is float64 and in evaluation mode. A bias on its output layer makes words happen:
tokens that begin with whitespace are frequent, most raw bytes are rare, and the end of the
response turns up now and then.
"""

import copy
import functools
import math
import string
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from adafuse_llm import AdaFuseEngine, RuntimeConfig
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from tests.reference import ReferenceMember

TEXT = """The ferry to Orrin leaves at nine. It carries twelve people, three goats and the post.
"Who keeps the light?" asked the boy. Nobody knew; the lamp was lit all the same.

 - bread, salt and oil: 14.50
 - rope (forty yards): 9.25
	a tab, and  two spaces

In winter the harbour freezes. Then the post goes over the ice, by sledge, from Orrin to Vell.
Anna counted: one, two, three, four, five, six. She wrote the number down and closed the book.
Caf\u00e9 Orrin serves soup \U0001f600 and tea. \u4e2d\u6587\u6ca1\u6709\u7a7a\u683c\u3002
The keeper said that the light is the light, and that the night is long. And so it was.
"""

EXTRA_PIECES = (" ", "\n", "\n\n", "  ", ".\n\n", ", ", "!", "?", "\t")

FREQUENT_BYTES = frozenset("\u00e9\U0001f600\u4e2d\u6587".encode()) | {0x0A, 0x20}
"""Bytes that random models emit: a few characters of two to four bytes, whole or broken."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)

TokenizerKind = Literal["bytelevel", "sentencepiece", "unigram", "unknowns"]
TOKENIZER_KINDS: tuple[TokenizerKind, ...] = ("bytelevel", "sentencepiece", "unigram", "unknowns")


@functools.cache
def tokenizer(kind: str, template: str | None = None) -> Any:
    """A tokenizer trained on `TEXT`, or one of the kinds of `tests.support.tokenizers`.

    ``bytelevel``      byte-level BPE, as GPT-2 and Llama 3
    ``composed``       the same, which composes accents with their letters, as Qwen
    ``sentencepiece``  a ``tokenizer.model`` of the sentencepiece trainer, as Llama 2
    ``unigram``        Unigram with Metaspace and byte fallback
    ``unknowns``       Unigram with Metaspace and no bytes: what it does not know is lost
    ``ascii``          the same with all characters of ASCII
    """
    if template is not None:
        made = copy.deepcopy(tokenizer(kind))
        made.chat_template = template
        return made
    if kind in _MAKERS:
        return _MAKERS[kind]()
    from tests.support.tokenizers import MAKERS

    return MAKERS[kind]()


def byte_level(
    *, add_prefix_space: bool = False, composes: bool = False
) -> PreTrainedTokenizerFast:
    core = Tokenizer(tokenizer_models.BPE())
    if composes:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=420,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )


def train_sentencepiece(folder: str, *, model_type: str, vocab_size: int) -> None:
    """Write ``tokenizer.model`` of the sentencepiece trainer to `folder`."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_prefix=f"{folder}/tokenizer",
        model_type=model_type,
        vocab_size=vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=0.98,
        num_threads=1,
        minloglevel=2,
    )


def _sentencepiece() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        train_sentencepiece(folder, model_type="bpe", vocab_size=440)
        return transformers.LlamaTokenizer.from_pretrained(folder)


def _pieces(count: int) -> list[tuple[str, float]]:
    """The parts of words that cover most of `TEXT`, with log-probabilities for a Unigram model.

    Counted here because the trainer of `tokenizers` gives another vocabulary every time.
    """
    words = ["\u2581" + word for word in TEXT.split()]
    parts = Counter(
        word[start:end]
        for word in words
        for start in range(len(word))
        for end in range(start + 1, min(start + 6, len(word)) + 1)
        if word[start:end].replace("\u2581", "").isascii()
    )
    single = {part for part in parts if len(part) == 1}
    longer = sorted(parts.keys() - single, key=lambda part: (-parts[part] * len(part), part))
    chosen = [*sorted(single), *longer[: count - len(single)]]
    total = sum(parts[part] for part in chosen)
    return [(part, math.log(parts[part] / total)) for part in chosen]


def _unigram(*, byte_fallback: bool, more: str = "") -> PreTrainedTokenizerFast:
    known = _pieces(200)
    names = {piece for piece, _ in known}
    extra = [
        (piece, -8.0)
        for text in (*EXTRA_PIECES, *more)
        if (piece := text.replace(" ", "\u2581")) not in names
    ]
    raw = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)] if byte_fallback else []
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), *raw, *known, *extra]
    core = Tokenizer(tokenizer_models.Unigram(vocabulary, 0, byte_fallback))
    core.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    steps: list[Any] = [decoders.ByteFallback()] if byte_fallback else []
    core.decoder = decoders.Sequence([*steps, decoders.Metaspace()])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


_MAKERS: Mapping[str, Callable[[], Any]] = {
    "bytelevel": byte_level,
    "composed": functools.partial(byte_level, composes=True),
    "sentencepiece": _sentencepiece,
    "unigram": functools.partial(_unigram, byte_fallback=True),
    "unknowns": functools.partial(_unigram, byte_fallback=False),
    "ascii": functools.partial(_unigram, byte_fallback=False, more=string.printable[:94]),
}


# Models ---------------------------------------------------------------------------------------

WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ROOM = {"max_position_embeddings": 1024}
TINY = {**WIDE, **HEADS, **ROOM}
FULL_AND_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}

GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}
GEMMA = {**TINY, **FULL_AND_SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8}
FALCON = {"alibi": True, "new_decoder_architecture": False, "multi_query": True}
STATES = {"hidden_size": 32, "num_hidden_layers": 2}
MAMBA2 = {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16}
JAMBA = {
    "num_experts": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
    "pad_token_id": 0,
}

ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", TINY),
    "mistral": ("Mistral", {**TINY, "sliding_window": 8}),
    "qwen2": ("Qwen2", TINY),
    "qwen3": ("Qwen3", {**TINY, "head_dim": 8}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3", GEMMA),
    "phi3": ("Phi3", {**TINY, "pad_token_id": 0}),
    "gpt2": ("GPT2", GPT),
    "gpt_neox": ("GPTNeoX", {**WIDE, **ROOM, "num_attention_heads": 4}),
    "gptj": ("GPTJ", {**GPT, "rotary_dim": 4}),
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": ("Falcon", {**STATES, **FALCON, "num_attention_heads": 4}),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 1024}),
    "olmo2": ("Olmo2", TINY),
    "granite": ("Granite", TINY),
    "smollm3": ("SmolLM3", {**TINY, "pad_token_id": 0}),
    "mamba": ("Mamba", {**STATES, "state_size": 4}),
    "mamba2": ("Mamba2", {**STATES, **MAMBA2}),
    "jamba": ("Jamba", {**TINY, **JAMBA}),
    "lfm2": ("Lfm2", {**TINY, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
}
"""Name to (class prefix in transformers, configuration)."""

CONFIG_CLASSES = {"gemma3": "Gemma3TextConfig"}
MODEL_CLASSES = {"gpt2": "GPT2LMHeadModel"}

SINGLE_PRECISION = frozenset(
    {"mamba", "mamba2", "jamba", "gptj", "gemma2", "gemma3", "mpt", "bloom"}
)
"""Architectures that compute a part in float32 whatever the dtype of their weights."""


@dataclass(frozen=True)
class Recipe:
    """A random member, described by plain values; equal recipes are one member.

    Attributes:
        window: positions of the model; None for the configuration's own number.
        spread: standard deviation of the weights; larger means more confident.
        end_bias: added to the logit of the end token.
        space_bias: added to the logits of tokens that begin with whitespace.
        layers: layers of the model; fewer take less time.
    """

    arch: str = "llama"
    kind: str = "bytelevel"
    seed: int = 0
    window: int | None = None
    spread: float = 0.4
    end_bias: float = 1.0
    space_bias: float = 2.5
    template: str | None = None
    layers: int = 2

    @property
    def name(self) -> str:
        return f"{self.arch}-{self.kind}-{self.seed}"


PAIR = (
    Recipe("llama", "bytelevel", seed=31, end_bias=2.0),
    Recipe("gpt2", "sentencepiece", seed=32, space_bias=1.5),
)
TRIPLE = (*PAIR, Recipe("qwen3", "unigram", seed=33, spread=0.6))
"""Two and three members that often disagree."""

LOSSY = (Recipe("llama", "unknowns", seed=34), Recipe("qwen2", "bytelevel", seed=35))
"""Two members, the first of which cannot write every text."""

CHATTING = (
    Recipe("llama", "bytelevel", seed=51, template=CHATML),
    Recipe("gpt2", "sentencepiece", seed=52, template=STRICT),
)
"""Two members with a chat template."""


def configuration(recipe: Recipe, vocabulary: int) -> Any:
    prefix, options = ARCHITECTURES[recipe.arch]
    settings = {**options, "vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
    if recipe.window is not None:
        keys = ("n_positions", "max_seq_len", "max_position_embeddings")
        settings[next(key for key in keys if key in settings)] = recipe.window
    if recipe.layers != Recipe.layers:
        depth = ("num_hidden_layers", "n_layer", "n_layers")
        settings[next(name for name in depth if name in settings)] = recipe.layers
    return getattr(transformers, CONFIG_CLASSES.get(recipe.arch, f"{prefix}Config"))(**settings)


@functools.cache
def model(recipe: Recipe) -> Any:
    """The random model of `recipe`, float64, in evaluation mode."""
    known = tokenizer(recipe.kind)
    size = len(known) + 3  # models often have rows that no token uses
    prefix, _ = ARCHITECTURES[recipe.arch]
    generator = torch.Generator().manual_seed(1000 + recipe.seed)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        config = configuration(recipe, size)
        config._experts_implementation = "eager"  # grouped matrix products know no float64
        name = MODEL_CLASSES.get(recipe.arch, f"{prefix}ForCausalLM")
        made = getattr(transformers, name)(config).double().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim >= 2 and "conv" not in name and not name.endswith("A_log"):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(noise * recipe.spread)
        head = made.get_output_embeddings()
        head.bias = torch.nn.Parameter(_biases(known, size, recipe), requires_grad=False)
    made.generation_config.eos_token_id = known.eos_token_id
    return made


def _biases(known: Any, size: int, recipe: Recipe) -> torch.Tensor:
    """What is added to the logits of random models so that they write words."""
    biases = torch.full((size,), -60.0, dtype=torch.float64)
    anchor = known.encode("a", add_special_tokens=False)
    before = known.decode(anchor)
    byte_of = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for letter, byte in byte_letters().items():
        byte_of.setdefault(letter, byte)
    for token in range(len(known)):
        piece = known.convert_ids_to_tokens(token)
        text = known.decode([*anchor, token], clean_up_tokenization_spaces=False)
        text = text.removeprefix(before)
        if token in known.all_special_ids or piece.startswith("<|"):
            continue
        biases[token] = recipe.space_bias if text[:1].isspace() else 0.0
        if "\ufffd" in text:
            biases[token] = 0.0 if byte_of.get(piece) in FREQUENT_BYTES else -60.0
        elif text in ("\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85"):
            biases[token] = -4.0
    biases[known.eos_token_id] = recipe.end_bias
    return biases


def byte_letters() -> dict[str, int]:
    """The letters by which byte-level tokenizers write single bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


@functools.cache
def backend(recipe: Recipe) -> HuggingFaceBackend:
    """The engine's member of `recipe`."""
    return HuggingFaceBackend(model(recipe), tokenizer(recipe.kind, recipe.template), recipe.name)


@functools.cache
def reference(recipe: Recipe) -> ReferenceMember:
    """The reference's member of `recipe`; it shares the weights and the encoding."""
    known = tokenizer(recipe.kind, recipe.template)
    config = model(recipe).config
    keys = ("max_position_embeddings", "n_positions", "max_seq_len")
    return ReferenceMember(
        recipe.name,
        model(recipe),
        known,
        backend(recipe).codec,
        frozenset({known.eos_token_id}),
        next((size for key in keys if (size := getattr(config, key, None))), None),
    )


@functools.cache
def engine(*recipes: Recipe, drafting: bool = True) -> AdaFuseEngine:
    """The ensemble of `recipes`, with the paper's rule."""
    members = [backend(recipe) for recipe in recipes]
    runtime = RuntimeConfig(drafting=drafting)
    return AdaFuseEngine(members, strategy="adafuse", runtime=runtime)
