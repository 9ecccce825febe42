"""Change the package in one place at a time, and see whether the tests nearest to it fail.

    python -m tests.mutants adafuse_llm/text/stops.py --sample 20
    python -m tests.mutants adafuse_llm/text/stops.py:51

The first command runs the tests of `tests/text` and `tests/test_*.py` once, and notes which of them
run each line. Each mutant then gets a process of its own with the tests that run its statement, up
to the first failure. Wordings, annotations, logging and assertions are not changed. A mutant that
survives is a missing test, code that can go, or equivalent to the original.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PLACES = tuple(
    f"adafuse_llm/{folder}"
    for folder in ("decoding", "strategies", "text", "runtime", "adapters", "serving")
)
PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.BitOr, ast.BitAnd)),
)
OTHERS: Mapping[type[ast.AST], type[ast.AST]] = {
    **{one: other for pair in PAIRS for one, other in (pair, pair[::-1])},
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Add,
}
"""Operators, and what takes their place."""

OWN = ("adafuse_llm", "benchmarks", "docs", "langchain_", "llama_index.", "tests", "training", "__")
"""Beginnings of the names of modules that may import the package."""

Change = Callable[[], object]
Lines = dict[str, dict[str, set[int]]]
"""The lines that a test runs, by test and file."""


class Mutant(NamedTuple):
    """A changed file: where, what, and its source. `lines` are those of the whole statement."""

    file: str
    line: int
    lines: range
    what: str
    source: str


def mutants_of(file: str) -> Iterator[Mutant]:
    """All mutants of a file, in the order of its syntax tree."""
    text = Path(file).read_text(encoding="utf-8")
    sizes = [len(changes(node)) for node, _ in changeable(ast.parse(text), range(0))]
    for place, size in enumerate(sizes):
        for number in range(size):
            tree = ast.parse(text)
            node, lines = changeable(tree, range(0))[place]
            line, before = node.lineno, ast.unparse(node)
            changes(node)[number]()
            after = ast.unparse(ast.fix_missing_locations(node))
            what = "  ->  ".join(each.partition("\n")[0][:70] for each in (before, after))
            yield Mutant(file, line, lines, what, ast.unparse(tree))


def changeable(node: ast.AST, lines: range) -> list[tuple[Any, range]]:
    """The nodes below `node` whose change is no change of words, types or imports, each with the
    lines of its statement.
    """
    found: list[tuple[Any, range]] = []
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or is_wording(child):
                continue
            own = lines
            if isinstance(child, ast.stmt):
                own = range(child.lineno, (child.end_lineno or child.lineno) + 1)
            if hasattr(child, "lineno"):
                found.append((child, own))
            found += changeable(child, own)
    return found


def is_wording(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        called = node.value.func if isinstance(node.value, ast.Call) else node.value
        return isinstance(called, ast.Constant) or "logger." in ast.unparse(called)
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":  # lengths are equal
        return True
    if isinstance(node, ast.Call):  # an error with its message
        return ast.unparse(node.func).endswith("Error")
    left_out = (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.AnnAssign)
    return isinstance(node, left_out) and getattr(node, "value", None) is None


def changes(node: Any) -> list[Change]:  # noqa: C901
    """The ways to change a node in its place."""

    def put(name: str, value: object) -> Change:
        return lambda: setattr(node, name, value)

    def negated(test: ast.expr) -> ast.expr:
        return ast.UnaryOp(ast.Not(), test)

    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHERS:
            return [put("ops", [OTHERS[type(op)]()])]
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OTHERS:
            drop = [put("__class__", ast.Pass)] if isinstance(node, ast.AugAssign) else []
            return [put("op", OTHERS[type(op)]()), *drop]
        case ast.UnaryOp(op=ast.Not(), operand=test):
            return [put("operand", negated(test))]
        case ast.If(test=ast.BoolOp() | ast.Call() | ast.Name() | ast.Attribute() as test):
            return [put("test", negated(test))]
        case ast.Constant(value=bool() as value):
            return [put("value", not value)]
        case ast.Constant(value=int() | float() as value):
            return [put("value", value + 1)]
        case ast.Constant(value=str() as value) if value.count(" ") < 2:  # else it is a wording
            return [put("value", value + "XX")]
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            return [put("value", ast.Constant(None))]
        case ast.Break():
            return [put("__class__", ast.Continue)]
        case ast.Expr() | ast.Raise() | ast.Continue():
            return [put("__class__", ast.Pass)]
    return []


# Tests ----------------------------------------------------------------------------------------


class Recorder:
    """A plugin of pytest that notes the lines of some files that each test runs, and its time."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = {str(Path(file).resolve()): file for file in files}
        self.lines: Lines = defaultdict(lambda: defaultdict(set))
        self.seconds: dict[str, float] = {}
        self.test = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.test, start = item.nodeid, time.perf_counter()
        threading.settrace(self.call)
        sys.settrace(self.call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self.seconds[item.nodeid] = time.perf_counter() - start

    def call(self, frame: Any, event: str, argument: Any) -> Any:
        return self.step if frame.f_code.co_filename in self.files else None

    def step(self, frame: Any, event: str, argument: Any) -> Any:
        self.lines[self.test][self.files[frame.f_code.co_filename]].add(frame.f_lineno)
        return self.step


def in_child(task: Callable[[], int], seconds: float, log: str = os.devnull) -> int | None:
    """Run a task in a forked process group, which prints to a file.

    Returns:
        Its exit status, or None after `seconds`.
    """
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setsid()
            file = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            code = task()
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if done[0] == 0:
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(done[1])


def run_tests(arguments: Sequence[str], *plugins: object) -> int:
    options = ("-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:randomly")
    return int(pytest.main([*options, *arguments], plugins=[*plugins]))


def run_mutant(mutant: Mutant, arguments: Sequence[str]) -> int:
    """Run tests while a file has the source of a mutant."""
    read, path = SourceFileLoader.get_code, str(Path(mutant.file).resolve())

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        if loader.path == path:
            return compile(mutant.source, path, "exec", dont_inherit=True)
        return read(loader, name)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]
    return run_tests(arguments)


