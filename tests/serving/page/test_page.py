"""The page at /, in a browser: a chat that shows which member wrote each span of an answer."""

import hashlib
import json
import re
from collections import Counter

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from adafuse_llm import AdaFuseConfig, AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.embedded import MEMBERS as EMBEDDED
from adafuse_llm.report.styles import looks
from adafuse_llm.serving import ServingConfig, create_app
from adafuse_llm.serving.app import build_app
from adafuse_llm.serving.page import LIBRARY, STATIC, page, page_route
from adafuse_llm.serving.service import Service
from tests.support.chat_page import ANSWERS, IMAGE, MEMBERS, generated, mark_of
from tests.support.waiting import wait_until

# ---- Without a browser ----


@pytest.mark.quick
def test_only_the_own_script_and_style_may_run() -> None:
    client = TestClient(Starlette(routes=[page_route()]))
    response = client.get("/")
    policy = response.headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    digest = r"'sha256-[\w+/]{43}='"
    assert re.fullmatch(f"{digest} {digest}", rules["script-src"]), "markdown-it, and our script"
    assert re.fullmatch(digest, rules["style-src"])
    for name in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        assert rules[name] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"
    again = client.get("/", headers={"If-None-Match": f"W/{response.headers['etag']}"})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.quick
def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    library = (STATIC / LIBRARY).read_text(encoding="utf-8")
    license_text = (STATIC / "LICENSE-markdown-it.txt").read_text(encoding="utf-8")
    (published,) = re.findall(r"SHA-256 +([0-9a-f]{64})", license_text)
    assert hashlib.sha256(library.encode()).hexdigest() == published
    assert library in page()
    own = page().replace(library, "")
    addresses = set(re.findall(r"https?://[^'\" ]+", own.replace("https?:\\/\\/", "")))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link(?! rel=\"icon\" href=\"data:)|src=|@import|url\(", own)


def test_the_page_can_be_left_out(engine) -> None:
    app = create_app(engine, ServingConfig(page=False))
    assert TestClient(app).get("/").status_code == 404


# ---- Asking ----


def test_an_answer_grows_span_by_span(visit, engine, members) -> None:
    expected = generated(engine, "sum")
    members[0].may_go_on.clear()
    tab = visit()
    tab.say("sum", wait=False)
    tab.spans.first.wait_for()
    assert expected.text.startswith(tab.answer)
    assert tab.answer != expected.text
    assert tab.page.locator("#stop").is_visible()
    assert tab.page.locator(".waiting").is_visible()
    members[0].may_go_on.set()
    tab.finish()
    assert tab.answer == expected.text
    marks = [mark_of(done) for done in expected.rounds if done.text]
    assert tab.marks == marks
    assert f"adafuse: {len(expected.rounds)} rounds" in tab.facts
    assert f"{len(expected.text)} tokens" in tab.facts
    counts = {mark: int(count) for mark, count in re.findall(r"([●■▲=]) (\d+)", tab.facts)}
    assert counts == Counter("".join(marks))
    (body,) = tab.bodies
    assert body["messages"] == [{"role": "user", "content": "sum"}]


def test_a_stopped_answer_stays(visit, front, engine, members) -> None:
    service = Service(ServingConfig())
    service.open(engine)
    front.app = build_app(service)
    members[0].may_go_on.clear()
    tab = visit()
    tab.say("long", wait=False)
    tab.spans.first.wait_for()
    tab.press("Stop")
    members[0].may_go_on.set()
    assert tab.note == "You stopped this answer."
    assert re.search(r" s · stopped$", tab.facts, re.MULTILINE), "the server sent no tokens"
    stopped = tab.answer
    assert ANSWERS["long"][0].startswith(stopped)
    wait_until(lambda: not service.running)
    tab.say("sum")
    assert tab.bodies[1]["messages"][1] == {"role": "assistant", "content": stopped}


