"""Real members keep the rules of backends, and draw from their own distributions."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from tests.decoding.test_sampling_distribution import chi_square
from tests.real.reference import CachedMember, check_rules, reference_of

pytestmark = pytest.mark.real

NAMES = ("smollm", "gemma", "qwen")
DRAWS = 400
TAIL = "(all other texts)"


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_real_member_keeps_the_rules_of_backends(
    name: str,
    real_backends: dict[str, HuggingFaceBackend],
    real_models: dict[str, tuple[Any, Any]],
) -> None:
    """The smallest member, and the one with a sliding window and the largest vocabulary."""
    member = real_backends[name]
    reference = reference_of(member, *real_models[name])

    def logits(ids: Any) -> Any:
        row = reference.logits(ids)
        reference.forget_rows()
        return row

    assert "test_draws" in check_rules(lambda: member, logits, 2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_real_member_draws_from_its_own_distribution(
    name: str,
    real_engine: Callable[..., AdaFuseEngine],
    references: dict[str, CachedMember],
) -> None:
    check_draws(real_engine(name), references[name])


def check_draws(engine: AdaFuseEngine, member: CachedMember) -> None:
    """Pearson's chi-square test of the first two tokens, with T = 0.7 and top_p = 0.9."""
    prompt, temperature, top_p = "My favourite animal is", 0.7, 0.9
    before = engine.encode_prompt(prompt)[member.name]

    def kept(tokens: list[int]) -> dict[int, float]:
        row = torch.from_numpy(member.row([*before, *tokens])).double() / temperature
        chances, ids = row.softmax(-1).sort(descending=True)
        size = int((chances.cumsum(-1) < top_p).sum()) + 1
        shares = chances[:size] / chances[:size].sum()
        return dict(zip(ids[:size].tolist(), shares.tolist(), strict=True))

    decode = member.tokenizer.decode
    expected: defaultdict[str, float] = defaultdict(float)
    for first, chance in kept([]).items():
        if chance < 0.02:  # a text of the tail, whatever follows
            expected[TAIL] += chance
            continue
        for second, share in kept([first]).items():
            text = decode([*before, first, second])[len(decode(before)) :]
            expected[text] += chance * share
    drawn: Counter[str] = Counter()
    for seed in range(DRAWS // 100):
        found = engine.generate(
            prompt, temperature=temperature, top_p=top_p, n=100, seed=seed, max_new_tokens=2
        )
        for each in (found, *found.alternatives):
            drawn[each.text if each.text in expected else TAIL] += 1
    assert math.isclose(sum(expected.values()), 1.0, abs_tol=1e-6)
    assert chi_square(drawn, expected) > 0.001
