"""Set-up shared by all tests: offline, and one thread (tiny models are faster with one)."""

import functools
import gc
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("COLUMNS", None)  # which workers of pytest-xdist have
os.environ["TERM"] = "dumb"  # rich keeps the codes of a style in the first colours it is shown in

import pytest

from adafuse_llm.adapters.model import warn_once
from adafuse_llm.backends.llamacpp.library import find_library
from adafuse_llm.errors import MissingDependencyError
from adafuse_llm.grammar import grammar, trial
from benchmarks.real import members
from tests.support import sizes

CHROMIUM_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)

GGUF_SHARE = 6
"""One of so many tests of GGUF members runs without ``--all``."""

LONG = {"clients", "cookbook", "docker", "real", "slow", "vllm"}
"""Marks of tests that may take longer than the time limit of pyproject.toml."""

LONG_SECONDS = 1800
"""Time limit of these tests, and of those with all cases of sweeps."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run all cases of sweeps and all tests of GGUF members"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let torch use one thread, and hypothesis always draw the same examples."""
    sizes.sweeps = config.getoption("--all")
    if config.getoption("tx", None):  # workers of pytest-xdist run the tests
        return
    import torch
    from hypothesis import HealthCheck, settings

    torch.set_num_threads(1)
    settings.register_profile(
        "adafuse",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("adafuse")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    runs_all = config.getoption("--all")
    places: Counter[str] = Counter()
    chosen: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        marks = {mark.name: mark for mark in item.iter_markers()}
        group, one_in = _share(item, marks)
        places[group] += 1
        place = (places[group] - 1) * 0.6180339887 % 1  # multiples of the golden ratio: no order
        (chosen if runs_all or place < 1 / one_in else left).append(item)
        if "timeout" not in marks and (LONG & {*marks} or (runs_all and "sweep" in marks)):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
        if "gguf" in marks and not has_llama_cpp():
            item.add_marker(pytest.mark.skip(reason="llama.cpp is not installed"))
        if "real" in marks and not has_real_members():
            item.add_marker(pytest.mark.skip(reason="make real fetches the real members"))
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = chosen


def _share(item: pytest.Item, marks: Mapping[str, pytest.Mark]) -> tuple[str, int]:
    """Return the group of a test, and of how many of this group one runs without ``--all``."""
    if "sweep" in marks:
        return item.nodeid.partition("[")[0], marks["sweep"].args[0]
    if "gguf" in marks and "real" not in marks:
        return str(item.path), GGUF_SHARE
    return "", 1


@functools.cache
def has_llama_cpp() -> bool:
    """Whether llama.cpp is installed."""
    try:
        return bool(find_library())
    except MissingDependencyError:
        return False


@functools.cache
def has_real_members() -> bool:
    """Whether all real members are present, for transformers and as GGUF files."""
    return len(members.real_folders()) == len(members.real_files()) == len(members.MEMBERS)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over the million objects of imported libraries."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, which the tests of a file share."""
    api = pytest.importorskip("playwright.sync_api")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("Chromium is not installed")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=[*CHROMIUM_FLAGS])
        yield found
        found.close()


@pytest.fixture(scope="module")
def untried() -> Iterator[None]:
    """Try no grammar in a process of its own, which takes time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "try_grammar", lambda _: None)
        patch.setattr(grammar, "try_grammar", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def _no_warnings_yet() -> None:
    """Let each test see the warnings that a process logs once."""
    warn_once.cache_clear()


@pytest.fixture
def new_tab(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open tabs with options of their own. They share no cookies, and are closed at the end."""
    tabs: list[Any] = []

    def call(**options: Any) -> Any:
        tabs.append(browser.new_page(**options))
        return tabs[-1]

    yield call
    for tab in tabs:
        tab.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.getreports("skipped")
    for reason, count in Counter(each.longrepr[2] for each in skipped).items():
        terminalreporter.write_line(f"{count} {reason}")
