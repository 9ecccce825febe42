"""Train the embedded members from nothing: ``python -m training.train --help``.

Three members of different architectures and vocabularies learn the same skills with different
emphasis. A training example is a *pack*: one prompt with many questions branching off it. The
attention mask lets each branch see the prompt and itself only, and positions continue from the
prompt in every branch, so each question is seen exactly as it is asked later, while the passages
are read once for all of them.

Training has three parts: reading and arithmetic; for some members, more of what they are meant to
be good at; then the use of tools, beside more of the same. The third can start from trained members
(``--start-from``).

Every step draws its text from its own seed (run seed, member, step), so a run that was interrupted
continues from its checkpoint as if it had not been.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from adafuse_llm.adapters.conversation import Tool
from adafuse_llm.documents import Passage, question_messages
from adafuse_llm.embedded import member_paths
from adafuse_llm.embedded.tools import CALCULATE, LOOK_UP
from training.dialogues import FORMS, Form, turns_of
from training.world import (
    NEEDS,
    SKILLS,
    AgentCase,
    Case,
    Names,
    Skill,
    Split,
    draw_agent_case,
    draw_problem,
    draw_scene,
    draw_sum,
    draw_sum_list,
    mark_syllables,
)

CONTEXT: Final = 4096
VOCABULARY: Final = 1536
BOUNDARY: Final = "\u2063"  # between syllables, while a tokenizer is trained
TOKENS_PER_STEP: Final = 4096
DEFAULT_STEPS: Final = 2200
MAIN_SHARE: Final = 9 / 11  # of the steps; the rest is the last part
FINISH_PEAK: Final = 0.6  # learning rate of the last parts, against that of the main part
DEFAULT_AGENT_STEPS: Final = 650
SHORT_SHARE: Final = 0.3  # of the part with tools, in which they are only named
READING_TOKENS: Final = (640, 1280)  # of the old in a step: in that share, then
AGENT_TOKENS: Final = (1280, 1920)  # of agents' turns in a step, likewise
AGENT_LENGTH: Final = 640  # of a row of agents' turns, in tokens
IGNORED: Final = -100

Architecture = Literal["qwen3", "stablelm", "olmo2"]
Learned = Skill | Literal["tools"]


# --------------------------------------------------------------------------------------------
# The three members
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emphasis:
    """What a member is asked most.

    ``mix`` weighs the skills asked about passages, ``arithmetic`` is the share of all training
    tokens that are word problems, ``sum_lists`` the share of those that are lists of sums.
    """

    mix: Mapping[Skill, float]
    arithmetic: float
    sum_lists: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """What makes a member: architecture, vocabulary, chat template, emphasis.

    ``end`` closes a turn, ``eos`` closes a plain text. ``emphasis`` is that of the main part of
    training, ``finish`` that of the last part, for members that have one.
    """

    name: str
    architecture: Architecture
    vocabulary: Literal["byte-level BPE", "SentencePiece BPE", "Unigram"]
    template: str
    control: tuple[str, ...]
    bos: str | None
    eos: str
    end: str
    pad: str
    emphasis: Emphasis
    finish: Emphasis | None
    layers: int = 5
    width: int = 192
    inner: int = 320
    heads: int = 6
    kv_heads: int = 6


RECIPES: Final[Mapping[str, Recipe]] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="wren",
            architecture="qwen3",
            vocabulary="byte-level BPE",
            template=(
                "{% for message in messages %}"
                "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
                "{% endfor %}"
                "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
            ),
            control=("<|endoftext|>", "<|start|>", "<|end|>", "<|pad|>"),
            bos=None,
            eos="<|endoftext|>",
            end="<|end|>",
            pad="<|pad|>",
            emphasis=Emphasis(
                mix={
                    "people": 0.40,
                    "places_products": 0.32,
                    "numbers": 0.08,
                    "dates": 0.08,
                    "not_stated": 0.12,
                },
                arithmetic=0.06,
            ),
            finish=None,
        ),
        Recipe(
            name="heron",
            architecture="stablelm",
            vocabulary="SentencePiece BPE",
            template=(
                "{{ bos_token }}{% set ns = namespace(system='') %}"
                "{% for message in messages %}"
                "{% if message['role'] == 'system' %}"
                "{% set ns.system = message['content'] + '\n\n' %}"
                "{% elif message['role'] == 'assistant' %}"
                "<model>\n{{ message['content'] }}<end>\n"
                "{% else %}"
                "<user>\n{{ ns.system + message['content'] }}<end>\n{% set ns.system = '' %}"
                "{% endif %}"
                "{% endfor %}"
                "{% if add_generation_prompt %}<model>\n{% endif %}"
            ),
            control=("<unk>", "<s>", "</s>", "<pad>", "<user>", "<model>", "<end>"),
            bos="<s>",
            eos="</s>",
            end="<end>",
            pad="<pad>",
            emphasis=Emphasis(
                mix={
                    "people": 0.10,
                    "places_products": 0.10,
                    "numbers": 0.34,
                    "dates": 0.34,
                    "not_stated": 0.12,
                },
                arithmetic=0.08,
            ),
            finish=Emphasis(
                mix={
                    "people": 0.10,
                    "places_products": 0.10,
                    "numbers": 0.30,
                    "dates": 0.30,
                    "not_stated": 0.20,
                },
                arithmetic=0.06,
                sum_lists=0.0,
            ),
        ),
        Recipe(
            name="finch",
            architecture="olmo2",
            vocabulary="Unigram",
            template=(
                "{% for message in messages %}"
                "[|{{ message['role'] }}|]\n{{ message['content'] }}"
                "{% if message['role'] == 'assistant' %}[|done|]{% endif %}{{ '\\n' }}"
                "{% endfor %}"
                "{% if add_generation_prompt %}[|assistant|]\n{% endif %}"
            ),
            control=("[|unk|]", "[|done|]", "[|pad|]", "[|system|]", "[|user|]", "[|assistant|]"),
            bos=None,
            eos="[|done|]",
            end="[|done|]",
            pad="[|pad|]",
            emphasis=Emphasis(
                mix={
                    "people": 0.14,
                    "places_products": 0.14,
                    "numbers": 0.14,
                    "dates": 0.14,
                    "not_stated": 0.44,
                },
                arithmetic=0.30,
            ),
            finish=Emphasis(
                mix={
                    "people": 0.13,
                    "places_products": 0.13,
                    "numbers": 0.13,
                    "dates": 0.13,
                    "not_stated": 0.48,
                },
                arithmetic=0.50,
                sum_lists=0.35,
            ),
        ),
    )
}


def build_model(recipe: Recipe, tokenizer: Any, seed: int) -> Any:
    """A freshly initialised float32 model for ``recipe`` (its weights depend on ``seed`` only)."""
    from transformers import (
        Olmo2Config,
        Olmo2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        StableLmConfig,
        StableLmForCausalLM,
    )

    head = recipe.width // recipe.heads
    ids = dict(
        zip(recipe.control, tokenizer.convert_tokens_to_ids(list(recipe.control)), strict=True)
    )
    stops = list(dict.fromkeys([ids[recipe.end], ids[recipe.eos]]))
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.width,
        "intermediate_size": recipe.inner,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": None if recipe.bos is None else ids[recipe.bos],
        "eos_token_id": stops,
        "pad_token_id": ids[recipe.pad],
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any
        match recipe.architecture:
            case "qwen3":
                model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=head))
            case "stablelm":
                rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
                config = StableLmConfig(**shape, qk_layernorm=True, rope_parameters=rope)
                model = StableLmForCausalLM(config)
            case "olmo2":
                model = Olmo2ForCausalLM(Olmo2Config(**shape))
    model.generation_config.eos_token_id = stops
    model.generation_config.pad_token_id = ids[recipe.pad]
    model.generation_config.bos_token_id = shape["bos_token_id"]
    return model.float()


# --------------------------------------------------------------------------------------------
# Tokenizers
# --------------------------------------------------------------------------------------------


def _corpus(recipe: Recipe, seed: int, n_scenes: int) -> Iterator[str]:
    """Training-split prompts and answers, one text each, syllables marked."""
    rng = random.Random(f"corpus {seed} {recipe.name}")
    names = Names(rng, "train")
    for _ in range(n_scenes):
        scene = draw_scene(names, 3)
        cases = [scene.ask(rng, skill) for skill in SKILLS if skill != "arithmetic"]
        asked = [case for case in cases if case is not None]
        layout = draw_layout(rng, scene.passages)
        lines = [layout.before]
        lines += [layout.around(case.question) + "\n" + case.answer for case in asked]
        problem = draw_problem(names)
        lines.append(f"Question: {problem.question}\n{problem.answer}")
        yield mark_syllables("\n".join(lines), BOUNDARY)


def build_tokenizer(recipe: Recipe, folder: Path, seed: int, n_scenes: int = 3000) -> Any:
    """Train the tokenizer of ``recipe``, save it in ``folder`` and return it as loaded from there.

    All three are lossless, keep digits single, and cut a made-up word into its two syllables
    wherever it stands: a name is learned once, with or without a space before it.
    """
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    texts = list(_corpus(recipe, seed, n_scenes))
    match recipe.vocabulary:
        case "byte-level BPE":
            _save_byte_level(recipe, folder, texts)
        case "SentencePiece BPE":
            _save_sentencepiece(folder, texts)
        case "Unigram":
            _save_unigram(recipe, folder, texts)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": recipe.end,
        "pad_token": recipe.pad,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": recipe.template,
        "extra_special_tokens": [
            token for token in recipe.control if token not in (recipe.end, recipe.pad, recipe.bos)
        ],
    }
    if recipe.bos is not None:
        settings["bos_token"] = recipe.bos
    if recipe.vocabulary == "SentencePiece BPE":
        settings |= {
            "tokenizer_class": "LlamaTokenizer",
            "unk_token": "<unk>",
            "add_bos_token": True,
            "add_prefix_space": False,
            "legacy": False,
        }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    # Loading needs to know the architecture; the real configuration is written with the model.
    if not (folder / "config.json").exists():
        text = json.dumps({"model_type": recipe.architecture})
        (folder / "config.json").write_text(text, encoding="utf-8")
    return AutoTokenizer.from_pretrained(folder)


_WORD_PATTERN: Final = r" (?=\p{Lu})| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n|[^\S\n]+(?!\S)|\s"


def _save_byte_level(recipe: Recipe, folder: Path, texts: Sequence[str]) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    def splitter(*first: Any) -> Any:
        words = pre_tokenizers.Split(Regex(_WORD_PATTERN), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*first, words, to_bytes])

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter(pre_tokenizers.Split(BOUNDARY, behavior="removed"))
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(recipe.control),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = splitter()
    tokenizer.save(str(folder / "tokenizer.json"))


def _save_sentencepiece(folder: Path, texts: Sequence[str]) -> None:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in text.split("\n") if line),
        model_writer=model,  # a file name would be stored in the model
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=True,
        pretokenization_delimiter=BOUNDARY,
        user_defined_symbols=["\n"],
        control_symbols=["<user>", "<model>", "<end>"],
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        character_coverage=1.0,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())


def _save_unigram(recipe: Recipe, folder: Path, texts: Sequence[str]) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    def splitter(*first: Any) -> Any:
        return pre_tokenizers.Sequence(
            [
                *first,
                pre_tokenizers.Split(
                    Regex(r"\n| (?=\p{Lu})|\p{N}|[^\s\p{L}\p{N}]"), behavior="isolated"
                ),
                pre_tokenizers.Metaspace(prepend_scheme="never", split=True),
            ]
        )

    # The pieces are the commonest words and syllables, with their frequencies; single characters
    # and bytes make up the rest. (Pruning by likelihood would cut rarer syllables to letters.)
    marked = splitter(pre_tokenizers.Split(BOUNDARY, behavior="removed"))
    counts: Counter[str] = Counter()
    characters: set[str] = set()
    for text in texts:
        found = [piece for piece, _ in marked.pre_tokenize_str(text)]
        counts.update(found)
        characters.update(*found)
    room = VOCABULARY - 256 - len(recipe.control) - len(characters)
    chosen = [piece for piece, _ in counts.most_common() if len(piece) > 1][:room]
    frequency = {piece: counts[piece] for piece in chosen} | dict.fromkeys(sorted(characters), 1)
    total = sum(frequency.values())
    pieces = [(token, 0.0) for token in recipe.control]
    pieces += [(piece, math.log(count / total)) for piece, count in frequency.items()]
    lowest = min(score for _, score in pieces) - 10.0
    pieces += [(f"<0x{byte:02X}>", lowest) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = splitter()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(list(recipe.control))
    tokenizer.save(str(folder / "tokenizer.json"))


# --------------------------------------------------------------------------------------------
# Prompts: where the passages and the question stand
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """A prompt for many questions about the same passages.

    ``before`` is the part all questions share. ``around`` puts a question into the rest.
    ``system`` is a system message, ``plain`` means no chat template, ``history`` a turn before.
    """

    before: str
    pattern: str
    system: str = ""
    plain: bool = False
    history: tuple[str, str] | None = None

    def around(self, question: str) -> str:
        """The part after ``before``, with the question in its place."""
        return self.pattern.replace("{q}", question)


_HEADS: Final = (
    "",
    "Context:\n",
    "Context information:\n",
    "Notes:\n\n",
    "Read these notes first.\n\n",
    "Some text to read:\n----------\n",
    "Reply to the question from the context only.\n\nContext:\n",
    "Keep to what the documents say.\n\nDocuments:\n",
    "You help people to find facts in documents.\n\n",
)
_TAILS: Final = (
    "\n\nQuestion: {q}",
    "\n\nQuestion: {q}\nAnswer:",
    "\n\n{q}",
    "\n----------\nFrom this text alone, answer: {q}",
    "\n\nQuery: {q}\nAnswer:",
    "\n\nNow the question: {q}",
    "\n\nQuestion: {q}\nReply with the answer only.",
    "\n\nBased on the above, {q}\n",
)
_QUESTION_FIRST: Final = (
    ("Question: {q}\n\nContext:\n", ""),
    ("{q}\n\n", ""),
    ("Question: {q}\n\nPassages:\n\n", "\n\nAnswer:"),
    ("Find the answer to this question in the text: {q}\n\nText:\n", ""),
)
_SYSTEMS: Final = (
    "Answer from the passages. If they do not say, answer: not stated.",
    "You answer questions about documents.",
    "You are a helpful assistant. Answer in a few words.",
    "Give short answers. Say not stated when the text does not say.",
)


def _join(rng: random.Random, passages: Sequence[Passage]) -> str:
    style = rng.randrange(6)
    if style == 0:
        return "\n\n".join(f"[{n}] {p.text}" for n, p in enumerate(passages, start=1))
    if style == 1:
        return "\n\n".join(f"Passage {n}:\n{p.text}" for n, p in enumerate(passages, start=1))
    if style == 2:
        return "\n---\n".join(p.text for p in passages)
    if style == 3:
        return "\n\n".join(f"Source: {p.source}\n{p.text}" for p in passages)
    if style == 4:
        return "\n".join(p.text for p in passages)
    return "\n\n".join(p.text for p in passages)


def draw_layout(rng: random.Random, passages: Sequence[Passage]) -> Layout:
    """A prompt form: three in five times the canonical one of ``question_messages``."""
    chance = rng.random()
    if chance < 0.6:
        content = question_messages("{q}", passages)[0]["content"]
        before, after = content[: -len("Question: {q}")], "Question: {q}"
        if not passages:
            before = ""
        system = rng.choice(_SYSTEMS) if rng.random() < 0.1 else ""
        return Layout(before, after, system)
    text = _join(rng, passages)
    if chance < 0.67:
        first, last = rng.choice(_QUESTION_FIRST)
        system = rng.choice(_SYSTEMS) if rng.random() < 0.3 else ""
        return Layout("", first + text + last, system)
    before, after = rng.choice(_HEADS) + text, rng.choice(_TAILS)
    if chance < 0.75:
        if not after.endswith("Answer:"):
            after += "\nAnswer:"
        return Layout(before, after, plain=True)
    if chance < 0.83:
        return Layout(
            "", "{q}", system=rng.choice((*_SYSTEMS, "Use this context.")) + "\n\n" + text
        )
    system = rng.choice(_SYSTEMS) if rng.random() < 0.4 else ""
    if chance < 0.87:
        return Layout(before, after, system, history=("Question: {q}", "{a}"))
    return Layout(before, after, system)


# --------------------------------------------------------------------------------------------
# Tools as an agent is told of them
# --------------------------------------------------------------------------------------------

_OTHER_TOOLS: Final = (
    ("send_mail", "Send a letter to a person.", "text"),
    ("translate", "Translate a text.", "text"),
    ("weather", "The weather of a place.", "place"),
    ("play_music", "Play a piece of music.", "title"),
    ("set_alarm", "Set an alarm.", "time"),
    ("draw_map", "Draw a map of a place.", "place"),
)
_OTHER_WORDS: Final = {
    "look_up": (
        "Search the handbook for a name.",
        "Look up a name in the handbook.",
        "What the documents say about a person, place, product or event.",
    ),
    "calculate": (
        "Calculate a sum.",
        "Work out a sum such as 3 * 4.50 + 2.",
        "A calculator for numbers.",
    ),
}
_SHORT_SYSTEMS: Final[Mapping[Form, str]] = {
    "tool calls": "To call a tool, look_up or calculate, write its name and arguments as JSON.",
    "ReAct": "Write Thought, Action (look_up, calculate) and Action Input, or Thought and Answer.",
}
_AGENT_SYSTEMS: Final = (
    "You are a helpful assistant.",
    "You answer questions about a town. Use your tools.",
    "Give short answers.",
    "You are an agent with tools. Look up what you do not know.",
)


def draw_tools(rng: random.Random) -> list[Tool]:
    """The two tools in any order, at times in other words, with titles, or beside another tool."""
    tools = [LOOK_UP, CALCULATE]
    for place, tool in enumerate(tools):
        if rng.random() < 0.2:
            tools[place] = replace(tool, description=rng.choice(_OTHER_WORDS[tool.name]))
    if rng.random() < 0.25:
        name, description, argument = rng.choice(_OTHER_TOOLS)
        schema = {
            "properties": {argument: {"type": "string"}},
            "required": [argument],
            "type": "object",
        }
        tools.append(Tool(name, description, schema))
    rng.shuffle(tools)
    style = rng.random()
    if style < 0.35:
        tools = [_with_title(tool) for tool in tools]
    if style < 0.2:
        tools = [_with_signature(tool) for tool in tools]
    return tools


def _with_title(tool: Tool) -> Tool:
    """The argument with a title, as pydantic describes one."""
    ((name, schema),) = tool.parameters["properties"].items()
    titled = {name: {"title": name.title(), **schema}}
    return replace(tool, parameters={**tool.parameters, "properties": titled})


def _with_signature(tool: Tool) -> Tool:
    """The description after the signature of the function, as LlamaIndex writes it."""
    (argument,) = tool.parameters["properties"]
    signature = f"{tool.name}({argument}: str) -> str"
    return replace(tool, description=f"{signature}\n{tool.description}")


# --------------------------------------------------------------------------------------------
# Packs: one prompt, many questions
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Branch:
    """Tokens of a question and its answer; the last ``n_answer`` of them are learned.

    It continues the prompt, or the branch with the number ``parent`` (the first is 1).
    """

    ids: list[int]
    n_answer: int
    skill: Learned
    parent: int = 0


@dataclass(frozen=True)
class Pack:
    """Tokens of a prompt and the branches that continue it."""

    prefix: list[int]
    branches: list[Branch]

    def __len__(self) -> int:
        return len(self.prefix) + sum(len(branch.ids) for branch in self.branches)


class Packer:
    """Draws packs for one member: text, prompt form, tokens."""

    def __init__(self, recipe: Recipe, tokenizer: Any, emphasis: Emphasis) -> None:
        self.recipe = recipe
        self.emphasis = emphasis
        self._tokenizer = tokenizer
        self._encoder = tokenizer.backend_tokenizer
        self._end = tokenizer.convert_tokens_to_ids(recipe.end)
        self._eos = tokenizer.convert_tokens_to_ids(recipe.eos)
        self._bos = [] if recipe.bos is None else [tokenizer.convert_tokens_to_ids(recipe.bos)]
        self._newline = len(self.encode("\n"))

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_after_newline(self, text: str) -> list[int]:
        """Tokens of ``text`` as they are when a line break stands before it."""
        return self.encode("\n" + text)[self._newline :]

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    def _chat(self, layout: Layout, content: str, example: Case | None) -> str:
        messages = [{"role": "system", "content": layout.system}] if layout.system else []
        if layout.history and example:
            earlier = layout.before + layout.around(example.question)
            messages += [
                {"role": "user", "content": earlier},
                {"role": "assistant", "content": example.answer},
            ]
        messages.append({"role": "user", "content": content})
        return self._render(messages)

    def pack(self, layout: Layout, cases: Sequence[Case]) -> Pack:
        """The cases (all about the same passages) as one pack in the given layout."""
        example: Case | None = None
        before, pattern = layout.before, layout.pattern
        if layout.history:
            example, cases = cases[0], cases[1:]
            before, pattern = "", "Question: {q}"
        content = before + pattern
        frame = content if layout.plain else self._chat(layout, content, example)
        # The shared part ends with the last line break before the question.
        cut = frame.rfind("\n", 0, frame.rindex("{q}")) + 1
        shared, rest = frame[:cut], frame[cut:]
        prefix = self.encode(shared)
        if layout.plain:
            prefix = self._bos + prefix
        branches = []
        for case in cases:
            question = self._branch_ids(rest.replace("{q}", case.question), bool(shared))
            if layout.plain:
                answer = [*self._encode_after_letter(" " + case.answer), self._eos]
            else:
                answer = [*self._encode_after_newline(case.answer), self._end]
            branches.append(Branch(question + answer, len(answer), case.skill))
        return Pack(prefix, branches)

    def _branch_ids(self, text: str, continues: bool) -> list[int]:
        return self._encode_after_newline(text) if continues else self.encode(text)

    def _encode_after_letter(self, text: str) -> list[int]:
        return self.encode(":" + text)[len(self.encode(":")) :]

    def reading(self, names: Names, stage: Stage) -> Pack:
        """Passages and questions about them, by the member's mix of skills."""
        rng = names.rng
        n_passages = rng.choice(stage.passages)
        scene = draw_scene(names, n_passages, stage.facts, stage.same_kind)
        layout = draw_layout(rng, scene.passages)
        if layout.history and n_passages == 0:
            layout = replace(layout, history=None)
        skills, weights = zip(*self.emphasis.mix.items(), strict=True)
        wanted = 2 if not layout.before and not layout.system else stage.questions
        cases: list[Case] = []
        asked: set[tuple[str, str]] = set()
        for skill in rng.choices(skills, weights, k=4 * wanted):
            case = scene.ask(rng, skill)
            if case is None or (case.question, case.answer) in asked:
                continue
            asked.add((case.question, case.answer))
            cases.append(case)
            if len(cases) == wanted + bool(layout.history):
                break
        return self.pack(layout, cases)

    def drill(self, names: Names) -> Pack:
        """A list of names and values to be repeated as it is."""
        names.forget()
        rng = names.rng
        kinds = (names.person, names.place, names.institution, names.product, names.address)
        values = (names.year, names.count, names.price, names.date, names.time)
        n_items = rng.randint(3, 9)
        items = [rng.choice(kinds if rng.random() < 0.8 else values)() for _ in range(n_items)]
        text = rng.choice((", ", "; ", "\n")).join(items)
        return self.pack(Layout("", "Repeat: {q}"), [Case(text, text, "people")])

    def problem(self, names: Names) -> Pack:
        """One word problem, mostly in the canonical form."""
        rng = names.rng
        chance = rng.random()
        if chance < 0.75:
            layout = Layout("", "Question: {q}")
        elif chance < 0.85:
            layout = Layout("", "{q}")
        elif chance < 0.95:
            layout = Layout("", "Question: {q}", system=rng.choice(_SYSTEMS[1:3]))
        else:
            layout = Layout("", "Question: {q}\nAnswer:", plain=True)
        if self.emphasis.sum_lists and rng.random() < self.emphasis.sum_lists:
            case = draw_sum_list(names)
        else:
            case = draw_sum(names) if rng.random() < 0.35 else draw_problem(names)
        return self.pack(layout, [case])

    def told(self, form: Form, tools: Sequence[Tool], system: str) -> str:
        """What every prompt of an agent with these tools begins with."""
        prompts = [
            self._render(turns_of(AgentCase(question, "", "none"), form, tools, system)[0][0])
            for question in ("A", "B")
        ]
        return prompts[0][: _shared_lines(prompts)]

    def dialogue(self, turns: Sequence[tuple[Sequence[Mapping[str, Any]], str]], told: str) -> Pack:
        """Turns, each as the messages before it and its text, as branches that continue ``told``.

        A turn continues the one before, up to where it tells it in another form.
        """
        branches: list[Branch] = []
        at, parent, after_line = len(told), 0, True

        def add(text: str, answer: list[int]) -> int:
            ids = self._branch_ids(text, after_line) + answer
            branches.append(Branch(ids, len(answer), "tools", parent))
            return len(branches)

        prompts = [self._render(messages) for messages, _ in turns]
        said = [text for _, text in turns]
        for prompt, text, follows in zip_longest(prompts, said, prompts[1:], fillvalue=""):
            answer = [*self._encode_after_newline(text), self._end]
            whole = f"{prompt}{text}{self.recipe.end}"
            if follows and not follows.startswith(whole):
                cut = _shared_lines([prompt, follows])
                parent, after_line = add(prompt[at:cut], []), True
                add(prompt[cut:], answer)
                at = cut
            else:
                parent, after_line = add(prompt[at:], answer), False
                at = len(whole)
        return Pack([], branches)


