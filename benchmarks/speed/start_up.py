"""Measure what the time from a command to its first words consists of.

Each measurement runs the command in a new process and times its parts one by one. The modules of
torch and transformers are imported first, so that their time is not part of anything else.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.speed.measure import Report, Target

if TYPE_CHECKING:
    import typer

ROOT: Final = Path(__file__).parents[2]

QUESTION: Final = "Who was the architect of the Silesse Mill?"

COMMANDS: Final[Mapping[str, Sequence[str]]] = {
    "adafuse ask": ("ask", QUESTION),
    "adafuse generate": ("generate", "The Silesse Mill is", "--max-new-tokens", "4"),
}
"""The commands to measure. Both use the embedded members."""

MODELS: Final = ("Qwen3ForCausalLM", "StableLmForCausalLM", "Olmo2ForCausalLM")
"""Classes of the embedded members."""

INTERPRETER: Final = "start of Python"
PACKAGE: Final = "import of adafuse_llm, typer and rich"
TORCH: Final = "import of torch"
MODEL_CODE: Final = "import of transformers"
REST: Final = "everything else"

STEPS: Final[Sequence[tuple[str, str, str]]] = (
    ("search of the passages", "adafuse_llm.cli.ask", "read_documents"),
    ("search of the passages", "adafuse_llm.documents", "Retriever.search"),
    ("configurations", "adafuse_llm.loading.members", "plan_huggingface"),
    ("weights", "adafuse_llm.loading.members", "load_huggingface"),
    ("tokenizers", "adafuse_llm.loading.huggingface", "load_huggingface_text"),
    ("trial at load", "adafuse_llm.backends.huggingface.trial", "Trial.choose"),
)
"""Parts of a command, each with a function that does it. A part does not include other parts within
it, such as the tokenizers within the weights."""

FIRST_ROUND: Final = "prompt and first round"


class Seconds(NamedTuple):
    """Wall-clock seconds and CPU seconds."""

    wall: float
    cpu: float


def moment() -> Seconds:
    """Return the time of the system, and the CPU time of this process since its start."""
    return Seconds(time.time(), time.process_time())


class Stopwatch:
    """A stopwatch that assigns every moment to one part: the innermost one that is running.

    Args:
        started: wall-clock time at which the process was started.
    """

    def __init__(self, started: float) -> None:
        self.parts: dict[str, Seconds] = {}
        self._last = Seconds(started, 0.0)
        self._running = [INTERPRETER]
        self.lap()
        self._running = [REST]

    def lap(self) -> None:
        """Add the time since the last lap to the part that is running."""
        now = moment()
        wall, cpu = self.parts.get(self._running[-1], (0.0, 0.0))
        self.parts[self._running[-1]] = Seconds(
            wall + now.wall - self._last.wall, cpu + now.cpu - self._last.cpu
        )
        self._last = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Assign the time of the ``with`` block to a part, unless another part runs within it."""
        self.lap()
        self._running.append(name)
        try:
            yield
        finally:
            self.lap()
            self._running.pop()

    def watch(self, name: str, owner: Any, attribute: str) -> None:
        """Assign the time of a function to a part."""
        function: Callable[..., Any] = getattr(owner, attribute)

        @functools.wraps(function)
        def watched(*args: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*args, **options)

        setattr(owner, attribute, watched)


def run(arguments: Sequence[str], started: float) -> None:
    """Run a command in this process, and write the seconds of its parts to stderr at its end."""
    watch = Stopwatch(started)
    sys.argv = ["adafuse", *arguments]
    with watch.part(PACKAGE):
        from adafuse_llm.cli import create_app, run_app
    try:
        run_app(functools.partial(_create, watch, create_app, arguments[0]), "adafuse")
    finally:
        print(json.dumps(watch.parts), file=sys.stderr)


def _create(watch: Stopwatch, create_app: Callable[..., typer.Typer], name: str) -> typer.Typer:
    """Import what the command needs, watch its parts, and create the application."""
    with watch.part(PACKAGE):
        app = create_app([name])
    with watch.part(TORCH):
        import_module("torch")
    with watch.part(MODEL_CODE):
        transformers = import_module("transformers")
        for model in MODELS:
            getattr(transformers, model)
    for part, module, path in STEPS:
        owner: Any = import_module(module)
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        watch.watch(part, owner, attribute)
    _watch_stream(watch)
    return app


def _watch_stream(watch: Stopwatch) -> None:
    """Measure the time from the request to the first event, and stop measuring there."""
    from adafuse_llm import AdaFuseEngine

    stream = AdaFuseEngine.stream

    def watched(*args: Any, **options: Any) -> Iterator[Any]:
        with watch.part(FIRST_ROUND):
            events = stream(*args, **options)
            first = next(events)
        found = dict(watch.parts)
        yield first
        yield from events
        watch.parts = found

    AdaFuseEngine.stream = watched  # type: ignore[method-assign, assignment]


def measure(report: Report, runs: int) -> None:
    """Add the median seconds of each command's parts, over several runs, to a report."""
    for name, arguments in COMMANDS.items():
        whole(arguments)  # the operating system caches the files
        parts, ends = [], []
        for _ in range(runs):
            parts.append(parts_of(arguments))
            ends.append({"whole": whole(arguments)})
        found = medians(parts)
        total = Seconds(*map(sum, zip(*found.values(), strict=True)))
        rows = {
            **found,
            "until the first words": total,
            "the whole command": medians(ends)["whole"],
        }
        report.figures += [
            (f"{name}: {part}", f"{seconds.cpu:.2f} s of CPU time, {seconds.wall:.2f} s")
            for part, seconds in rows.items()
        ]
        imports = found[INTERPRETER].cpu + found[TORCH].cpu + found[MODEL_CODE].cpu
        report.targets.append(
            Target(
                f"{name}, CPU time to the first words / start of Python and imports of torch and "
                "transformers",
                total.cpu / imports,
                1.5,
            )
        )


def parts_of(arguments: Sequence[str]) -> dict[str, Seconds]:
    """Run a command in a new process, and return the seconds of its parts until the first words."""
    code = "import sys; from benchmarks.speed.start_up import run; "
    code += "run(sys.argv[2:], float(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(time.time()), *arguments]
    done = subprocess.run(
        command, env=_environment(), capture_output=True, text=True, check=True, cwd=ROOT
    )
    found = json.loads(done.stderr.splitlines()[-1])
    return {name: Seconds(*seconds) for name, seconds in found.items()}


def whole(arguments: Sequence[str]) -> Seconds:
    """Run a command in a new process, and return the seconds until the process ends."""
    import resource

    code = "from adafuse_llm.cli import main; main()"
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=_environment(), capture_output=True, check=True, cwd=ROOT,
    )  # fmt: skip
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Seconds(wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def medians(runs: Sequence[Mapping[str, Seconds]]) -> dict[str, Seconds]:
    """Return the median seconds of each part over several runs."""
    return {
        name: Seconds(*map(statistics.median, zip(*(each[name] for each in runs), strict=True)))
        for name in runs[0]
    }


def _environment() -> dict[str, str]:
    """Return the variables for the process. They let Python store compiled modules, as usual."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment
