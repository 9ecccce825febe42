"""The page at /, in a browser: a chat that shows which member wrote each span of an answer."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra [serve]")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra [serve]")
sync_api = pytest.importorskip("playwright.sync_api")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from adafuse_llm import AdaFuseEngine, Candidate, Round
from adafuse_llm.backends import FakeBackend
from adafuse_llm.report.styles import COLORS, looks, owner, shared
from adafuse_llm.serving.page import page, page_route
from adafuse_llm.summary import choice_probabilities
from tests.support.colors import contrast

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]

IMAGE = "<img src=x onerror=\"document.title='hurt'\">"
SCRIPT = "<script>document.title='hurt'</script>"
MEMBERS = ("wren", "heron", IMAGE)
HEBREW = "1874 הטחנה נוסדה על ידי עדה ברוק ליד הנהר"


def decided(index: int, text: str, by: str, *others: str) -> Round:
    """A round that commits `text` of the members whose numbers `by` has; others propose more."""
    proposers = [MEMBERS[int(number)] for number in by]
    candidates = [
        Candidate(
            text=each,
            stops=False,
            proposers=tuple(proposers if not place else (MEMBERS[0],)) if by else (),
            nll={} if not by else {name: place + 0.25 * n for n, name in enumerate(MEMBERS)},
            score=place + 0.25 if by else None,
        )
        for place, each in enumerate([text, *others])
    ]
    margins: dict[str, tuple[float, ...]] = dict.fromkeys(MEMBERS if by else (), (0.9, 0.5))
    return Round(
        index=index,
        candidates=tuple(candidates),
        winner=0,
        text=text,
        margins=margins,
        elapsed=0.12,
        forced=not by,
    )


def rounds_of(*spans: tuple[str, ...]) -> list[Round]:
    return [decided(index, *span) for index, span in enumerate(spans)]


ANSWERS = {
    "sum": rounds_of(
        ("34 + 58", "012"), (" = 92. 92", "2", " = 90. 90"), (" - 7 =", "01", " is"), (" 85.", "")
    ),
    "nasty": rounds_of((SCRIPT, "0"), (IMAGE, "2", SCRIPT), (" a & b", "012")),
    "hebrew": rounds_of(*((word, "0", "אחר") for word in re.findall(r"\S+\s*", HEBREW))),
    "long": rounds_of(*((f"line {number}\n", "012") for number in range(60))),
    "think": rounds_of(("<think>\nI th", "0"), ("ink</think>\n\nNow", "1"), (" then", "0")),
}
SHOWN = {"think": [("I th", ""), ("ink", "Now"), ("", " then")]}
"""Reasoning and content of each chunk, where they are not the texts of the rounds."""


@dataclass
class Plan:
    """What the scripted server does, and the requests that it got."""

    key: str = ""
    ready: bool = True
    refusals: list[Response] = field(default_factory=list)
    pace: float = 0.0
    breaks_after: int = 1000
    how: str = "error"
    requests: list[dict[str, Any]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)


def error(status: int, message: str, code: str | None = None, **headers: str) -> JSONResponse:
    body = {"error": {"message": message, "type": "error", "param": None, "code": code}}
    return JSONResponse(body, status, {name.replace("_", "-"): headers[name] for name in headers})


class Scripted:
    """A server that speaks the protocol, with scripted answers and faults."""

    def __init__(self) -> None:
        self.plan = Plan()
        routes = [
            page_route(),
            Route("/ready", self.ready),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    def refusal(self, request: Request) -> Response | None:
        if self.plan.key and request.headers.get("authorization") != f"Bearer {self.plan.key}":
            return error(401, "Wrong key.", "invalid_api_key")
        return None if self.plan.ready else error(503, "The members are loading.")

    async def ready(self, request: Request) -> Response:
        return JSONResponse({"status": "ready"}) if self.plan.ready else error(503, "loading")

    async def models(self, request: Request) -> Response:
        lists = {"adafuse": MEMBERS, **{name: [name] for name in MEMBERS}}
        data = [{"id": name, "adafuse": {"members": lists[name]}} for name in lists]
        return self.refusal(request) or JSONResponse({"object": "list", "data": data})

    async def chat(self, request: Request) -> Response:
        if refusal := self.refusal(request):
            return refusal
        body = await request.json()
        self.plan.requests.append(body)
        if self.plan.refusals:
            return self.plan.refusals.pop(0)
        name = body["messages"][-1]["content"]
        return StreamingResponse(self.stream(name), media_type="text/event-stream")

    async def stream(self, name: str) -> AsyncIterator[str]:
        plan, rounds = self.plan, ANSWERS[name]
        shown = SHOWN.get(name) or [("", each.text) for each in rounds]
        try:
            yield event(delta={"role": "assistant", "content": ""})
            for number, (each, (thought, text)) in enumerate(zip(rounds, shown, strict=True)):
                if number == plan.breaks_after:
                    if plan.how == "error":
                        yield 'data: {"error": {"message": "A member ran out of memory."}}\n\n'
                        return
                    raise ConnectionError("cut on purpose")
                await asyncio.sleep(plan.pace)
                delta = {"content": text, **({"reasoning_content": thought} if thought else {})}
                yield event(delta=delta, adafuse={"round": each.model_dump(mode="json")})
            yield event(delta={}, finish_reason="stop", adafuse={"finish_reason": "stop"})
            yield 'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\ndata: [DONE]\n\n'
        except asyncio.CancelledError:
            plan.left.set()
            raise


def event(**choice: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}\n\n"


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Scripted, str]]:
    app = Scripted()
    config = uvicorn.Config(
        app.app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield app, f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def plan(scripted) -> Plan:
    scripted[0].plan = Plan()
    return scripted[0].plan


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        if chromium is None:
            pytest.skip("Chromium is not installed")
        found = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def visit(browser, scripted, plan) -> Iterator[Any]:
    """Open the page in a tab of its own; afterwards the tab has reported no problem."""
    problems: list[str] = []
    contexts = []

    def opened(**options: Any) -> Any:
        contexts.append(
            browser.new_context(**{"viewport": {"width": 1100, "height": 700}, **options})
        )
        tab = contexts[-1].new_page()
        tab.set_default_timeout(10_000)
        tab.on("pageerror", lambda problem: problems.append(str(problem)))
        tab.on("console", lambda message: problems.append(message.text))
        tab.goto(scripted[1])
        return tab

    yield opened
    for context in contexts:
        context.close()
    network = "Failed to load resource"  # refusals and cut connections, which tests want
    assert [each for each in problems if network not in each] == []


def say(tab: Any, text: str, *, wait: bool = True) -> None:
    tab.fill("#text", text)
    tab.keyboard.press("Enter")
    if wait:
        finished(tab)


def finished(tab: Any) -> None:
    tab.locator("#send").wait_for()


def answer(tab: Any) -> str:
    return tab.locator(".answer[role=group]").last.text_content()


def text_of(name: str) -> str:
    return "".join(each.text for each in ANSWERS[name])


def note(tab: Any) -> str:
    return tab.locator(".note").last.inner_text()


def is_too_wide(tab: Any) -> bool:
    return tab.evaluate("document.documentElement.scrollWidth > innerWidth")


# ---- Without a browser ----


def test_only_the_own_script_and_style_may_run() -> None:
    response = TestClient(Starlette(routes=[page_route()])).get("/")
    rules = dict(
        rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; ")
    )
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", rules["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", rules["style-src"])
    assert {rules[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    addresses = set(re.findall(r"https?://[^'\" ]+", page()))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link(?! rel=\"icon\" href=\"data:)|src=|@import|url\(", page())


# ---- Asking ----


def test_an_answer_grows_span_by_span(visit, plan) -> None:
    plan.pace = 0.1
    tab = visit()
    say(tab, "sum", wait=False)
    tab.locator(".span").first.wait_for()
    assert len(answer(tab)) < len(text_of("sum"))
    assert tab.locator("#stop").is_visible()
    assert tab.locator(".waiting").is_visible()
    finished(tab)
    assert answer(tab) == text_of("sum")
    marks = tab.locator(".span").evaluate_all("spans => spans.map(span => span.dataset.mark)")
    assert marks == ["=", "▲", "●■", "–"]
    facts = tab.locator(".foot").inner_text()
    assert "4 rounds" in facts
    assert "7 tokens" in facts
    assert "ended by the winner" in facts
    (request,) = plan.requests
    assert request == {
        "model": "adafuse",
        "messages": [{"role": "user", "content": "sum"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "adafuse": {"rounds": True},
    }
    assert tab.locator("#shared-forced").is_visible()


def test_the_whole_conversation_is_sent(visit, plan) -> None:
    tab = visit()
    say(tab, "sum")
    tab.locator("#text").press("Shift+Enter")
    assert tab.input_value("#text") == "\n"
    say(tab, "nasty")
    assert [each["content"] for each in plan.requests[1]["messages"]] == [
        "sum",
        text_of("sum"),
        "nasty",
    ]
    tab.get_by_role("button", name="New conversation").click()
    assert not tab.locator(".question").count()
    say(tab, "sum")
    assert len(plan.requests[2]["messages"]) == 1


def test_a_stopped_answer_stays(visit, plan) -> None:
    plan.pace = 0.1
    tab = visit()
    say(tab, "long", wait=False)
    tab.locator(".span").nth(1).wait_for()
    tab.get_by_role("button", name="Stop").click()
    assert note(tab) == "You stopped this answer."
    stopped = answer(tab)
    assert text_of("long").startswith(stopped)
    assert plan.left.wait(5), "the server still decodes"
    plan.pace = 0
    say(tab, "sum")
    assert plan.requests[1]["messages"][1] == {"role": "assistant", "content": stopped}


def test_models_members_and_options_can_be_chosen(visit, plan) -> None:
    tab = visit()
    tab.get_by_label("heron").uncheck()
    tab.get_by_role("button", name="Settings").click()
    tab.get_by_label("Maximum tokens").fill("40")
    tab.get_by_label("Temperature").fill("0")
    say(tab, "sum")
    assert plan.requests[0]["adafuse"]["use"] == ["wren", IMAGE]
    assert (plan.requests[0]["max_tokens"], plan.requests[0]["temperature"]) == (40, 0)
    tab.get_by_label("wren").uncheck()
    assert tab.locator("#members input:checked").is_disabled(), "one member has to decode"
    tab.get_by_label("Model").select_option("heron")
    tab.get_by_label("Maximum tokens").fill("0")
    tab.fill("#text", "sum")
    tab.keyboard.press("Enter")
    assert len(plan.requests) == 1, "0 tokens are not valid"
    tab.get_by_label("Maximum tokens").fill("")
    say(tab, "sum")
    assert plan.requests[1]["model"] == "heron"
    assert plan.requests[1]["adafuse"] == {"rounds": True}
    assert "max_tokens" not in plan.requests[1]


def test_reasoning_folds_and_its_spans_have_rounds(visit) -> None:
    tab = visit()
    say(tab, "think")
    assert answer(tab) == "Now then"
    folded = tab.locator(".reasoning .answer")
    assert not folded.is_visible()
    tab.get_by_text("Reasoning").click()
    assert folded.inner_text() == "I think"
    rounds = "spans => spans.map(span => [span.dataset.round, span.textContent])"
    assert tab.locator(".span").evaluate_all(rounds) == [
        ["0", "I th"],
        ["1", "ink"],
        ["1", "Now"],
        ["2", " then"],
    ]


def test_a_reload_keeps_conversation_and_draft(visit, plan) -> None:
    tab = visit()
    say(tab, "sum")
    plan.pace = 0.2
    say(tab, "nasty", wait=False)
    tab.locator("article").nth(1).locator(".span").first.wait_for()
    tab.fill("#text", "a draft")
    tab.reload()
    assert tab.input_value("#text") == "a draft"
    assert tab.locator(".question").all_inner_texts() == ["sum", "nasty"]
    assert "lost" in note(tab)
    tab.locator(".span").nth(1).click()
    assert tab.locator(".candidate").count() == 2
    marks = tab.locator(".span").evaluate_all("spans => spans.map(span => span.dataset.mark)")
    assert marks[:4] == ["=", "▲", "●■", "–"]


def test_the_view_follows_the_text_unless_the_reader_scrolls(visit, plan) -> None:
    plan.pace = 0.01
    tab = visit()
    say(tab, "long", wait=False)
    tab.locator(".span").nth(40).wait_for()
    away = "e => e.scrollHeight - e.scrollTop - e.clientHeight"
    assert tab.locator("#log").evaluate(away) < 60
    tab.locator("#log").evaluate("e => { e.scrollTop = 40; }")
    finished(tab)
    assert tab.locator("#log").evaluate("e => e.scrollTop") == 40
    tab.get_by_role("button", name="Newest text").click()
    assert tab.locator("#log").evaluate(away) < 60


# ---- Rounds ----


def test_a_click_opens_a_round(visit) -> None:
    tab = visit()
    say(tab, "sum")
    tab.locator(".span").nth(1).click()
    panel = tab.get_by_role("dialog", name="Round 2")
    won, lost = panel.locator(".candidate").all_inner_texts()
    assert '" = 92. 92"' in won
    assert "committed" in won
    assert f"proposed by ▲ {IMAGE}" in won
    assert "F\n0.250" in won
    assert [line for line in won.split("\n") if re.fullmatch(r"\d\.\d+", line)] == [
        "0.000",
        "0.250",
        "0.500",
        "0.250",
    ]
    assert "committed" not in lost
    assert "0.90, 0.50" in panel.inner_text()
    tab.get_by_role("button", name="Next round").click()
    tab.get_by_role("button", name="Next round").click()
    assert "The grammar allows no other text here" in tab.locator("#round").inner_text()
    tab.get_by_role("button", name="Close").click()
    assert not tab.locator("#round").is_visible()


def test_the_keyboard_reaches_every_round(visit) -> None:
    tab = visit()
    say(tab, "sum")
    for _ in range(20):
        tab.keyboard.press("Shift+Tab")
        if tab.evaluate("document.activeElement.className") == "span":
            break
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    assert tab.get_by_role("dialog", name="Round 2").is_visible()
    tab.keyboard.press("Escape")
    assert not tab.locator("#round").is_visible()
    assert tab.evaluate("document.activeElement.textContent") == " = 92. 92"
    tab.keyboard.press("End")
    assert tab.evaluate("document.activeElement.textContent") == " 85."


def test_rounds_belong_to_the_same_members_as_in_reports(visit) -> None:
    tab = visit()
    engine = AdaFuseEngine([FakeBackend("wren", drawn(0.8)), FakeBackend("heron", drawn(0.6))])
    with engine:
        told = [*engine.generate(">", max_words=1).rounds]
        told += engine.generate(">", choices=["a b", "c"]).rounds
    told += [each for rounds in ANSWERS.values() for each in rounds]
    script = (
        "rounds => rounds.map(each => [sharedBy(each), authorsOf(each)[0], probabilitiesOf(each)])"
    )
    found = tab.evaluate(script, [each.model_dump(mode="json") for each in told])
    names = {"all agree": "agreed", "forced by the grammar": "forced", "chosen by score": "chosen"}
    assert {kind for kind, _, _ in found} == {None, *names.values()}
    for each, (kind, author, probabilities) in zip(told, found, strict=True):
        joint = shared(each)
        assert kind == (names[joint.name] if joint else None)
        if joint is None:
            assert author == owner(each, MEMBERS)
        assert probabilities == pytest.approx(choice_probabilities(each))
    assert [tab.evaluate("name => lookOf(name).mark", name) for name in MEMBERS] == [
        look.mark for look in looks(MEMBERS).values()
    ]


def drawn(sure: float) -> Any:
    """A rule that writes "a b", and is more or less sure of it."""

    def after(text: str) -> dict[str, float]:
        written = text.partition(">")[2]
        following = {"": "a", "a": " ", "a ": "b"}.get(written, "<end>")
        return {following: sure, "c": 1 - sure}

    return after


# ---- Text from models ----


def test_tags_in_answers_and_names_stay_text(visit) -> None:
    tab = visit()
    say(tab, SCRIPT, wait=False)  # an unknown question: the server fails
    finished(tab)
    say(tab, "nasty")
    assert answer(tab) == text_of("nasty")
    tab.locator(".span").nth(1).click()
    assert json.dumps(SCRIPT) in tab.locator("#round").inner_text()
    assert IMAGE in tab.locator("#round").inner_text()
    assert IMAGE in tab.locator("#members").inner_text()
    assert tab.get_by_label("Model").locator("option").nth(3).inner_text() == f"{IMAGE} alone"
    tab.reload()
    assert answer(tab) == text_of("nasty")
    assert tab.title() == "adafuse"
    assert not tab.locator("img").count()


def test_text_runs_in_its_own_direction(visit) -> None:
    tab = visit(viewport={"width": 390, "height": 800})
    say(tab, "hebrew")
    direction = "e => getComputedStyle(e).direction"
    assert tab.locator(".answer[role=group]").evaluate(direction) == "rtl"
    first, second = (tab.locator(".span").nth(at).bounding_box() for at in (0, 1))
    assert first["x"] > second["x"]
    tab.locator(".span").first.focus()
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("Enter")
    assert tab.get_by_role("dialog", name="Round 2").is_visible()
    codes = tab.locator(".candidate code").evaluate_all(
        "e => e.map(e => getComputedStyle(e).direction)"
    )
    assert codes == ["rtl", "rtl"]
    assert tab.locator("#round").evaluate(direction) == "ltr"
    tab.fill("#text", HEBREW)
    assert tab.locator("#text").evaluate(direction) == "rtl"


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_events_are_read_wherever_the_stream_is_cut(visit, ends) -> None:
    tab = visit()
    stream = ends.join(
        [": a comment", "data: one", "", "event: x", "data:two", "data: three", "", ""]
    )
    script = """stream => Array.from({ length: stream.length }, (_, at) => {
        const seen = [], read = eventReader(data => seen.push(data));
        read(stream.slice(0, at)); read(stream.slice(at)); read("\\n");
        return seen.join("|");
    })"""
    assert set(tab.evaluate(script, stream)) == {"one|two\nthree"}


# ---- Looks ----


def test_a_narrow_screen_needs_no_horizontal_scrolling(visit) -> None:
    tab = visit(viewport={"width": 390, "height": 800})
    assert not is_too_wide(tab)
    say(tab, "sum" + "m" * 200)
    say(tab, "nasty")
    tab.get_by_role("button", name="Settings").click()
    tab.locator(".span").nth(1).click()
    assert not is_too_wide(tab)
    parts = tab.locator("header, #members, #log, #form, #round, .candidate, .answer")
    cut = "e => e.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.id || e.className)"
    assert parts.evaluate_all(cut) == []
    box = tab.locator(".span").nth(1).bounding_box()
    assert box["y"] + box["height"] <= tab.locator("#round").bounding_box()["y"] + 1


def blended(color: str, paper: str) -> str:
    """A color as the browser computes it, such as color(srgb 1 0 0 / 0.1), on paper."""
    numbers = [
        float(each) for each in re.findall(r"[\d.]+(?:e-\d+)?", color.removeprefix("color(srgb"))
    ]
    scale = 1 if color.startswith("color(") else 255
    alpha = numbers[3] if len(numbers) > 3 else 1.0
    under = [int(paper[at : at + 2], 16) / 255 for at in (1, 3, 5)] if paper else [0, 0, 0]
    channels = [
        alpha * n / scale + (1 - alpha) * u for n, u in zip(numbers[:3], under, strict=True)
    ]
    return "#" + "".join(f"{round(255 * each):02x}" for each in channels)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_spans_have_contrast(visit, scheme) -> None:
    tab = visit(color_scheme=scheme)
    tab.evaluate("count => Array.from({ length: count }, (_, at) => lookOf(`m${at}`))", len(COLORS))
    say(tab, "sum")
    script = """(element) => [0, 1, 2, 3, 4, 5].flatMap(number => ["", "open"].map(state => {
        element.style.setProperty("--member", `var(--color-${number})`);
        element.className = `span ${state}`;
        const style = getComputedStyle(element);
        const mark = getComputedStyle(element, "::before").color;
        return [style.color, style.backgroundColor, style.borderBottomColor, mark];
    }))"""
    paper = blended(tab.evaluate("getComputedStyle(document.body).backgroundColor"), "")
    assert paper == {"light": "#ffffff", "dark": "#15181c"}[scheme]
    for text, tint, line, mark in tab.locator(".span").nth(1).evaluate(script):
        background = blended(tint, paper)
        assert background != paper
        assert contrast(blended(text, ""), background) >= 7
        assert contrast(blended(line, ""), paper) >= 3
        assert contrast(blended(mark, ""), background) >= 3


# ---- When things go wrong ----


def test_the_page_asks_for_the_key(visit, plan) -> None:
    plan.key = "right"
    tab = visit()
    dialog = tab.get_by_role("dialog", name="This server needs an API key")
    secret = dialog.get_by_label("API key")
    assert secret.get_attribute("type") == "password"
    assert not tab.locator("#wrong").is_visible()
    secret.fill("wrong")
    secret.press("Enter")
    tab.locator("#wrong").wait_for()
    secret.fill("right")
    secret.press("Enter")
    say(tab, "sum")
    assert answer(tab) == text_of("sum")
    assert "right" not in tab.url
    tab.reload()
    say(tab, "nasty")
    assert answer(tab) == text_of("nasty")
    plan.key = "new"
    say(tab, "sum", wait=False)
    tab.locator("#wrong").wait_for()
    tab.keyboard.press("Escape")
    assert note(tab) == "The server needs an API key."
    tab.get_by_role("button", name="Send again").click()
    secret.fill("new")
    secret.press("Enter")
    finished(tab)
    assert answer(tab) == text_of("sum")


def test_a_message_waits_until_the_members_are_loaded(visit, plan) -> None:
    plan.ready = False
    tab = visit()
    tab.get_by_text("The members are loading.").wait_for()
    say(tab, "sum", wait=False)
    tab.locator(".note").wait_for()
    assert "sent as soon as it is" in note(tab)
    plan.ready = True
    finished(tab)
    assert answer(tab) == text_of("sum")
    assert not tab.locator("#status, .note").filter(visible=True).count()
    plan.ready = False
    say(tab, "nasty", wait=False)
    tab.locator(".note").wait_for()
    tab.get_by_role("button", name="Stop").click()
    assert note(tab) == "You stopped this answer."


def test_a_busy_server_gets_the_message_again(visit, plan) -> None:
    plan.refusals = [
        error(429, "Too many requests wait.", Retry_After="7"),
        error(400, "prompt of 9,000 tokens", "context_length_exceeded"),
        error(500, "A member failed."),
    ]
    tab = visit()
    say(tab, "sum")
    assert note(tab) == "The server is busy. Send the message again in 7 s."
    again = tab.get_by_role("button", name="Send again")
    again.click()
    tab.get_by_text("too long for the members").wait_for()
    again.click()
    tab.get_by_text("The server failed: A member failed.").wait_for()
    again.click()
    tab.locator(".span").first.wait_for()
    finished(tab)
    assert answer(tab) == text_of("sum")
    assert tab.locator(".question").all_inner_texts() == ["sum"]
    assert not tab.locator(".note").count()
    assert all(len(each["messages"]) == 1 for each in plan.requests)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("error", "The answer failed: A member ran out of memory."),
        ("cut", "The connection to the server was lost before the answer was complete."),
    ],
)
def test_an_answer_that_breaks_off_stays(visit, plan, how, words) -> None:
    plan.breaks_after, plan.how, plan.pace = 2, how, 0.05
    tab = visit()
    say(tab, "sum")
    assert note(tab) == words
    assert answer(tab) == "34 + 58 = 92. 92"
    plan.breaks_after = 1000
    tab.get_by_role("button", name="Send again").click()
    tab.locator(".span").nth(3).wait_for()
    finished(tab)
    assert answer(tab) == text_of("sum")
