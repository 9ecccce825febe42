"""What happens to a model that fits no form."""

from __future__ import annotations

import pytest

from adafuse_llm import UnsupportedModelError
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from tests.support.models import Recipe, model, tokenizer


def test_a_member_that_fits_no_form_is_refused_with_the_reason():
    member = model(Recipe("llama", seed=77))

    class Moody(type(member)):
        """Computes something else without a cache: no cached run can agree."""

        def forward(self, input_ids=None, use_cache=None, past_key_values=None, **kwargs):
            output = super().forward(
                input_ids=input_ids, use_cache=use_cache, past_key_values=past_key_values, **kwargs
            )
            if not use_cache:
                output.logits[..., ::2] += 50
            return output

    odd = Moody(member.config).double().eval()
    with pytest.raises(
        UnsupportedModelError, match=r"'odd'.*tree form: .*differ.*path form: .*differ"
    ):
        HuggingFaceBackend(odd, tokenizer("bytelevel"), "odd")
