"""Conversations and the templates that they are shown to members in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from adafuse_llm import InvalidInputError
from adafuse_llm.text.chat import (
    Message,
    check_messages,
    fit,
    fold_system,
    merge_turns,
    render_plain,
)
from tests.support.templates import turn

pytestmark = pytest.mark.quick


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
def test_bad_messages_are_refused(messages: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        check_messages(messages)


def test_consecutive_turns_are_merged() -> None:
    assert merge_turns([turn("user", "a"), turn("user", "b"), turn("assistant", "c")]) == [
        turn("user", "a\n\nb"),
        turn("assistant", "c"),
    ]


def test_system_messages_are_folded_into_the_users_words() -> None:
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
    """A template that refuses system roles or repeated roles; renders `role:content;`."""

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


def test_templates_get_the_messages_as_they_are_where_they_take_them() -> None:
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


def test_a_message_is_missed_even_if_others_hold_its_words() -> None:
    messages = [turn("system", "who?"), turn("user", "who? me?")]
    template = picky(system=True, repeats=True, shows=["user", "assistant"])
    assert rendered(messages, template) == "user:who?\n\nwho? me?;"


def test_only_what_a_template_does_not_take_is_folded_into_the_users_words() -> None:
    messages = [turn("system", "s"), turn("user", "a"), turn("system", "b"), turn("tool", "c")]
    template = picky(system=True, repeats=True, shows=["system", "user"])
    assert rendered(messages, template) == "system:s;user:a\n\nb\n\nc;"


def test_a_template_that_takes_nothing_is_an_error_with_its_reason() -> None:
    def template(messages: list[dict[str, Any]]) -> str:
        raise ValueError("not today")

    with pytest.raises(InvalidInputError, match=r"not today.*user"):
        fit([turn("user", "a")], template)


def test_extra_fields_of_a_message_are_refused_not_dropped() -> None:
    with pytest.raises(InvalidInputError, match=r"message 0 has 'tool_calls'; only"):
        check_messages([{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}])
