"""The `adafuse` command: parse the flags, call the engine, print the result.

Exit codes: 0 success; 1 unexpected failure, or members that cannot work together (`info`); 2
unusable input, option or model; 130 interrupted.

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final

from adafuse_llm import __version__
from adafuse_llm.errors import install_command

if TYPE_CHECKING:
    from adafuse_llm.cli.common import Command

__all__ = ["COMMANDS", "load", "main", "run"]

COMMANDS: Final = {
    "ask": "answer a question from documents and show how the ensemble decides",
    "decide": "answer a question about a text with probabilities of given options",
    "chat": "talk with the ensemble, and see which member wrote what",
    "generate": "continue a prompt, or answer it as a chat message",
    "serve": "serve the ensemble to applications, in the form of OpenAI's API",
    "tune": "find the best members and options, and test them against the best member alone",
    "info": "describe models and check whether they can work together",
}
"""What the commands do, by name. Every command is a module of this package."""


def main() -> None:
    """Run the command `adafuse` with the arguments of this process, and exit."""
    # Imports and loading create more than 600,000 objects, almost all of which stay. If the garbage
    # collector visited them again and again, `adafuse ask` would need 1.5 times the CPU time.
    gc.disable()
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # the stream is closed
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: PTH123, SIM115
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        sys.exit(run(sys.argv[1:]))
    except ImportError as error:  # from the import of a command's module
        package = (error.name or "").partition(".")[0]
        sys.stderr.write(f"error: the command line needs {package}: {install_command('cli')}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def run(arguments: Sequence[str]) -> int:
    """Run a command, and return its exit code.

    Raises:
        SystemExit: the arguments ask for help or the version, or are unusable.
    """
    if arguments and arguments[0] in COMMANDS:
        return load(arguments[0]).run(arguments[1:])
    commands = "\n".join(f"  {name:10}{does}" for name, does in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "adafuse",
        usage="adafuse COMMAND [flags]",
        description="Let several local language models answer as one (AdaFuse, arXiv 2601.06022).\n"
        f"\ncommands (adafuse COMMAND --help shows the flags):\n{commands}",
        epilog="Exit codes: 0 success; 1 unexpected failure, or members that cannot work together\n"
        "(info); 2 unusable input, option or model; 130 interrupted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"adafuse {__version__}")
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.parse_args(arguments or ["--help"])
    return 0


def load(name: str) -> Command:
    """Import the module of a command, and return the command."""
    command: Command = import_module(f"adafuse_llm.cli.{name}").COMMAND
    return command
