"""What the engine itself costs beside the passes of its members.

On a GPU, a pass of few tokens takes about as long as one of many. So the rest counts: the Python
between two passes, the operations that a pass starts, and how often it waits for the device. All
three can be counted on a CPU.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import psutil
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend, Query
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.backends.logits.adjust import adjusted
from adafuse_llm.backends.logits.draw import drawn
from adafuse_llm.backends.logits.state import Written
from adafuse_llm.embedded import member_paths
from adafuse_llm.tree.adjustment import Adjustment
from adafuse_llm.tree.sampling import Draw
from adafuse_llm.tree.tokens import TokenTree
from benchmarks.speed.measure import Line

REQUESTS: Final = (1, 16, 64)
PASS_SECONDS: Final = 0.015
"""Seconds of a pass of a model with eight billion parameters on a GPU."""

VOCABULARY: Final = 151_936
"""Number of tokens of Qwen2.5."""

VIEWS: Final = {
    *("view", "_unsafe_view", "slice", "select", "narrow", "expand", "transpose", "permute", "t"),
    *("unsqueeze", "squeeze", "alias", "detach", "split", "split_with_sizes", "unbind"),
    *("as_strided", "reshape", "flatten"),
}
"""Operations that compute nothing."""

WAITS: Final = {"cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__"}
"""Methods of tensors that wait for the device."""


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is not typed
    """Counts operations, except those that only return a view."""

    count = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Counts what waits for the device: numbers that Python reads, and lists as an index.

    Numbers that are on the CPU already do not count: `read` moves them there with ``cpu``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._here: set[int] = set()

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        result = func(*args, **(kwargs or {}))
        if name == "cpu":
            self.count += 1
            self._here.add(result.untyped_storage().data_ptr())
        elif name in WAITS:
            self.count += args[0].untyped_storage().data_ptr() not in self._here
        elif name == "__getitem__":
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.count += any(isinstance(part, list) for part in parts)
        return result


def toy(layers: int = 4, vocabulary: int = 8192, hidden: int = 64) -> HuggingFaceBackend:
    """Return a member with random weights and the tokenizer of an embedded member."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32_768,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(member_paths()[0])
    return HuggingFaceBackend(model, tokenizer, "toy", prefix_cache_bytes=0)


def rounds() -> Iterator[Line]:
    """Measure the CPU time of the engine's own thread."""
    prompts = [f"Question {number}: Why is the sky blue?" for number in range(16)]
    for strategy in ("auto", "mixture"):
        with AdaFuseEngine.from_pretrained([*map(str, member_paths())], strategy=strategy) as one:
            one.generate_batch(prompts[:2], max_new_tokens=8)
            thread = [each for each in threading.enumerate() if each.name == "adafuse"][-1]
            clock = time.pthread_getcpuclockid(thread.ident or 0)
            for count in (1, 16):
                values = []
                for _ in range(5):
                    start = time.clock_gettime(clock)
                    done = one.generate_batch(prompts[:count], max_new_tokens=32)
                    spent = time.clock_gettime(clock) - start
                    values.append(1000 * spent / sum(len(each.rounds) for each in done))
                what = f"engine's thread: milliseconds per round, {count} at once"
                yield Line(what, strategy, values)


def passes() -> Iterator[Line]:
    """Count the operations of a pass, and how often it waits for the device."""
    backend = toy()
    for draw, system in ((None, "greedy"), (Draw(7, 1.0, 0.9, None), "top_p")):
        counts = {count: _one_pass(backend, count, draw) for count in REQUESTS}
        for count, (operations, waits) in counts.items():
            what = f"operations of a pass, {count} requests"
            yield Line(what, system, [operations])
            yield Line(f"{what} / one", system, [operations / counts[1][0]])
            yield Line(f"waits for the device per pass, {count} requests", system, [waits])


def _one_pass(backend: HuggingFaceBackend, count: int, draw: Draw | None) -> tuple[int, int]:
    trees = [TokenTree([5 + n, *range(20, 60 + 3 * n)]) for n in range(count)]
    for step in range(3):
        for tree in trees:
            if step:
                tree.commit(tree.grow([30 + step]))
            tree.root.draw = draw
        queries = [Query(tree, (tree.root,), (), 8) for tree in trees]
        with Operations() as operations, Waits() as waits:  # type: ignore[no-untyped-call]
            backend.evaluate(queries)
    return operations.count, waits.count


