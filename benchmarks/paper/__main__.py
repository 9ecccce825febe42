"""The command that makes the paper's tables and figures. Run it in a clone of the repository.

python -m benchmarks.paper --output results/embedded
python -m benchmarks.paper --data BENCHMARKS --model ONE --model TWO --output results/mine
python -m benchmarks.paper benchmarks/paper/paper_8b.yaml --data BENCHMARKS --output results/8b
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adafuse_llm.cli import run_app

if TYPE_CHECKING:
    import typer

NAME = "python -m benchmarks.paper"


def main() -> None:
    """Run `python -m benchmarks.paper`."""
    run_app(create_app, NAME)


def create_app() -> typer.Typer:
    """Return the Typer application."""
    import typer

    from adafuse_llm.cli.common import command
    from adafuse_llm.cli.eval import OPEN
    from benchmarks.paper.command import run_suite

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(
        command(run_suite, **OPEN)
    )
    return app


if __name__ == "__main__":
    main()
