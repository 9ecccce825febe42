"""What the commands share: flags, the loading of members, and error messages."""

from __future__ import annotations

import argparse
import gc
import inspect
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from rich.markup import escape

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    AdaFuseError,
    InvalidOptionError,
    RuntimeConfig,
)
from adafuse_llm.cli.terminal import discard_stdout, one_line, stderr_console, stdout_console, tell
from adafuse_llm.config import CONSTRAINTS, GRAMMARS, Options, advice
from adafuse_llm.embedded import member_paths
from adafuse_llm.errors import nearest, short_repr
from adafuse_llm.loading.config_file import LOADING, SECTIONS, ConfigFile, read_config, read_schema
from adafuse_llm.loading.specs import GGUFMember
from adafuse_llm.report.terminal import Display
from adafuse_llm.serving_config import ServerConfig
from adafuse_llm.strategies.registry import AUTO, NAMED

FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130
"""Exit codes other than 0, which the docstring of `adafuse_llm.cli` explains."""

STOPPED = "interrupted"
"""The message on stderr after Ctrl-C."""

ONE_RESPONSE: Final = {
    "n": "this command gives one response; for another one, run it again with another seed",
    "continue_final_message": "this command writes the messages itself",
}
"""Options that commands with one response refuse, each with the reason."""

DECODING: Final = {
    "max_new_tokens": (
        "--max-new-tokens NUMBER",
        "Maximum number of tokens of the response, in any member's tokens. Default: 256, and 2,048 "
        "for a response of a given form.",
    ),
    "temperature": ("--temperature NUMBER", "Draw the response: the higher, the more random."),
    "seed": ("--seed NUMBER", "Seed of what is drawn. Default: a random one, which is reported."),
    "stop": (
        "--stop TEXT",
        r"End the response before this text. Repeatable. \n is a line break, '' no such text.",
    ),
    "use": ("--use NAME", "Name of a member that decodes. Repeatable. Default: all members."),
    "json_schema": ("--json-schema FILE", "JSON schema that the response fits."),
    "choices": ("--choice TEXT", "Text that the response may be. Repeatable; the likeliest wins."),
}
"""By option of `AdaFuseConfig`: the flag that sets it in commands that decode, and its help."""

OPTIONS: Final = (AdaFuseConfig, RuntimeConfig)
"""Classes of the options that most commands can set with ``-o``."""

FIELDS: Final = {
    **ConfigFile.model_fields,
    **RuntimeConfig.model_fields,
    **ServerConfig.model_fields,
}
"""The options that flags and ``-o`` can set, by name."""


