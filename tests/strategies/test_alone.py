"""One member alone: by default, it writes its own greedy text."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from adafuse_llm import AdaFuseConfig, AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from tests.reference import Options, decode
from tests.support.compare import TOLERANCE, assert_same
from tests.support.models import CHATML, TRIPLE, Recipe, backend, model, reference

RECIPES = tuple(replace(recipe, template=CHATML) for recipe in TRIPLE)
PROMPTS = ("Caf\u00e9 \U0001f600 Orrin", "\u4e2d\u6587\u6ca1\u6709\u7a7a\u683c\u3002\u4e2d\u6587")
MESSAGES = [{"role": "user", "content": "When does the ferry leave?"}]

TEMPTING = {
    "": {" The": 0.4, " L": 0.3},
    " The": {" capital": 0.4, " city": 0.3},
    " The capital": {END: 1.0},
    " L": {"'": 1.0},
    " L'": {"E": 1.0},
    " L'E": {END: 1.0},
}
"""The likeliest text is "The capital". With alternatives, "L'E" wins,
because its mean NLL per token is lower than that of "The"."""


def written_alone(recipe: Recipe, ids: list[int], length: int) -> str:
    """The text of the model's own greedy `generate`."""
    written = model(recipe).generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        do_sample=False,
        max_new_tokens=length,
        eos_token_id=sorted(backend(recipe).end_ids),
        pad_token_id=0,
    )[0, len(ids) :]
    tokens = [token for token in written.tolist() if token not in backend(recipe).end_ids]
    return backend(recipe).codec.decode_continuation(ids, tokens)


@pytest.mark.parametrize(("recipe", "prompt"), [*zip(RECIPES, [*PROMPTS, None], strict=True)])
def test_one_member_with_defaults_writes_what_its_own_generate_writes(
    recipe: Recipe, prompt: str | None
) -> None:
    given: dict[str, Any] = {"prompt": prompt} if prompt else {"messages": MESSAGES}
    codec = backend(recipe).codec
    ids = codec.encode_prompt(prompt) if prompt else codec.encode_messages(MESSAGES)
    with AdaFuseEngine([backend(recipe)]) as engine:
        alone = engine.generate(max_new_tokens=24, **given)
        single = engine.with_strategy("single").generate(max_new_tokens=24, **given)
    with AdaFuseEngine([backend(each) for each in RECIPES]) as engine:
        chosen = engine.generate(max_new_tokens=24, use=recipe.name, **given)
    length = alone.usage.completion_tokens[recipe.name] + (alone.finish_reason == "stop")
    expected = written_alone(recipe, list(ids), length)
    assert alone.text == single.text == chosen.text == (expected if prompt else expected.lstrip())
    options = {"prompt": None, **given, "options": Options(max_new_tokens=24)}
    assert_same(alone, decode([reference(recipe)], **options), TOLERANCE)


@pytest.mark.quick
def test_one_member_proposes_alternatives_only_if_the_caller_asks_for_them() -> None:
    texts = [" The", " L", " capital", " city"]

    def follow(text: str) -> dict[str, float]:
        return TEMPTING.get(text[1:], {END: 1.0})

    members = [FakeBackend(name, follow, texts) for name in ("one", "two")]
    with AdaFuseEngine(members[:1]) as engine:
        assert engine.generate("x").text == " The capital"
        assert engine.generate("x", branching_factor=3).text == " L'E"
    with AdaFuseEngine(members) as engine:
        assert engine.generate("x").text == " L'E"
        assert engine.generate("x", use="two").text == " The capital"
        assert engine.generate("x", use="two", branching_factor=2).text == " L'E"
    with AdaFuseEngine(members[:1], AdaFuseConfig(branching_factor=3)) as engine:
        assert engine.generate("x").text == " L'E"
        assert engine.generate("x", branching_factor=None).text == " The capital"
