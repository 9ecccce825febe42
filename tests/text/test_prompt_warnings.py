"""What ends a reply in the plain format of messages, and warnings about what members read."""

from __future__ import annotations

import copy
import logging
import unicodedata
from typing import Any

import pytest

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, ContextWindowError
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.text.codec import TokenizerCodec
from adafuse_llm.text.exactness import change_of, difference
from tests.support.models import CHATML, tokenizer
from tests.support.scripted import scripted, scripted_model

QUESTION = [{"role": "user", "content": "Is it blue?"}]
RUNS_ON = "Yes. \n\nUser: Is it green?\n\nAssistant: No."


def runs_on(prompt: str) -> str:
    return RUNS_ON


def plain(name: str = "plain", script: Any = runs_on) -> HuggingFaceBackend:
    return scripted(script, name=name, template=None)


def chat(name: str = "chat", script: Any = runs_on) -> HuggingFaceBackend:
    return scripted(script, name=name, template=CHATML)


@pytest.mark.parametrize("strategy", ["adafuse", "single"])
def test_a_reply_in_the_plain_format_ends_before_an_invented_turn(strategy: str) -> None:
    with AdaFuseEngine([plain()], strategy=strategy) as engine:
        reply = engine.generate(messages=QUESTION, max_new_tokens=40)
        assert (reply.text, reply.finish_reason) == ("Yes.", "stop")
        joined = "".join(event.text for event in engine.stream(messages=QUESTION))
        assert joined == "Yes."


def test_one_member_without_a_template_is_enough() -> None:
    with AdaFuseEngine([chat(), plain()]) as engine:
        assert engine.generate(messages=QUESTION).text == "Yes."
        assert engine.generate(messages=QUESTION, use=["plain"]).text == "Yes."
        alone = engine.generate(messages=QUESTION, use=["chat"])  # its template ends its replies
        assert alone.text == RUNS_ON


def test_a_member_that_ends_its_reply_ends_it_as_before() -> None:
    with AdaFuseEngine([chat(script=lambda _: "Yes. "), plain(script=lambda _: "Yes. ")]) as engine:
        reply = engine.generate(messages=QUESTION)
    assert (reply.text, reply.finish_reason) == ("Yes. ", "stop")


def test_prompts_and_forms_have_no_such_stop() -> None:
    with AdaFuseEngine([plain()]) as engine:
        assert engine.generate("User: Is it blue?\n\nAssistant:").text.strip() == RUNS_ON
        chosen = engine.generate(messages=QUESTION, choices=["a\nUser: b", "c\nUser: d"])
        assert chosen.text in ("a\nUser: b", "c\nUser: d")


def test_a_grammar_is_not_cut() -> None:
    pytest.importorskip("llguidance")
    with AdaFuseEngine([plain()]) as engine:
        regex = r"Yes\. \n\nUser: [A-Z][a-z]"
        assert engine.generate(messages=QUESTION, regex=regex).text == "Yes. \n\nUser: Is"


def test_a_continued_message_ends_there_too() -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "Yes."}]
    rest = plain(script=lambda _: RUNS_ON)
    with AdaFuseEngine([rest]) as engine:
        reply = engine.generate(messages=begun, continue_final_message=True)
    assert (reply.text, reply.finish_reason) == ("", "stop")


def test_stops_of_the_caller_count_too() -> None:
    with AdaFuseEngine([plain()], AdaFuseConfig(stop=("es",))) as engine:
        reply = engine.generate(messages=QUESTION)
    assert (reply.text, reply.finish_reason) == ("Y", "stop_sequence")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_mixture_of_members_with_and_without_a_template_is_one_warning(caplog) -> None:
    with AdaFuseEngine([chat(), plain()]) as engine:
        engine.generate(messages=QUESTION)
    (warning,) = warnings_in(caplog)
    assert warning.startswith("only some members have a chat template: 'chat', but not 'plain'.")
    assert "use=[...]" in warning


@pytest.mark.parametrize("make", [plain, chat])
def test_members_of_one_kind_are_no_warning(make, caplog) -> None:
    with AdaFuseEngine([make("a"), make("b")]) as engine:
        engine.generate(messages=QUESTION)
    assert not warnings_in(caplog)


RENDERED = "<|im_start|>user\nIs it blue?<|im_end|>\n<|im_start|>assistant\n"


def test_a_rendered_prompt_is_one_warning(caplog) -> None:
    with AdaFuseEngine([chat("ink"), chat("jar")]) as engine:
        for _ in range(3):
            engine.generate(RENDERED)
            engine.score(RENDERED, ["Yes."])
    (warning,) = warnings_in(caplog)
    assert "'<|im_start|>'" in warning
    assert "'ink'" in warning
    assert "messages=[...]" in warning


def test_other_prompts_are_no_warning(caplog) -> None:
    with AdaFuseEngine([chat()]) as engine:
        engine.generate("What does <|im_end mean? And <end_of_turn>?")
        engine.generate(messages=[{"role": "user", "content": RENDERED}])
    assert not warnings_in(caplog)


DECOMPOSED = "cafe\u0301"


def normalizing(name: str) -> HuggingFaceBackend:
    """A member whose tokenizer normalizes texts to NFC."""
    from tokenizers import normalizers

    model, known = scripted_model(lambda _: "Yes.", "bytelevel", None)
    known = copy.deepcopy(known)  # other tests share it
    known.backend_tokenizer.normalizer = normalizers.NFC()
    return HuggingFaceBackend(model, known, name)


def test_what_a_tokenizer_changes_is_known() -> None:
    codec = normalizing("nfc").codec
    assert change_of(codec, DECOMPOSED) == r"'e\u0301' becomes '\xe9'"
    assert change_of(codec, unicodedata.normalize("NFC", DECOMPOSED)) is None
    assert change_of(TokenizerCodec(tokenizer("sentencepiece")), " a\u2581b") == (
        r"'\u2581' becomes ' '"
    )
    assert difference("aXbYc", "aZbWc") == "'XbY' becomes 'ZbW'"
    assert difference("aa", "aaa") == "'' becomes 'a'"


def test_a_score_that_loses_a_member_says_so() -> None:
    with AdaFuseEngine([normalizing("nfc"), plain("whole")]) as engine:
        lost, kept = engine.score("One", [f" {DECOMPOSED} two", " two"]).texts
    assert set(lost.nll) == {"whole"}
    assert lost.missing == {"nfc": r"its tokenizer cannot write the text: 'e\u0301' becomes '\xe9'"}
    assert set(kept.nll) == {"nfc", "whole"}
    assert kept.missing == {}


def test_an_impossible_text_is_missing_for_another_reason() -> None:
    sure = FakeBackend("sure", lambda text: {" a": 1.0, " b": 0.0})
    with AdaFuseEngine([sure]) as engine:
        (text,) = engine.score("One", [" b"]).texts
    assert text.missing == {"sure": "it gives the text a probability of 0"}


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_prompt_that_is_too_long_has_one_error_and_no_warning(template, caplog) -> None:
    model, known = scripted_model(lambda _: "Yes.", "bytelevel", template, window=64)
    known.model_max_length = 64
    before = (known.verbose, dict(known.deprecation_warnings))
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        with AdaFuseEngine([HuggingFaceBackend(model, known, "ink")]) as engine:
            with pytest.raises(ContextWindowError, match="exceeds the context window of 64"):
                engine.generate(messages=[{"role": "user", "content": "word " * 200}])
            with pytest.raises(ContextWindowError, match="exceeds the context window of 64"):
                engine.generate("word " * 200)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not warnings_in(caplog)
    assert (known.verbose, known.deprecation_warnings) == before
