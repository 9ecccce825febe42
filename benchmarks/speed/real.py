"""What ensembles of real members cost, compared with their members alone.

``make real`` fetches the members. ``python -m benchmarks.speed --suite real`` runs all parts, and
``--only NAME`` some of them. With ``--output``, a file keeps the results of parts that ran before.

All systems answer the same chats with one thread each, in turns. Costs are CPU seconds
per byte of text, so other programs on the machine change them little. A ratio is the
median over the chats.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from adafuse_llm import AdaFuseEngine, MemberSpec, RuntimeConfig
from adafuse_llm.backends.llamacpp.library import load_library
from adafuse_llm.backends.llamacpp.model import Model
from benchmarks.real.members import real_files, real_folders
from tests.support.gguf_files import rewritten

PAIR: Final = ("smollm", "qwen")
TRIPLE: Final = ("smollm", "gemma", "qwen")
PASSAGE: Final = (
    "The Eiffel Tower is a wrought-iron lattice tower in Paris. It is named after the engineer "
    "Gustave Eiffel, whose company designed and built the tower from 1887 to 1889 as the "
    "centerpiece of the 1889 World's Fair."
)
CHATS: Final = (
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Write a Python function that reverses a string.",
    f"{PASSAGE}\n\nWho built the tower, and when? Quote the text.",
)
SYSTEMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "mixture": {"strategy": "mixture"},
    "adafuse, B = 1": {"strategy": "adafuse", "branching_factor": 1},
    "adafuse, B = 3": {"strategy": "adafuse", "branching_factor": 3},
    "adafuse, B = 1, no drafts": {"strategy": "adafuse", "branching_factor": 1, "drafting": False},
}
"""The ensembles' strategies and options."""

SUM_AIMS: Final = {"mixture": 1.0, "adafuse, B = 1": 0.85}
"""The highest ratio to the sum of the members alone."""


class Line(NamedTuple):
    """A line of the table. The aim is an upper limit, or a lower limit if `at_least` is true."""

    what: str
    system: str
    values: Sequence[float]
    aim: float | None = None
    at_least: bool = False


@dataclass(frozen=True)
class Size:
    """Tokens of a response, chats, requests at once, and tokens of long prompts."""

    response: int = 24
    chats: tuple[str, ...] = CHATS
    requests: int = 16
    prompts: tuple[int, ...] = (2000, 8000)


QUICK: Final = Size(8, CHATS[:1], 4, (500,))


Counts = tuple[int, int, int]
"""Bytes of text, and passes and tokens of the largest member."""


class Run(NamedTuple):
    """A run: CPU and wall-clock seconds, bytes of text, and the passes and tokens of the largest
    member."""

    cpu: float
    wall: float
    bytes: int
    passes: int = 0
    tokens: int = 1


