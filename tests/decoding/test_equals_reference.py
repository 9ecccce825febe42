"""The engine against an independent transcription of the algorithm, in float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from tests.decoding.cases import CONVERSATIONS, FREE, PROMPTS, TEXTS
from tests.reference import Options, ReferenceMember, decode
from tests.support.compare import TOLERANCE, assert_same, check
from tests.support.models import (
    ARCHITECTURES,
    CHATML,
    LOSSY,
    PAIR,
    STRICT,
    TOKENIZER_KINDS,
    TRIPLE,
    Recipe,
    TokenizerKind,
    backend,
    model,
    reference,
    tokenizer,
)
from tests.support.sizes import sized

ARCHS = list(ARCHITECTURES)


def recipe(arch: str, number: int = 0, **changes: Any) -> Recipe:
    """A member whose tokenizer and randomness follow from its place in the list."""
    place = ARCHS.index(arch) + number
    return Recipe(arch, TOKENIZER_KINDS[place % 3], seed=place, **changes)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_alone(arch: str) -> None:
    number = ARCHS.index(arch)
    member = recipe(arch)
    for prompt, threshold, branches in (
        (PROMPTS[number % len(PROMPTS)], 0.1, 3),
        (PROMPTS[(number + 3) % len(PROMPTS)], 0.7, 5),
    ):
        check(
            [member],
            prompt,
            margin_threshold=threshold,
            branching_factor=branches,
            max_new_tokens=sized(12, 24),
        )


@pytest.mark.sweep(5)
@pytest.mark.parametrize("number", range(len(ARCHS)))
def test_pairs_and_triples_of_every_architecture(number: int) -> None:
    """Each with its neighbours in the list, whose tokenizers are of the other kinds."""
    members = [recipe(ARCHS[(number + i) % len(ARCHS)]) for i in range(2 + number % 2)]
    generation = check(
        members,
        PROMPTS[number % len(PROMPTS)],
        margin_threshold=(0.3, 0.05, 0.7)[number % 3],
        branching_factor=(3, 2, 5, 1)[number % 4],
        max_words=(3, 1, 2)[number % 3],
        max_new_tokens=sized(12, 24),
    )
    assert generation.text or generation.finish_reason == "length"


@pytest.mark.sweep(5)
@pytest.mark.parametrize("max_word_tokens", [1, 4, 16])
@pytest.mark.parametrize("margin_threshold", [0.0, 0.1, 0.7, 1.0])
def test_thresholds_and_word_lengths(margin_threshold: float, max_word_tokens: int) -> None:
    for branching_factor, max_words in ((1, 3), (2, 1), (3, 2), (5, 3)):
        check(
            PAIR,
            PROMPTS[branching_factor],
            margin_threshold=margin_threshold,
            max_word_tokens=max_word_tokens,
            branching_factor=branching_factor,
            max_words=max_words,
            max_new_tokens=sized(10, 16),
        )


@pytest.mark.sweep(4)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_with_spaces_newlines_and_other_scripts(prompt: str) -> None:
    check(TRIPLE, prompt, margin_threshold=0.2, max_new_tokens=sized(12, 24))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("prompt", PROMPTS[:4])
def test_a_member_that_cannot_write_every_text_is_left_out_where_it_cannot(prompt: str) -> None:
    left_out = 0
    for margin_threshold in (0.0, 0.3):
        generation = check(
            LOSSY, prompt, margin_threshold=margin_threshold, max_new_tokens=24, max_words=2
        )
        left_out += sum(len(c.nll) < 2 for r in generation.rounds for c in r.candidates)
    assert left_out


@pytest.mark.quick
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 2.0), (0.25, 1.5)])
def test_weights(weights: tuple[float, float]) -> None:
    check(PAIR, PROMPTS[0], weights=weights, margin_threshold=0.2, max_new_tokens=32)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("member", TRIPLE, ids=lambda member: member.kind)
def test_two_members_that_are_alike_agree_with_the_reference(member: Recipe) -> None:
    """Ties in the fused score and candidates with several proposers."""
    twin = Recipe(member.arch, member.kind, seed=member.seed + 10, spread=member.spread)
    check([member, twin], PROMPTS[1], margin_threshold=0.3, max_new_tokens=sized(12, 24))


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    "stop", [("a",), ("er", "th"), ("\n",), (" t", "e "), ("zzzz",), ("o\n", "i", "Orr")]
)
def test_stop_sequences(stop: tuple[str, ...]) -> None:
    reasons = set()
    for prompt in PROMPTS[:3]:
        generation = check(
            PAIR, prompt, stop=stop, margin_threshold=0.2, max_new_tokens=24, max_words=2
        )
        reasons.add(generation.finish_reason)
        assert not any(sequence in generation.text for sequence in stop)
    assert ("stop_sequence" in reasons) == (stop != ("zzzz",))


@pytest.mark.quick
def test_every_finish_reason_occurs() -> None:
    eager = (
        Recipe("llama", "bytelevel", seed=41, end_bias=6.0),
        Recipe("qwen2", "sentencepiece", seed=42, end_bias=6.0),
    )
    reasons = [
        check(eager, prompt, margin_threshold=0.3, max_new_tokens=60).finish_reason
        for prompt in PROMPTS
    ]
    assert "stop" in reasons
    assert check(PAIR, PROMPTS[0], max_new_tokens=6).finish_reason == "length"


@pytest.mark.sweep(1)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["user", "system", "many"])
def test_conversations_with_and_without_templates(messages: list[dict[str, str]]) -> None:
    members = [
        Recipe("llama", "bytelevel", seed=51, template=CHATML),
        Recipe("gpt2", "sentencepiece", seed=52, template=STRICT),
        Recipe("qwen3", "unigram", seed=53),
    ]
    for chosen in (members, members[:2], members[1:]):
        check(chosen, messages=messages, margin_threshold=0.2, max_new_tokens=sized(8, 16))


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("short", "extra"),
    [
        *(("llama", extra) for extra in (1, 2, 3, 5, 8, 12)),
        *((arch, extra) for arch in ("gpt2", "qwen3", "lfm2") for extra in (1, 3, 8)),
    ],
)
def test_small_context_windows(short: str, extra: int) -> None:
    """Windows that end 1 to 12 tokens after the prompt."""
    kind = TOKENIZER_KINDS[("llama", "gpt2", "qwen3", "lfm2").index(short) % 3]
    prompt = "The ferry to"
    room = len(tokenizer(kind).encode(prompt)) + extra
    small = Recipe(short, kind, seed=61, window=room)
    assert backend(small).context_window == room
    for margin_threshold in (0.0, 0.2, 1.0):
        for members in ([small], [PAIR[0], small], [small, PAIR[1]]):
            generation = check(
                members, prompt, margin_threshold=margin_threshold, max_new_tokens=40
            )
            assert generation.finish_reason in ("length", "stop")


@pytest.mark.sweep(1)
def test_a_sliding_window_model_far_past_its_window() -> None:
    member = recipe("mistral")
    assert model(member).config.sliding_window == 8
    check(
        [member, PAIR[0]],
        "The ferry to Orrin leaves at nine. " * 3,
        max_new_tokens=sized(24, 60),
        margin_threshold=0.2,
    )


@pytest.mark.sweep(5)
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt2", "phi3", "olmo2", "gpt_neox"])
def test_the_path_form_gives_what_the_tree_form_gives(arch: str) -> None:
    member = recipe(arch)
    assert backend(member, "tree").form == "tree"
    assert backend(member, "path").form == "path"
    options: dict[str, Any] = {"margin_threshold": 0.2, "max_new_tokens": sized(10, 24)}
    expected = decode([reference(member), reference(PAIR[1])], PROMPTS[1], Options(**options))
    for form in ("tree", "path"):
        with AdaFuseEngine([backend(member, form), backend(PAIR[1], form)]) as ensemble:
            assert_same(ensemble.generate(PROMPTS[1], **options), expected, TOLERANCE)


LONG_PROMPT = "The keeper said that the light is the light. " * 40


def talkative(arch: str, kind: TokenizerKind, seed: int) -> Recipe:
    """A member that writes short words and never ends."""
    return Recipe(arch, kind, seed=seed, space_bias=5.0, end_bias=-20.0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("tokens", "new"),
    [
        (5, sized(40, 150)),
        (300, sized(15, 150)),
    ],
)
def test_long_decodes_with_many_rounds(tokens: int, new: int) -> None:
    """Many commits, so that trees are re-rooted and caches compacted again and again."""
    members = talkative("llama", "bytelevel", 71), talkative("qwen3", "sentencepiece", 72)
    known = tokenizer("bytelevel")
    prompt = known.decode(known.encode(LONG_PROMPT)[:tokens])
    generation = check(
        members,
        prompt,
        margin_threshold=0.5,
        max_words=2,
        branching_factor=2,
        max_new_tokens=new,
    )
    assert len(generation.rounds) >= 2 * new // 3
    assert generation.finish_reason == "length"


@pytest.mark.sweep(1)
def test_a_long_decode_in_the_path_form() -> None:
    members = talkative("lfm2", "unigram", 73), talkative("mistral", "bytelevel", 74)
    generation = check(
        members,
        "The keeper",
        margin_threshold=0.5,
        branching_factor=2,
        max_new_tokens=sized(40, 70),
    )
    assert len(generation.rounds) >= sized(20, 30)


SEVERAL = (
    PAIR,
    (Recipe("gemma2", "unigram", seed=81), Recipe("llama", "sentencepiece", seed=82)),
    (Recipe("mamba2", "bytelevel", seed=83), Recipe("qwen2", "unigram", seed=84)),
    LOSSY,
)


@pytest.mark.sweep(1)
@settings(max_examples=sized(20, 1500))
@given(
    text=TEXTS,
    options=st.fixed_dictionaries(FREE),
    members=st.one_of(
        st.sampled_from(SEVERAL),
        st.lists(st.sampled_from(ARCHS).map(recipe), min_size=1, max_size=sized(1, 3), unique=True),
    ),
)
def test_random_prompts_and_options(
    text: str, options: dict[str, Any], members: Sequence[Recipe]
) -> None:
    check(members, text, **options)


@functools.cache
def embedded_members() -> tuple[list[HuggingFaceBackend], list[ReferenceMember]]:
    """The members that ship with the package, in float64."""
    from adafuse_llm.embedded import member_paths

    backends, references = [], []
    for folder in member_paths():
        loaded = AutoModelForCausalLM.from_pretrained(folder).double().eval()
        known = AutoTokenizer.from_pretrained(folder)
        backends.append(HuggingFaceBackend(loaded, known, folder.name))
        references.append(
            ReferenceMember(
                folder.name,
                loaded,
                known,
                backends[-1].codec,
                backends[-1].end_ids,
                backends[-1].context_window,
            )
        )
    return backends, references


@pytest.mark.sweep(3)
@pytest.mark.parametrize("question", range(3))
@pytest.mark.parametrize("margin_threshold", [0.3, 0.7, 0.99])
def test_the_embedded_members(question: int, margin_threshold: float) -> None:
    from adafuse_llm.embedded import handbook_path, handbook_questions

    backends, references = embedded_members()
    asked = [q for q in handbook_questions() if q.source is not None][question]
    assert asked.source is not None
    source = next(handbook_path().rglob(Path(asked.source).name))
    passage = source.read_text(encoding="utf-8")[:600]
    messages = [{"role": "user", "content": f"{passage}\n\nQuestion: {asked.question}"}]
    options: dict[str, Any] = {"margin_threshold": margin_threshold, "max_new_tokens": 24}
    expected = decode(references, None, Options(**options), messages=messages)
    with AdaFuseEngine(backends) as ensemble:
        assert_same(ensemble.generate(messages=messages, **options), expected, TOLERANCE)