def recorded(files: Sequence[str], tests: Sequence[str]) -> tuple[Lines, dict[str, float]]:
    """The lines and the seconds of all tests. All must pass. Afterwards, this process has imported
    what they import from elsewhere, so that mutants start at once.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines.json")

        def record() -> int:
            recorder = Recorder(files)
            code = run_tests(tests, recorder)
            lines = {t: {f: sorted(n) for f, n in r.items()} for t, r in recorder.lines.items()}
            modules = [name for name in sys.modules if not name.startswith(OWN)]
            path.write_text(json.dumps([lines, recorder.seconds, modules]))
            return code

        if in_child(record, 3600, str(log := Path(folder, "log"))) != 0:
            raise SystemExit(f"tests fail without any mutant:\n{log.read_text()[-3000:]}")
        lines, seconds, modules = json.loads(path.read_text())
        if in_child(lambda: run_tests(["--collect-only", *seconds]), 600) != 0:
            raise SystemExit("some tests have other names in every run")
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return lines, seconds


def main() -> None:
    """Try mutants, and print those that no test notices."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("places", nargs="*", default=PLACES, help="files, folders, FILE:LINE,LINE")
    parser.add_argument("--sample", type=int, help="number of mutants of each file or folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--tests", nargs="+", help="files and folders of tests")
    args = parser.parse_args()
    survivors: list[Mutant] = []
    for place in args.places:
        name, _, numbers = place.partition(":")
        path = Path(name)
        files = sorted(map(str, path.rglob("*.py"))) if path.is_dir() else [name]
        found = [mutant for file in files for mutant in mutants_of(file)]
        if numbers:
            found = [mutant for mutant in found if str(mutant.line) in numbers.split(",")]
        if args.sample is not None and args.sample < len(found):
            found = sorted(random.Random(args.seed).sample(found, args.sample))
        near = Path("tests", *path.parts[1:2])
        tests = args.tests or [str(near), *map(str, sorted(Path("tests").glob("test_*.py")))]
        lines, seconds = recorded(files, tests)
        tried, lived = Counter[str](), Counter[str]()
        for mutant in found:
            own = [
                test
                for test, run in lines.items()
                if not {*mutant.lines}.isdisjoint(run.get(mutant.file, ()))
            ]
            own = sorted(own, key=lambda test: seconds[test]) or tests
            tried[mutant.file] += 1
            limit = 60 + sum(10 + 5 * seconds.get(test, 10.0) for test in own)
            if in_child(partial(run_mutant, mutant, own), limit) == 0:
                lived[mutant.file] += 1
                survivors.append(mutant)
                print(f"{mutant.file}:{mutant.line}: {mutant.what}", flush=True)
        for file in sorted(tried):
            print(f"{file}: {tried[file]} tried, {lived[file]} survived", flush=True)
    print(f"{len(survivors)} survived")


if __name__ == "__main__":
    main()
