"""Real models on a real vLLM, beside the same checkpoints in this process."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from adafuse_llm import (
    AdaFuseEngine,
    LoadError,
    MemberUnavailableError,
    ServerMember,
    TransformersMember,
)
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.backends.servers.backend import ServerBackend
from adafuse_llm.loading.members import load_members
from tests.real.reference import check_rules, reference_of
from tests.real.servers import vllm_server

pytestmark = [pytest.mark.real, pytest.mark.vllm, pytest.mark.timeout(3600)]

TOLERANCE = 2e-3
"""Largest difference of log-probabilities in float32. They are sums over passes of other shapes."""

PROMPTS = (
    *(f"{number + 2} boats left the harbour, and" for number in range(13)),
    "The old lighthouse keeper climbed the stairs and",
    "Water boils at",
    "My favourite food",
)
TOKENS = 12


@pytest.fixture(scope="module")
def smollm(real_folders: dict[str, Path]) -> Path:
    return real_folders["smollm"]


@pytest.fixture(scope="module")
def url(smollm: Path) -> Iterator[str]:
    with vllm_server(smollm) as address:
        yield address


def member(url: str, name: str = "smollm", **settings: Any) -> ServerBackend:
    (loaded,), _ = load_members([ServerMember(url, name=name, **settings)])
    assert isinstance(loaded, ServerBackend)
    return loaded


@pytest.fixture(scope="module")
def here(real_folders: dict[str, Path]) -> Callable[[str], HuggingFaceBackend]:
    """Return a member in this process, in float32."""
    known: dict[str, HuggingFaceBackend] = {}

    def load(name: str) -> HuggingFaceBackend:
        if name not in known:
            spec = TransformersMember(str(real_folders[name]), name=name, dtype="float32")
            (loaded,), _ = load_members([spec])
            assert isinstance(loaded, HuggingFaceBackend)
            known[name] = loaded
        return known[name]

    return load


def test_the_member_keeps_the_rules_of_backends(
    url: str, here: Callable[[str], HuggingFaceBackend]
) -> None:
    near = here("smollm")
    reference = reference_of(near, near.model, near.tokenizer)

    def logits(ids: Any) -> Any:
        row = reference.logits(ids)
        reference.forget_rows()
        return row

    assert "test_walk" in check_rules(lambda: member(url), logits, TOLERANCE)


@pytest.mark.parametrize(
    ("others", "options"),
    [
        ((), {"branching_factor": 1}),
        (("gemma",), {"branching_factor": 3}),
        (("gemma",), {"strategy": "mixture"}),
    ],
    ids=str,
)
def test_texts_rounds_and_scores_equal_those_in_this_process(
    url: str,
    others: tuple[str, ...],
    options: dict[str, Any],
    here: Callable[[str], HuggingFaceBackend],
) -> None:
    far = member(url)
    compare([far, *map(here, others)], [here("smollm"), *map(here, others)], **options)
    far.close()


def compare(far: list[Any], near: list[Any], strategy: str = "adafuse", **options: Any) -> None:
    """Compare texts, rounds and scores of two lists of members."""
    one, two = (AdaFuseEngine(members, strategy=strategy) for members in (far, near))
    options |= {"max_new_tokens": TOKENS}
    got, want = one.generate_batch(PROMPTS, **options), two.generate_batch(PROMPTS, **options)
    assert [each.text for each in got] == [each.text for each in want]
    for a, b in zip(got, want, strict=True):
        for left, right in zip(a.rounds, b.rounds, strict=True):
            assert [c.text for c in left.candidates] == [c.text for c in right.candidates]
            for c, d in zip(left.candidates, right.candidates, strict=True):
                assert c.score == pytest.approx(d.score, abs=TOLERANCE)


def test_two_members_on_one_server(url: str, smollm: Path) -> None:
    """Both ask it at the same time. A mixed batch would have wrong likeliest tokens."""
    names = ("one", "two")
    far = [member(url, name) for name in names]
    near, _ = load_members(
        [TransformersMember(str(smollm), name=name, dtype="float32") for name in names]
    )
    compare(far, near)
    for each in far:
        each.close()


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


def test_another_model_and_a_wrong_key_and_a_limit_of_logprobs(
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
    with (
        vllm_server(real_folders["gemma"], *flags, port=port),
        pytest.raises(MemberUnavailableError, match="another model under the name 'smollm'"),
    ):
        AdaFuseEngine([far]).generate(PROMPTS[0], max_new_tokens=4)
    far.close()