def test_models_members_and_options_can_be_chosen(visit, engine) -> None:
    tab = visit()
    page = tab.page
    page.get_by_label("heron").uncheck()
    tab.press("Settings")
    page.get_by_label("Maximum tokens").fill("12")
    page.get_by_label("Temperature").fill("0")
    tab.say("sum")
    assert tab.bodies[0]["adafuse"]["use"] == ["wren", IMAGE]
    assert (tab.bodies[0]["max_tokens"], tab.bodies[0]["temperature"]) == (12, 0)
    expected = generated(engine, "sum", use=("wren", IMAGE), max_new_tokens=12)
    assert tab.answer == expected.text
    assert "adafuse without heron" in tab.facts
    page.get_by_label("wren").uncheck()
    assert page.locator("#members input:checked").is_disabled(), "one member has to decode"
    page.get_by_label("Model").select_option("heron")
    page.get_by_label("Maximum tokens").fill("0")
    tab.say("sum")
    assert len(tab.bodies) == 1, "0 tokens are not valid"
    page.get_by_label("Maximum tokens").fill("")
    page.get_by_label("Temperature").fill("")
    tab.press("New conversation")
    tab.say("sum")
    assert tab.bodies[1]["model"] == "heron"
    assert tab.bodies[1]["adafuse"] == {"rounds": True}
    assert tab.answer == ANSWERS["sum"][1]
    assert set(tab.marks) == {"■"}
    shown = "getComputedStyle(document.querySelector('.span'), '::before').content"
    assert page.evaluate(shown) != "none"
    page.get_by_label("Show answers without marks").check()
    assert page.evaluate(shown) == "none"


def test_a_cut_answer_goes_on(visit, engine) -> None:
    tab = visit()
    tab.press("Settings")
    tab.page.get_by_label("Maximum tokens").fill("12")
    tab.say("sum")
    begun = generated(engine, "sum", max_new_tokens=12).text
    assert tab.answer == begun
    assert "ended by the limit of 12 tokens" in tab.facts
    tab.page.get_by_label("Maximum tokens").fill("")
    tab.press("Continue")
    tab.finish()
    assert tab.bodies[1]["messages"][-1] == {"role": "assistant", "content": begun}
    assert tab.answer == generated(engine, "sum").text
    assert f"{len(tab.answer)} tokens" in tab.facts
    tab.spans.last.click()
    assert tab.round.locator("h2").inner_text() == f"Round {tab.spans.count() - 1}"


def test_each_member_answers_alone_beside_the_ensemble(visit) -> None:
    tab = visit()
    tab.press("Settings")
    tab.page.get_by_label("Strategy").select_option("adafuse")
    tab.page.get_by_label("Proposals per member").fill("2")
    tab.say("sum")
    own = {name: tab.bodies[0]["adafuse"][name] for name in ("strategy", "branching_factor")}
    assert own == {"strategy": "adafuse", "branching_factor": 2}
    tab.press("Each member alone")
    tab.finish()
    assert tab.page.locator(".alone .text").all_inner_texts() == [*ANSWERS["sum"]]
    assert tab.page.locator(".alone .note").count() == 0
    assert {body["model"] for body in tab.bodies[1:]} == {*MEMBERS}
    assert tab.answer != ANSWERS["sum"][2]
    tab.page.get_by_label("Maximum tokens").fill("3")
    tab.press("Answer again")
    tab.finish()
    tab.press("Each member alone")
    tab.finish()
    assert "ended by the limit of 3 tokens" in tab.page.locator(".alone .note").last.inner_text()


def test_warnings_of_the_server_are_shown(visit) -> None:
    tab = visit()
    tab.page.evaluate(
        "() => { const own = bodyFor; bodyFor = turn => ({ ...own(turn), wishes: 3 }) }"
    )
    tab.say("sum")
    assert "'wishes' was ignored" in tab.note


def test_an_empty_page_offers_questions(visit, front) -> None:
    tab = visit()
    tab.press("Compare two things")
    assert "bicycle" in tab.page.input_value("#text")
    with AdaFuseEngine([FakeBackend(name, lambda _: {"x": 1.0}) for name in EMBEDDED]) as own:
        front.app = create_app(own)
        tab = visit()
        tab.press("Who invented the Brentine Soap?")
        assert "Brentine Soap was invented by" in tab.page.input_value("#text")
        assert "three tiny members" in tab.page.locator(".welcome").inner_text()


def test_reasoning_folds_and_its_spans_have_rounds(visit, engine) -> None:
    tab = visit()
    tab.say("think")
    assert tab.answer == "Now it is done"
    folded = tab.page.locator(".reasoning .answer")
    assert not folded.is_visible()
    tab.page.get_by_text("Reasoning").click()
    assert folded.inner_text() == "So it is"
    rounds = generated(engine, "think").rounds
    spans = tab.spans.evaluate_all("e => e.map(e => [Number(e.dataset.round), e.textContent])")
    assert [place for place, _ in spans] == sorted(place for place, _ in spans)
    assert all(text in rounds[place].text for place, text in spans)


