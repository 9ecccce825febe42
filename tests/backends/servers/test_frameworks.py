"""The same code of LangChain and LlamaIndex runs with members in this process and on a
server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("langchain_core")
pytest.importorskip("llama_index.core")

from llama_index.core.llms import ChatMessage
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm.embedded import member_paths
from langchain_adafuse import ChatAdaFuse
from tests.support.inference_servers import InferenceServer
from tests.support.serving import served

QUESTION = "Who is the director of the Kalost Bakery?"
OPTIONS: dict[str, Any] = {"max_new_tokens": 12}


@pytest.fixture(params=["here", "server"])
def members(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    first, second, _ = map(str, member_paths())
    with ExitStack() as stack:
        place: dict[str, Any] = {"path": first}
        if request.param == "server":
            server = InferenceServer("vllm", folder=member_paths()[0])
            place = {"url": stack.enter_context(served(server.app())), "tokenizer": first}
        yield [{**place, "name": "first"}, second]


def test_the_same_code_runs_wherever_the_members_are(members: list[Any]) -> None:
    chat = ChatAdaFuse(members=members, **OPTIONS)
    llm = AdaFuseLLM(members=members, **OPTIONS)
    try:
        reply = chat.invoke(QUESTION).text
        assert str(llm.chat([ChatMessage(QUESTION)]).message.content) == reply
        near = ChatAdaFuse(members=list(map(str, member_paths()[:2])), **OPTIONS)
        assert reply == near.invoke(QUESTION).text
    finally:
        chat.unload()
