"""What ends a reply in the plain format of messages, and warnings about what members read."""

import copy
import logging
import unicodedata
from typing import Any

import pytest
from tokenizers import normalizers

from adafuse_llm import AdaFuseEngine, ContextWindowError
from adafuse_llm.backends import FakeBackend
from adafuse_llm.text.codec import TokenizerCodec, change_of, difference
from tests.support.models import CHATML, tokenizer
from tests.support.scripted import Scripted, scripted

QUESTION = [{"role": "user", "content": "Is it blue?"}]
RUNS_ON = "Yes. \n\nUser: Is it green?\n\nAssistant: No."
RENDERED = "<|im_start|>user\nIs it blue?<|im_end|>\n<|im_start|>assistant\n"


def member(name: str, template: str | None = None, reply: str = RUNS_ON) -> Scripted:
    return scripted(lambda _: reply, name=name, template=template)


CONTINUED = {
    "messages": [*QUESTION, {"role": "assistant", "content": "Yes."}],
    "continue_final_message": True,
}


@pytest.mark.parametrize(
    ("reply", "request_", "text"),
    [
        (RUNS_ON, {}, "Yes."),
        (RUNS_ON, {"use": ["chat"]}, RUNS_ON),  # its template ends its replies
        (RUNS_ON, {"stop": ["es"]}, "Y"),
        (RUNS_ON, CONTINUED, ""),
        ("Yes. ", {}, "Yes. "),  # the members end it
        (RUNS_ON, {"messages": None, "prompt": "User: Is it blue?\n\nAssistant:"}, RUNS_ON),
        (RUNS_ON, {"choices": ["a\nUser: b", "a\nUser: b c"]}, "a\nUser: b"),
        (RUNS_ON, {"regex": r"Yes\. \n\nUser: [A-Z][a-z]"}, "Yes. \n\nUser: Is"),
    ],
)
def test_a_reply_in_the_plain_format_ends_before_an_invented_turn(
    reply: str, request_: dict[str, Any], text: str
) -> None:
    if "regex" in request_:
        pytest.importorskip("llguidance")
    asked = {"messages": QUESTION, **request_}
    with AdaFuseEngine([member("chat", CHATML, reply), member("plain", None, reply)]) as engine:
        assert engine.generate(**asked).text.strip(" " * (reply == RUNS_ON)) == text
        if "choices" not in asked:
            assert "".join(event.text for event in engine.stream(**asked)).strip() == text.strip()


@pytest.mark.parametrize(
    ("templates", "asked", "words"),
    [
        ([CHATML, None], {"messages": QUESTION}, ["'a', but not 'b'", "use=[...]"]),
        ([None, None], {"messages": QUESTION}, ["no member has a chat template"]),
        ([None, None], {"prompt": "Is it blue?"}, []),
        ([CHATML, CHATML], {"messages": QUESTION}, []),
        ([CHATML, CHATML], {"prompt": RENDERED}, ["'<|im_start|>'", "'a'", "messages=[...]"]),
        ([CHATML, CHATML], {"messages": [{"role": "user", "content": RENDERED}]}, []),
    ],
)
def test_members_and_prompts_that_work_badly_are_one_warning(
    templates: list[str | None],
    asked: dict[str, Any],
    words: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with AdaFuseEngine([*map(member, "ab", templates)]) as engine:
        for _ in range(2):
            engine.generate(**asked)
    assert len(caplog.messages) == bool(words)
    assert all(word in caplog.text for word in words)


DECOMPOSED = "cafe\u0301"


def normalizing(name: str) -> Scripted:
    """A member whose tokenizer normalizes texts to NFC."""
    known = copy.deepcopy(tokenizer("bytelevel"))  # other tests share it
    known.backend_tokenizer.normalizer = normalizers.NFC()
    return Scripted(lambda _: "Yes.", known, name)


def test_what_a_tokenizer_changes_is_known() -> None:
    codec = normalizing("nfc").codec
    assert change_of(codec, DECOMPOSED) == r"'e\u0301' becomes '\xe9'"
    assert change_of(codec, unicodedata.normalize("NFC", DECOMPOSED)) is None
    assert change_of(TokenizerCodec(tokenizer("sentencepiece")), " a\u2581b") == (
        r"'\u2581' becomes ' '"
    )
    assert difference("aXbYc", "aZbWc") == "'XbY' becomes 'ZbW'"
    assert difference("aa", "aaa") == "'' becomes 'a'"


def test_a_score_that_loses_a_member_says_why() -> None:
    sure = FakeBackend("sure", lambda text: {" a": 1.0, " b": 0.0})
    with AdaFuseEngine([normalizing("nfc"), member("whole")]) as engine:
        lost, kept = engine.score("One", [f" {DECOMPOSED} two", " two"]).texts
    assert set(lost.nll) == {"whole"}
    assert lost.missing == {"nfc": r"its tokenizer cannot write the text: 'e\u0301' becomes '\xe9'"}
    assert (set(kept.nll), kept.missing) == ({"nfc", "whole"}, {})
    with AdaFuseEngine([sure]) as engine:
        (text,) = engine.score("One", [" b"]).texts
    assert text.missing == {"sure": "it gives the text a probability of 0"}


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_prompt_that_is_too_long_has_one_error_and_no_warning(
    template: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    known = copy.deepcopy(tokenizer("bytelevel", template))
    known.model_max_length = 64
    long = [{"role": "user", "content": "word " * 200}]
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        with AdaFuseEngine([Scripted(lambda _: "Yes.", known, "ink", 64)]) as engine:
            for asked in ({"messages": long}, {"prompt": "word " * 200}):
                with pytest.raises(ContextWindowError, match="exceeds the context window of 64"):
                    engine.generate(**asked)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not caplog.messages
