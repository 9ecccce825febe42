"""Shared parts of the commands: flags, loading, errors."""

from __future__ import annotations

import errno
import gc
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Optional, TypeVar, get_args, get_origin

import typer
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    AdaFuseError,
    InvalidInputError,
    InvalidOptionError,
    RuntimeConfig,
)
from adafuse_llm.cli.terminal import (
    discard_stdout,
    drop_unwritten,
    one_line,
    quiet,
    stderr_console,
    stdout_console,
)
from adafuse_llm.cli.values import FIELDS, PARSERS, parse_option
from adafuse_llm.config import CONSTRAINTS, GRAMMARS, Options
from adafuse_llm.embedded import member_paths
from adafuse_llm.errors import short_repr
from adafuse_llm.loading.config_file import LOADING, SECTIONS, ConfigFile, read_config
from adafuse_llm.loading.specs import GGUFMember, MemberSpec, as_spec
from adafuse_llm.report.terminal import Display
from adafuse_llm.serving_config import ServerConfig
from adafuse_llm.strategies.registry import AUTO, NAMED

FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130
"""Exit codes other than 0. The docstring of `adafuse_llm.cli` explains them."""

STOPPED = "interrupted"
RESUMABLE = "interrupted: run the same command again to resume"
"""What commands print on stderr after Ctrl-C."""

FILE: dict[str, Any] = {"exists": True, "dir_okay": False, "readable": True}
"""Typer settings for flags that name a file to read."""

DECODING = (
    *("max_new_tokens", "temperature", "seed", "n", "stop", "use", "weights"),
    *("json_schema", "regex", "grammar", "choices"),
)
"""Options of `AdaFuseConfig` that have a flag. All others are set with ``-o``."""

SMALL = 100_000_000
"""Number of parameters below which a member counts as small. With one thread, a small member loses
little on an idle machine and gains much on a busy one."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk. Without a file's name, they are about standard output."""


Section = TypeVar("Section", bound=Options)


@dataclass(frozen=True)
class Setup:
    """The values of the shared flags: members, loading settings, decoding options.

    Attributes:
        threads: number of CPU threads for the members. None for one thread if all members are
            small (`SMALL`), and otherwise for PyTorch's default. Members always load with one
            thread then. The variable OMP_NUM_THREADS has precedence over None.
        options: options of `AdaFuseConfig` that are set: by a flag, otherwise by the file of
            --config, otherwise by the command. Options that the command refuses are absent.
        config: `options`, completed with the defaults of `AdaFuseConfig`.
        runtime: how the engine runs requests.
        serving: how the server runs.
    """

    models: tuple[str | Mapping[str, Any], ...]
    dtype: str
    device_map: str | None
    revision: str | None
    threads: int | None
    trust_remote_code: bool
    debug: bool
    options: Mapping[str, Any]
    strategy: str
    config: AdaFuseConfig
    runtime: RuntimeConfig
    serving: ServerConfig

    @property
    def has_grammar(self) -> bool:
        """Whether a schema, a regular expression or a grammar determines the response's form."""
        return any(getattr(self.config, name) is not None for name in GRAMMARS)

    def paths(self) -> list[str]:
        """Return the folders or Hub IDs of the models. The default is the embedded members."""
        return [each.path for each in self.members()]

    def members(self) -> list[MemberSpec]:
        """Return what to load."""
        return [self._member(given) for given in self.models or map(str, member_paths())]

    @property
    def is_embedded(self) -> bool:
        """Whether all members are embedded members."""
        embedded = {path.resolve() for path in member_paths()}
        return all(Path(path).resolve() in embedded for path in self.paths())

    @contextmanager
    def engine(self, **runtime: Any) -> Iterator[AdaFuseEngine]:
        """Load the ensemble, and close it at the end.

        Args:
            **runtime: options of `RuntimeConfig` that override `runtime`.
        """
        with self.quiet(), self.load(**runtime) as engine:
            yield engine

    def display(self, engine: AdaFuseEngine) -> Display:
        """Return the display of the members that decode, on stdout."""
        members = tuple(self.config.member_weights(engine.members))
        strategy = engine.strategy.name
        return Display(members, stdout_console(), strategy, forced=self.has_grammar)

    def quiet(self) -> AbstractContextManager[None]:
        """Silence the logs and warnings of libraries while models load and run."""
        return quiet(self.debug)

    def load(self, **runtime: Any) -> AdaFuseEngine:
        """Load the ensemble. The caller closes it.

        Args:
            **runtime: options of `RuntimeConfig` that override `runtime`.
        """
        cores = os.cpu_count() or 1
        if self.threads is not None and self.threads > cores:
            raise InvalidInputError(
                f"--threads must be at most {cores}, the number of CPU cores; got {self.threads}"
            )
        names = ", ".join(Path(path).name for path in self.paths())
        local = all(map(os.path.exists, self.paths()))
        console = stderr_console()
        shown = local and console.is_interactive  # downloads show their own progress bars
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
            progress.add_task(escape(f"loading {names}"), total=None)
            import torch

            default = torch.get_num_threads()
            if self.threads is not None or "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(self.threads or 1)
            engine = AdaFuseEngine.from_pretrained(
                self.members(),
                config=self.config,
                runtime=self.runtime.model_copy(update=runtime),
                strategy=self.strategy,
                dtype=self.dtype,
                device_map=self.device_map,
                trust_remote_code=self.trust_remote_code,
                revision=self.revision,
            )
            if self.threads is None and not _are_small(engine):
                torch.set_num_threads(default)
        if not gc.isenabled():  # `run_app` has paused it
            gc.freeze()  # it never visits the objects that exist now
            gc.enable()
        return engine

    def _member(self, given: str | Mapping[str, Any]) -> MemberSpec:
        """Return a member. ``--threads`` sets the threads of GGUF members, too."""
        spec = as_spec(given, self.revision)
        if isinstance(spec, GGUFMember) and spec.threads is None:
            return spec.model_copy(update={"threads": self.threads})
        return spec


