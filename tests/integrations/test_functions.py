"""How many functions of ours a request enters beyond those of `generate`: what a reader has to know
of the server, or of the LangChain model, to follow a request."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

pytest.importorskip("starlette")
pytest.importorskip("langchain_adafuse")

import httpx
from starlette.applications import Starlette

import adafuse_llm
import langchain_adafuse
from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.serving import create_app
from langchain_adafuse import ChatAdaFuse

TURNS = [{"role": "user", "content": "Where does the ferry go?"}]
WORDS = 8

OURS = tuple(str(Path(each.__file__ or "").parent) for each in (adafuse_llm, langchain_adafuse))

CHAT = 75
"""Functions of a chat request to the server that `generate` does not enter."""

LANGCHAIN = 79
"""Functions of `ChatAdaFuse.invoke` that `generate` does not enter."""


def entered(work: Callable[[], object]) -> set[str]:
    """The functions of ours that the second call enters, in this thread and in new ones.

    The first call fills caches. Methods and nested functions count; lambdas, comprehensions and
    bodies of classes do not.
    """
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if event == "call" and is_function and code.co_filename.startswith(OURS):
            seen.add(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}")

    work()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


def fake() -> AdaFuseEngine:
    first = FakeBackend("first", lambda _: {"a": 0.6, " b": 0.4})
    return AdaFuseEngine([first, FakeBackend("second", lambda _: {"a": 0.5, " c": 0.5})])


async def chat(app: Starlette) -> None:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        body = {"model": "adafuse", "messages": TURNS, "max_tokens": WORDS}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.fixture(scope="module")
def of_generate() -> set[str]:
    with fake() as engine:
        return entered(lambda: engine.generate(messages=TURNS, max_new_tokens=WORDS))


def test_a_chat_request_to_the_server_enters_few_functions(of_generate: set[str]) -> None:
    with fake() as engine:
        app = create_app(engine)
        beyond = entered(lambda: asyncio.run(chat(app))) - of_generate
    assert len(beyond) <= CHAT, "\n".join(sorted(beyond))


def test_the_langchain_model_enters_few_functions(of_generate: set[str]) -> None:
    with fake() as engine:
        model = ChatAdaFuse(engine=engine, max_new_tokens=WORDS)
        beyond = entered(lambda: model.invoke("Where does the ferry go?")) - of_generate
    assert len(beyond) <= LANGCHAIN, "\n".join(sorted(beyond))