def timed(work: Callable[[], Counts]) -> Run:
    """Run a function that returns bytes, passes and tokens."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = work()
    return Run(time.process_time() - cpu, time.perf_counter() - wall, *found)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@contextmanager
def ensemble(names: Sequence[str], kind: str = "f32", **options: Any) -> Iterator[AdaFuseEngine]:
    """Load an ensemble. Nothing is kept between requests."""
    if kind == "f32":
        paths = [real_folders()[name] for name in names]
    else:
        paths = [gguf(name, kind) for name in names]
        options = {"threads": 1, "context": 2048, **options}
    specs = [MemberSpec(str(path), prefix_cache_bytes=0, **options) for path in paths]
    with AdaFuseEngine.from_pretrained(specs, dtype="float32") as engine:
        try:
            yield engine
        finally:
            sharing.cache_clear()


@cache
def sharing(engine: AdaFuseEngine, strategy: str, drafting: bool) -> AdaFuseEngine:
    """Return an ensemble of the same members. It knows what their passes cost from its own runs."""
    runtime = RuntimeConfig(drafting=drafting)
    return AdaFuseEngine(engine.backends, strategy=strategy, runtime=runtime)


def gguf(name: str, kind: str) -> Path:
    """Return a GGUF file: the downloaded one (Q4), or one with weights of another kind."""
    file = real_files()[name]
    return file if kind == "q4" else rewritten(file, file.parent, kind)


def answering(
    engine: AdaFuseEngine,
    texts: Sequence[str],
    new: int,
    strategy: str,
    *,
    drafting: bool = True,
    **options: Any,
) -> Callable[[], Counts]:
    """Return a function that answers all texts at once."""
    answers = sharing(engine, strategy, drafting)
    largest = engine.members[-1]

    def run() -> Counts:
        found = answers.generate_batch(messages=[*map(chat, texts)], max_new_tokens=new, **options)
        return (
            sum(len(each.text.encode()) for each in found),
            sum(each.usage.forward_passes[largest] for each in found),
            sum(each.usage.completion_tokens[largest] for each in found),
        )

    return run


@torch.inference_mode()
def generate(backend: Any, text: str, new: int) -> Counts:
    """Run the greedy ``generate()`` of a member."""
    ids = torch.tensor([backend.codec.encode_messages(chat(text))])
    output = backend.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new
    )
    written = output[0, ids.shape[1] :]
    text = backend.tokenizer.decode(written, skip_special_tokens=True)
    return len(text.encode()), 0, len(written)


class LlamaCpp:
    """The greedy decoding of llama.cpp, with its default settings and one thread."""

    def __init__(self, backend: Any) -> None:
        self._backend, self._library = backend, load_library()
        self._model = Model(backend.path, backend.name, gpu_layers=0)
        params = self._library.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 2048, 1, 1
        self._context = self._library.llama_init_from_model(self._model.pointer, params)
        self._batch = self._library.llama_batch_init(2048, 0, 1)

    def answer(self, text: str, new: int) -> Counts:
        """Answer a chat."""
        codec = self._backend.codec
        prompt = codec.encode_messages(chat(text))
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), False)
        tokens: list[int] = []
        rest, length = prompt, 0
        while len(tokens) < new:
            for index, token in enumerate(rest):
                self._batch.token[index], self._batch.pos[index] = token, length + index
                self._batch.n_seq_id[index], self._batch.seq_id[index][0] = 1, 0
                self._batch.logits[index] = index == len(rest) - 1
            self._batch.n_tokens = len(rest)
            assert not self._library.llama_decode(self._context, self._batch)
            length += len(rest)
            logits = self._library.llama_get_logits(self._context)
            rest = [int(np.ctypeslib.as_array(logits, (self._model.vocabulary,)).argmax())]
            if rest[0] in self._backend.end_ids:
                break
            tokens += rest
        return len(codec.decode_continuation(prompt, tokens).encode()), 0, len(tokens)


def ratios(
    engine: AdaFuseEngine, alone: Sequence[Callable[[str, int], Counts]], size: Size
) -> Iterator[tuple[str, list[Run], list[float], list[float]]]:
    """Run the members alone and the ensembles on each chat in turns, after an untimed chat.

    Args:
        engine: the ensemble.
        alone: functions that answer with one member. The last one is the largest.
        size: the chats, and tokens of the responses.

    Yields:
        The name of each ensemble, its runs, and the CPU seconds per byte of each chat, relative to
        the sum of all members alone and to the largest member.
    """
    runs: dict[str, list[Run]] = {name: [] for name in SYSTEMS}
    bases: list[list[float]] = []
    for text in (size.chats[0], *size.chats):
        bases.append([per_byte(timed(partial(each, text, size.response))) for each in alone])
        for name, options in SYSTEMS.items():
            runs[name].append(asked(engine, size.response, options, text))
    for name, found in runs.items():
        pairs = list(zip(map(per_byte, found), bases, strict=True))[1:]
        sums = [cost / sum(base) for cost, base in pairs]
        yield name, found[1:], sums, [cost / base[-1] for cost, base in pairs]


def per_byte(run: Run) -> float:
    return run.cpu / max(1, run.bytes)


def asked(engine: AdaFuseEngine, new: int, options: Mapping[str, Any], text: str) -> Run:
    return timed(answering(engine, [text], new, **options))


def against_generate(names: Sequence[str], size: Size) -> Iterator[Line]:
    """Compare ensembles in float32 with ``generate()`` of their members."""
    what = " + ".join(names)
    with ensemble(names) as engine:
        alone = [partial(generate, backend) for backend in engine.backends]
        for name, runs, sums, larger in ratios(engine, alone, size):
            yield Line(f"{what}: CPU time / sum of `generate()`", name, sums, SUM_AIMS.get(name))
            yield Line(f"{what}: CPU time / larger member alone", name, larger, 1.25)
            passes = [run.passes / max(1, run.tokens) for run in runs]
            yield Line(f"{what}: passes of the larger member per token", name, passes, 0.7)


def against_llamacpp(kind: str, size: Size) -> Iterator[Line]:
    """Compare an ensemble of GGUF members with llama.cpp's own greedy decoding of each."""
    with ensemble(PAIR, kind) as engine:
        alone = [LlamaCpp(backend).answer for backend in engine.backends]
        for name, _, sums, _ in ratios(engine, alone, size):
            what = f"GGUF {kind.upper()}: CPU time / sum of llama.cpp's own decoding"
            yield Line(what, name, sums, 1.1)


