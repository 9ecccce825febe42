"""The shipped members: standard, lossless, and with the tokens their templates need."""

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

TEXT = (
    " leading and  double   spaces, trailing \nlines\n\n\n\ttabs\r\nemoji 😀👩‍👩‍👧‍👦 é ß "
    "中文没有空格，标点。<|y|>z '\\n' 12345 6.78 <0x41> [INST] <s\u0000\u200b\ufeff\u00a0"
)


@pytest.fixture(scope="module", params=MEMBERS)
def folder(request: pytest.FixtureRequest) -> Path:
    return next(path for path in member_paths() if path.name == request.param)


def test_a_member_is_standard_loses_no_text_and_ends_its_turns(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert (folder / "model.safetensors").exists()
    assert not list(folder.glob("*.bin"))
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings >= 2048
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.unk_token_id not in ids
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    rest = tokenizer.encode(whole[len(prompt) :], add_special_tokens=False)
    assert tokenizer.decode(rest[:1]) == "A"
    assert rest[1] == tokenizer.eos_token_id
    for stops in (model.config.eos_token_id, model.generation_config.eos_token_id):
        assert rest[1] in (stops if isinstance(stops, list) else [stops])


def test_the_ensemble_answers_questions_from_the_passages_it_retrieves() -> None:
    passages = Retriever(read_documents([handbook_path()]))
    right = found = 0
    with AdaFuseEngine.from_embedded() as engine:
        asked = handbook_questions()[::10]
        for question in asked:
            best = passages.search(question.question, k=3)
            found += question.source is None or question.source in {p.source for p in best}
            messages = question_messages(question.question, best)
            answer = engine.generate(messages=messages, max_new_tokens=24).text
            right += final_answer(answer) == question.answer
    assert found == len(asked)
    assert right >= 0.65 * len(asked)
