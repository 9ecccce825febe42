"""Conversations that the browser keeps, and the system prompt."""

import json
from pathlib import Path

import pytest

from tests.support.chat_page import ANSWERS, Tab, generated

pytestmark = pytest.mark.slow


def open_list(tab: Tab) -> None:
    tab.page.get_by_role("button", name="Conversations", exact=True).click()


def titles(tab: Tab) -> list[str]:
    return tab.page.locator("#talks .talk span:first-child").all_inner_texts()


def questions(tab: Tab) -> list[str]:
    return tab.page.locator(".question").all_inner_texts()


def confirm(tab: Tab, name: str) -> None:
    tab.page.get_by_role("dialog").get_by_role("button", name=name, exact=True).click()


def test_conversations_are_kept_in_the_browser(visit, site, engine) -> None:
    tab = visit()
    open_list(tab)
    assert tab.page.get_by_text("There are no conversations yet.").is_visible()
    tab.say("sum")
    tab.say("think")
    tab.press("New conversation")
    tab.say("long")
    assert titles(tab) == ["long", "sum"], "the latest first"
    assert tab.page.locator('#talks [aria-current="true"]').inner_text().startswith("long")
    other = tab.page.context.new_page()  # a new tab begins a new conversation
    other.goto(site[1])
    assert not other.locator(".question").count()
    other.close()
    tab.page.get_by_role("button", name="sum").first.click()
    assert questions(tab) == ["sum", "think"]
    assert tab.page.locator(".answer[role=group]").first.text_content() == (
        generated(engine, "sum").text
    )
    tab.page.locator(".span").first.click()
    assert tab.round.locator(".candidate").count(), "the rounds are kept"
    tab.page.reload()
    assert questions(tab) == ["sum", "think"], "the open conversation stays open"
    tab.say("sum")
    assert [each["content"] for each in tab.bodies[-1]["messages"]][::2] == ["sum", "think", "sum"]
    open_list(tab)
    assert titles(tab) == ["sum", "long"], "a new question makes a conversation the latest"


def test_conversations_can_be_deleted(visit) -> None:
    tab = visit()
    for question in ("sum", "long", "think"):
        tab.press("New conversation")
        tab.say(question)
    open_list(tab)
    for answer in ("Cancel", "Delete"):
        assert titles(tab) == ["think", "long", "sum"]
        tab.press("Delete long")
        confirm(tab, answer)
    tab.page.get_by_role("button", name="Delete long").wait_for(state="hidden")
    assert titles(tab) == ["think", "sum"]
    assert questions(tab) == ["think"], "the open one stays"
    tab.press("Delete all")
    confirm(tab, "Delete")
    tab.page.get_by_text("There are no conversations yet.").wait_for()
    tab.page.reload()
    assert tab.page.evaluate("localStorage.length") == 0


def test_another_conversation_stops_what_runs(visit, members, engine) -> None:
    tab = visit()
    tab.say("sum")
    tab.press("New conversation")
    members[0].may_go_on.clear()
    tab.say("long", wait=False)
    tab.spans.first.wait_for()
    open_list(tab)
    tab.page.get_by_role("button", name="sum").first.click()
    tab.finish()
    members[0].may_go_on.set()
    assert questions(tab) == ["sum"]
    tab.page.locator("#talks .talk", has_text="long").click()
    assert tab.note == "You stopped this answer."
    assert ANSWERS["long"][0].startswith(tab.answer) and tab.answer
    tab.press("Send again")
    tab.finish()
    assert tab.answer == generated(engine, "long").text


def test_a_system_prompt_is_sent_and_belongs_to_its_conversation(visit) -> None:
    tab = visit()
    tab.press("Settings")
    system = tab.page.get_by_label("System prompt")
    system.fill("Answer in one word.")
    tab.say("sum")
    system_message = {"role": "system", "content": "Answer in one word."}
    assert tab.bodies[0]["messages"][0] == system_message
    tab.say("long")
    assert [each["role"] for each in tab.bodies[1]["messages"]] == [
        *("system", "user", "assistant", "user")
    ]
    assert tab.page.locator("#more").get_attribute("title") == "Some settings are in use"
    tab.press("New conversation")
    system.fill("")
    tab.say("sum")
    assert [each["role"] for each in tab.bodies[2]["messages"]] == ["user"]
    open_list(tab)
    tab.page.locator("#talks .talk").nth(1).click()
    tab.page.reload()
    tab.press("Settings")
    assert system.input_value() == "Answer in one word."


def test_an_edited_question_replaces_what_follows(visit) -> None:
    tab = visit()
    for question in ("sum", "think", "long"):
        tab.say(question)
    tab.page.get_by_role("button", name="Edit this question").nth(1).click()
    assert tab.page.locator(".replaced").count() == 2
    tab.page.keyboard.press("Escape")
    assert (questions(tab), tab.page.input_value("#text")) == (["sum", "think", "long"], "")
    tab.page.get_by_role("button", name="Edit this question").nth(1).click()
    assert tab.page.input_value("#text") == "think"
    tab.say("bold")
    assert questions(tab) == ["sum", "bold"]
    assert [each["content"] for each in tab.bodies[-1]["messages"]][::2] == ["sum", "bold"]


def test_a_conversation_can_be_saved(visit) -> None:
    tab = visit()
    tab.say("sum")
    open_list(tab)
    files = []
    for form in ("Markdown", "JSON"):
        with tab.page.expect_download() as saved:
            tab.press(form)
        files.append(Path(saved.value.path()).read_text(encoding="utf-8"))
    assert files[0] == f"## Question\n\nsum\n\n## Answer (adafuse)\n\n{tab.answer}\n"
    (turn,) = json.loads(files[1])["turns"]
    assert (turn["question"], turn["answer"]) == ("sum", tab.answer)
    assert turn["rounds"]
