"""The command that makes the paper's tables and figures. Run it in a clone of the repository.

python -m benchmarks.paper --output results/embedded
python -m benchmarks.paper --suite long
python -m benchmarks.paper --data BENCHMARKS --model ONE --model TWO --output results/mine
python -m benchmarks.paper --suite benchmarks/paper/paper_8b.yaml --data BENCHMARKS
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

    from adafuse_llm.cli.common import PlainCommand, command
    from adafuse_llm.config import AdaFuseConfig
    from benchmarks.paper.command import run_suite
    from benchmarks.paper.layout import OF_TASKS

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    of_rows = {"strategy", *AdaFuseConfig.model_fields} - set(OF_TASKS)
    app.command(cls=PlainCommand, context_settings={"help_option_names": ["-h", "--help"]})(
        command(run_suite, hidden=of_rows, stop=None, max_new_tokens=None)
    )
    return app


if __name__ == "__main__":
    main()
