"""The page of the server in a browser, and members that write given answers."""

import asyncio
import threading
from typing import Any

from playwright import sync_api
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adafuse_llm import AdaFuseEngine, Generation, Round
from adafuse_llm.backends import FakeBackend
from adafuse_llm.report.styles import looks, owner, shared
from adafuse_llm.serving.errors import ApiError

IMAGE = "<img src=x onerror=\"document.title='hurt'\">"
SCRIPT = "<script>document.title='hurt'</script>"
MEMBERS = ("wren", "heron", IMAGE)
HEBREW = "1874 הטחנה נוסדה על ידי עדה ברוק ליד הנהר"
PATIENCE = 20
"""Seconds after which a member fails that waits for a test."""

HOSTILE = f"""{IMAGE} {SCRIPT}

{SCRIPT}

<div style="position:fixed;inset:0;background:red" onclick="document.title='hurt'">over</div>

<style>body {{ display: none }}</style>

<svg onload="document.title='hurt'"><iframe src="javascript:document.title='hurt'"></iframe>

[one](javascript:document.title='hurt') [two](JaVaScRiPt:document.title='hurt')
[three](data:text/html,{SCRIPT}) [four](vbscript:x) [five](file:///etc/passwd) [six](//example.org)
[seven](&#106;avascript:document.title='hurt') [eight](java&Tab;script:document.title='hurt')
[nine][ref] <javascript:document.title='hurt'> <https://example.org/auto> [ten](mailto:a@x.org)

![pixel](http://example.org/pixel.gif) ![svg](data:image/svg+xml,x) ![js](javascript:1)
![alt "onerror="document.title='hurt'](https://example.org/x.png "t" onerror=1)

[ref]: javascript:document.title='hurt'

```<img src=x onerror=document.title='hurt'>
</code></pre>{SCRIPT}
```

[quoted](https://example.org/"onclick="document.title='hurt')"""
"""What a model may write to run code, load files, or change the look of the page."""

ANSWERS: dict[str, tuple[str, ...]] = {
    "sum": ("The sum is 85 for sure.", "The sum is 90 for sure.", "The result is 90, I think."),
    "hebrew": (HEBREW, HEBREW, "1874 אחר"),
    "long": ("\n".join(f"line {number}" for number in range(12)),),
    "think": ("<think>\nSo it is</think>\n\nNow it is done",),
    "bold": (
        "The **sum is `85` for** sure, [see](https://example.org/85) and\n\n> it is\n> 85 &amp; so",
        "The **sum is `90` for** sure, [see](https://example.org/85) and\n\n> it is\n> 90 &amp; so",
        "The **result is `90`** I think.",
    ),
    "markdown": (
        "# Title\n\nSome *slanted*, **bold** and ~~gone~~ `x = 1` text\nover two lines.\n\n"
        "1. one\n2. two\n   - inner\n\n> quoted\n\n"
        "```python title\nif a < b:\n    print(a)\n```\n\n"
        "| left | right |\n|:-----|------:|\n| a | 1 |\n\n---\n\n"
        "A [link](https://example.org/a_(b)) and ![a cat](http://example.org/cat.png) &copy; "
        "\\*no\\*.",
    ),
    "hostile": (HOSTILE,),
}
"""What the members write by themselves, in their order; the last one is for all further ones."""


