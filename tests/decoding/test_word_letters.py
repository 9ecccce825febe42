"""The limit of letters in words of scripts without spaces, on members that write such scripts."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from adafuse_llm import AdaFuseEngine, RuntimeConfig
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from tests.reference import Options, ReferenceMember, decode
from tests.support.compare import TOLERANCE, as_data, assert_same
from tests.support.models import TINY
from tests.support.sizes import sized

TEXT = (
    "我们今天去公园看花。公园里的花很好看，我们很高兴！明天我们用Python写代码。"
    "今日は公園で花を見ます。カメラを持って行きます。"
    "วันนี้เราไปดูดอกไม้ที่สวน ดอกไม้สวยมาก"
    "😀😀 the park, the flowers 公园"
)
SCRIPTS = re.compile("[一-鿿ぁ-ヿก-ฮ]")


@functools.cache
def members() -> tuple[tuple[HuggingFaceBackend, ...], tuple[ReferenceMember, ...]]:
    """Two random models in float64, whose tokens are parts of the text above."""
    backends, references = [], []
    for number, size in enumerate((330, 420)):
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["</s>"], show_progress=False)
        core.train_from_iterator([TEXT[place:] for place in range(40)], trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
        torch.manual_seed(number)
        config = LlamaConfig(**{**TINY, "vocab_size": len(tokenizer), "eos_token_id": 0})
        model = LlamaForCausalLM(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, 0.4)
            whole = [
                token != 0 and "�" not in tokenizer.decode([token])
                for token in range(len(tokenizer))
            ]
            bias = torch.tensor([2.0 if each else -1.0 for each in whole]).double()
            model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
        backend = HuggingFaceBackend(model, tokenizer, f"writer-{number}")
        backends.append(backend)
        references.append(
            ReferenceMember(backend.name, model, tokenizer, backend.codec, frozenset({0}))
        )
    return tuple(backends), tuple(references)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("branching_factor", [1, 3])
def test_the_engine_equals_the_reference_with_and_without_drafts(branching_factor: int) -> None:
    backends, references = members()
    rounds = []
    for letters in sized((1, 4, 256), (1, 2, 4, 256)):
        options: dict[str, Any] = {
            "branching_factor": branching_factor,
            "max_new_tokens": sized(16, 24),
            "margin_threshold": 0.2,
            "max_word_letters": letters,
        }
        found = []
        for drafting in (True, False):
            with AdaFuseEngine(backends, runtime=RuntimeConfig(drafting=drafting)) as engine:
                found.append(engine.generate(TEXT[:30], **options))
        expected = decode(references, TEXT[:30], Options(**options))
        assert_same(found[0], expected, TOLERANCE)
        assert as_data(found[0])["text"] == as_data(found[1])["text"]
        assert len(SCRIPTS.findall(found[0].text)) > 5
        rounds.append(len(found[0].rounds))
    assert rounds[0] > rounds[-1]


def test_one_member_writes_the_same_text_with_any_limit() -> None:
    (backend, _), _ = members()
    with AdaFuseEngine([backend]) as engine:
        texts = {
            engine.generate(
                TEXT[:30], branching_factor=1, max_new_tokens=40, max_word_letters=letters
            ).text
            for letters in (1, 2, 3, 8, 256)
        }
    assert len(texts) == 1
