"""The arguments of the command, and what is made of them: tasks, engine and runner."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, InvalidInputError
from adafuse_llm.cli.common import Setup
from adafuse_llm.cli.terminal import interruptible
from adafuse_llm.strategies.registry import AUTO
from adafuse_llm.text.prompt_warnings import logger as prompt_warnings
from benchmarks.paper.layout import OF_TASKS, Suite, load_suite
from benchmarks.paper.run import Runner, Work, load_work
from benchmarks.real.members import FOLDER_VARIABLE, real_folder, real_folders


class Given(TypedDict):
    """The arguments as they were given."""

    suite: str
    output: Path | None
    data: Path | None
    tasks: Sequence[str]
    metrics: Sequence[str]
    limit: int | None
    first: int | None
    max_requests: int | None
    workers: int | None
    chat: bool


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Checked arguments of the command.

    Attributes:
        name: name or file of the suite.
        suite: the suite.
        works: tasks by name.
        absent: tasks that are left out, with the reason.
        output: folder of the answers and the report.
        models: the models, as the report and the answers name them.
    """

    name: str
    suite: Suite
    works: dict[str, Work]
    absent: dict[str, str]
    output: Path
    models: tuple[str | Mapping[str, Any], ...]


def check_arguments(setup: Setup, given: Given) -> tuple[Arguments, Setup]:
    """Check the arguments before a model is loaded. Return them, and the setup of the members."""
    suite = load_suite(given["suite"]).limited(given["limit"]).starting(given["first"])
    if given["max_requests"] is not None:
        suite = suite.model_copy(update={"max_requests": given["max_requests"]})
    if given["workers"] is not None:
        suite = suite.model_copy(update={"workers": given["workers"]})
    if given["chat"]:
        suite = suite.model_copy(update={"chat": True})
    defaults = AdaFuseConfig()
    allowed = ", ".join("--" + option.replace("_", "-") for option in OF_TASKS)
    for option, value in setup.options.items():
        if option not in OF_TASKS and value != getattr(defaults, option):
            raise InvalidInputError(
                f"--{option.replace('_', '-')} is not allowed, because the rows of a suite set it. "
                f"To change it, write a suite file. Allowed options: {allowed}."
            )
    if setup.strategy != AUTO:
        raise InvalidInputError("--strategy is not allowed, because the rows of a suite set it")
    output = given["output"] or Path("results") / Path(given["suite"]).stem
    if output.exists() and not output.is_dir():
        raise InvalidInputError(f"--output {output} must be a folder; it is a file")
    options = {
        option: value
        for option, value in setup.options.items()
        if option in OF_TASKS and option != "use"
    }
    works, absent = load_work(
        suite, given["data"], tasks=given["tasks"], metrics=given["metrics"], options=options
    )
    if suite.real and setup.models:
        raise InvalidInputError("--model is not allowed, because the suite names its members")
    models = setup.models or suite.models
    setup = dataclasses.replace(
        setup,
        models=_real_models(suite.real) or models,
        dtype=suite.dtype if setup.dtype == "auto" else setup.dtype,
        device_map=setup.device_map or suite.device_map,
    )
    return Arguments(given["suite"], suite, works, absent, output, suite.real or models), setup


def _real_models(names: Sequence[str]) -> tuple[dict[str, str], ...]:
    """Return members of ``make real`` to load.

    Raises:
        InvalidInputError: a member is not there.
    """
    folders = real_folders()
    if missing := [name for name in names if name not in folders]:
        raise InvalidInputError(
            f"the real members {', '.join(missing)} are not in {real_folder()}. Run `make real`, "
            f"which fetches them, or set {FOLDER_VARIABLE} to the folder that has them."
        )
    return tuple({"path": str(folders[name]), "name": name} for name in names)


class LazyEngine:
    """The engine with all members. It is loaded on the first call."""

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        plain = dataclasses.replace(setup, config=AdaFuseConfig())
        self._setup, self._stack = plain, stack

    @cached_property
    def _engine(self) -> AdaFuseEngine:
        with interruptible():
            engine = self._stack.enter_context(self._setup.engine())
        # the engine of every row would repeat what this one has said of the members
        self._stack.callback(prompt_warnings.setLevel, prompt_warnings.level)
        prompt_warnings.setLevel(logging.ERROR)
        return engine

    def __call__(self) -> AdaFuseEngine:
        return self._engine


def make_runner(
    arguments: Arguments, setup: Setup, engine: LazyEngine, members: Sequence[str]
) -> Runner:
    """Return the runner of a suite's jobs.

    Args:
        arguments: the checked arguments.
        setup: the setup of the members.
        engine: the engine with all members.
        members: names of the members that take part.
    """
    return Runner(
        engine,
        arguments.output,
        arguments.works,
        arguments.suite,
        identity={
            "models": list(arguments.models) or "embedded",
            "dtype": setup.dtype,
            "revision": setup.revision,
            "device_map": setup.device_map,
        },
        members=None if setup.config.use is None else members,
    )
