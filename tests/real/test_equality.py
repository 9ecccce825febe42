"""Real members decode as the reference says, and hold exactly the text that the user sees."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from adafuse_llm import Generation
from adafuse_llm.backends.base import Query, QueryResult
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.tree.tokens import TokenTree
from tests.real.reference import CachedMember, check
from tests.reference import ReferenceMember

pytestmark = pytest.mark.real

TOLERANCE = 2e-3
"""Largest difference of log-probabilities in float32. They are sums over passes of other shapes."""

NAMES = ("smollm", "gemma", "qwen")
PAIRS = tuple(itertools.combinations(NAMES, 2))

PROMPTS = {
    "prose": "The old lighthouse keeper climbed the stairs and",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    ",
    "chinese": "\u5317\u4eac\u662f\u4e2d\u56fd\u7684\u9996\u90fd\uff0c",
    "emoji": "My favourite animals \U0001f436\U0001f431 are",
    "german": "Die Hauptstadt von \u00d6sterreich hei\u00dft",
    "json": '{"name": "Anna", "age": 31, "languages": ["German", ',
    "spaces": "Question: What is 2 + 2?\nAnswer:   ",
    "chat": "What is the capital of France?",
}
FACTS = "The ferry to Orrin leaves at nine. It carries twelve people, three goats and the post. "
"""A passage of 21 to 23 tokens, to make prompts longer than Gemma's sliding window of 512."""


def given(kind: str) -> dict[str, Any]:
    text = PROMPTS[kind]
    return {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}


@pytest.mark.parametrize("kind", PROMPTS)
def test_ensembles_equal_the_reference_and_their_tokens_are_the_text(
    kind: str,
    real_backends: dict[str, HuggingFaceBackend],
    references: dict[str, CachedMember],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All three members, a pair and a member alone. Prompts take turns with pairs and members."""
    number = list(PROMPTS).index(kind)
    trees: dict[str, TokenTree] = {}
    for backend in real_backends.values():
        record(backend, trees, monkeypatch)
    for turn, names in enumerate((NAMES, PAIRS[number % 3], (NAMES[(number + 1) % 3],))):
        actual = check(
            [real_backends[name] for name in names],
            [references[name] for name in names],
            given(kind),
            TOLERANCE,
            branching_factor=(3, 1)[(turn + number // 3) % 2],
            max_new_tokens=8,
        )
        for name in names:
            check_tokens(references[name], trees[name].ids, given(kind), actual)


def check_tokens(
    member: CachedMember, ids: list[int], request: Mapping[str, Any], actual: Generation
) -> None:
    """The tokens that a member holds are the prompt and the response, and nothing else."""

    def decoded(ids: list[int]) -> str:
        return str(member.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    text = decoded(ids)
    if "prompt" in request:
        written = request["prompt"] + actual.text
        assert text.removeprefix(member.tokenizer.bos_token or "") == written
    else:
        before = decoded(ids[: actual.usage.prompt_tokens[member.name]])
        after = text.removeprefix(before).lstrip()
        assert after.removesuffix("\n\nUser: What") == actual.text


@pytest.mark.parametrize("copies", [30, 100], ids=["beyond-512", "beyond-2000"])
def test_long_prompts_equal_the_reference(
    copies: int,
    real_backends: dict[str, HuggingFaceBackend],
    references: dict[str, CachedMember],
) -> None:
    prompt = FACTS * copies + "\n\nQuestion: When does the ferry leave?\nAnswer: The ferry leaves"
    for names in (("gemma",), NAMES)[: 2 if copies == 30 else 1]:
        actual = check(
            [real_backends[name] for name in names],
            [references[name] for name in names],
            {"prompt": prompt},
            TOLERANCE,
            branching_factor=3,
            max_new_tokens=6,
        )
        assert min(actual.usage.prompt_tokens.values()) > (512 if copies == 30 else 2000)
        assert "nine" in actual.text


def test_the_cache_of_the_reference_changes_nothing(references: dict[str, CachedMember]) -> None:
    """Beyond the sliding window, the cached reference equals a plain pass over all tokens."""
    member = references["gemma"]
    ids = member.codec.encode_prompt(FACTS * 30)
    for end in (len(ids) - 9, len(ids) - 4, len(ids)):  # 4 and 5 tokens come after a cached part
        cached = member.logits(ids[:end])
        assert abs(cached - ReferenceMember.forward(member, ids[:end])[-1]).max() < TOLERANCE


def record(backend: Any, trees: dict[str, TokenTree], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tree of the latest request at a member."""
    evaluate = backend.evaluate

    def recorded(queries: Sequence[Query]) -> list[QueryResult]:
        trees[backend.name] = queries[-1].tree
        results: list[QueryResult] = evaluate(queries)
        return results

    monkeypatch.setattr(backend, "evaluate", recorded)