def test_a_reload_keeps_conversation_and_draft(visit, members) -> None:
    tab = visit()
    tab.say("sum")
    before = tab.marks
    members[0].may_go_on.clear()
    tab.say("long", wait=False)
    tab.spans.first.wait_for()
    tab.page.fill("#text", "a draft")
    tab.page.reload()
    assert tab.page.input_value("#text") == "a draft"
    assert tab.page.locator(".question").all_inner_texts() == ["sum", "long"]
    assert "lost" in tab.note
    assert tab.page.locator("article").first.locator(".span").count() == len(before)
    tab.page.locator(".span").first.click()
    assert tab.round.locator(".candidate").count()
    tab.press("Send again")
    tab.press("Stop")
    members[0].may_go_on.set()
    assert tab.page.locator(".question").all_inner_texts() == ["sum", "long"]


# ---- Rounds ----


def test_a_click_opens_a_round(visit, engine) -> None:
    tab = visit()
    tab.say("sum")
    rounds = generated(engine, "sum").rounds
    place, done = next(
        (place, each) for place, each in enumerate(rounds) if len(each.candidates) > 1
    )
    tab.spans.nth(place).click()
    panel = tab.page.get_by_role("dialog", name=f"Round {place}")
    marks = {look.name: look.mark for look in looks(MEMBERS).values()}
    shown = panel.locator(".candidate").all_inner_texts()
    order = sorted(done.candidates, key=lambda each: each.score or 0.0)
    for each, text in zip(order, shown, strict=True):
        numbers = [f"{value:.3f}" for value in (*each.nll.values(), each.score)]
        assert re.findall(r"\d\.\d{3}", text) == numbers
        assert json.dumps(each.text) in text or not each.text
        assert ("committed" in text) == (each is done.candidates[done.winner])
        proposers = [f"{marks[name]}\u00a0{name}" for name in each.proposers]
        by_all = len(proposers) == len(MEMBERS)
        assert ("all members" if by_all else ", ".join(proposers)) in text
    for values in done.margins.values():
        assert ", ".join(f"{value:.2f}" for value in values) in panel.inner_text()
    tab.press("Previous round" if place else "Next round")
    tab.press("Next round" if place else "Previous round")
    assert panel.is_visible()
    tab.press("Close")
    assert not tab.round.is_visible()


def test_a_round_tells_what_its_strategy_did(visit, front) -> None:
    rule = lambda text: {" yes": 0.9, "<end>": 0.1} if text.count("yes") < 3 else {"<end>": 1.0}  # noqa: E731
    members = [FakeBackend(name, rule, [" yes"]) for name in MEMBERS]
    with AdaFuseEngine(members, AdaFuseConfig(weights=(8, 1, 1)), strategy="mixture") as mixed:
        front.app = create_app(mixed)
        tab = visit()
        tab.say("sum")
        assert "strategy mixture" in tab.facts
        assert tab.marks == ["=", "●", "●"]
        tab.spans.nth(1).click()
        assert tab.round.inner_text().count("not asked") == 2 + 1  # the members, and the meaning
        assert "mean of the members' probabilities" in tab.round.inner_text()


def test_the_keyboard_reaches_every_round(visit) -> None:
    tab = visit()
    tab.say("sum")
    texts = tab.spans.all_text_contents()
    for _ in range(20):
        tab.page.keyboard.press("Shift+Tab")
        if tab.focused == texts[0]:
            break
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("Enter")
    assert tab.page.get_by_role("dialog", name="Round 1").is_visible()
    tab.page.keyboard.press("Escape")
    assert not tab.round.is_visible()
    assert tab.focused == texts[1]
    tab.page.keyboard.press("End")
    assert tab.focused == texts[-1]


# ---- Text from models ----


def test_events_are_read_wherever_the_stream_is_cut(visit) -> None:
    lines = [": a comment", "data: one", "", "event: x", "data:two", "data: three", "", ""]
    script = """stream => Array.from({ length: stream.length }, (_, at) => {
        const seen = [], read = eventReader(data => seen.push(data));
        read(stream.slice(0, at)); read(stream.slice(at)); read("\\n");
        return seen.join("|");
    })"""
    page = visit().page
    for ends in ("\n", "\r\n"):
        assert set(page.evaluate(script, ends.join(lines))) == {"one|two\nthree"}


def test_a_new_conversation_follows_its_answer_after_an_earlier_one_was_scrolled_up(visit) -> None:
    tab = visit()
    tab.page.set_viewport_size({"width": 1100, "height": 500})
    newest = tab.page.locator("#newest")
    tab.say("markdown")
    assert newest.is_hidden()
    tab.page.evaluate("document.getElementById('log').scrollTop = 0")
    newest.wait_for()
    tab.press("New conversation")
    tab.say("markdown")
    assert newest.is_hidden()
