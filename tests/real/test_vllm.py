"""A real model on a real vLLM, beside the same checkpoint in this process."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from adafuse_llm import AdaFuseEngine, LoadError, MemberSpec, MemberUnavailableError
from adafuse_llm.backends import conformance
from adafuse_llm.backends.conformance import Subject
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.backends.servers.backend import ServerBackend
from adafuse_llm.loading.members import load_members
from tests.real.reference import reference_of
from tests.support.vllm_server import vllm_server

pytestmark = [pytest.mark.real, pytest.mark.vllm]

TOLERANCE = 2e-3
"""Largest difference of log-probabilities in float32. They are sums over passes of other shapes."""

PROMPTS = (
    "The old lighthouse keeper climbed the stairs and",
    "Water boils at",
    "My favourite food",
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOKENS = 24


@pytest.fixture(scope="module")
def smollm(real_folders: dict[str, Path]) -> Path:
    return real_folders["smollm"]


@pytest.fixture(scope="module")
def url(smollm: Path) -> Iterator[str]:
    with vllm_server(smollm) as address:
        yield address


def member(url: str, **settings: Any) -> ServerBackend:
    (loaded,), _ = load_members([MemberSpec(url=url, name="smollm", **settings)])
    assert isinstance(loaded, ServerBackend)
    return loaded


def here(folders: dict[str, Path], name: str) -> HuggingFaceBackend:
    """A member in this process, in float32."""
    (loaded,), _ = load_members([MemberSpec(str(folders[name]), name=name, dtype="float32")])
    assert isinstance(loaded, HuggingFaceBackend)
    return loaded


def test_the_member_keeps_the_rules_of_backends(url: str, real_folders: dict[str, Path]) -> None:
    near = here(real_folders, "smollm")
    reference = reference_of(near, near.model, near.tokenizer)

    def logits(ids: Any) -> Any:
        row = reference.logits(ids)
        reference.forget_rows()
        return row

    far = Subject(lambda: member(url), logits=logits, tolerance=TOLERANCE)
    report = conformance.run_checks(far)
    assert {"scores", "commits", "batches", "faults", "close"} <= {*report.passed}


@pytest.mark.parametrize("others", [(), ("gemma",)], ids=["alone", "pair"])
@pytest.mark.parametrize("branching", [1, 3])
def test_texts_rounds_and_scores_equal_those_in_this_process(
    url: str,
    others: tuple[str, ...],
    branching: int,
    real_folders: dict[str, Path],
) -> None:
    near = AdaFuseEngine([here(real_folders, name) for name in ("smollm", *others)])
    far_member = member(url)
    far = AdaFuseEngine([far_member, *near.backends[1:]])
    worst = 0.0
    for prompt in PROMPTS:
        options: Any = {"max_new_tokens": TOKENS, "branching_factor": branching}
        got, want = far.generate(prompt, **options), near.generate(prompt, **options)
        assert got.text == want.text
        for one, two in zip(got.rounds, want.rounds, strict=True):
            assert [c.text for c in one.candidates] == [c.text for c in two.candidates]
            for a, b in zip(one.candidates, two.candidates, strict=True):
                assert a.score == pytest.approx(b.score, abs=TOLERANCE)
                worst = max(worst, abs((a.score or 0) - (b.score or 0)))
    print(f"worst difference of scores: {worst:.2g}")
    far_member.close()


def test_prefixes_stay_in_the_cache_of_the_server(url: str) -> None:
    """The server's own counters: tokens that it computed for each committed token."""
    far = member(url)
    prompt = "The ferry to Orrin leaves at nine. It carries twelve people and the post. " * 16
    before = _counters(url)
    found = AdaFuseEngine([far]).generate(prompt, max_new_tokens=TOKENS)
    after = _counters(url)
    asked, cached = (after[name] - before[name] for name in ("queries", "hits"))
    committed = len(far.codec.encode_continuation((), found.text)[0])
    size = len(far.codec.encode_prompt(prompt))
    print(f"{asked} tokens asked for, {cached} of them cached, {committed} committed of {size}")
    assert asked - cached < 3 * size + 80 * committed
    far.close()


def _counters(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics").text
    return {
        name: sum(
            float(value)
            for value in re.findall(rf"^vllm:prefix_cache_{name}_total\{{.*\}} (\S+)$", text, re.M)
        )
        for name in ("queries", "hits")
    }


def test_a_request_survives_a_kill_of_the_server(smollm: Path) -> None:
    with vllm_server(smollm) as address:
        far = member(address)
        engine = AdaFuseEngine([far])
        expected = engine.generate(PROMPTS[0], max_new_tokens=TOKENS).text
        found: list[str] = []
        seen = threading.Event()

        def answer() -> None:
            pieces = []
            for event in engine.stream(PROMPTS[0], max_new_tokens=TOKENS):
                pieces.append(event.text)
                seen.set()
                time.sleep(0.2)
            found.append("".join(pieces))

        thread = threading.Thread(target=answer)
        thread.start()
        assert seen.wait(60)  # the server ends in the middle of the answer
    port = int(address.rpartition(":")[2])
    with vllm_server(smollm, port=port):
        thread.join(300)
        assert found == [expected]
    far.close()


def test_another_model_and_a_wrong_key_and_too_few_logprobs(
    smollm: Path, real_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIGHT", "a-key")
    monkeypatch.setenv("WRONG", "another-key")
    flags = ("--api-key", "a-key", "--max-logprobs", "3")
    with vllm_server(smollm, *flags) as address:
        for name, message in ((None, "needs a key"), ("WRONG", "refuses the key")):
            with pytest.raises(LoadError, match=message):
                member(address, api="vllm", api_key_env=name)
        far = member(address, api_key_env="RIGHT")
        assert far.listed_limit == 3
    port = int(address.rpartition(":")[2])
    flags = ("--api-key", "a-key", "--max-logprobs", "1")
    with vllm_server(real_folders["gemma"], *flags, port=port):
        with pytest.raises(MemberUnavailableError, match="another model under the name 'smollm'"):
            AdaFuseEngine([far]).generate(PROMPTS[0], max_new_tokens=4)
        with pytest.raises(LoadError, match="lists 1 likeliest token"):
            member(address, api_key_env="RIGHT")
    far.close()
