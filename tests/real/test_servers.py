"""A real model on a real llama-server, beside the same file in this process."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine, GGUFMember, ServerMember
from adafuse_llm.backends import Query, TokenTree
from adafuse_llm.backends.servers.backend import ServerBackend
from adafuse_llm.loading.members import load_members
from tests.real.reference import check_rules
from tests.real.servers import llama_server

pytestmark = [pytest.mark.real, pytest.mark.gguf, pytest.mark.timeout(3600)]

TOLERANCE = 1e-3
"""Largest difference of log-probabilities."""

PROMPT = "The old lighthouse keeper climbed the stairs and"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm(real_files: dict[str, Path]) -> Path:
    return real_files["smollm"]


@pytest.fixture(scope="module")
def url(smollm: Path) -> Iterator[str]:
    with llama_server(smollm) as address:
        yield address


def member(url: str, **settings: Any) -> ServerBackend:
    (loaded,), _ = load_members([ServerMember(url, name="smollm", **settings)])
    assert isinstance(loaded, ServerBackend)
    return loaded


def test_the_member_keeps_the_rules_of_backends(url: str) -> None:
    applied = check_rules(lambda: member(url), None, TOLERANCE, 12)  # a call takes 0.1 s and more
    assert "test_walk" in applied


def test_numbers_equal_those_of_the_file_in_this_process(url: str, smollm: Path) -> None:
    far = member(url)
    (near,), _ = load_members([GGUFMember(str(smollm), context=4096, repeatable=True)])
    assert far.end_ids == near.end_ids
    ids = far.codec.encode_messages(QUESTION)
    assert ids == near.codec.encode_messages(QUESTION)
    results = []
    for backend in (far, near):
        tree = TokenTree(ids)
        nodes = [tree.root, tree.grow([504, 3575]), tree.child(tree.root, 2)]
        query = Query(tree, tuple(nodes), tuple(nodes[1:]), 10)
        (result,) = backend.evaluate([query])
        backend.release(tree)
        for summary in result.next:
            assert len(summary.tokens) == 10
        results.append(result)
    one, two = results
    assert list(one.logprobs) == pytest.approx(list(two.logprobs), abs=TOLERANCE)
    for got, want in zip(one.next, two.next, strict=True):
        assert got.tokens[0] == want.tokens[0]
        assert list(got.logprobs) == pytest.approx(list(want.logprobs), abs=TOLERANCE)
        assert got.end_logprob == pytest.approx(want.end_logprob, abs=TOLERANCE)
    far.close()


def test_a_request_survives_a_kill_of_the_server(smollm: Path) -> None:
    with llama_server(smollm) as address:
        far = member(address)
        engine = AdaFuseEngine([far])
        expected = engine.generate(PROMPT, max_new_tokens=200).text
        port = int(address.rpartition(":")[2])
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.append(engine.generate(PROMPT, max_new_tokens=200).text)
    )
    with llama_server(smollm, port=port):
        thread.start()
        time.sleep(1)  # in the middle of the answer
    assert not found
    with llama_server(smollm, port=port):
        thread.join(120)
        assert found == [expected]
    far.close()
