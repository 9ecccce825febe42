"""What members of other kinds cost: GGUF members, and members in processes of their own.

``python -m benchmarks.speed.kinds`` prints the tables of docs/speed.md. The members are embedded
ones, widened to about 114 million parameters (`benchmarks.speed.wide`), so they agree as often as
trained members do. With ``--only real``, they are real members, which ``make real`` fetches.

Times of the engine include the CPU time of all its processes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from adafuse_llm import AdaFuseEngine, MemberSpec, RuntimeConfig
from adafuse_llm.backends import NodeQuery, TokenTree
from adafuse_llm.embedded import member_paths
from benchmarks.real.members import real_files, real_folders
from benchmarks.speed.members import prompt_of
from benchmarks.speed.wide import widen
from tests.support.gguf_files import rewritten, write_gguf

KINDS = ("f32", "q8_0", "q4_0")
PAIR = ("wren", "finch")


@dataclass(frozen=True)
class Size:
    """Sizes of the members, of prompts and responses (in tokens), and of the measurements."""

    width: int = 768
    inner: int = 3072
    layers: int = 12
    prompt: int = 256
    response: int = 64
    repeats: int = 3
    requests: int = 16


QUICK = Size(256, 512, 5, 64, 16, 2, 4)


@dataclass(frozen=True)
class Cost:
    """The costs of a run: wall-clock seconds, CPU seconds, and tokens of the responses."""

    wall: float
    cpu: float
    tokens: int


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the processes that it has started."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def timed(run: Callable[[], int]) -> Cost:
    """Time a function that returns a number of tokens."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    tokens = run()
    return Cost(time.perf_counter() - wall, cpu_seconds() - cpu, tokens)