def _shared_lines(texts: Sequence[str]) -> int:
    """How many characters of whole lines the texts begin with alike, with a line left of each."""
    lines = [text.splitlines(keepends=True)[:-1] for text in texts]
    shared = takewhile(lambda line: len(set(line)) == 1, zip(*lines, strict=False))
    return sum(len(line[0]) for line in shared)


# --------------------------------------------------------------------------------------------
# Stages and batches
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """How long and how hard the prompts are at some point of training (lengths in tokens).

    ``drills`` is the share of tokens spent on repeating lists: copying must be there before
    reading can be learned, and a few minutes of nothing else teach it. ``same_kind`` is how often
    all passages tell of the same kind of thing, so that only the name tells them apart.
    """

    length: int
    passages: tuple[int, ...]
    facts: tuple[int, int]
    questions: int
    drills: float = 0.0
    same_kind: float = 0.5


def stage_at(progress: float, rng: random.Random) -> Stage:
    """The stage at ``progress``: below 1 in the main part of training, 1 in the last part.

    Copying first, then short prompts, then real and some long ones. The last part has many short
    passages of one kind, where only the right one answers the question.
    """
    if progress >= 1.0:
        chance = rng.random()
        if chance < 0.04:
            return Stage(1536, (8, 10, 12), (2, 6), 20)
        if chance < 0.55:
            return Stage(512, (2, 3, 3, 4), (1, 4), 12, same_kind=0.7)
        return Stage(640, (1, 2, 3, 3, 4), (2, 6), 14, same_kind=0.6)
    if progress < 0.10:
        return Stage(256, (1,), (2, 3), 6, drills=1.0)
    if progress < 0.17:
        return Stage(256, (1,), (2, 4), 6, drills=0.3)
    if progress < 0.28:
        return Stage(384, (1, 2), (2, 5), 8, drills=0.1)
    if progress > 0.6 and rng.random() < 0.04:
        return Stage(1536, (8, 10, 12), (2, 6), 14)
    if progress < 0.55:
        return Stage(512, (1, 2, 3), (2, 6), 9)
    return Stage(640, (1, 2, 3, 3, 4), (2, 6), 9)


