"""What the page says when something goes wrong, and what the reader can do then."""

import pytest

from adafuse_llm.errors import MemberError
from adafuse_llm.serving import ServingConfig, create_app, errors
from adafuse_llm.serving.app import build_app
from adafuse_llm.serving.errors import ApiError, api_error
from adafuse_llm.serving.service import Service
from tests.support.chat_page import HEBREW, cut, generated, refuse

pytestmark = pytest.mark.slow


def test_the_page_asks_for_the_key(visit, front, engine) -> None:
    front.app = create_app(engine, api_keys=["right"])
    tab = visit()
    dialog = tab.page.get_by_role("dialog", name="This server needs an API key")
    secret, wrong = dialog.get_by_label("API key"), tab.page.locator("#wrong")
    assert secret.get_attribute("type") == "password"
    assert not wrong.is_visible()
    secret.fill("wrong")
    secret.press("Enter")
    wrong.wait_for()
    secret.fill("right")
    secret.press("Enter")
    wrong.wait_for(state="hidden")
    tab.say("sum")
    tab.page.reload()
    assert "right" not in tab.page.url
    tab.say("hebrew")
    assert tab.answer == HEBREW
    front.app = create_app(engine, api_keys=["new"])
    tab.say("sum", wait=False)
    wrong.wait_for()
    tab.page.keyboard.press("Escape")
    assert tab.note == "The server needs an API key."
    tab.press("Send again")
    secret.fill("new")
    secret.press("Enter")
    tab.finish()
    assert tab.answer == generated(engine, "sum").text


def test_a_message_waits_until_the_members_are_loaded(visit, front, engine, monkeypatch) -> None:
    monkeypatch.setitem(errors.RETRY, "Retry-After", "0")
    service = Service(ServingConfig())
    front.app = build_app(service)
    tab = visit()
    tab.page.get_by_text("The members are loading.").wait_for()
    tab.say("sum", wait=False)
    tab.page.locator(".note").wait_for()
    assert "sent as soon as it is" in tab.note
    service.open(engine)
    tab.finish()
    assert tab.answer == generated(engine, "sum").text
    assert not tab.page.locator("#status, .note").filter(visible=True).count()
    front.app = build_app(Service(ServingConfig()))
    tab.say("hebrew", wait=False)
    tab.page.locator(".note").wait_for()
    tab.press("Stop")
    assert tab.note == "You stopped this answer."


def test_a_refused_message_can_be_sent_again(visit, front, engine) -> None:
    busy = ApiError(429, "too many requests wait", headers={"Retry-After": "7"})
    refuse(front, busy, api_error(MemberError("wren", "broken")))
    tab = visit()
    tab.say("sum")
    assert tab.note == "The server is busy. Send the message again in 7 s."
    tab.press("Send again")
    tab.page.get_by_text("The server failed: member 'wren' failed: broken.").wait_for()
    tab.press("Send again")
    tab.spans.first.wait_for()
    tab.finish()
    assert tab.answer == generated(engine, "sum").text
    assert tab.page.locator(".question").all_inner_texts() == ["sum"]
    assert not tab.page.locator(".note").count()
    assert all(len(each["messages"]) == 1 for each in tab.bodies)


@pytest.mark.parametrize("how", ["failed", "cut"])
def test_an_answer_that_breaks_off_stays(visit, front, engine, members, how) -> None:
    whole = generated(engine, "sum").text
    tab = visit()
    if how == "failed":
        members[1].fails = True
        tab.say("sum")
    else:
        may_cut = cut(front, 4)
        tab.say("sum", wait=False)
        tab.spans.first.wait_for()
        may_cut.set()
        tab.finish()
    assert ("The answer failed: " if how == "failed" else "The connection to") in tab.note
    assert whole.startswith(tab.answer)
    assert 0 < len(tab.answer) < len(whole)
    members[1].fails = False
    front.app = create_app(engine)
    tab.press("Send again")
    tab.finish()
    assert tab.answer == whole
