"""Shared parts of the commands: flags, loading, errors."""

from __future__ import annotations

import errno
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

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
from adafuse_llm.cli.collection import resume_collection
from adafuse_llm.cli.terminal import (
    discard_stdout,
    drop_unwritten,
    one_line,
    quiet,
    stderr_console,
    stdout_console,
)
from adafuse_llm.cli.values import PARSERS
from adafuse_llm.config import CONSTRAINTS, GRAMMARS, Options
from adafuse_llm.embedded import member_paths
from adafuse_llm.errors import short_repr
from adafuse_llm.loading.config_file import (
    LOADING,
    SECTIONS,
    ConfigFile,
    read_config,
)
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
        options: options of `AdaFuseConfig` that have a value. The value comes from the flag,
            otherwise from the file of --config, otherwise from the command's default. Options
            without a value are absent, and so are options that the command refuses.
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
        resume_collection()
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
    hidden: Container[str] = (),
    refused: Mapping[str, str] = MappingProxyType({}),
    sections: Sequence[str] = (),
    **defaults: Any,
) -> Callable[..., None]:
    """Turn a function that takes a `Setup` and returns an exit code into a Typer command.

    The command takes the shared flags and passes their values as the parameter ``setup``. It prints
    an exception as one line on stderr.

    Args:
        function: the function. Its other parameters become the flags of this command only. A
            parameter with the name of a shared flag takes its place.
        decoding: whether the command takes the options of `AdaFuseConfig`, and ``--model``,
            and ``--config``.
        hidden: names of shared flags that the help does not list, because the command allows only
            their default.
        refused: options of `AdaFuseConfig` that the command allows only with their default, by name
            with the reason. The help does not list their flags.
        sections: sections of configuration files (`SECTIONS`) whose options are flags.
        **defaults: options with a different default in this command. None means that the command
            chooses a value if the flag is absent.
    """
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
        if parameter.name != "setup"
    ]
    names = {parameter.name for parameter in own}
    parameters = [
        *own,
        *(flag for name in sections for flag in _section_flags(name, defaults)),
        *_member_flags(model=decoding),
        *(flag for flag in _config_flags(defaults) if decoding and flag.name not in names),
        _CONTEXT,
        _flag("debug", bool, False, "Show tracebacks, and the warnings and logs of libraries."),
    ]
    for parameter in parameters:
        for option in getattr(parameter.annotation, "__metadata__", ()):
            option.hidden = parameter.name in hidden or (
                parameter.name in refused and parameter.name not in names
            )
            if option.metavar is None:
                option.metavar = _metavar(parameter.annotation)

    def call(context: typer.Context, **values: Any) -> None:
        debug = values["debug"]
        try:
            options = [name for name in AdaFuseConfig.model_fields if name not in names]
            setup = _setup(
                values,
                options if decoding else (),
                refused,
                partial(_is_typed, context),
                dict.fromkeys(sections, defaults),
            )
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


SINGULAR = {
    "allowed_hosts": "allowed-host",
    "allowed_strategies": "allowed-strategy",
    "cors_origins": "cors-origin",
    "trusted_proxies": "trusted-proxy",
}
"""Flags of options with several values. A flag is repeated for each value."""

_METAVARS = {bool: "", int: "N", float: "NUMBER", str: "TEXT", Path: "FILE"}


def _metavar(kind: Any) -> str:
    """Return the name of a flag's value for the help. The kind may be optional or a list."""
    return _metavar(get_args(kind)[0]) if get_args(kind) else _METAVARS[kind]


_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def _config_flags(defaults: dict[str, Any]) -> Iterator[inspect.Parameter]:
    """Yield a flag for the strategy and for every option that `AdaFuseConfig` declares."""
    names = AUTO, *NAMED
    text = (
        f"Strategy that chooses the next piece of text: {', '.join(names)}, or the place of your "
        "own, such as mypackage.mymodule:MyStrategy."
    )
    yield _flag("strategy", str, AUTO, text, panel="Decoding", metavar="NAME", values=names)
    for name, field in AdaFuseConfig.model_fields.items():
        default = defaults.get(name, field.default)
        text = field.description or ""
        if name in PARSERS:
            parser = PARSERS[name]
            yield _flag(
                name,
                parser.kind,
                list(default or ()) if parser.kind == list[str] else default,
                f"{text} {parser.hint}",
                panel="Decoding",
                metavar=parser.metavar,
                flag=parser.flag,
            )
        else:
            yield _flag(name, field.annotation, default, text, panel="Decoding")


