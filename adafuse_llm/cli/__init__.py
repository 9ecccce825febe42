"""The `adafuse` command: parse the flags, call the engine, print the result.

ask       answer a question from documents and show how the ensemble decides
chat      talk with the ensemble, and ask why it said what it said
generate  continue a prompt, or answer it as a chat message
run       answer a test set and write one result per line; can be resumed
serve     serve the ensemble to applications, in the form of OpenAI's API
tune      find the best members and options, and test them against the best member alone
info      describe models and check whether they can work together

Exit codes: 0 success; 1 unexpected failure, failed lines (`run`), or members that cannot work
together (`info`); 2 unusable input, option or model; 130 interrupted.

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from adafuse_llm import __version__

if TYPE_CHECKING:
    import typer

__all__ = ["create_app", "main", "run_app"]


def main() -> None:
    """Run the command `adafuse`."""
    chosen = sys.argv[1:2]
    names = chosen if chosen and chosen[0] in COMMANDS else tuple(COMMANDS)
    run_app(partial(create_app, names), "adafuse")


def run_app(create: Callable[[], typer.Typer], name: str) -> None:
    """Run a Typer application on the command line of this process, and exit.

    The garbage collector pauses until members are loaded.

    Args:
        create: function that creates the application. If it cannot import a package, one line on
            stderr reports this.
        name: name of the program, for its help.
    """
    # Imports and loading create more than 600,000 objects, almost all of which stay. To visit them
    # again and again would take a third of the CPU time of `adafuse ask` with embedded members.
    gc.disable()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # print "?" for characters that the encoding lacks
            stream.reconfigure(errors="replace")
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401

        app = create()
    except ImportError as error:
        from adafuse_llm.errors import install_command

        sys.stderr.write(f"error: the command line needs {error.name}: {install_command('cli')}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    app(prog_name=name)


def create_app(names: Iterable[str] | None = None) -> typer.Typer:
    """Create the Typer application.

    Args:
        names: commands that the application has; None for all. Only their modules are imported.
    """
    import typer

    from adafuse_llm.cli.common import PlainCommand, PlainGroup

    app = typer.Typer(
        help="Let several local language models answer as one (AdaFuse, arXiv 2601.06022).",
        epilog="Exit codes: 0 success; 1 unexpected failure, failed lines (run), or members that "
        "cannot work together (info); 2 unusable input, option or model; 130 interrupted.",
        cls=PlainGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"adafuse {__version__}")
            raise typer.Exit

    @app.callback()
    def adafuse(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show the version."
        ),
    ) -> None:
        pass

    for name in COMMANDS if names is None else names:
        app.command(name, cls=PlainCommand)(COMMANDS[name]())
    return app


def _ask() -> Callable[..., None]:
    from adafuse_llm.cli import ask
    from adafuse_llm.cli.common import command

    return command(ask.ask, refused=ask.REFUSED)


def _chat() -> Callable[..., None]:
    from adafuse_llm.cli import chat
    from adafuse_llm.cli.common import command

    return command(chat.chat, refused=chat.REFUSED)


def _generate() -> Callable[..., None]:
    from adafuse_llm.cli import generate
    from adafuse_llm.cli.common import command

    return command(generate.generate, refused=generate.REFUSED)


def _run() -> Callable[..., None]:
    from adafuse_llm.cli import run
    from adafuse_llm.cli.common import command

    return command(run.run, **run.DEFAULTS)


def _tune() -> Callable[..., None]:
    from adafuse_llm.cli import tune
    from adafuse_llm.cli.common import command

    return command(tune.tune, refused=tune.REFUSED)


def _serve() -> Callable[..., None]:
    from adafuse_llm.cli import serve
    from adafuse_llm.cli.common import command

    return command(serve.serve, flags=serve.FLAGS, refused=serve.REFUSED, **serve.DEFAULTS)


def _info() -> Callable[..., None]:
    from adafuse_llm.cli.common import command
    from adafuse_llm.cli.info import info

    return command(info, decoding=False)


COMMANDS: Final[Mapping[str, Callable[[], Callable[..., None]]]] = {
    "ask": _ask,
    "chat": _chat,
    "generate": _generate,
    "run": _run,
    "serve": _serve,
    "tune": _tune,
    "info": _info,
}
"""The commands by name, each with a function that imports and creates it."""