@dataclass(frozen=True)
class Setup:
    """The settings from the shared flags.

    Attributes:
        file: models, loading settings and options: from flags, from the file of --config, or else
            from the command's defaults. Options that the command refuses are absent.
        threads: number of CPU threads for the members; None for the default of --threads.
        trust_remote_code: whether to run code that comes with a model.
        debug: whether to show tracebacks and the logs of libraries.
    """

    file: ConfigFile
    threads: int | None
    trust_remote_code: bool
    debug: bool

    @property
    def has_grammar(self) -> bool:
        """Whether a schema, a regular expression or a grammar sets the form of the response."""
        return any(getattr(self.file, name) is not None for name in GRAMMARS)

    @property
    def is_embedded(self) -> bool:
        """Whether all members are embedded members."""
        embedded = {path.resolve() for path in member_paths()}
        return all(Path(spec.path).resolve() in embedded for spec in self.file.members)

    def identity(self, config: AdaFuseConfig) -> dict[str, Any]:
        """Return all models and options on which the answers of a run depend, as JSON data."""
        models = list(self.file.models) or "embedded"
        return {"models": models, **self.file.loading, **config.model_dump(mode="json")}

    def display(self, engine: AdaFuseEngine) -> Display:
        """Return a display on stdout for the members that decode."""
        members = [*engine.config.member_weights(engine.members)]
        console = stdout_console()
        return Display(members, console, engine.strategy.name, forced=self.has_grammar)

    def load(self, config: AdaFuseConfig | None = None) -> AdaFuseEngine:
        """Load the ensemble, which the caller must close. Without `debug`, silence other libraries.

        `config`: the engine's decoding options. Default: those of `file`.
        """
        members = [
            spec.model_copy(update={"threads": self.threads})
            if isinstance(spec, GGUFMember) and spec.threads is None
            else spec
            for spec in self.file.members
        ]
        console = stderr_console()
        # show no status during downloads, which have progress bars
        shown = console.is_interactive and all(Path(spec.path).exists() for spec in members)
        names = ", ".join(Path(spec.path).name for spec in members)
        with console.status(escape(f"loading {names}")) if shown else nullcontext():
            import torch

            if self.debug:
                logging.basicConfig(level=logging.INFO)
            else:
                from transformers.utils import logging as chatter

                chatter.set_verbosity(chatter.CRITICAL)
                warnings.simplefilter("ignore")
            if self.threads is not None:
                torch.set_num_threads(self.threads)
            elif self.is_embedded and "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(1)  # more threads gain little, and lose on a busy machine
            engine = AdaFuseEngine.from_pretrained(
                members,
                config=config or self.file.config,
                runtime=self.file.runtime,
                trust_remote_code=self.trust_remote_code,
                **self.file.loading,
            )
        if not gc.isenabled():  # because `main` has disabled it
            gc.freeze()  # the collector never visits the objects that exist now
            gc.enable()
        return engine


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors. For an unknown flag, it suggests a known one."""

    unused: Collection[str] = ()

    def flag(self, usage: str, text: str = "", **settings: Any) -> None:
        """Add a flag. A flag with the name of an option sets this option.

        Args:
            usage: the flag, and the name of its value if it has one, such as ``--trials N``. FILE
                and PATH stand for a `Path`, and N for a whole number from 1.
            text: the help, or "" for the option's description. The default is added to it. If it
                says *Repeatable*, the value is a list.
            **settings: other arguments of `add_argument`.
        """
        flag, _, value = usage.partition(" ")
        name = settings.setdefault("dest", flag.strip("-").replace("-", "_"))
        if not value:
            settings["action"] = "store_true"
        else:
            kinds = {"FILE": Path, "PATH": Path, "N": positive}
            settings = {"metavar": value, "type": kinds.get(value, str), **settings}
        text = text or FIELDS[name].description or ""
        if "Repeatable" in text:
            settings |= {"action": "append", "default": []}
        default = settings.get("default", FIELDS[name].default if name in FIELDS else None)
        if default and "Default" not in text:
            text += f" Default: {default}."
        self.add_argument(flag, help=text, **settings)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the values of all arguments, among which flags may stand anywhere."""
        flags, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            flag = unknown[0].partition("=")[0]
            option = flag.strip("-").replace("-", "_")
            known = self._option_string_actions
            hint = nearest(flag, known, similarity=0.75)  # not --strategy for --trace
            if option in FIELDS:
                hint = "" if option in self.unused else f" Use -o {option}=VALUE"
            self.error(f"unknown argument {flag}.{hint}")
        return flags

    def error(self, message: str) -> NoReturn:  # noqa: D102
        tell(f"error: {one_line(message)} ({self.prog} --help shows the flags)")
        raise SystemExit(UNUSABLE)


