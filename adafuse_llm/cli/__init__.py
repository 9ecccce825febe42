"""The `adafuse` command: parse the flags, call the engine, print the result.

ask       answer a question from documents and show how the ensemble decides
generate  continue a prompt, or answer it as a chat message
run       answer a test set and write one result per line; can be resumed
eval      answer a benchmark, score it and compare systems
tune      find the best members and options, and test them against the best member alone
report    summarize a run
info      describe models and check whether they can work together

Exit codes: 0 success; 1 unexpected failure, failed lines (`run`, `eval`), or members that cannot
work together (`info`); 2 unusable input, option or model; 130 interrupted.

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from adafuse_llm import __version__

if TYPE_CHECKING:
    import typer

__all__ = ["create_app", "main", "run_app"]


def main() -> None:
    """Run the command `adafuse`."""
    run_app(create_app, "adafuse")


def run_app(create: Callable[[], typer.Typer], name: str) -> None:
    """Run a Typer application on the command line of this process, and exit.

    Args:
        create: function that creates the application. If it cannot import a package, one line on
            stderr reports this.
        name: name of the program, for its help.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # print "?" for characters that the encoding lacks
            stream.reconfigure(errors="replace")
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401

        app = create()
    except ImportError as error:
        sys.stderr.write(
            f'error: the command line needs {error.name}: pip install "adafuse-llm[cli]"\n'
        )
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    app(prog_name=name)


def create_app() -> typer.Typer:
    """Create the Typer application."""
    import typer

    from adafuse_llm.cli import ask, generate, run, tune
    from adafuse_llm.cli import eval as evaluation
    from adafuse_llm.cli.common import PlainCommand, PlainGroup, command
    from adafuse_llm.cli.info import info
    from adafuse_llm.cli.report import report

    app = typer.Typer(
        help="Let several local language models answer as one (AdaFuse, arXiv 2601.06022).",
        epilog="Exit codes: 0 success; 1 unexpected failure, failed lines (run, eval), or members "
        "that cannot work together (info); 2 unusable input, option or model; 130 interrupted.",
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

    functions: dict[str, Callable[..., None]] = {
        "ask": command(ask.ask, refused=ask.REFUSED),
        "generate": command(generate.generate, refused=generate.REFUSED),
        "run": command(run.run, **run.DEFAULTS),
        "eval": command(evaluation.evaluate, refused=evaluation.REFUSED, **evaluation.OPEN),
        "tune": command(tune.tune, refused=tune.REFUSED, **tune.OPEN),
        "report": command(report, decoding=False, loading=False),
        "info": command(info, decoding=False),
    }
    for name, function in functions.items():
        app.command(name, cls=PlainCommand)(function)
    return app
