"""The shipped members: small, standard, lossless, and with the tokens their templates need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adafuse_llm import AdaFuseEngine
from adafuse_llm.documents import Retriever, question_messages, read_documents
from adafuse_llm.embedded import (
    MEMBERS,
    final_answer,
    handbook_path,
    handbook_questions,
    member_paths,
)

TEXTS = [
    "",
    " ",
    "Maren Tolvik",
    " leading and  double   spaces, trailing ",
    "lines\nmore\n\nand \n indented\n\n\n",
    "\ttabs\tand\r\nreturns\r",
    "emoji 😀👩‍👩‍👧‍👦🇳🇴 and é ü ß ñ",
    "中文没有空格，标点。日本語テキスト",
    "code: if (x<|y|>z) { return '\\n'; }  # 100%",
    "12345 6.78 9:10 <0x41> [INST] <s",
    "\u0000\u200b\ufeff\u00a0",
]


@pytest.fixture(scope="module", params=MEMBERS)
def folder(request: pytest.FixtureRequest) -> Path:
    return next(path for path in member_paths() if path.name == request.param)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.quick
def test_together_the_members_are_below_25_megabytes() -> None:
    files = [file for path in member_paths() for file in path.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 25_000_000


@pytest.mark.quick
def test_architectures_and_vocabularies_differ() -> None:
    configs = [json.loads((path / "config.json").read_text()) for path in member_paths()]
    assert len({config["model_type"] for config in configs}) == 3
    has_model = [(path / "tokenizer.model").exists() for path in member_paths()]
    kinds = {
        json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["type"]
        for path in member_paths()
        if (path / "tokenizer.json").exists()
    }
    assert sum(has_model) == 1
    assert kinds == {"BPE", "Unigram"}
    assert len({AutoTokenizer.from_pretrained(p).chat_template for p in member_paths()}) == 3


def test_weights_are_safetensors_in_float32_with_room_for_long_prompts(
    folder: Path, model: Any
) -> None:
    assert (folder / "model.safetensors").exists()
    assert not list(folder.glob("*.bin"))
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings >= 2048
    assert model.get_input_embeddings().num_embeddings >= len(AutoTokenizer.from_pretrained(folder))


@pytest.mark.quick
@pytest.mark.parametrize("text", TEXTS)
def test_tokenizers_lose_nothing(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids


def test_the_end_of_a_turn_is_an_end_of_sequence(tokenizer: Any, model: Any) -> None:
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    ids = tokenizer.encode(
        tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False
    )
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    start = len(tokenizer.encode(prompt, add_special_tokens=False))
    assert tokenizer.decode(ids[start : start + 1]) == "A"
    end = ids[start + 1]
    for stops in (model.config.eos_token_id, model.generation_config.eos_token_id):
        assert end in (stops if isinstance(stops, list) else [stops])
    assert tokenizer.eos_token_id == end
    assert end in tokenizer.all_special_ids


def test_the_ensemble_answers_questions_from_the_passages_it_retrieves() -> None:
    passages = Retriever(read_documents([handbook_path()]))
    right = found = 0
    with AdaFuseEngine.from_embedded() as engine:
        asked = handbook_questions()[::5]
        for question in asked:
            best = passages.search(question.question, k=3)
            found += question.source is None or question.source in {p.source for p in best}
            messages = question_messages(question.question, best)
            answer = engine.generate(messages=messages, max_new_tokens=24).text
            right += final_answer(answer) == question.answer
    assert found == len(asked)
    assert right >= 0.65 * len(asked)