class _PlainHelp:
    """Let the help show ``--json`` and ``QUESTION``, without the Python type of the value."""

    def get_params(self, context: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in parameters:
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: None  # noqa: ARG005
            elif parameter.is_flag:
                parameter.metavar = ""
        return parameters


class PlainCommand(_PlainHelp, typer.core.TyperCommand):
    """A command with plain help."""


class PlainGroup(_PlainHelp, typer.core.TyperGroup):
    """A group of commands with plain help."""


def command(
    function: Callable[..., int],
    *,
    decoding: bool = True,
    flags: Sequence[str] = (),
    refused: Mapping[str, str] = MappingProxyType({}),
    **defaults: Any,
) -> Callable[..., None]:
    """Turn a function that takes a `Setup` and returns an exit code into a Typer command.

    The command takes the shared flags and passes their values as the parameter ``setup``. It prints
    an exception as one line on stderr.

    Args:
        function: the function. Its other parameters become the flags of this command only. A
            parameter with the name of a shared flag takes its place.
        decoding: whether the command takes options of `AdaFuseConfig`, and ``--model``, and
            ``--config``.
        flags: options of `RuntimeConfig` and `ServerConfig` that have a flag.
        refused: options of `AdaFuseConfig` that the command allows only with their default, by name
            with the reason.
        **defaults: options with a different default in this command.
    """
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
        if parameter.name != "setup"
    ]
    names = {parameter.name for parameter in own}
    shared = [*_member_flags(model=decoding)]
    if decoding:
        shared += (_option_flag(each) for each in DECODING if each not in {*names, *refused})
    parameters = [
        *own,
        *map(_option_flag, flags),
        *shared,
        _flag("options", list[str], [], OPTIONS_HELP, metavar="NAME=VALUE", flags=("-o",)),
        _CONTEXT,
        _flag("debug", bool, False, "Show tracebacks, and the warnings and logs of libraries."),
    ]
    for parameter in parameters:
        for option in getattr(parameter.annotation, "__metadata__", ()):
            if option.metavar is None:
                option.metavar = _metavar(parameter.annotation)

    def call(context: typer.Context, **values: Any) -> None:  # noqa: ARG001
        debug = values["debug"]
        try:
            typed = {name: values.pop(name) for name in [each.name for each in shared]}
            typed |= {name: values.pop(name) for name in (*flags, "options", "debug")}
            sections = ("runtime", "serving") if flags else ("runtime",)
            setup = _setup(typed, sections if decoding else (), names, refused, defaults)
            code = function(setup, **values)
            sys.stdout.flush()
        except KeyboardInterrupt:
            typer.echo(STOPPED, err=True)
            code = INTERRUPTED
        except BrokenPipeError:  # the reader closed the pipe, as in `adafuse ... | head`
            discard_stdout()
            code = FAILED
        except Exception as error:
            if debug:
                traceback.print_exc()
            code = _report(error, debug)
            drop_unwritten()
        raise typer.Exit(code)

    call.__name__ = function.__name__
    call.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