def draws() -> Iterator[Line]:
    """Measure draws and penalties of one node."""
    torch.manual_seed(0)
    codes = torch.randint(-(2**62), 2**62, (VOCABULARY,))
    rules = {"temperature": (1.0, None), "top_p": (0.9, None), "top_k": (1.0, 50)}
    for name, spread in (("peaked", 8.0), ("flat", 0.1)):
        logits = torch.randn(9, 1, VOCABULARY) * spread
        for system, cuts in rules.items():
            rule = [Draw(7, 1.0, *cuts)]
            times = _times([partial(drawn, row, rule, codes, exact=False) for row in logits])
            yield Line(f"a draw among {VOCABULARY:,} tokens, {name}: milliseconds", system, times)
    adjustment = Adjustment(repetition_penalty=1.1)
    row = torch.randn(1, VOCABULARY)
    total = row.logsumexp(-1, keepdim=True)
    for length in (1_000, 32_000):
        tree = TokenTree([n * 7919 % VOCABULARY for n in range(length)], adjustment)
        written = Written()

        def penalize(token: int, tree: TokenTree = tree, written: Written = written) -> None:
            adjusted(row, total, [tree.changes(tree.grow([token]))], [written])

        times = _times([partial(penalize, token) for token in range(9)])
        yield Line(f"penalties after {length:,} tokens: milliseconds", "repetition_penalty", times)


def _times(works: Sequence[Callable[[], object]]) -> list[float]:
    """Return the milliseconds of the processor for each call except the first one."""
    times = [(time.thread_time(), work(), time.thread_time()) for work in works]
    return [1000 * (end - start) for start, _, end in times[1:]]


@torch.inference_mode()
def scores() -> Iterator[Line]:
    """Compare the scores of a long text with the model's own forward pass."""
    backend, text = toy(2, VOCABULARY, 256), " the sky is blue" * 260
    ids = torch.tensor([backend.codec.encode_prompt("Say:" + text)])
    costs = []
    with AdaFuseEngine([backend]) as engine:
        engine.score("Say:", [" the sky"])
        for _ in range(5):  # in turns, because the speed of a machine changes
            own = _spent(lambda: backend.model(ids).logits.log_softmax(-1))
            costs.append((own, _spent(lambda: engine.score("Say:", [text]))))
    what = f"score of {ids.shape[1]:,} tokens among {VOCABULARY:,}"
    yield Line(f"{what}: time / forward pass", "", [ours[0] / own[0] for own, ours in costs])
    yield Line(f"{what}: megabytes more", "", [ours[1] for _, ours in costs])


def _spent(work: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU seconds of a call, and the most megabytes by which the process grew."""
    ctypes.CDLL(None).malloc_trim(0)  # give back what earlier calls have freed
    process, done = psutil.Process(), threading.Event()
    sizes = [process.memory_info().rss]

    def watch() -> None:
        while not done.wait(0.004):
            sizes.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.process_time()
    work()
    seconds = time.process_time() - start
    done.set()
    watcher.join()
    return seconds, (max(sizes) - sizes[0]) / 1e6


class Waiting(FakeBackend):
    """An imitation of a member on a GPU: it sleeps until a pass has taken `PASS_SECONDS`."""

    batches = 0  # of all members

    def evaluate(self, queries: Any) -> Any:
        """Wait until the pass is over."""
        start = time.perf_counter()
        results = super().evaluate(queries)
        time.sleep(max(0.0, PASS_SECONDS - (time.perf_counter() - start)))
        Waiting.batches += 1  # the members take turns
        return results


def gpu() -> Iterator[Line]:
    """Compare the engine's time with that of its members' passes, on an imitation of a GPU."""
    words = [f" w{number}" for number in range(100)]

    def likely(shift: int, text: str) -> dict[str, float]:
        last = int(text.rsplit(" w", 1)[-1]) if " w" in text else 0
        return {words[(last * 7 + shift) % 100]: 0.6, words[(last * 3 + 1) % 100]: 0.3}

    for strategy in ("adafuse", "mixture"):
        members = [Waiting(f"m{n}", partial(likely, n), words, device="gpu") for n in range(3)]
        with AdaFuseEngine(members, strategy=strategy) as engine:
            for count in REQUESTS:
                prompts = [f"Go {number}:" for number in range(count)]
                engine.generate_batch(prompts, max_new_tokens=4)
                values = []
                for _ in range(3):
                    Waiting.batches, start = 0, time.perf_counter()
                    engine.generate_batch(prompts, max_new_tokens=24)
                    values.append(Waiting.batches * PASS_SECONDS / (time.perf_counter() - start))
                yield Line(f"a model of a GPU, {count} at once: passes / time", strategy, values)


MEASUREMENTS: Final[Mapping[str, Callable[[], Iterator[Line]]]] = {
    work.__name__: work for work in (rounds, passes, draws, scores, gpu)
}