@dataclass(frozen=True)
class Batch:
    """Token ids, positions and answers ``[rows, length]``, mask ``[rows, 1, length, n + length]``.

    ``prompt`` ``[n]`` is what all rows continue; mostly it is empty.
    ``labels`` and ``weights`` belong to the token at the *next* position.
    ``spans`` lists (row, first, last + 1, skill) of the answer predictions, for measuring.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    labels: Tensor
    weights: Tensor
    spans: tuple[tuple[int, int, int, Learned], ...]
    prompt: Tensor


def draw_packs(packer: Packer, names: Names, stage: Stage, n_rows: int) -> list[list[Pack]]:
    """Packs in rows of at most ``stage.length`` tokens, word problems at their share."""
    rows: list[list[Pack]] = [[] for _ in range(n_rows)]
    room = [stage.length] * n_rows
    total = of_problems = of_drills = 0
    for _ in range(40 * n_rows):
        only_drills = stage.drills == 1.0
        is_problem = not only_drills and of_problems < packer.emphasis.arithmetic * total
        is_drill = only_drills or (not is_problem and of_drills < stage.drills * total)
        if is_problem:
            pack = packer.problem(names)
        else:
            pack = packer.drill(names) if is_drill else packer.reading(names, stage)
        row = max(range(n_rows), key=lambda index: room[index])
        while len(pack) > room[row] and len(pack.branches) > 1:
            pack = Pack(pack.prefix, pack.branches[:-1])
        if len(pack) > room[row]:
            if is_problem or is_drill or room[row] < 96:
                break
            continue
        rows[row].append(pack)
        room[row] -= len(pack)
        total += len(pack)
        of_problems += len(pack) * is_problem
        of_drills += len(pack) * is_drill
    return rows


def assemble(
    rows: Sequence[Sequence[Pack]],
    length: int,
    rng: random.Random,
    context_weight: float,
    prompt: Sequence[int] = (),
) -> Batch:
    """Rows of packs as tensors; all packs continue ``prompt``.

    A fifth of the tokens of the packs' own prompts is learned with a small weight.
    """
    shape = (len(rows), length)
    ids = np.zeros(shape, np.int64)
    positions = np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    weights = np.zeros(shape, np.float32)
    mask = np.ones((*shape, len(prompt) + length), bool)
    spans: list[tuple[int, int, int, Learned]] = []
    noise = np.random.default_rng(rng.getrandbits(32))
    causal = np.tril(np.ones((length, length), bool))
    for r, packs in enumerate(rows):
        part = np.zeros(length, np.int64)  # number of the prompt or branch; 0 is padding
        seen = [{0}]  # by each part: itself and what it continues
        ends = [0]  # position after each part
        at = 0
        for pack in packs:
            n = len(pack.prefix)
            root = len(seen)
            seen.append({root})
            ends.append(len(prompt) + n)
            ids[r, at : at + n] = pack.prefix
            positions[r, at : at + n] = len(prompt) + np.arange(n)
            part[at : at + n] = root
            chosen = np.flatnonzero(noise.random(max(n - 1, 0)) < 0.2)
            labels[r, at + chosen] = ids[r, at + chosen + 1]
            weights[r, at + chosen] = context_weight
            at += n
            for branch in pack.branches:
                m = len(branch.ids)
                start = ends[root + branch.parent]
                part[at : at + m] = len(seen)
                seen.append({len(seen)} | seen[root + branch.parent])
                ends.append(start + m)
                ids[r, at : at + m] = branch.ids
                positions[r, at : at + m] = start + np.arange(m)
                if branch.n_answer:
                    first, last = at + m - branch.n_answer - 1, at + m - 1
                    labels[r, first:last] = branch.ids[-branch.n_answer :]
                    weights[r, first:last] = 1.0
                    spans.append((r, first, last, branch.skill))
                at += m
        sees = np.zeros((len(seen), len(seen)), bool)
        for number, parts in enumerate(seen):
            sees[number, list(parts)] = True
        mask[r, :, len(prompt) :] = sees[part[:, None], part[None, :]] & causal
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(mask)[:, None],
        torch.from_numpy(labels),
        torch.from_numpy(weights),
        tuple(spans),
        torch.tensor(prompt, dtype=torch.int64),
    )


def draw_batch(
    packer: Packer, seed: int, step: int, progress: float, tokens: int, split: Split = "train"
) -> Batch:
    """The batch of one step; depends on its arguments only."""
    rng = random.Random(f"{split} {seed} {packer.recipe.name} {step}")
    stage = stage_at(progress, rng)
    if stage.drills == 1.0:
        tokens //= 2
    n_rows = max(1, tokens // stage.length)
    rows = draw_packs(packer, Names(rng, split), stage, n_rows)
    return assemble(rows, stage.length, rng, context_weight=0.1)


def draw_agent_batch(
    packer: Packer, seed: int, step: int, progress: float, tokens: int, split: Split = "train"
) -> Batch:
    """Turns of agents that are all told of the same tools; depends on its arguments only.

    First the tools are only named, and most cases end with the first turn of their question: which
    tool, and with which argument, is learned from many short prompts. Then the prompts are real,
    most cases go on to their answer, and more of them read what a tool returned.
    """
    rng = random.Random(f"{split} tools {seed} {packer.recipe.name} {step}")
    names = Names(rng, split)
    form = rng.choice(FORMS)
    is_short = progress < SHORT_SHARE
    tools = [] if is_short else draw_tools(rng)
    system = rng.choice(_AGENT_SYSTEMS) if rng.random() < 0.5 else ""
    if is_short:
        system = _SHORT_SYSTEMS[form]
    told = packer.told(form, tools, system)
    n_rows = max(1, tokens // AGENT_LENGTH)
    rows: list[list[Pack]] = [[] for _ in range(n_rows)]
    room = [AGENT_LENGTH] * n_rows
    too_long = 0
    while too_long < 4:
        (need,) = rng.choices(NEEDS, (5, 3, 4, 3) if is_short else (6, 2, 5, 2))
        case = draw_agent_case(names, need)
        turns = turns_of(case, form, tools, system, earlier=True)
        if rng.random() < (0.75 if is_short else 0.2):
            turns = turns[: len(turns) - len(case.uses)]
        pack = packer.dialogue(turns, told)
        row = max(range(n_rows), key=lambda index: room[index])
        if len(pack) > room[row]:
            too_long += 1
            continue
        rows[row].append(pack)
        room[row] -= len(pack)
    return assemble(rows, AGENT_LENGTH, rng, context_weight=0.1, prompt=packer.encode(told))


# --------------------------------------------------------------------------------------------
# Optimisation
# --------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (Jordan et al. 2024), in float32.

    Parameters of the same shape are treated together. ``torch.optim.Muon`` computes in bfloat16,
    which is slow on processors.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Apply one update to every parameter with a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = []
                for parameter in parameters:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    assert parameter.grad is not None
                    state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(state["momentum"], group["momentum"]))
                whitened = orthogonalise(torch.stack(updates))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, whitened, strict=True):
                    parameter.sub_(update, alpha=scale)


def orthogonalise(matrices: Tensor) -> Tensor:
    """``[n, rows, columns]`` with singular values moved towards 1 (five Newton-Schulz steps)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    whitened: Tensor = x.mT if tall else x
    return whitened


