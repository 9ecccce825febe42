"""What real members without a chat template, and with tokenizers that change texts, tell users."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from adafuse_llm import AdaFuseEngine
from tests.support.commands import adafuse

pytestmark = pytest.mark.real

RealEngine = Callable[..., AdaFuseEngine]

QUESTIONS = ("What is the capital of France?", "What is 17 + 25?", "Name three colors.")
DECOMPOSED = "cafe\u0301"


@pytest.mark.parametrize("names", [("gemma",), ("gemma", "qwen")])
def test_replies_of_a_base_model_end_before_an_invented_turn(
    names: tuple[str, ...], real_engine: RealEngine
) -> None:
    engine = real_engine(*names)
    reasons = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        reply = engine.generate(messages=messages, max_new_tokens=32)
        assert "User:" not in reply.text
        assert "Assistant:" not in reply.text
        reasons.append(reply.finish_reason)
        if reply.finish_reason == "stop":
            assert reply.text == reply.text.rstrip()
        streamed = engine.stream(messages=messages, max_new_tokens=32)
        assert "".join(event.text for event in streamed) == reply.text
    assert "stop_sequence" not in reasons
    assert "stop" in reasons


@pytest.mark.parametrize(
    ("text", "loser", "change"),
    [
        (f" {DECOMPOSED}", "qwen", r"'e\u0301' becomes '\xe9'"),
        (" a\u2581b", "gemma", r"'\u2581' becomes ' '"),
    ],
)
def test_a_score_that_loses_a_member_says_so(
    text: str, loser: str, change: str, real_engine: RealEngine
) -> None:
    engine = real_engine("gemma", "qwen")
    lost, kept = engine.score("The word is", [text, " tea"]).texts
    assert lost.missing == {loser: f"its tokenizer cannot write the text: {change}"}
    assert set(lost.nll) == {"gemma", "qwen"} - {loser}
    assert (kept.missing, set(kept.nll)) == ({}, {"gemma", "qwen"})


def test_info_names_what_real_tokenizers_change(
    real_folders: dict[str, Path],
) -> None:
    paths = [str(path) for path in real_folders.values()]
    result = adafuse("info", *paths, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["is_chat_model"] is True
    texts = [finding["text"] for finding in report["findings"]]
    assert any(r"loses decomposed accents ('e\u0301' becomes '\xe9')" in text for text in texts)
    assert any("loses the character \u2581" in text for text in texts)
    assert any(text.startswith("only some members have a chat template") for text in texts)
