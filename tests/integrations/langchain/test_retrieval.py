"""Questions about the handbook, answered from what an offline retriever finds; the guide."""

from __future__ import annotations

import re
from typing import Any

import pytest
import pytest_socket
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough

from adafuse_llm import AdaFuseEngine
from adafuse_llm.documents import INSTRUCTION, Retriever, read_documents
from adafuse_llm.embedded import handbook_path, handbook_questions
from adafuse_llm.serving import create_app
from langchain_adafuse import ChatAdaFuse, get_round_callback
from tests.support.paths import ROOT
from tests.support.real_pages import put_embedded
from tests.support.serving import served

GUIDE = ROOT / "docs" / "guides" / "langchain.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
SERVER = "http://127.0.0.1:8000"
ASKED = handbook_questions()[::8]


class HandbookRetriever(BaseRetriever):
    """The best passage of the handbook, without a network."""

    index: Any

    def _get_relevant_documents(self, query, *, run_manager):
        found = self.index.search(query, k=1)
        return [Document(each.text, metadata={"source": each.source}) for each in found]


@pytest.fixture(scope="module")
def retriever():
    return HandbookRetriever(index=Retriever(read_documents([handbook_path()])))


@pytest.fixture(scope="module")
def embedded():
    chat = ChatAdaFuse.from_embedded(max_new_tokens=24)
    yield chat
    chat.unload()


@pytest.fixture
def in_folder_of_models(tmp_path, monkeypatch):
    put_embedded(tmp_path)
    monkeypatch.chdir(tmp_path)


def numbered(documents: list[Document]) -> str:
    return "\n\n".join(f"[{n}] {each.page_content}" for n, each in enumerate(documents, start=1))


PROMPT = ChatPromptTemplate.from_messages(
    [("user", INSTRUCTION + "\n\n{context}\n\nQuestion: {input}")]
)


def right(answers: list[dict[str, Any]]) -> int:
    return sum(
        each["answer"].strip() == question.answer
        and (question.source is None or each["documents"][0].metadata["source"] == question.source)
        for question, each in zip(ASKED, answers, strict=True)
    )


async def test_a_chain_answers_with_sources_and_rounds(retriever, embedded):
    answer = (
        RunnablePassthrough.assign(context=lambda asked: numbered(asked["documents"]))
        | PROMPT
        | embedded
        | StrOutputParser()
    )
    chain = RunnablePassthrough.assign(documents=(lambda asked: asked["input"]) | retriever).assign(
        answer=answer
    )
    asked = [{"input": question.question} for question in ASKED]
    with get_round_callback() as rounds:
        answers = chain.batch(asked)
    assert right(answers) >= len(ASKED) - 1
    assert len({each["run_id"] for each in rounds.rounds}) == len(ASKED)
    pieces = [piece async for piece in chain.astream(asked[0])]
    assert "".join(piece.get("answer", "") for piece in pieces) == answers[0]["answer"]


def test_the_readme_answers_with_sources_in_under_twenty_lines(capsys, in_folder_of_models):
    (block,) = [each for each in BLOCKS if "handbook_path" in each]
    assert len(block.splitlines()) < 20
    names: dict[str, Any] = {}
    exec(block, names)
    assert isinstance(names["result"]["answer"], AIMessage)
    said = capsys.readouterr().out
    assert "silesse-mill.md" in said
    assert names["result"]["answer"].content in names["result"]["context"][0].text
    assert names["rounds"].summary().rounds == len(names["rounds"].rounds) > 0


@pytest.mark.parametrize("block", [each for each in BLOCKS if "handbook_path" not in each])
def test_other_blocks_of_the_readme_run(block, capsys, in_folder_of_models):
    if SERVER in block:
        pytest_socket.enable_socket()
        with AdaFuseEngine.from_embedded() as engine, served(create_app(engine)) as address:
            exec(block.replace(SERVER, address), {})
    else:
        exec(block, {})
    if "print" in block:
        assert capsys.readouterr().out.strip()