class Writer(FakeBackend):
    """A member that writes its own answer as long as the text allows it, else another one.

    Attributes:
        may_go_on: whether passes run that follow three words of an answer; others wait.
        fails: whether these passes fail.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, self.following)
        self.number = MEMBERS.index(name)
        self.may_go_on = threading.Event()
        self.reset()

    def reset(self) -> None:
        self.may_go_on.set()
        self.fails = False
        self.context_window = None

    def following(self, text: str) -> dict[str, float]:
        conversation, _, written = text.rpartition("Assistant:")
        answers = ANSWERS[conversation.rpartition("User: ")[2].strip()]
        written = written.removeprefix(" ")
        if len(written.split()) >= 3:
            if not self.may_go_on.wait(PATIENCE):
                raise TimeoutError("no test let the member go on")
            if self.fails:
                raise OSError("broken")
        own = answers[min(self.number, len(answers) - 1)]
        odds = {own: 0.8} if own.startswith(written) else {}
        odds |= {each: 0.1 for each in answers if each != own and each.startswith(written)}
        following: dict[str, float] = {}
        for each, odd in odds.items():
            letter = each[len(written)] if each != written else "<end>"
            following[letter] = following.get(letter, 0.0) + odd
        return following or {"<end>": 0.9}


class Front:
    """The application at an address. Tests replace it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def refuse(front: Front, *refusals: ApiError) -> None:
    app, left = front.app, list(refusals)

    async def refused(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "POST" and left:
            await left.pop(0).response()(scope, receive, send)
        else:
            await app(scope, receive, send)

    front.app = refused


def cut(front: Front, parts: int) -> threading.Event:
    """Cut the connection of the next response after some parts of its body.

    Browsers drop what arrives together with a cut, so it waits for the returned event.
    """
    app, left, may_cut = front.app, parts, threading.Event()

    async def cutting(scope: Scope, receive: Receive, send: Send) -> None:
        async def put(message: Message) -> None:
            nonlocal left
            left -= message["type"] == "http.response.body"
            if left < 0:
                await asyncio.to_thread(may_cut.wait, PATIENCE)
                raise ConnectionError("cut on purpose")
            await send(message)

        await app(scope, receive, put if scope.get("method") == "POST" else send)

    front.app = cutting
    return may_cut


class Tab:
    """The page in a tab of a browser, with what happened there since the last visit began."""

    def __init__(self, page: sync_api.Page) -> None:
        self.page = page
        self.problems: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.addresses: set[str] = set()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda problem: self.problems.append(str(problem)))
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("request", self.note_request)

    def open(self, address: str) -> None:
        self.page.set_viewport_size({"width": 1100, "height": 700})
        self.problems.clear()
        self.bodies.clear()
        self.addresses.clear()
        self.page.goto(address)

    def leave(self) -> None:
        self.page.evaluate(
            "stored.set = kept.set = () => true; sessionStorage.clear(); localStorage.clear()"
        )
        self.page.goto("about:blank")

    def note_request(self, request: sync_api.Request) -> None:
        self.addresses.add(request.url)
        if request.method == "POST":
            self.bodies.append(request.post_data_json or {})

    def say(self, text: str, *, wait: bool = True) -> None:
        self.page.fill("#text", text)
        self.page.keyboard.press("Enter")
        if wait:
            self.finish()

    def finish(self) -> None:
        self.page.locator("#send").wait_for()

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name).click()

    @property
    def spans(self) -> sync_api.Locator:
        return self.page.locator("article").last.locator(".span")

    @property
    def marks(self) -> list[str]:
        return self.spans.evaluate_all("spans => spans.map(span => span.dataset.mark)")

    @property
    def answer(self) -> str:
        return self.page.locator(".answer[role=group]").last.text_content() or ""

    @property
    def note(self) -> str:
        return self.page.locator(".note").last.inner_text()

    @property
    def facts(self) -> str:
        return self.page.locator("article").last.locator(".foot").inner_text()

    @property
    def round(self) -> sync_api.Locator:
        return self.page.locator("#round")

    @property
    def focused(self) -> str:
        return self.page.evaluate("document.activeElement.textContent")


def generated(engine: AdaFuseEngine, question: str, **options: Any) -> Generation:
    return engine.generate(messages=[{"role": "user", "content": question}], **options)


def mark_of(done: Round) -> str:
    """The marks of a span: those of the proposers, in the order of the members."""
    joint, proposers = shared(done), done.candidates[done.winner].proposers
    marks = {look.name: look.mark for look in looks(MEMBERS).values()}
    authors = proposers or (owner(done, MEMBERS),)
    return joint.mark if joint else "".join(marks[name] for name in MEMBERS if name in authors)
