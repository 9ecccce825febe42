"""What happens to a model that fits no form."""

from __future__ import annotations

import pytest
import torch

from adafuse_llm import UnsupportedModelError
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from tests.support.models import Recipe, model, tokenizer


def test_a_member_that_fits_no_form_is_refused_with_the_reason():
    member = model(Recipe("llama", seed=77))

    class Moody(type(member)):  # type: ignore[misc]
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


@pytest.mark.parametrize(("error", "accepted"), [(0.012, True), (0.1, False)])
def test_passes_in_bfloat16_may_differ_as_much_as_on_a_gpu(error, accepted):
    member = model(Recipe("llama", seed=78))

    class Rounded(type(member)):  # type: ignore[misc]
        """Rounds otherwise with a cache, as the kernels of a GPU do."""

        def forward(self, *args, use_cache=None, past_key_values=None, **kwargs):
            output = super().forward(
                *args, use_cache=use_cache, past_key_values=past_key_values, **kwargs
            )
            if use_cache or past_key_values is not None:
                torch.manual_seed(0)
                noise = torch.randn_like(output.logits) * output.logits.std()
                output.logits += error / 0.8 * noise  # the mean of |noise| is 0.8 of its deviation
            return output

    rounded = Rounded(member.config).to(torch.bfloat16).eval()
    if accepted:
        HuggingFaceBackend(rounded, tokenizer("bytelevel"), "rounded")
    else:
        with pytest.raises(UnsupportedModelError, match="differ"):
            HuggingFaceBackend(rounded, tokenizer("bytelevel"), "rounded")