def _member_flags(*, model: bool) -> Iterator[inspect.Parameter]:
    if model:
        text = (
            "Folder, GGUF file or Hub ID of a member, or the address of a server that runs it, "
            "such as vllm+http://host:8000/NAME. Repeatable. Default: the embedded members."
        )
        yield _flag("model", list[str], [], text, panel="Members", metavar="PATH_OR_ID")
        text = "YAML or JSON file with models, loading settings and options. Flags override it."
        yield _flag("config", Path | None, None, text, panel="Members", metavar="FILE")
    text = "Data type of the weights, such as bfloat16. auto uses the type in the checkpoint."
    yield _flag("dtype", str, "auto", text, panel="Members", metavar="NAME")
    text = "Where Accelerate places the weights, such as auto, cpu or cuda."
    yield _flag("device_map", str | None, None, text, panel="Members", metavar="NAME")
    text = "Revision of models from the Hub."
    yield _flag("revision", str | None, None, text, panel="Members", metavar="NAME")
    text = (
        "Number of CPU threads for the members. Default: 1 if every member has fewer than "
        f"{SMALL / 1e6:.0f} million parameters, otherwise the default of PyTorch."
    )
    yield _flag("threads", int | None, None, text, panel="Members", min=1)
    text = "Allow custom code that comes with a model to run."
    yield _flag("trust_remote_code", bool, False, text, panel="Members")


def _section_flags(section: str, defaults: Mapping[str, Any]) -> Iterator[inspect.Parameter]:
    """Yield a flag for every option of a section of configuration files."""
    for name, field in SECTIONS[section].model_fields.items():
        kind, flag = field.annotation, name.replace("_", "-")
        default, text = defaults.get(name, field.default), field.description or ""
        if get_origin(kind) is tuple:
            kind, default, flag = list[str], list(default), SINGULAR[name]
            text += " Repeatable."
        elif get_origin(kind) is Literal:
            kind = str
        elif kind is bool and default:
            flag = f"{flag}/--no-{flag}"
        yield _flag(name, kind, default, text, panel=section.capitalize(), flag=flag)


def _flag(
    name: str,
    kind: Any,
    default: Any,
    text: str,
    *,
    panel: str | None = None,
    metavar: str | None = None,
    min: int | None = None,  # noqa: A002  # the name that Typer uses
    flag: str | None = None,
    values: Iterable[str] = (),
) -> inspect.Parameter:
    flag = f"--{(flag or name).replace('_', '-')}"

    def completed(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    option = typer.Option(
        flag,
        help=text,
        rich_help_panel=panel,
        metavar=metavar,
        min=min,
        autocompletion=completed if values else None,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def _setup(
    values: dict[str, Any],
    names: Sequence[str],
    refused: Mapping[str, str],
    is_typed: Callable[[str], bool],
    sections: Mapping[str, Mapping[str, Any]],
) -> Setup:
    """Remove the shared flags from `values` and return them as a `Setup`.

    A flag overrides the file of --config, which overrides the command's defaults. A flag for the
    form of the response (`CONSTRAINTS`) also overrides the other options of this kind in the file.

    Args:
        values: values of all flags.
        names: options of `AdaFuseConfig` that are shared flags of this command.
        refused: reasons for the options that the command refuses, as for `command`.
        is_typed: function that returns whether the user typed a flag.
        sections: the command's defaults by section, for the sections whose options are flags.
    """
    path = values.pop("config", None)
    file = ConfigFile() if path is None else read_config(path)
    overridden = CONSTRAINTS if any(map(is_typed, CONSTRAINTS)) else ()
    options: dict[str, Any] = {}
    for name in names:
        given = values.pop(name)
        if name in file.options and not is_typed(name) and name not in overridden:
            options[name] = file.options[name]
        elif given is not None and given != []:
            options[name] = PARSERS[name].parse(given) if name in PARSERS else given
    for name, reason in refused.items():
        given = options.pop(name, file.options.get(name))
        if given is not None and given != AdaFuseConfig.model_fields[name].default:
            raise InvalidOptionError(f"option {name!r}: {reason}; got {short_repr(given)}")
    models = tuple(values.pop("model", None) or ())
    loading = {}
    for name in LOADING:
        given = values.pop(name, None)
        loading[name] = given if is_typed(name) else getattr(file, name)
    return Setup(
        models=models or file.models,
        **loading,
        threads=values.pop("threads", None),
        trust_remote_code=values.pop("trust_remote_code", False),
        debug=values.pop("debug"),
        options=options,
        config=AdaFuseConfig(**options),
        runtime=_section("runtime", file.runtime, values, is_typed, sections),
        serving=_section("serving", file.serving, values, is_typed, sections),
    )


def _section(
    name: str,
    given: Section,
    values: dict[str, Any],
    is_typed: Callable[[str], bool],
    sections: Mapping[str, Mapping[str, Any]],
) -> Section:
    """Return a section of the file of --config, with the flags of its options.

    Flags are removed from `values`. They override the file, which overrides the command's defaults.
    """
    if name not in sections:
        return given
    flags = {option: values.pop(option) for option in type(given).model_fields}
    defaults = {option: each for option, each in sections[name].items() if option in flags}
    typed = {option: value for option, value in flags.items() if is_typed(option)}
    return type(given)(**{**defaults, **given.model_dump(include=given.model_fields_set), **typed})


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