def many(kind: str, size: Size) -> Iterator[Line]:
    """Compare requests at once with one request at a time."""
    texts = [f"{text} (Answer {number}.)" for number in range(4) for text in size.chats]
    texts = texts[: size.requests]
    new = size.response // 2
    with ensemble(PAIR, kind) as engine:
        for name, options in list(SYSTEMS.items())[:2]:
            asked(engine, 4, options, texts[0])
            single = [asked(engine, new, options, text) for text in texts[: len(size.chats)]]
            batch = timed(answering(engine, texts, new, **options))
            one = sum(run.cpu for run in single) / sum(run.bytes for run in single)
            what = f"{size.requests} requests at once, {kind.upper()}: throughput / one at a time"
            aim = 3.0 if kind == "f32" else 4.0
            yield Line(what, name, [one / per_byte(batch)], aim, at_least=True)


def prompts(size: Size) -> Iterator[Line]:
    """Compare the time until the first span of long prompts with the members' own prefill.

    The default strategy stands for all, which read prompts in the same way.
    """
    name, options = next(iter(SYSTEMS.items()))
    with ensemble(PAIR) as engine:
        for length in size.prompts:
            words = f"{PASSAGE} " * (length // 60)  # 59 tokens each
            own = timed(partial(prefill, engine, words)).cpu
            first = timed(partial(first_span, engine, words, **options)).cpu
            what = f"prompt of {length:,} tokens: CPU time to the first span / prefill"
            yield Line(what, name, [first / own], 1.05)


@torch.inference_mode()
def prefill(engine: AdaFuseEngine, text: str) -> Counts:
    """Run a pass of each model over a prompt."""
    backends: Sequence[Any] = engine.backends
    for backend in backends:
        ids = torch.tensor([backend.codec.encode_messages(chat(text))])
        backend.model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return 0, 0, 0


def first_span(engine: AdaFuseEngine, text: str, strategy: str, **options: Any) -> Counts:
    """Run an ensemble until its first span."""
    cancel = threading.Event()
    events = engine.with_strategy(strategy).stream(
        messages=chat(text),
        max_new_tokens=16,
        cancel=cancel,
        on_round=lambda *_: cancel.set(),
        **options,
    )
    return sum(len(event.text) for event in events), 0, 0


PARTS: Final[Mapping[str, Callable[[Size], Iterator[Line]]]] = {
    "pair": partial(against_generate, PAIR),
    "triple": partial(against_generate, TRIPLE),
    "q4": partial(against_llamacpp, "q4"),
    "q8": partial(against_llamacpp, "q8_0"),
    "many": partial(many, "f32"),
    "many-q8": partial(many, "q8_0"),
    "prompts": prompts,
}


def measure(only: Sequence[str], size: Size, output: Path | None, header: Mapping[str, str]) -> str:
    """Run parts, add their results to a file, and return the table of all parts in the file."""
    stored: dict[str, Any] = {}
    if output is not None and output.is_file():
        stored = json.loads(output.read_text(encoding="utf-8"))
    for name in only:
        print(name, file=sys.stderr, flush=True)
        start = time.perf_counter()
        lines = [each._asdict() for each in PARTS[name](size)]
        taken = f"{time.perf_counter() - start:.0f} s"
        stored[name] = {**header, "took": taken, "lines": lines}
        if output is not None:
            output.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return table(stored)


def table(stored: Mapping[str, Any]) -> str:
    """Return results as a Markdown table. Missed aims are bold."""
    rows = ["| what | strategy | median | range | aim |", "|---|---|---:|---:|---:|"]
    for name in PARTS:
        for each in stored.get(name, {"lines": ()})["lines"]:
            line = Line(**each)
            median = statistics.median(line.values)
            shown, aim = f"{median:.2f}", ""
            if line.aim is not None:
                aim = f"{'≥' if line.at_least else '≤'} {line.aim:g}"
                is_met = median >= line.aim if line.at_least else median <= line.aim
                shown = shown if is_met else f"**{shown}**"
            spread = f"{min(line.values):.2f} to {max(line.values):.2f}"
            spread = spread if len(line.values) > 1 else ""
            rows.append(f"| {line.what} | {line.system} | {shown} | {spread} | {aim} |")
    return "\n".join(rows)
