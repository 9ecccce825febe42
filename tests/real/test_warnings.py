"""What real members without a chat template, and with tokenizers that change texts, tell users."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from adafuse_llm import AdaFuseEngine
from tests.support.commands import adafuse

pytestmark = pytest.mark.real

RealEngine = Callable[..., AdaFuseEngine]

QUESTIONS = ("What is the capital of France?", "What is 17 + 25?", "Name three colors.")
DECOMPOSED = "cafe\u0301"


def ask(question: str, *, system: str = "") -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": question}]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("adafuse_llm.encoding")
    ]


@pytest.mark.parametrize("names", [("gemma",), ("gemma", "qwen")])
def test_replies_of_a_base_model_end_before_an_invented_turn(
    names: tuple[str, ...], real_engine: RealEngine
) -> None:
    engine = real_engine(*names)
    reasons = []
    for question in QUESTIONS:
        reply = engine.generate(messages=ask(question), max_new_tokens=32)
        assert "User:" not in reply.text
        assert "Assistant:" not in reply.text
        reasons.append(reply.finish_reason)
        if reply.finish_reason == "stop":
            assert reply.text == reply.text.rstrip()
        streamed = engine.stream(messages=ask(question), max_new_tokens=32)
        assert "".join(event.text for event in streamed) == reply.text
    assert "stop_sequence" not in reasons
    assert "stop" in reasons


def test_a_prompt_of_the_same_form_goes_on(real_engine: RealEngine) -> None:
    prompt = f"User: {QUESTIONS[0]}\n\nAssistant:"
    reply = real_engine("gemma").generate(prompt, max_new_tokens=32)
    assert "\n\nUser:" in reply.text


def test_a_base_model_among_chat_models_is_one_warning(
    real_engine: RealEngine, caplog: pytest.LogCaptureFixture
) -> None:
    real_engine("smollm", "qwen")
    real_engine("gemma")
    assert not warnings_in(caplog)
    real_engine("smollm", "gemma", "qwen")
    (warning,) = warnings_in(caplog)
    assert "'smollm', 'qwen', but not 'gemma'" in warning


def test_a_prompt_that_qwen_would_render_is_one_warning(
    real_engine: RealEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = real_engine("qwen")
    rendered = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    for _ in range(2):
        engine.generate(rendered, max_new_tokens=1)
    (warning,) = warnings_in(caplog)
    assert "'<|im_start|>'" in warning
    assert "'qwen'" in warning
    caplog.clear()
    real_engine("qwen").generate(messages=ask(rendered), max_new_tokens=1)
    real_engine("gemma").generate(rendered, max_new_tokens=1)
    assert not warnings_in(caplog)


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