def learning_rate_factor(step: int, main: int, steps: int, end: int = 0) -> float:
    """Warm-up, a constant third, linearly to zero; twice the same from a lower peak, up to
    ``steps`` with no plateau and up to ``end``.
    """
    if step < main:
        return min((step + 1) / 40, 1.0, (main - step) / (main * 0.67))
    if step < steps:
        return FINISH_PEAK * min((step - main + 1) / 20, (steps - step) / (steps - main))
    falling = (end - step) / ((end - steps) * 0.67)
    return FINISH_PEAK * min((step - steps + 1) / 20, 1.0, falling)


def main_steps(steps: int) -> int:
    """Steps of the main part, of `steps` in the first two."""
    return round(steps * MAIN_SHARE)


def last_step(recipe: Recipe, steps: int) -> int:
    """Where the first two parts end: a member may have a main part only."""
    return main_steps(steps) if recipe.finish is None else steps


class Trainer:
    """One member in training: model, optimisers, step count, checkpoint."""

    def __init__(
        self,
        recipe: Recipe,
        work: Path,
        *,
        steps: int,
        seed: int,
        agent_steps: int = 0,
        tokens_per_step: int = TOKENS_PER_STEP,
        muon_rate: float = 0.02,
        adam_rate: float = 3e-3,
        tokenizer_scenes: int = 3000,
    ) -> None:
        self.recipe, self.steps, self.seed, self.tokens = recipe, steps, seed, tokens_per_step
        self.folder = work / recipe.name
        if (self.folder / "tokenizer_config.json").exists():
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        else:
            self.tokenizer = build_tokenizer(recipe, self.folder, seed, tokenizer_scenes)
        self.model = build_model(recipe, self.tokenizer, seed)
        self.main = main_steps(steps)
        self.packer = Packer(recipe, self.tokenizer, recipe.emphasis)
        self.finisher = Packer(recipe, self.tokenizer, recipe.finish or recipe.emphasis)
        self.taught = last_step(recipe, steps)
        self.last = self.taught + agent_steps
        self.rates = (muon_rate, adam_rate)
        self.optimisers = self._fresh_optimisers()
        self.step = 0

    def _fresh_optimisers(self) -> list[tuple[torch.optim.Optimizer, float]]:
        muon_rate, adam_rate = self.rates
        matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        return [
            (Muon(matrices, lr=muon_rate), muon_rate),
            (
                torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
                adam_rate,
            ),
        ]

    @property
    def checkpoint(self) -> Path:
        """Where the state of this member's training is kept."""
        return self.folder / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {
            "step": self.step,
            "steps": self.steps,
            "last": self.last,
            "seed": self.seed,
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser, _ in self.optimisers],
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint)

    def resume(self) -> bool:
        """Continue from the checkpoint, if there is one of the same run."""
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint, weights_only=True)
        run = (self.steps, self.last, self.seed)
        if (state["steps"], state["last"], state["seed"]) != run:
            raise SystemExit(
                f"{self.checkpoint} is of a run with {state['steps']} steps up to step "
                f"{state['last']} and seed {state['seed']}, not {run[0]}, {run[1]} and {run[2]}; "
                "choose another --work folder"
            )
        self.model.load_state_dict(state["model"])
        for (optimiser, _), saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step = state["step"]
        return True

    def start_from(self, folder: Path) -> None:
        """Take the weights of a trained member in ``folder`` and go on with the part with tools."""
        from transformers import AutoModelForCausalLM

        trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.load_state_dict(trained.state_dict())
        self.step = self.taught

    def hidden(self, batch: Batch) -> Tensor:
        """Last hidden states ``[rows, length, width]``."""
        past = None
        if len(batch.prompt):
            past = self.model.model(input_ids=batch.prompt[None], use_cache=True).past_key_values
            past.batch_repeat_interleave(len(batch.ids))
        states: Tensor = self.model.model(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            past_key_values=past,
            use_cache=past is not None,
        ).last_hidden_state
        return states

    def _predict(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits ``[n, vocabulary]``, labels ``[n]`` and weights ``[n]`` of learned positions."""
        chosen = batch.weights > 0
        logits: Tensor = self.model.lm_head(self.hidden(batch)[chosen])
        return logits, batch.labels[chosen], batch.weights[chosen]

    def _batches(self) -> list[Batch]:
        """The text of this step; in the part with tools, some of the old and agents' turns."""
        packer = self.packer if self.step < self.main else self.finisher
        progress = min(self.step / self.main, 1.0)
        if self.step < self.taught:
            return [draw_batch(packer, self.seed, self.step, progress, self.tokens)]
        of_part = (self.step - self.taught) / (self.last - self.taught)
        is_real = of_part >= SHORT_SHARE
        return [
            draw_batch(packer, self.seed, self.step, progress, READING_TOKENS[is_real]),
            draw_agent_batch(packer, self.seed, self.step, of_part, AGENT_TOKENS[is_real]),
        ]

    def train_step(self) -> float:
        """One step; returns the mean loss of answer tokens in nats."""
        if self.step == self.taught:
            self.optimisers = self._fresh_optimisers()
        batches = self._batches()
        total = sum(float(batch.weights.sum()) for batch in batches)
        answered = n_answers = 0.0
        for batch in batches:
            logits, labels, weights = self._predict(batch)
            losses = nn.functional.cross_entropy(logits, labels, reduction="none")
            ((losses * weights).sum() / total).backward()  # type: ignore[no-untyped-call]
            answered += float(losses.detach()[weights == 1.0].sum())
            n_answers += int((weights == 1.0).sum())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = learning_rate_factor(self.step, self.main, self.taught, self.last)
        for optimiser, rate in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return answered / n_answers

    @torch.no_grad()
    def check(self, batches: int = 3) -> dict[str, float]:
        """Share of held-out answers predicted exactly (every token given the ones before)."""
        learned: tuple[Learned, ...] = (*SKILLS, "tools")
        right = dict.fromkeys(learned, 0)
        asked = dict.fromkeys(learned, 0)
        even = Emphasis(dict.fromkeys(self.recipe.emphasis.mix, 1.0), arithmetic=0.2)
        packer = Packer(self.recipe, self.tokenizer, even)
        for index in range(batches):
            read = draw_batch(packer, self.seed, index, 0.59, 8192, "heldout")
            for batch in (read, draw_agent_batch(packer, self.seed, index, 1.0, 4096, "heldout")):
                hits = self.model.lm_head(self.hidden(batch)).argmax(-1) == batch.labels
                for row, first, last, skill in batch.spans:
                    right[skill] += bool(hits[row, first:last].all())
                    asked[skill] += 1
        return {skill: right[skill] / max(asked[skill], 1) for skill in learned}

    def export(self, out: Path) -> None:
        """Write the member to ``out/<name>`` in the standard format (float32 safetensors)."""
        folder = out / self.recipe.name
        copy_tokenizer(self.folder, folder)
        self.model.save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a member's tokenizer from one folder to another."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        if (source / name).exists():
            (folder / name).write_bytes((source / name).read_bytes())


# --------------------------------------------------------------------------------------------
# Command
# --------------------------------------------------------------------------------------------


def _report(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _train_one(args: argparse.Namespace, name: str, until: int) -> None:
    """Train one member up to step ``until``; one JSON line per report on standard output."""
    torch.set_num_threads(args.threads)
    if args.start_from:
        copy_tokenizer(args.start_from / name, args.work / name)
    trainer = Trainer(
        RECIPES[name], args.work, steps=args.steps, seed=args.seed, agent_steps=args.agent_steps
    )
    if not (args.resume and trainer.resume()) and args.start_from:
        trainer.start_from(args.start_from / name)
    losses: list[float] = []
    until = min(until, trainer.last)
    while trainer.step < until:
        losses.append(trainer.train_step())
        if trainer.step % 10 == 0 or trainer.step == until:
            loss = sum(losses) / len(losses)
            losses.clear()
            _report({"member": name, "step": trainer.step, "loss": loss})
        if trainer.step % args.save_every == 0 or trainer.step == until:
            trainer.save()
        if args.check_every and trainer.step % args.check_every == 0:
            checked = {key: round(value, 3) for key, value in trainer.check().items()}
            _report({"member": name, "step": trainer.step, "heldout": checked})
    if trainer.step == trainer.last:
        trainer.export(args.out)


def plan_lanes(
    members: Sequence[str], steps: int, workers: int, first: int = 0
) -> list[list[tuple[str, int]]]:
    """What each worker trains, as (member, until step), so that all are busy from step ``first``
    to the end.

    Three members on two workers: the third is trained half by one and half by the other.
    """
    if workers >= len(members) or workers == 1:
        lanes: list[list[tuple[str, int]]] = [[] for _ in range(min(workers, len(members)))]
        for index, member in enumerate(members):
            lanes[index % len(lanes)].append((member, steps))
        return lanes
    if len(members) == 3 and workers == 2:
        a, b, c = members
        return [[(c, (first + steps) // 2), (a, steps)], [(b, steps), (c, steps)]]
    lanes = [[] for _ in range(workers)]
    for index, member in enumerate(members):
        lanes[index % workers].append((member, steps))
    return lanes


def _run_lane(
    args: argparse.Namespace, lane: Sequence[tuple[str, int]], bars: Mapping[str, Any]
) -> None:
    """Run the jobs of one worker one after the other, each as its own process."""
    for name, until in lane:
        command = [sys.executable, "-m", "training.train", "--worker", name]
        command += ["--until", str(until), "--steps", str(args.steps), "--seed", str(args.seed)]
        command += ["--out", str(args.out), "--work", str(args.work)]
        command += ["--threads", str(args.threads), "--save-every", str(args.save_every)]
        command += ["--check-every", str(args.check_every)]
        command += ["--agent-steps", str(args.agent_steps)]
        if args.start_from:
            command += ["--start-from", str(args.start_from)]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        with subprocess.Popen(  # noqa: S603
            command, stdout=subprocess.PIPE, text=True, env=environment
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                report = json.loads(line)
                bar = bars[name]
                if "heldout" in report:
                    bar.write(line.strip())
                else:
                    bar.update(report["step"] - bar.n)
                    bar.set_postfix(loss=f"{report['loss']:.3f}")
        if child.returncode != 0:
            raise RuntimeError(f"training {name} ended with exit code {child.returncode}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.train",
        description="Train the embedded members from nothing. A run that was interrupted "
        "continues where its last checkpoint was.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=member_paths()[0].parent, help="folder of the members"
    )
    parser.add_argument("--work", type=Path, default=Path("embedded-training"), help="checkpoints")
    parser.add_argument("--members", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help="steps per member, first two parts"
    )
    parser.add_argument(
        "--agent-steps", type=int, default=DEFAULT_AGENT_STEPS, help="steps of the part with tools"
    )
    parser.add_argument(
        "--start-from", type=Path, help="folder of trained members, to do the part with tools only"
    )
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--workers", type=int, default=2, help="members trained side by side")
    parser.add_argument("--threads", type=int, default=1, help="threads per member")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--check-every", type=int, default=0, help="steps between held-out checks")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--worker", choices=list(RECIPES), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name, least in (
        ("steps", 1),
        ("agent_steps", 0),
        ("workers", 1),
        ("threads", 1),
        ("save_every", 1),
    ):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    args = _arguments(argv)
    if args.worker:
        _train_one(args, args.worker, args.until or args.steps + args.agent_steps)
        return 0
    from tqdm.auto import tqdm

    if not args.resume:
        for name in args.members:
            (args.work / name / "checkpoint.pt").unlink(missing_ok=True)
    first = args.steps if args.start_from else 0
    lanes = plan_lanes(args.members, args.steps + args.agent_steps, args.workers, first)
    bars = {
        name: tqdm(
            total=last_step(RECIPES[name], args.steps) + args.agent_steps,
            desc=name,
            position=position,
            unit="step",
        )
        for position, name in enumerate(args.members)
    }
    failures: list[str] = []

    def run(lane: Sequence[tuple[str, int]]) -> None:
        try:
            _run_lane(args, lane, bars)
        except RuntimeError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=run, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for bar in bars.values():
        bar.close()
    for failure in failures:
        sys.stderr.write(failure + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