def in_turns(
    systems: Mapping[str, Callable[[], int]], repeats: int, *, warm: bool = False
) -> dict[str, Cost]:
    """Time systems in turns, and return the medians.

    Args:
        systems: the systems by name.
        repeats: number of timed runs of each.
        warm: whether all systems have run before. Otherwise each runs once without being timed.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in systems}
    for number in range(repeats + (not warm)):
        for name, system in systems.items():
            cost = timed(system)
            if number or warm:
                costs[name].append(cost)
    return {
        name: Cost(
            statistics.median(each.wall for each in runs),
            statistics.median(each.cpu for each in runs),
            runs[-1].tokens,
        )
        for name, runs in costs.items()
    }


def generating(folders: Sequence[Path], prompt: str, new: int, threads: int) -> Callable[[], int]:
    """Return a function that runs the ``generate()`` of each model, one after the other."""
    loaded = [
        (
            transformers.AutoModelForCausalLM.from_pretrained(folder).eval(),
            transformers.AutoTokenizer.from_pretrained(folder),
        )
        for folder in folders
    ]

    @torch.inference_mode()
    def run() -> int:
        torch.set_num_threads(threads)
        try:
            for model, tokenizer in loaded:
                ids = torch.tensor([tokenizer.encode(prompt)])
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=new,
                    min_new_tokens=new,
                )
        finally:
            torch.set_num_threads(1)
        return new

    return run


@contextmanager
def side_by_side(folders: Sequence[Path], prompt: str, new: int) -> Iterator[Callable[[], int]]:
    """Yield a function that runs ``generate()`` of each model at the same time, in processes.

    It shows how much the models slow each other down on this machine.
    """
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, spawn)) for _ in folders]

        def run() -> int:
            jobs = [
                pool.submit(_generate_alone, folder, prompt, new)
                for pool, folder in zip(pools, folders, strict=True)
            ]
            return max(job.result() for job in jobs)

        yield run


def _generate_alone(folder: Path, prompt: str, new: int) -> int:
    torch.set_num_threads(1)
    return _generator(folder, prompt, new)()


@functools.cache
def _generator(folder: Path, prompt: str, new: int) -> Callable[[], int]:
    return generating([folder], prompt, new, 1)


def asking(
    engine: AdaFuseEngine, prompts: Sequence[str], new: int, **options: Any
) -> Callable[[], int]:
    """Return a function that asks an ensemble all prompts at once."""

    def run() -> int:
        generations = engine.generate_batch(prompts, max_new_tokens=new, **options)
        return sum(max(each.usage.completion_tokens.values()) for each in generations)

    return run


@contextmanager
def engine(specs: Sequence[MemberSpec], **runtime: Any) -> Iterator[AdaFuseEngine]:
    """Load an ensemble that keeps nothing between requests."""
    with AdaFuseEngine.from_pretrained(specs, runtime=RuntimeConfig(**runtime)) as loaded:
        yield loaded


def spec(path: Path, **options: Any) -> MemberSpec:
    return MemberSpec(str(path), prefix_cache_bytes=0, **options)


def processes(folders: Sequence[Path], size: Size) -> None:
    """Compare members in processes with members in this process and with ``generate()``."""
    prompt = prompt_of(size.prompt)
    specs = [spec(folder) for folder in folders]
    apart = [spec(folder, process=True, threads=1) for folder in folders]
    with engine(specs) as inside, engine(apart) as outside:
        texts = {each.generate(prompt, max_new_tokens=16).text for each in (inside, outside)}
        assert len(texts) == 1, texts
        systems = {
            f"`generate()` of both, {threads} thread{'s' * (threads > 1)}": generating(
                folders, prompt, size.response, threads
            )
            for threads in (1, 2)
        }
        ways = {"1 thread": inside, "2 processes": outside}
        for branches, (way, ensemble) in itertools.product((1, 3), ways.items()):
            systems[f"ensemble, B = {branches}, {way}"] = asking(
                ensemble, [prompt], size.response, branching_factor=branches
            )
        with side_by_side(folders, prompt, size.response) as both:
            systems["`generate()` of both at the same time, 2 processes"] = both
            costs = in_turns(systems, size.repeats)
        table("Two members, one request", costs, "`generate()` of both, 1 thread")
        prompts = [f"{prompt} {number}" for number in range(size.requests)]
        many = {
            f"ensemble, {way}": asking(ensemble, prompts, size.response)
            for way, ensemble in ways.items()
        }
        title = f"{size.requests} requests at once"
        table(title, in_turns(many, 1, warm=True), "ensemble, 1 thread")
    overhead()


def overhead() -> None:
    """Print what a pass of one token costs in a process of its own and in this process."""
    path = str(member_paths()[0])
    with (
        AdaFuseEngine.from_pretrained([path]) as inside,
        AdaFuseEngine.from_pretrained([MemberSpec(path, process=True, threads=1)]) as outside,
    ):
        engines = (inside, outside)
        pairs = [[statistics.median(passes(each, 1)) for each in engines] for _ in range(5)]
    here, there = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
    name = Path(path).name
    print(f"\nA pass of one token of {name}: {here:.2f} ms here, {there:.2f} ms in a process.\n")


def passes(loaded: AdaFuseEngine, nodes: int, count: int = 200) -> list[float]:
    """Return the seconds of passes over `nodes` siblings, after a prompt of 256 tokens."""
    backend = loaded.backends[0]
    tree = TokenTree([5 + number for number in range(256)])
    backend.evaluate([NodeQuery(tree, (tree.root,), (), 2)])
    seconds = []
    for _ in range(count):
        siblings = tuple(tree.grow([10 + number]) for number in range(nodes))
        started = time.perf_counter()
        backend.evaluate([NodeQuery(tree, siblings, (), 2)])
        seconds.append(time.perf_counter() - started)
        tree.commit(siblings[0])
    backend.release(tree)
    return seconds


def prompt_seconds(loaded: AdaFuseEngine, tokens: int = 256) -> float:
    """Return the median seconds of a prompt."""
    backend, seconds = loaded.backends[0], []
    for number in range(5):
        tree = TokenTree([5 + number + each for each in range(tokens)])
        started = time.perf_counter()
        backend.evaluate([NodeQuery(tree, (tree.root,), (), 2)])
        seconds.append(time.perf_counter() - started)
        backend.release(tree)
    return statistics.median(seconds)


def gguf(folders: Sequence[Path], files: Mapping[str, Sequence[Path]], size: Size) -> None:
    """Compare GGUF members with transformers members."""
    print("\n| member (one thread) | 1 node, ms | 5 nodes, ms | 256 prompt tokens, ms | MiB |")
    print("|---|---:|---:|---:|---:|")
    kinds: dict[str, MemberSpec] = {"transformers f32": spec(folders[0])}
    kinds |= {f"GGUF {kind}": spec(files[kind][0], threads=1) for kind in files}
    for name, member in kinds.items():
        with engine([member]) as loaded:
            one, five = (1000 * statistics.median(passes(loaded, n, 40)) for n in (1, 5))
            whole = 1000 * prompt_seconds(loaded)
        path = Path(member.path)
        file = path / "model.safetensors" if path.is_dir() else path
        megabytes = file.stat().st_size / 2**20
        print(f"| {name} | {one:.1f} | {five:.1f} | {whole:.0f} | {megabytes:.0f} |")
    prompt = prompt_of(size.prompt)
    prompts = [f"{prompt} {number}" for number in range(size.requests)]
    systems = {"`generate()` of one": generating(folders[:1], prompt, size.response, 1)}
    many: dict[str, Callable[[], int]] = {}
    loaded_engines = {"transformers f32": [spec(folder) for folder in folders]}
    loaded_engines |= {
        f"GGUF {kind}": [spec(file, threads=1) for file in files[kind]] for kind in files
    }
    apart = [spec(file, threads=1, process=True) for file in files["q8_0"]]
    loaded_engines["GGUF q8_0, 2 processes"] = apart
    opened = []
    for name, specs in loaded_engines.items():
        ensemble = AdaFuseEngine.from_pretrained(specs)
        opened.append(ensemble)
        for alone in ensemble.members:
            systems[f"{alone} alone, {name}"] = asking(
                ensemble, [prompt], size.response, use=(alone,)
            )
        for branches in (1, 3):
            systems[f"ensemble of two, B = {branches}, {name}"] = asking(
                ensemble, [prompt], size.response, branching_factor=branches
            )
        many[f"ensemble of two, {name}"] = asking(ensemble, prompts, size.response)
        print(f"\n{name}: {ensemble.generate(prompt, max_new_tokens=12).text!r}")
    table("One request, one thread", in_turns(systems, size.repeats), "`generate()` of one")
    title = f"{size.requests} requests at once, one thread"
    costs = in_turns(many, 1, warm=True)
    table(title, costs, "ensemble of two, transformers f32")
    for ensemble in opened:
        ensemble.close()


REAL = Size(response=24)
CHATS = ("Why is the sky blue?", "How do I boil an egg?")
REAL_PAIR = ("smollm", "qwen")


def real(folder: Path, size: Size) -> None:
    """Compare a real pair as GGUF files with the same weights in transformers.

    Every system runs in a process of its own, so that its memory can be measured. Files are written
    in a process, too, because on Linux a new process inherits the peak of the one that starts it.

    Args:
        folder: where to keep the files that are written again as Q8_0 and F32.
        size: number of repeats, and length of the responses.
    """
    files = [real_files()[name] for name in REAL_PAIR]
    pairs = {"transformers, float32": [str(real_folders()[name]) for name in REAL_PAIR]}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as writer:
        for kind in ("f32", "q8_0"):
            written = [writer.submit(rewritten, file, folder, kind) for file in files]
            pairs[f"GGUF {kind.upper()}"] = [str(each.result()) for each in written]
    pairs["GGUF Q4_1 and Q4_K_M, as downloaded"] = [str(file) for file in files]
    costs: dict[tuple[str, int], list[Cost]] = {}
    peaks: dict[str, float] = {}
    with ExitStack() as stack:
        pools = {name: stack.enter_context(ProcessPoolExecutor(1, context)) for name in pairs}
        for number in range(size.repeats + 1):
            for branches, (name, paths) in itertools.product((1, 3), pairs.items()):
                new = size.response if number else 8  # the first run is not timed
                job = pools[name].submit(_ask_real, paths, branches, new)
                cost, peaks[name] = job.result()
                if number:
                    costs.setdefault((name, branches), []).append(cost)
    print("\n| pair | B | seconds | ratio | CPU ms per token | ratio (range) | peak memory, MiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for (name, branches), runs in costs.items():
        bases = costs[next(iter(pairs)), branches]
        walls = [run.wall / base.wall for run, base in zip(runs, bases, strict=True)]
        ratios = [
            (run.cpu / run.tokens) / (base.cpu / base.tokens)
            for run, base in zip(runs, bases, strict=True)
        ]
        per_token = 1000 * statistics.median(run.cpu / run.tokens for run in runs)
        print(
            f"| {name} | {branches} | {statistics.median(run.wall for run in runs):.1f} | "
            f"{statistics.median(walls):.2f} | {per_token:.0f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {peaks[name]:,.0f} |"
        )


def _ask_real(paths: Sequence[str], branches: int, new: int) -> tuple[Cost, float]:
    """Answer the chats one after the other. Return the cost, and the process's peak in MiB."""
    import resource  # Windows has none

    loaded = _real_engine(tuple(paths))
    chats = [[{"role": "user", "content": text}] for text in CHATS]

    def run() -> int:
        generations = [
            loaded.generate(messages=chat, max_new_tokens=new, branching_factor=branches)
            for chat in chats
        ]
        return sum(max(each.usage.completion_tokens.values()) for each in generations)

    return timed(run), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