_METAVARS = {bool: "", int: "N", float: "NUMBER", str: "TEXT", Path: "FILE"}

OPTIONS_HELP = (
    "Any other option, such as max_words=2 or 'stop=[Q:, A:]'. The value is YAML, except that the "
    "text of an expression or a grammar is taken as it is. Repeatable."
)


def _metavar(kind: Any) -> str:
    """Return the name of a flag's value for the help. The kind may be optional or a list."""
    return _metavar(get_args(kind)[0]) if get_args(kind) else _METAVARS[kind]


_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def _member_flags(*, model: bool) -> Iterator[inspect.Parameter]:
    if model:
        text = (
            "Folder, GGUF file or Hub ID of a member, or the address of a server that runs it, "
            "such as vllm+http://host:8000/NAME. Repeatable. Default: the embedded members."
        )
        yield _flag("model", list[str], [], text, metavar="PATH_OR_ID")
        text = "YAML or JSON file with models, loading settings and options. Flags override it."
        yield _flag("config", Path | None, None, text)
        names = AUTO, *NAMED
        text = (
            f"Strategy that chooses the next piece of text: {', '.join(names)}, or the place of "
            "your own, such as mypackage.mymodule:MyStrategy."
        )
        yield _flag("strategy", str | None, None, text, metavar="NAME", values=names)
    text = "Data type of the weights, such as bfloat16. Default: the type in the checkpoint."
    yield _flag("dtype", str | None, None, text, metavar="NAME")
    text = "Where Accelerate places the weights, such as auto, cpu or cuda."
    yield _flag("device_map", str | None, None, text, metavar="NAME")
    text = (
        "Number of CPU threads for the members. Default: 1 if every member has fewer than "
        f"{SMALL / 1e6:.0f} million parameters, otherwise the default of PyTorch."
    )
    yield _flag("threads", int | None, None, text, min=1)
    text = "Allow custom code that comes with a model to run."
    yield _flag("trust_remote_code", bool, False, text)


def _option_flag(name: str) -> inspect.Parameter:
    """Return the flag of an option, whose default is None or an empty list."""
    field = FIELDS[name]
    text, kind = field.description or "", field.annotation
    if field.default not in (None, (), False) and "Default" not in text:
        text += f" Default: {field.default}."
    if name in PARSERS:
        parser = PARSERS[name]
        default: list[str] | None = [] if parser.kind == list[str] else None
        flag = parser.flag or f"--{name.replace('_', '-')}"
        text = f"{text} {parser.hint}"
        return _flag(name, parser.kind, default, text, metavar=parser.metavar, flags=(flag,))
    if get_origin(kind) is Literal:
        kind = str
    return _flag(name, Optional[kind], None, text)  # noqa: UP045  # computed


