"""Real GGUF files have the end tokens and the prompts of their transformers checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from tests.real.test_equality import PROMPTS

pytestmark = [pytest.mark.real, pytest.mark.gguf]


def test_r3_ends_are_those_of_the_transformers_checkpoint(
    real_folders: dict[str, Path], real_files: dict[str, Path]
) -> None:
    from adafuse_llm.backends.llamacpp.vocabulary import LlamaText

    for name, folder in real_folders.items():
        kinds = (AutoConfig, GenerationConfig, AutoTokenizer)
        expected = {kind.from_pretrained(folder).eos_token_id for kind in kinds}
        assert LlamaText.from_file(real_files[name]).end_ids == expected, name


@pytest.mark.parametrize("name", ["smollm", "qwen"])
def test_prompts_are_those_of_the_transformers_checkpoint(
    name: str, real_folders: dict[str, Path], real_files: dict[str, Path]
) -> None:
    from adafuse_llm.backends.llamacpp.vocabulary import LlamaText

    text = LlamaText.from_file(real_files[name])
    tokenizer = AutoTokenizer.from_pretrained(real_folders[name])
    turns = [
        {"role": role, "content": content}
        for role, content in zip(("user", "assistant") * 4, PROMPTS.values(), strict=True)
    ]
    system = {"role": "system", "content": "You answer in one word. \u00dc\U0001f436"}
    for messages in (turns[4:5], turns[:1], turns[:3], turns[:7], [system, *turns[:5]]):
        expected = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert text.codec.encode_messages(messages) == expected
