"""Tiny random models, and the command run in this process or in one of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.cli import create_app
from tests.support.paths import ROOT

WORDS = (
    "the mill was founded by Ada Brook in the year 1874 and stands at the river; "
    "question answer town hall teacher bread market harbour "
) * 4
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


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
    runner = CliRunner()
    app = create_app()

    def call(*arguments, **options):
        return runner.invoke(app, [str(argument) for argument in arguments], **options)

    return call


def _heed_interrupts():
    """Jobs that run in the background of a shell ignore Ctrl-C, and so do their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def interrupted_while_loading(monkeypatch):
    """Ctrl-C comes while members are loaded."""

    def load(*_arguments, **_options):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")

    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", load)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def start():
    """Start `adafuse` as a process of its own; whatever is left is killed."""
    processes = []

    def call(*arguments, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from adafuse_llm.cli import main; main()",
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


def rule(*continuations):
    """A distribution: the first continuation that fits the text so far is the likeliest."""

    def distribution(text):
        for written, following in continuations:
            if text.endswith(written):
                return following
        return {END: 1.0}

    return distribution


@pytest.fixture
def fakes(monkeypatch):
    """Members without models: wren prefers " Brook", heron " Stone", both are sure of " did"."""
    vocabulary = ["Ada", " Brook", " Stone", " did"]
    start = {"Ada": 0.8, "The": 0.2}
    wren, heron = (
        rule(
            (":", start), ("Ada", {" Brook": brook, " Stone": 1 - brook}), ("Brook", {" did": 1.0})
        )
        for brook in (0.8, 0.4)
    )
    loaded = []

    def load(paths, *, config, strategy="adafuse", **options):
        loaded.append({"paths": paths, "config": config, "strategy": strategy, **options})
        backends = [FakeBackend("wren", wren, vocabulary), FakeBackend("heron", heron, vocabulary)]
        engine = AdaFuseEngine(backends, config, strategy=strategy)
        loaded[-1]["engine"] = engine
        return engine

    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", load)
    return loaded