@functools.cache
def _real_engine(paths: Sequence[str]) -> AdaFuseEngine:
    torch.set_num_threads(1)
    kinds = [{"threads": 1, "context": 1024} if path.endswith(".gguf") else {} for path in paths]
    specs = [spec(Path(path), **kind) for path, kind in zip(paths, kinds, strict=True)]
    return AdaFuseEngine.from_pretrained(specs, dtype="float32")


def table(title: str, costs: Mapping[str, Cost], base: str) -> None:
    """Print costs, and their ratios to one of the systems."""
    print(f"\n**{title}**\n")
    print("| system | seconds | ratio | CPU ms per token of the response | ratio |")
    print("|---|---:|---:|---:|---:|")
    first = costs[base]
    for name, cost in costs.items():
        per_token, base_per_token = (1000 * each.cpu / each.tokens for each in (cost, first))
        print(
            f"| {name} | {cost.wall:.2f} | {cost.wall / first.wall:.2f} | {per_token:.1f} | "
            f"{per_token / base_per_token:.2f} |"
        )


def main() -> None:
    """Make the members in a temporary folder, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="use toy sizes")
    parser.add_argument("--only", choices=("processes", "gguf", "real"))
    parser.add_argument(
        "--folder", type=Path, help="where --only real keeps files that it writes (3.9 GB)"
    )
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        if arguments.only == "real":
            real(arguments.folder or Path(name), REAL)
            return
        members = {path.name: path for path in member_paths()}
        folders = [
            widen(
                members[each],
                Path(name) / each,
                width=size.width,
                inner=size.inner,
                layers=size.layers,
            )
            for each in PAIR
        ]
        if arguments.only != "gguf":
            processes(folders, size)
        if arguments.only != "processes":
            files = {
                kind: [write_gguf(folder, folder / f"{kind}.gguf", kind) for folder in folders]
                for kind in KINDS
            }
            gguf(folders, files, size)


if __name__ == "__main__":
    main()
