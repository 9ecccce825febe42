"""A real member keeps the rules of backends."""

from typing import Any

import pytest

from adafuse_llm.backends.huggingface import HuggingFaceBackend
from tests.real.reference import check_rules, reference_of

pytestmark = pytest.mark.real


def test_a_real_member_keeps_the_rules_of_backends(
    real_backends: dict[str, HuggingFaceBackend], real_models: dict[str, tuple[Any, Any]]
) -> None:
    """The one with a sliding window and the largest vocabulary."""
    member = real_backends["gemma"]
    reference = reference_of(member, *real_models["gemma"])

    def logits(ids: Any) -> Any:
        row = reference.logits(ids)
        reference.forget_rows()
        return row

    assert "test_draws" in check_rules(lambda: member, logits, 2e-3, 5)
