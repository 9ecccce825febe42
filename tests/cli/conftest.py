"""Tiny random models, and the command run in this process or in one of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import adafuse as run_here
from tests.support.commands import fakes
from tests.support.paths import ROOT

__all__ = ["fakes"]  # a fixture

WORDS = (
    "the mill was founded by Ada Brook in the year 1874 and stands at the river; "
    "question answer town hall teacher bread market harbour "
) * 4
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

ADAFUSE = "from adafuse_llm.cli import main; main()"


@pytest.fixture(scope="session", autouse=True)
def offline():
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of two models with different architectures and vocabularies."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models")
    llama, gpt2 = folder / "otter", folder / "badger"
    size = _save_tokenizer(llama, 300, TEMPLATE)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(llama)
    size = _save_tokenizer(gpt2, 360, None)
    torch.manual_seed(2)
    other = GPT2Config(
        vocab_size=size,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=8192,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
    )
    GPT2LMHeadModel(other).save_pretrained(gpt2)
    return [str(llama), str(gpt2)]


def _save_tokenizer(folder: Path, size: int, template: str | None) -> int:
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return len(fast)


@pytest.fixture(scope="session")
def members(models):
    """The flags that choose the two models."""
    return ["--model", models[0], "--model", models[1]]


@pytest.fixture
def adafuse():
    """Run `adafuse` in this process."""
    return run_here


def _heed_interrupts():
    """Jobs that run in the background of a shell ignore Ctrl-C, and so do their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start():
    """Start `adafuse`, or other code, as a process of its own; whatever is left is killed."""
    processes = []

    def call(*arguments, code=ADAFUSE, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                code,
                *map(str, arguments),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYTHONUNBUFFERED": "",
                "TERM": "xterm-256color",
            },
            preexec_fn=_heed_interrupts,  # noqa: PLW1509  # it takes no lock
            **options,
        )
        processes.append(process)
        return process

    yield call
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