@dataclass(frozen=True)
class Command:
    """A command: a function and its flags.

    Attributes:
        function: the function, which returns the exit code. Its docstring is the help.
        add_flags: function that adds the command's own flags to a parser.
        arguments: the arguments that are not flags, as the first line of the help shows them.
        kinds: classes of the options that ``-o`` can set besides `LOADING`. If empty, the command
            has no flags for members and decoding, and ignores such options of a configuration file.
        refused: reasons why this command refuses an option, by the name of the option.
        defaults: values that replace the usual defaults of options in this command.
        unused: options without effect in this command. Only a configuration file may set them.
    """

    function: Callable[[Setup, argparse.Namespace], int]
    add_flags: Callable[[Parser], None]
    arguments: str = ""
    kinds: Sequence[type[Options]] = OPTIONS
    refused: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unused: Collection[str] = ()

    def run(self, arguments: Sequence[str]) -> int:
        """Run the command, and return its exit code. An exception becomes one line on stderr."""
        flags = self.parser().read(arguments)
        try:
            code = self.function(self._setup(flags), flags)
            sys.stdout.flush()
        except KeyboardInterrupt:
            tell(STOPPED)
            return INTERRUPTED
        except BrokenPipeError:  # the reader closed the pipe, as in `adafuse ... | head`
            discard_stdout()
            return FAILED
        except Exception as error:
            if flags.debug:
                traceback.print_exc()
            message, code = _described(error)
            tell(f"error: {one_line(message)}")
            try:
                sys.stdout.flush()
            except OSError:  # such as a full disk
                discard_stdout()
        return code

    def parser(self) -> Parser:
        """Return a parser of the command's own flags and of those that commands share."""
        parser = Parser(
            f"adafuse {self.function.__name__}",
            usage=" ".join(["%(prog)s", *self.arguments.split(), "[flags]"]),
            description=inspect.getdoc(self.function),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.unused = self.unused
        self.add_flags(parser)
        parser.flag("--config FILE", "YAML or JSON file with models and options.")
        if self.kinds:
            parser.flag(
                "--model PATH_OR_ID",
                "Folder, GGUF file or Hub ID of a member, or the address of a server that runs it, "
                "such as vllm+http://host:8000/NAME. Repeatable. Default: the embedded members.",
                dest="models",
            )
            if "strategy" not in self.unused:
                parser.flag(
                    "--strategy NAME",
                    "Strategy that chooses the next piece of text: "
                    f"{', '.join((AUTO, *NAMED))}, or the place of your own, such as "
                    "mypackage.mymodule:MyStrategy.",
                )
            for name, (usage, text) in DECODING.items():
                if name not in (*self.refused, *self.unused):
                    parser.flag(usage, text, dest=name)
        parser.flag("--dtype NAME", "Data type of the weights. Default: that of the checkpoint.")
        parser.flag(
            "--device-map NAME", "Where Accelerate places the weights, such as auto or cuda."
        )
        parser.flag(
            "--threads N",
            "Number of CPU threads of each member. Default: all physical cores for GGUF files; 1 "
            "for the embedded members; otherwise PyTorch's default.",
        )
        parser.flag("--trust-remote-code", "Allow code that comes with a model to run.")
        text = "Any other option, such as revision=main. Repeatable."
        if self.kinds:
            text = (
                "Any other option, such as revision=main or 'weights={wren: 2, heron: 1}'. The "
                "value is YAML, except for a regex or a grammar. Repeatable."
            )
        parser.flag("-o NAME=VALUE", text, dest="options")
        parser.flag("--debug", "Show tracebacks, and the logs of libraries.")
        return parser

    def _setup(self, flags: argparse.Namespace) -> Setup:
        """Return the settings from the shared flags.

        A flag overrides the file of --config, which overrides the command's defaults. A flag for
        the form of the response (`CONSTRAINTS`) overrides all such options in the file.
        """
        file = ConfigFile() if flags.config is None else read_config(flags.config)
        typed = self._typed(flags)
        overridden = CONSTRAINTS if any(name in typed for name in CONSTRAINTS) else ()
        of_file = {name: getattr(file, name) for name in file.model_fields_set - {*overridden}}
        values = {**self.defaults, **of_file, **typed}
        for name, reason in self.refused.items():
            value = values.pop(name, None)
            if value is not None and value != AdaFuseConfig.model_fields[name].default:
                raise InvalidOptionError(f"option {name!r}: {reason}; got {short_repr(value)}")
        for section, kind in SECTIONS.items():
            known = getattr(file, section).model_dump(exclude_unset=True)
            values[section] = kind(**_only(kind, {**self.defaults, **known, **typed}))
        merged = ConfigFile(**_only(ConfigFile, values))
        return Setup(merged, flags.threads, flags.trust_remote_code, flags.debug)

    def _typed(self, flags: argparse.Namespace) -> dict[str, Any]:
        names = [*LOADING, *(name for kind in self.kinds for name in kind.model_fields)]
        allowed = [name for name in names if name not in self.unused]
        given = {
            name: value
            for name, value in vars(flags).items()
            if name in ("models", *allowed) and value not in (None, [], False)
        }
        if "stop" in given:
            given["stop"] = tuple(unescaped(text) for text in given["stop"] if text)
        if "json_schema" in given:
            given["json_schema"] = read_schema(given["json_schema"])
        for name, value in (parse_option(text, allowed) for text in flags.options):
            if name in given:
                raise InvalidOptionError(f"option {name!r} is given twice")
            given[name] = value
        return given


def _only(kind: type[Options], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in kind.model_fields}


def positive(text: str) -> int:
    """Return a flag's value as a whole number, which must be 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more; got {number}")
    return number


def parse_option(text: str, allowed: Sequence[str]) -> tuple[str, Any]:
    """Return the name and the value of ``NAME=VALUE``. YAML is parsed, except for text options.

    Raises:
        InvalidOptionError: the text does not have this form, or the name is not in `allowed`.
    """
    name, _, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not name or "=" not in text:
        raise InvalidOptionError(
            f"-o takes NAME=VALUE, such as max_words=2; got {short_repr(text)}"
        )
    if name not in allowed:
        raise InvalidOptionError(f"unknown option {name!r}.{advice(name, allowed)}")
    if FIELDS[name].annotation in (str, str | None):
        return name, value
    import yaml

    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        return name, value


def unescaped(text: str) -> str:
    r"""Replace the escapes ``\n``, ``\t`` and ``\\`` in the value of a flag."""
    escapes = {"n": "\n", "t": "\t", "\\": "\\"}
    return re.sub(r"\\([nt\\])", lambda match: escapes[match[1]], text)


def _described(error: Exception) -> tuple[str, int]:
    if isinstance(error, AdaFuseError):
        return str(error), UNUSABLE
    if isinstance(error, OSError) and error.strerror:  # errors about a full disk have no file name
        named = "" if error.filename is None else f"{error.filename}: "
        return f"{named}{error.strerror}", UNUSABLE
    return f"{type(error).__name__}: {error} (unexpected; --debug shows the traceback)", FAILED
