"""Train, save and copy the tokenizers of the members."""

from __future__ import annotations

import io
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from training.layouts import draw_layout
from training.recipes import CONTEXT, VOCABULARY, Recipe
from training.world.cases import SKILLS
from training.world.names import Names
from training.world.problems import draw_problem
from training.world.scenes import draw_scene
from training.world.words import mark_syllables

BOUNDARY: Final = "\u2063"  # separates syllables in the texts that a tokenizer is trained on


def _corpus(recipe: Recipe, seed: int, n_scenes: int) -> Iterator[str]:
    """Yield one text per scene from the training split, with marked syllables."""
    rng = random.Random(f"corpus {seed} {recipe.name}")
    names = Names(rng, "train")
    for _ in range(n_scenes):
        scene = draw_scene(names, 3)
        cases = [scene.ask(rng, skill) for skill in SKILLS if skill != "arithmetic"]
        layout = draw_layout(rng, scene.passages)
        lines = [layout.before]
        lines += [layout.ask(case.question) + "\n" + case.answer for case in cases if case]
        problem = draw_problem(names)
        lines.append(f"Question: {problem.question}\n{problem.answer}")
        yield mark_syllables("\n".join(lines), BOUNDARY)


def build_tokenizer(recipe: Recipe, folder: Path, seed: int, n_scenes: int = 3000) -> Any:
    """Train the tokenizer of ``recipe``, save it in ``folder``, and return the saved tokenizer.

    All three tokenizers are lossless, encode each digit as its own token, and always split a
    made-up word into its two syllables. So a model has to learn a name only once, whether or not a
    space precedes it.
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
    # `AutoTokenizer` needs to know the architecture. The full configuration follows when the
    # trained model is saved.
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
        model_writer=model,  # if given a file name, SentencePiece would store it in the model
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

    # The vocabulary holds the most frequent words and syllables, scored by their frequencies, and
    # also single characters and bytes. (The usual pruning by likelihood would split rare syllables
    # into letters.)
    training_splitter = splitter(pre_tokenizers.Split(BOUNDARY, behavior="removed"))
    counts: Counter[str] = Counter()
    characters: set[str] = set()
    for text in texts:
        found = [piece for piece, _ in training_splitter.pre_tokenize_str(text)]
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


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a member's tokenizer from one folder to another."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        if (source / name).exists():
            (folder / name).write_bytes((source / name).read_bytes())