def _flag(
    name: str,
    kind: Any,
    default: Any,
    text: str,
    *,
    metavar: str | None = None,
    min: int | None = None,  # noqa: A002  # the name that Typer uses
    flags: Sequence[str] = (),
    values: Iterable[str] = (),
) -> inspect.Parameter:
    def completed(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    option = typer.Option(
        *(flags or (f"--{name.replace('_', '-')}",)),
        help=text,
        metavar=metavar,
        min=min,
        autocompletion=completed if values else None,
    )
    annotation = Annotated[kind, option]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _setup(
    values: dict[str, Any],
    sections: Sequence[str],
    own: Collection[str],
    refused: Mapping[str, str],
    defaults: Mapping[str, Any],
) -> Setup:
    """Return the values of the shared flags as a `Setup`.

    A flag overrides the file of --config, which overrides the command's defaults. A flag for the
    form of the response (`CONSTRAINTS`) also overrides the other options of this kind in the file.

    Args:
        values: values of the flags; None or an empty list if the flag is not given.
        sections: sections of configuration files whose options can be set.
        own: parameters of the command. Their flags take the place of options with their names.
        refused: as for `command`.
        defaults: the command's defaults.
    """
    path = values.pop("config", None)
    file = ConfigFile() if path is None else read_config(path)
    kinds: tuple[type[Options], ...] = (
        (AdaFuseConfig, *map(SECTIONS.__getitem__, sections)) if sections else ()
    )
    fields = [name for kind in kinds for name in kind.model_fields]
    allowed = [name for name in (*LOADING, *fields) if name not in own or name in refused]
    typed: dict[str, Any] = {}
    for name, value in (parse_option(text, allowed) for text in values.pop("options")):
        if name in typed:
            raise InvalidOptionError(f"option {name!r} is given twice with -o")
        typed[name] = value
    for name in [name for name in values if name in allowed]:
        given = values.pop(name)
        if given is None or given == []:
            continue
        if name in typed:
            raise InvalidOptionError(f"option {name!r} is given twice, as a flag and with -o")
        typed[name] = PARSERS[name].parse(given) if name in PARSERS else given
    overridden = CONSTRAINTS if any(name in typed for name in CONSTRAINTS) else ()
    given = {name: each for name, each in file.options.items() if name not in overridden}
    options = {
        name: each
        for name, each in {**defaults, **given, **typed}.items()
        if name in AdaFuseConfig.model_fields
    }
    for name, reason in refused.items():
        found = options.pop(name, None)
        if found is not None and found != AdaFuseConfig.model_fields[name].default:
            raise InvalidOptionError(f"option {name!r}: {reason}; got {short_repr(found)}")

    def section(name: str, kind: type[Section]) -> Section:
        given: Section = getattr(file, name)
        known = {**defaults, **given.model_dump(include=given.model_fields_set), **typed}
        return kind(**{name: each for name, each in known.items() if name in kind.model_fields})

    return Setup(
        models=tuple(values.pop("model", ())) or file.models,
        **{name: typed.get(name, getattr(file, name)) for name in LOADING},
        options=options,
        config=AdaFuseConfig(**options),
        runtime=section("runtime", RuntimeConfig),
        serving=section("serving", ServerConfig),
        **values,
    )


def _report(error: Exception, debug: bool) -> int:
    """Print an error as one line on stderr, and return the exit code."""
    if isinstance(error, AdaFuseError):
        message, code = str(error), UNUSABLE
    elif isinstance(error, OSError) and error.filename is not None:
        message, code = f"{error.filename}: {error.strerror}", UNUSABLE
    elif isinstance(error, OSError) and error.errno in _FULL:
        message, code = f"standard output: {error.strerror}", UNUSABLE
    else:
        hint = "" if debug else " (unexpected; --debug shows the traceback)"
        message, code = f"{type(error).__name__}: {error}{hint}", FAILED
    typer.echo(f"error: {one_line(message)}", err=True)
    return code


def check_logprobs(config: AdaFuseConfig, *, rounds: bool) -> None:
    """Check that the results can hold what the options `logprobs` and `top_logprobs` ask for.

    Raises:
        InvalidOptionError: an option asks for log-probabilities, and results have no rounds.
    """
    for name in ("logprobs", "top_logprobs"):
        if (value := getattr(config, name)) and not rounds:
            raise InvalidOptionError(
                f"option {name!r}: the rounds hold the log-probabilities, so also pass --rounds; "
                f"got {value}"
            )


def _are_small(engine: AdaFuseEngine) -> bool:
    """Return whether every member has fewer than `SMALL` parameters."""
    models = [getattr(backend, "model", None) for backend in engine.backends]
    return all(model is None or model.num_parameters() < SMALL for model in models)
