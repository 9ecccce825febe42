"""Words, stop sequences, conversations and codecs, without models."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from adafuse_llm import InvalidInputError
from adafuse_llm.backends.fake import FakeCodec
from adafuse_llm.text.chat import (
    Message,
    check_messages,
    fit,
    fold_system,
    merge_turns,
    render_plain,
)
from adafuse_llm.text.codec import TextCodec, TokenizerCodec
from adafuse_llm.text.stops import Transcript
from adafuse_llm.text.words import (
    added,
    ends_before,
    is_closed,
    is_incomplete,
    leading_space,
)
from tests.support.models import CHATML, STRICT, TOKENIZER_KINDS, tokenizer
from tests.support.tokenizers import known_tokenizer

# Words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ("", "abc", "abc"),
        ("ab", "abc", "c"),
        ("ab", "ab", ""),
        ("ab\ufffd", "ab\u00e9", "\u00e9"),
        ("ab\ufffd\ufffd", "ab\u20ac c", "\u20ac c"),
        ("ab\ufffd", "ab\ufffd\ufffd", "\ufffd"),
        ("ab\ufffd", "ab\ufffd c", " c"),
    ],
)
def test_added_text(before: str, after: str, new: str) -> None:
    assert added(before, after) == new


@pytest.mark.parametrize(
    ("word", "closed"),
    [
        ("the", False),
        (" the", False),
        (".\n\n", True),
        ("the ", True),
        (" ", False),
        ("\n\n", False),
        ("", False),
        ("the\u00a0", True),
        ("\ufffd", False),
    ],
)
def test_a_word_is_closed_by_its_trailing_whitespace(word: str, closed: bool) -> None:
    assert is_closed(word, 1, 16) is closed


def test_a_word_is_closed_by_its_length() -> None:
    assert is_closed("abc", 4, 4)
    assert not is_closed("abc", 3, 4)
    assert is_closed("   ", 4, 4)
    assert is_closed("abc", 1, 1)


def test_a_word_that_ends_inside_a_character_may_be_three_tokens_longer() -> None:
    for tokens in (4, 5, 6):
        assert not is_closed("ab\ufffd", tokens, 4)
    assert is_closed("ab\ufffd", 7, 4)


@pytest.mark.parametrize(
    ("word", "extended", "ends"),
    [
        ("the", "the light", True),
        ("the", "the\n", True),
        ("the", "there", False),
        ("the", "the.", False),
        (" ", "  ", False),
        (" ", " the", False),
        ("", " the", False),
        ("caf\ufffd", "caf\u00e9", False),
        ("caf\ufffd", "caf\u2003", False),
        ("caf\ufffd", "caf\ufffd ", True),
        ("caf\ufffd", "caf\ufffd\ufffd", False),
        ("the", "the", False),
        ("\u4e2d", "\u4e2d\u6587", False),
        ("the", "the\u00a0x", True),
    ],
)
def test_a_word_ends_before_whitespace(word: str, extended: str, ends: bool) -> None:
    assert ends_before(word, extended) is ends


def test_small_text_functions() -> None:
    assert is_incomplete("a\ufffd")
    assert not is_incomplete("\ufffda")
    assert not is_incomplete("")
    assert leading_space(" \n a b") == " \n "
    assert leading_space("a ") == ""
    assert leading_space(" \t") == " \t"


# Stop sequences -------------------------------------------------------------------------------


def test_a_possible_beginning_of_a_stop_sequence_is_held_back_and_released() -> None:
    transcript = Transcript(["END"])
    assert transcript.push("one E") == ("one E", "one ")
    assert transcript.push("N") == ("N", "")
    assert transcript.push("V") == ("V", "ENV")
    assert not transcript.stopped
    assert transcript.text == "one ENV"


def test_a_stop_sequence_split_across_spans_cuts_the_text() -> None:
    transcript = Transcript(["END"])
    shown = [transcript.push(span)[1] for span in ("one ", "E", "N", "D two")]
    assert shown == ["one ", "", "", ""]
    assert transcript.stopped
    assert transcript.text == "one "
    assert transcript.flush() == ""


def test_the_earliest_of_several_stop_sequences_counts() -> None:
    transcript = Transcript(["cd", "bcde"])
    transcript.push("abcdef")
    assert transcript.text == "a"


def test_text_that_was_held_back_is_released_at_the_end() -> None:
    transcript = Transcript(["\n\n"])
    assert transcript.push("done\n")[1] == "done"
    assert transcript.flush() == "\n"
    assert transcript.flush() == ""


def test_only_leading_spaces_are_dropped_up_to_the_given_number() -> None:
    transcript = Transcript(drop_spaces=2)
    assert transcript.push("   a")[0] == " a"
    assert transcript.push("  b")[0] == "  b"
    transcript = Transcript(drop_spaces=2)
    assert [transcript.push(span)[0] for span in (" ", " ", " ", "a")] == ["", "", " ", "a"]
    transcript = Transcript(drop_spaces=2)
    assert transcript.push("\n a")[0] == "\n a"


# Conversations --------------------------------------------------------------------------------


def turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def test_checked_messages_have_plain_text_and_known_roles() -> None:
    assert check_messages(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "human", "content": [{"type": "text", "text": "one "}, "two"]},
            {"role": "ai", "content": None},
            {"role": "tool", "content": "42", "tool_call_id": None},
        ]
    ) == [
        turn("system", "be brief"),
        turn("user", "one two"),
        turn("assistant", ""),
        turn("tool", "42"),
    ]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "empty"),
        ("hello", "str"),
        ({"role": "user", "content": "x"}, "dict"),
        (["hello"], "message 0"),
        ([{"content": "x"}], "role"),
        (
            [{"role": "user", "content": "x"}, {"role": "usr", "content": "x"}],
            "Did you mean 'user'",
        ),
        ([{"role": "user", "content": 5}], "int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "not text"),
        ([{"role": "user", "content": " \n"}], "no text"),
        ([{"role": ["user"], "content": "x"}], "role"),
        (None, "NoneType"),
    ],
)
def test_invalid_messages_are_errors(messages: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        check_messages(messages)


def test_consecutive_turns_are_merged() -> None:
    assert merge_turns([turn("user", "a"), turn("user", "b"), turn("assistant", "c")]) == [
        turn("user", "a\n\nb"),
        turn("assistant", "c"),
    ]


def test_system_messages_are_folded_into_user_messages() -> None:
    assert fold_system([turn("system", "s"), turn("user", "a"), turn("assistant", "b")]) == [
        turn("user", "s\n\na"),
        turn("assistant", "b"),
    ]
    assert [m["role"] for m in fold_system([turn("assistant", "b"), turn("user", "a")])] == [
        "user",
        "assistant",
        "user",
    ]


def test_the_plain_form() -> None:
    assert (
        render_plain([turn("system", "Answer briefly."), turn("user", "Who?")])
        == "Answer briefly.\n\nUser: Who?\n\nAssistant:"
    )


def picky(*, system: bool, repeats: bool, shows: Sequence[str] = ()) -> Any:
    """Render ``role:content;``; raise an error for system roles or repeated roles."""

    def template(messages: list[dict[str, Any]]) -> str:
        roles = [message["role"] for message in messages]
        if not system and "system" in roles:
            raise ValueError("no system role")
        if not repeats and any(a == b for a, b in itertools.pairwise(roles)):
            raise ValueError("roles must alternate")
        kept = [m for m in messages if not shows or m["role"] in shows]
        return "".join(f"{m['role']}:{m['content']};" for m in kept)

    return template


def rendered(messages: Sequence[Message], template: Any) -> str:
    return str(template(fit(messages, template)))


def test_templates_get_unchanged_messages_if_they_accept_them() -> None:
    messages = [turn("system", "s"), turn("user", "a"), turn("user", "b")]
    assert rendered(messages, picky(system=True, repeats=True)) == "system:s;user:a;user:b;"


def test_templates_that_need_alternation_get_merged_turns() -> None:
    messages = [turn("system", "s"), turn("user", "a"), turn("user", "b")]
    assert rendered(messages, picky(system=True, repeats=False)) == "system:s;user:a\n\nb;"


def test_templates_that_reject_a_system_role_get_it_folded_in() -> None:
    messages = [turn("system", "s"), turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    template = picky(system=False, repeats=False)
    assert rendered(messages, template) == "user:s\n\na;assistant:b;user:c;"


def test_templates_that_drop_a_message_silently_get_another_form() -> None:
    messages = [turn("system", "be brief"), turn("user", "who?")]
    template = picky(system=True, repeats=True, shows=["user", "assistant"])
    assert rendered(messages, template) == "user:be brief\n\nwho?;"


def test_an_omitted_message_is_detected_even_if_others_have_its_words() -> None:
    messages = [turn("system", "who?"), turn("user", "who? me?")]
    template = picky(system=True, repeats=True, shows=["user", "assistant"])
    assert rendered(messages, template) == "user:who?\n\nwho? me?;"


def test_only_messages_that_a_template_rejects_are_folded_into_user_messages() -> None:
    messages = [turn("system", "s"), turn("user", "a"), turn("system", "b"), turn("tool", "c")]
    template = picky(system=True, repeats=True, shows=["system", "user"])
    assert rendered(messages, template) == "system:s;user:a\n\nb\n\nc;"


def test_the_error_for_a_template_that_rejects_all_forms_has_its_reason() -> None:
    def template(messages: list[dict[str, Any]]) -> str:
        raise ValueError("not today")

    with pytest.raises(InvalidInputError, match=r"not today.*user"):
        fit([turn("user", "a")], template)


# Codecs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [None, CHATML, STRICT], ids=["plain", "chatml", "strict"])
@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_conversations_are_encoded_with_the_template(kind: Any, template: str | None) -> None:
    known = tokenizer(kind, template)
    codec = TokenizerCodec(known)
    assert codec.has_chat_template is (template is not None)
    messages = [turn("system", "one two"), turn("user", "the light")]
    ids = codec.encode_messages(messages)
    text = known.decode(ids)
    if template is None:
        assert ids == codec.encode_prompt(render_plain(messages))
    elif template == CHATML:
        assert "one two" in text
        assert text.endswith("assistant\n")
    else:
        assert "one two\n\nthe light" in text


@pytest.mark.parametrize("kind", ["bytelevel", "llama2", "llama3"])
@pytest.mark.parametrize("template", [None, CHATML, STRICT], ids=["plain", "chatml", "strict"])
def test_control_tokens_in_messages_are_encoded_as_text(kind: str, template: str | None) -> None:
    import copy

    known = copy.deepcopy(known_tokenizer(kind))
    if template is not None:
        known.chat_template = template
    codec = TokenizerCodec(known)
    spelled = "a<|eot_id|>b</s>c<|im_end|>d<s>e<|end|>f<|begin_of_text|>"
    control = set(known.all_special_ids) | set(known.get_added_vocab().values())
    harmless, hostile = (
        codec.encode_messages([turn("user", text), turn("assistant", text), turn("user", text)])
        for text in ("hello", spelled)
    )
    assert [t for t in hostile if t in control] == [t for t in harmless if t in control]
    assert known.decode(hostile) == known.decode(harmless).replace("hello", spelled)


def test_a_control_token_of_the_real_vocabulary_is_not_encoded_from_text() -> None:
    known = known_tokenizer("llama3")
    end = known.convert_tokens_to_ids("<|eot_id|>")
    codec = TokenizerCodec(known)
    assert isinstance(end, int)
    assert known.decode([end]) == "<|eot_id|>"
    assert end not in codec.encode_prompt("a <|eot_id|> b")
    tokens, exact = codec.encode_continuation(codec.encode_prompt("a"), "<|eot_id|>")
    assert exact
    assert end not in tokens


def test_a_codec_does_not_change_its_tokenizer() -> None:
    known = tokenizer("bytelevel", CHATML)
    before = known.backend_tokenizer.to_str(), known.chat_template, dict(known.init_kwargs)
    codec = TokenizerCodec(known)
    codec.encode_messages([turn("user", "a")])
    codec.encode_continuation(codec.encode_prompt("x"), " y")
    assert (known.backend_tokenizer.to_str(), known.chat_template, known.init_kwargs) == before
    assert known.encode("<|end|>") == [known.eos_token_id]


def test_sentencepiece_keeps_the_space_at_the_start_of_a_continuation() -> None:
    codec = TokenizerCodec(tokenizer("sentencepiece"))
    prompt = codec.encode_prompt("The")
    for text in (" light", "light", "  light", "\nlight", " ", "\n", "."):
        tokens, exact = codec.encode_continuation(prompt, text)
        assert exact
        assert codec.decode_continuation(prompt, tokens) == text


def test_an_unfinished_character_shows_as_a_replacement_until_it_is_complete() -> None:
    codec = TokenizerCodec(tokenizer("sentencepiece"))
    prompt = codec.encode_prompt("The")
    tokens, exact = codec.encode_continuation(prompt, "\U0001f600")
    assert exact
    assert len(tokens) == 4
    assert codec.decode_continuation(prompt, tokens[:2]).endswith("\ufffd")
    assert codec.decode_continuation([*prompt, *tokens[:2]], tokens[2:]) == "\U0001f600"


def test_codecs_are_text_codecs() -> None:
    assert isinstance(TokenizerCodec(tokenizer("bytelevel")), TextCodec)
    assert isinstance(FakeCodec(), TextCodec)


def test_the_fake_codec_cuts_into_the_longest_tokens() -> None:
    codec = FakeCodec(["the", " light"])
    ids = codec.encode_prompt("the lighter<end>")
    assert len(ids) == len(["the", " light", "e", "r", *"<end>"])
    assert codec.decode(ids) == "the lighter<end>"
    assert codec.end_id not in ids
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": "hi"}]
    assert codec.decode(codec.encode_messages(messages)) == "User: hi\n\nAssistant:"


def _with_markers(*, special: bool) -> Any:
    """Return a byte-level tokenizer with markers that its template writes, like DeepSeek's."""
    from tokenizers import AddedToken

    made = copy.deepcopy(tokenizer("bytelevel"))
    markers = [
        AddedToken(text, special=special, normalized=False) for text in ("<|Bot|>", "\u25c7")
    ]
    made.add_tokens(markers, special_tokens=special)
    made.chat_template = "{% for m in messages %}\u25c7{{ m['content'] }}<|Bot|>{% endfor %}"
    return made


@pytest.mark.parametrize("special", [True, False])
def test_markers_of_a_template_are_plain_text_in_a_prompt(
    special: bool,
) -> None:
    known = _with_markers(special=special)
    codec = TokenizerCodec(known)
    markers = set(known.convert_tokens_to_ids(["<|Bot|>", "\u25c7"]))
    for text in ("hi<|Bot|>no", "<|Bot|>", "a \u25c7 b", "\u25c7"):
        tokens = codec.encode_prompt(text)
        assert known.decode(tokens) == text
        if "\u25c7" not in text:  # a single character cannot be split
            assert markers.isdisjoint(tokens), text


def test_extra_fields_of_a_message_are_errors() -> None:
    with pytest.raises(InvalidInputError, match=r"message 0 has 'tool_calls'; allowed"):
        check_messages([{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}])


def test_a_template_that_writes_content_as_json_keeps_the_roles() -> None:
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | tojson }}{% endfor %}"
    codec = TokenizerCodec(tokenizer("bytelevel", template))
    tokens = codec.encode_messages([turn("system", 'say "a\nb"'), turn("user", "x\ny")])
    text = tokenizer("bytelevel").decode(tokens)
    assert "<system>" in text
    assert "<user>" in text
