"""Words of scripts without spaces, written by real members."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.real

QUESTION = [{"role": "user", "content": "为什么天空是蓝色的？"}]
LIMITS = (1, 2, 256)


def test_one_member_writes_the_same_text_with_any_limit(real_engine: Any) -> None:
    engine = real_engine("qwen")
    texts = {
        engine.generate(messages=QUESTION, max_new_tokens=16, max_word_letters=letters).text
        for letters in LIMITS
    }
    assert len(texts) == 1


def test_members_fuse_within_clauses(real_engine: Any) -> None:
    engine = real_engine("qwen", "gemma", strategy="adafuse")
    rounds = [
        len(
            engine.generate(
                messages=QUESTION, max_new_tokens=16, max_words=1, max_word_letters=letters
            ).rounds
        )
        for letters in LIMITS
    ]
    assert rounds[1] > 2 * rounds[2]
