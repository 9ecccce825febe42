"""Whether the form of a reply is enforced: one policy for the frameworks and the server."""

import json
from typing import Any

import pytest

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, GrammarError, InvalidInputError, Tool
from adafuse_llm.adapters.reply_form import Enforce, ReplyForm, enforced, to_tool_choice
from adafuse_llm.backends import FakeBackend

pytestmark = pytest.mark.quick

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OBJECT = ReplyForm(schema=SCHEMA)
CLOSED = {**SCHEMA, "additionalProperties": False}
NO_CALLS = ReplyForm(tools=[Tool("add", "", {})], choice="none")


class Checks(AdaFuseEngine):
    def __init__(self, *, fits: bool = True, **options: Any) -> None:
        super().__init__([FakeBackend("one", lambda _: {"a": 1.0})], AdaFuseConfig(**options))
        self.fits = fits

    def check_grammar(self, **_: Any) -> None:
        if not self.fits:
            raise GrammarError("no")


@pytest.mark.parametrize(
    ("own", "form", "options", "enforce", "expected"),
    [
        ({}, OBJECT, {"regex": "a+"}, True, {"regex": "a+"}),
        ({}, OBJECT, {"n": 1}, "auto", {"n": 1, "json_schema": CLOSED}),
        ({}, OBJECT, {}, False, {}),
        ({"regex": "a+"}, OBJECT, {}, True, {"regex": None, "json_schema": CLOSED}),
        ({"regex": "a+"}, OBJECT, {}, False, {"regex": None}),
        ({"regex": "a+"}, NO_CALLS, {}, True, {}),
    ],
)
def test_the_options_that_enforce_a_form(
    own: Any, form: ReplyForm, options: Any, enforce: Enforce, expected: Any
) -> None:
    assert enforced(Checks(**own), form, options, enforce) == (expected, "")


def test_a_form_that_cannot_be_enforced_is_described_or_an_error() -> None:
    options, warning = enforced(Checks(fits=False), OBJECT, {"n": 1}, "auto")
    assert options == {"n": 1}
    assert "described" in warning
    with pytest.raises(GrammarError, match="no"):
        enforced(Checks(fits=False), OBJECT, {}, True)


ASKED = {"role": "user", "content": "How many?"}
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
ANSWERED = {"role": "tool", "content": "5"}


@pytest.mark.parametrize(
    ("turns", "choice", "has_object"),
    [
        ([ASKED], "auto", False),
        ([ASKED, CALLED, ANSWERED], "auto", True),
        ([ASKED, CALLED, ANSWERED, CALLED, ANSWERED], "none", True),
        ([ASKED, CALLED, ANSWERED, CALLED, ANSWERED, ASKED], "auto", False),
    ],
)
def test_an_object_comes_after_a_result_and_at_once_after_a_repeated_call(
    turns: Any, choice: str, has_object: bool
) -> None:
    form = ReplyForm([Tool("add", "", {})], "auto", schema=SCHEMA)
    assert form.after(turns) == ReplyForm(form.tools, choice, schema=SCHEMA if has_object else None)
    required = ReplyForm(form.tools, "required", schema=SCHEMA)
    assert required.after(turns) == required


def test_a_form_is_described_for_members_that_are_not_held_to_it() -> None:
    schema = {"type": "object", "title": "Größe", "properties": {"a": {"type": "integer"}}}
    *_, last = ReplyForm(schema=schema).instructions.splitlines()
    assert json.loads(last) == schema
    assert "Größe" in last
    assert ": " not in last
    assert ReplyForm([Tool("add", "", {})], "auto", parallel=False).instructions
    assert not ReplyForm([Tool("add", "", {})], "none", parallel=False).instructions
    with pytest.raises(InvalidInputError, match="cannot be written as JSON"):
        assert ReplyForm(schema={"default": object()}).instructions


@pytest.mark.parametrize(
    ("choice", "names", "resolved"),
    [
        (None, ["add"], "auto"),
        (True, ["add"], "required"),
        (False, ["add"], "none"),
        ("any", ["add"], "required"),
        ("any", ["add", "any"], "any"),
        ({"type": "function", "function": {"name": "any"}}, ["any"], "any"),
        ({"type": "any"}, ["add"], "required"),
        ({"type": "tool", "name": "add"}, ["add"], "add"),
    ],
)
def test_a_tool_choice_is_read_in_all_its_forms(
    choice: Any, names: list[str], resolved: str
) -> None:
    assert to_tool_choice(choice, names) == resolved
    assert to_tool_choice(to_tool_choice(choice, names), names) == resolved
    with pytest.raises(InvalidInputError, match="tool_choice"):
        to_tool_choice("sub", names)
