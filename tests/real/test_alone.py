"""One real member alone, with defaults, writes the text of its own greedy `generate`."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adafuse_llm import AdaFuseEngine

pytestmark = pytest.mark.real

NAMES = ("smollm", "gemma", "qwen")
LENGTH = 32
PROMPTS = (
    "The old lighthouse keeper climbed the stairs and",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "\u5317\u4eac\u662f\u4e2d\u56fd\u7684\u9996\u90fd\uff0c",
    "My favourite animals \U0001f436\U0001f431 are",
    '{"name": "Anna", "age": 31, "languages": ["German",',
    "Die Hauptstadt von \u00d6sterreich hei\u00dft",
)
CHATS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "\u4e2d\u56fd\u7684\u9996\u90fd\u662f\u54ea\u91cc\uff1f",
    "Reply with an emoji and one word \U0001f600",
    "Give me a JSON object with the fields name and age.",
    "What is 12 + 7?",
)
Engine = Callable[..., AdaFuseEngine]


def whole(text: str) -> str:
    """A text without a token that the limit has cut inside a character, and its space."""
    return re.sub(r" ?\ufffd+$", "", text)


def generated(model: Any, tokenizer: Any, text: str, *, chat: bool) -> str:
    """The text of a model's own `generate`."""
    ids = tokenizer(text)["input_ids"]
    if chat:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    found = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=LENGTH, pad_token_id=0
    )
    written = tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True)
    return whole(written.lstrip() if chat else written)


@pytest.mark.parametrize("name", NAMES)
def test_alone_and_chosen_among_several(
    name: str, real_engine: Engine, real_models: dict[str, tuple[Any, Any]]
) -> None:
    """One half of the texts goes to the member alone, the other half to a pair with this member."""
    alone, pair = real_engine(name), real_engine(name, NAMES[NAMES.index(name) - 1])
    different = {}
    for texts, chat in ((PROMPTS, False), (CHATS, name != "gemma")):  # Gemma has no template
        for engine, half, use in ((alone, texts[::2], None), (pair, texts[1::2], name)):
            inputs = [[{"role": "user", "content": text}] if chat else text for text in half]
            given: dict[str, Any] = {"messages" if chat else "prompts": inputs}
            found = engine.generate_batch(use=use, max_new_tokens=LENGTH, **given)
            for text, generation in zip(half, found, strict=True):
                expected = generated(*real_models[name], text, chat=chat)
                if whole(generation.text) != expected:
                    different[text] = (generation.text, expected)
    assert not different
