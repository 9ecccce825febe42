"""Every block of Python in README and docs runs."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from sybil import Sybil
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from adafuse_llm import AdaFuseEngine
from adafuse_llm.embedded import member_paths
from adafuse_llm.serving import create_app
from tests.support.documents import put_documents
from tests.support.gguf_files import embedded_gguf
from tests.support.inference_servers import InferenceServer
from tests.support.paths import ROOT
from tests.support.real_pages import SHOWN, needs_real_models
from tests.support.serving import served

GUIDES = ROOT / "docs" / "guides"
PAGES = sorted(
    {
        ROOT / "README.md",
        *(ROOT / "integrations").glob("*/README.md"),
        *(page for page in (ROOT / "docs").rglob("*.md") if "```python" in page.read_text("utf-8")),
    }
)
MODEL = re.compile(r'"((?:[\w.-]+/)+[\w.-]+|model-\d)"')
"""How the pages name models: these become the embedded members."""

SERVER = "http://127.0.0.1:8000"
"""The address of the server in the pages."""

INFERENCE_SERVER = "http://127.0.0.1:8001"
"""The address of a server that runs a member in the pages."""


def examples(page: Path) -> Document:
    return Sybil([PythonCodeBlockParser(), SkipParser()], path=str(page.parent)).parse(page)


def put_models(page: Path, folder: Path) -> None:
    names = dict.fromkeys(MODEL.findall(page.read_text(encoding="utf-8")))
    for number, name in enumerate(names):
        count = 2 if name.lower().endswith("gguf") else 3  # a GGUF file of the third is refused
        path, member = folder / name, member_paths()[number % count]
        if path.exists() or name.endswith((".md", ".html", ".jsonl", ".pdf")):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".gguf"):
            path.symlink_to(embedded_gguf(member.name, "q8_0"))
        elif name.endswith("-GGUF"):
            path.mkdir()
            for kind in ("Q4_K_M", "Q8_0"):
                (path / f"model-{kind}.gguf").symlink_to(embedded_gguf(member.name, "q8_0"))
        else:
            path.symlink_to(member, target_is_directory=True)


@contextmanager
def addressed(page: Path, folder: Path) -> Iterator[Document]:
    """The examples of a page, in which addresses of running servers replace those of the page."""
    copy = folder / page.name
    text = page.read_text(encoding="utf-8")
    code = "".join(str(block.parsed) for block in examples(page).examples())
    with ExitStack() as stack:
        if INFERENCE_SERVER in code:
            app = InferenceServer("vllm", folder=member_paths()[0]).app()
            text = text.replace(INFERENCE_SERVER, stack.enter_context(served(app)))
        elif SERVER in code:
            engine = stack.enter_context(AdaFuseEngine.from_embedded())
            text = text.replace(SERVER, stack.enter_context(served(create_app(engine))))
        copy.write_text(text, encoding="utf-8")
        yield examples(copy)


def a_page(page: Path) -> ParameterSet:
    needs_llama_cpp = ".gguf" in page.read_text("utf-8")
    marks = [pytest.mark.gguf] * needs_llama_cpp
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


PRINTING = {"rounds": 2, "structured-output": 7, "sampling": 2, "chat": 2, "your-documents": 3}
"""Guides that show what their code prints, and the number of these outputs."""

APART = GUIDES / "llamaindex.md"
"""A page that runs in a process of its own, as it changes global settings."""


@pytest.mark.sweep(3)
@pytest.mark.parametrize("page", [a_page(page) for page in PAGES if page != APART])
def test_the_code_of_a_page_runs_and_prints_what_a_guide_shows(
    page: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    put_models(page, tmp_path)
    put_documents(tmp_path / "documents")
    monkeypatch.chdir(tmp_path)
    with addressed(page, tmp_path) as document:
        for block in document.examples():
            block.evaluate()
    if page.stem not in PRINTING:
        return
    printed = capsys.readouterr().out
    outputs = re.findall(r"```\n\n```text\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(outputs) == PRINTING[page.stem]
    for output in outputs:
        assert output in printed
        assert not re.search(r"(.)\1{9}", output), "the members repeat themselves"


@pytest.mark.gguf
@pytest.mark.slow
def test_the_guide_to_llamaindex_runs_offline_and_prints_what_it_says(tmp_path: Path) -> None:
    put_models(APART, tmp_path)
    blocks = SHOWN.findall(APART.read_text(encoding="utf-8"))
    deny = "import pytest_socket\npytest_socket.disable_socket(allow_unix_socket=True)\n"
    code = deny + "\nprint('\\0')\n".join(block for block, _ in blocks)
    environment = {key: value for key, value in os.environ.items() if key != "TIKTOKEN_CACHE_DIR"}
    command = [sys.executable, "-c", code]
    printed = subprocess.check_output(command, text=True, env=environment, cwd=tmp_path)
    for (block, expected), said in zip(blocks, printed.split("\0"), strict=True):
        if not needs_real_models(block):  # tests/real/test_pages.py checks what those print
            assert not expected or said.strip() == expected.strip()
