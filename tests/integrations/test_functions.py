"""How many functions one must read to follow a request, beside those of `generate`."""

import gc
import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from starlette.testclient import TestClient

import adafuse_llm
import langchain_adafuse
from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.serving import create_app

TURNS = [{"role": "user", "content": "Where does the ferry go?"}]
OURS = tuple(str(Path(each.__file__ or "").parent) for each in (adafuse_llm, langchain_adafuse))


def entered(work: Callable[[], object]) -> set[str]:
    """The functions of our packages that a second call enters, in all threads, without lambdas."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name[0] != "<"
        if event == "call" and is_function and code.co_filename.startswith(OURS):
            seen.add(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}")

    work()  # fills caches
    gc.collect()
    gc.disable()  # it would enter functions that free what earlier tests left
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()
    return seen


def test_a_request_enters_few_functions_beyond_those_of_generate() -> None:
    members = [FakeBackend(name, lambda _: {"a": 0.6, " b": 0.4}) for name in ("wren", "heron")]
    with AdaFuseEngine(members) as engine:
        client = TestClient(create_app(engine))
        model = langchain_adafuse.ChatAdaFuse(engine=engine, max_new_tokens=8)
        body = {"messages": TURNS, "max_tokens": 8}
        known = entered(lambda: engine.generate(messages=TURNS, max_new_tokens=8))
        served = entered(lambda: client.post("/v1/chat/completions", json=body)) - known
        streamed = entered(lambda: [*model.stream(TURNS)]) - known
    assert len(served) <= 50, sorted(served)
    assert len(streamed) <= 45, sorted(streamed)
