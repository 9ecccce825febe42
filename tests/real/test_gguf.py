"""Real GGUF files: prompts and ends as their transformers checkpoints, decoding as the reference.

These quantized members have ``repeatable=True``, so their numbers are those of the reference.
"""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import Query, TokenTree
from tests.real.reference import CachedMember, check, check_rules, reference_of
from tests.real.test_equality import FACTS, NAMES, PROMPTS, given
from tests.real.test_grammar import check_forms, forms
from tests.support.gguf_vocabularies import read_vocabulary

pytestmark = [pytest.mark.real, pytest.mark.gguf]

TOLERANCE = 1e-4
"""Largest difference of log-probabilities, because the engine sums them up in 32-bit numbers."""

TEAMS = (("smollm",), ("smollm", "qwen"), ("qwen",), NAMES, ("gemma",), ("gemma", "qwen"))


@pytest.fixture(scope="module")
def gguf_references(
    real_gguf: dict[str, Any], real_models: dict[str, tuple[Any, Any]]
) -> Iterator[dict[str, CachedMember]]:
    from adafuse_llm.backends.llamacpp.context import Context

    contexts = {
        name: Context(member._model, cells=4096, threads=1, repeatable=True)
        for name, member in real_gguf.items()
    }
    yield {
        name: reference_of(member, contexts[name], real_models[name][1])
        for name, member in real_gguf.items()
    }
    for context in contexts.values():
        context.close()


def test_ends_are_those_of_the_transformers_checkpoint(
    real_folders: dict[str, Path], real_files: dict[str, Path]
) -> None:
    for name, folder in real_folders.items():
        kinds = (AutoConfig, GenerationConfig, AutoTokenizer)
        expected = {kind.from_pretrained(folder).eos_token_id for kind in kinds}
        assert read_vocabulary(real_files[name]).tokenizer.end_ids == expected, name


@pytest.mark.parametrize("name", ["smollm", "qwen"])
def test_prompts_are_those_of_the_transformers_checkpoint(
    name: str, real_folders: dict[str, Path], real_files: dict[str, Path]
) -> None:
    text = read_vocabulary(real_files[name])
    tokenizer = AutoTokenizer.from_pretrained(real_folders[name])
    turns = [
        {"role": role, "content": content}
        for role, content in zip(("user", "assistant") * 4, PROMPTS.values(), strict=True)
    ]
    system = {"role": "system", "content": "You answer in one word. \u00dc\U0001f436"}
    for messages in (turns[4:5], turns[:1], turns[:3], turns[:7], [system, *turns[:5]]):
        expected = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert text.codec.encode_messages(messages) == expected


@pytest.mark.parametrize(("kind", "team"), list(zip(PROMPTS, cycle(TEAMS), strict=False)))
def test_repeatable_members_equal_the_reference(
    kind: str,
    team: tuple[str, ...],
    real_gguf: dict[str, Any],
    gguf_references: dict[str, CachedMember],
) -> None:
    backends = [real_gguf[name] for name in team]
    members = [gguf_references[name] for name in team]
    branches = (3, 1)[len(team) % 2]
    options = {"branching_factor": branches, "max_new_tokens": 12}
    check(backends, members, given(kind), TOLERANCE, **options)


def test_members_of_both_kinds_equal_the_reference(
    real_gguf: dict[str, Any],
    real_backends: dict[str, Any],
    references: dict[str, CachedMember],
    gguf_references: dict[str, CachedMember],
) -> None:
    backends = [real_gguf["qwen"], real_backends["smollm"]]
    members = [gguf_references["qwen"], references["smollm"]]
    for branches in (1, 3):
        options = {"branching_factor": branches, "max_new_tokens": 12}
        check(backends, members, given("german"), 2e-3, **options)


def test_a_real_file_keeps_the_rules_of_backends(
    real_files: dict[str, Path], gguf_references: dict[str, CachedMember]
) -> None:
    from adafuse_llm.backends.llamacpp import LlamaCppBackend

    def member() -> LlamaCppBackend:
        return LlamaCppBackend(real_files["smollm"], "smollm", context=4096, repeatable=True)

    logits = gguf_references["smollm"].row
    assert "test_draws" in check_rules(member, logits, TOLERANCE, 8)


def test_every_response_has_its_form(real_gguf: dict[str, Any]) -> None:
    engine = AdaFuseEngine([real_gguf["smollm"], real_gguf["qwen"]])
    check_forms(engine, [*forms()][3::8])


def test_a_kept_prefix_beyond_the_window_changes_no_number(real_gguf: dict[str, Any]) -> None:
    """llama.cpp may reuse cells outside a sliding window, which a kept prefix can need again."""
    member = real_gguf["gemma"]
    long, other = (member.codec.encode_prompt(text * 36) for text in (FACTS, FACTS[::-1]))

    def likeliest(ids: list[int]) -> list[tuple[int, float]]:
        tree = TokenTree(ids)
        query = Query(tree, evaluate=(tree.root,), score=(), top=20)
        found = member.evaluate([query])[0].next[0]
        member.release(tree)
        return list(zip(found.tokens, found.logprobs, strict=True))

    for size in (len(long), 400):
        asked = [*long[:size], *other[:9]]
        for ids in (long, other[:400], other[300:900]):
            likeliest(ids)
        warm = likeliest(asked)
        member.clear_prefix_cache()
        assert likeliest(asked) == warm
