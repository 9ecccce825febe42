"""`adafuse tune`: search for the best members and options, and test them."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adafuse_llm import InvalidInputError, RequestCancelledError, __version__
from adafuse_llm.cli.common import INTERRUPTED, RESUMABLE, Command, Parser, Setup
from adafuse_llm.cli.run import add_prompt
from adafuse_llm.cli.terminal import (
    cancel_on_interrupt,
    one_line,
    print_json,
    progress_bar,
    stdout_console,
    tell,
)
from adafuse_llm.config import SAMPLING
from adafuse_llm.evaluation import tuning
from adafuse_llm.evaluation.confidence import Reliability
from adafuse_llm.evaluation.exact_match import load_metric
from adafuse_llm.evaluation.files import Results, prompt_form
from adafuse_llm.loading.config_file import ConfigFile, write_config
from adafuse_llm.loading.specs import as_spec, member_names
from adafuse_llm.report.styles import printable
from adafuse_llm.strategies.registry import find_strategy


def add_flags(parser: Parser) -> None:
    """Add the flags of this command."""
    text = 'JSON lines with "question" and "answer". Default: questions for the embedded members.'
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help=text)
    parser.flag("--output FILE", "Configuration file to write.", default=Path("adafuse.yaml"))
    add_prompt(parser)
    parser.flag("--limit N", "Use only the first N questions.")
    parser.flag(
        "--metric NAME",
        "Metric to maximize: exact_match, contains, number or verbatim. Default: exact_match, or "
        "verbatim without a FILE.",
    )
    parser.flag("--trials N", "Maximum number of ensemble settings to try.", default=30)
    parser.flag("--seed NUMBER", "Seed of the search.", dest="search_seed", type=int, default=1)
    parser.flag("--held-out SHARE", "Share of questions for the test.", type=float, default=0.5)
    parser.flag("--keep-ensemble", "Write the ensemble even if it is not significantly better.")
    parser.flag("--json", "Print one JSON object.")


def tune(setup: Setup, flags: Namespace) -> int:
    """Find the members and options that best answer your questions, and test them.

    The search tries members and settings on one part of the questions. The best setting is then
    compared with the best single member on the other, held-out part. If the ensemble scores higher
    at p < 0.05, OUTPUT describes the ensemble, otherwise the best member alone. To use the file
    with another command, pass --config OUTPUT. Options that you set are not searched.

    With 50 answers or more, at least 5 of them right and 5 wrong, OUTPUT also calibrates the
    confidence of every answer, and a table shows how many of the surest answers are right.

    Answers are saved in OUTPUT.trials.jsonl. To resume after an interruption, run the same command
    again.
    """
    if setup.file.calibration is not None or setup.file.decisions is not None:
        tell("the old calibration is left out; with enough answers, a new one is fitted")
        kept = setup.file.model_fields_set - {"calibration", "decisions"}
        values = {name: getattr(setup.file, name) for name in kept}
        setup = replace(setup, file=ConfigFile(**values))
    file, output, seed, held_out = flags.file, flags.output, flags.search_seed, flags.held_out
    questions = _questions(setup, flags)
    metric = flags.metric or ("verbatim" if file is None else "exact_match")
    load_metric(metric)
    results = Results(output.with_name(f"{output.name}.trials.jsonl"))
    if output.exists() and not flags.overwrite and not results.path.exists():
        raise InvalidInputError(f"{output} exists. Pass --overwrite, or choose another --output.")
    config = setup.file.config
    if file is not None and "stop" not in setup.file.options:
        config = config.override({"stop": ("\nQuestion:",)})  # base models write another one
    names = member_names(setup.file.members)
    tuning.candidates(names, config, find_strategy(setup.file.strategy))
    searched, tested = map(len, tuning.divide(questions, held_out, seed))
    asked = repr([(question.request, question.accepted) for question in questions])
    identity = {
        "questions": hashlib.sha256(asked.encode()).hexdigest(),
        "metric": metric,
        **setup.identity(config),
        "held-out": held_out,
        "seed": seed,
    }
    numbers = range(1, 10**12)
    with ExitStack() as stack:
        stack.enter_context(results.lock())
        known = [] if flags.overwrite else results.done(identity, numbers)
        engine = stack.enter_context(setup.load(config))
        cancel = stack.enter_context(cancel_on_interrupt())
        progress = stack.enter_context(progress_bar())
        results.begin(identity, afresh=not known)
        settings = len(engine.config.use or engine.members) + flags.trials
        bar = progress.add_task("answers", total=settings * searched + 2 * tested)

        def on_answer(_members: str, answer: tuning.Answer) -> None:
            progress.advance(bar)
            if answer.error is not None:
                progress.console.print(f"line {answer.line}: {one_line(answer.error)}")

        try:
            result = tuning.tune(
                engine,
                questions,
                metric=metric,
                trials=flags.trials,
                seed=seed,
                held_out=held_out,
                fixed=setup.file.options,
                known=known,
                log=results.append,
                cancel=cancel,
                on_answer=on_answer,
            )
        except RequestCancelledError:
            tell(RESUMABLE)
            return INTERRUPTED
    options = result.ensemble if flags.keep_ensemble else result.options
    comment = (
        f"adafuse tune, adafuse-llm {__version__}, {date.today().isoformat()}\n"  # noqa: DTZ011
        f"{result.metric}, {result.searched} questions to search on, {result.held_out} held out, "
        f"seed {result.seed}, {len(result.trials)} settings tried\n{result.verdict}\n"
    )
    write_config(output, _file_options(setup, result, options), comment=comment)
    if flags.json:
        chosen = {"written": options, "pays": result.pays, "verdict": result.verdict}
        print_json({**result.model_dump(mode="json"), **chosen})
    else:
        stdout_console().print(_shown(result, options, output))
    return 0


def _questions(setup: Setup, flags: Namespace) -> list[tuning.Question]:
    form = prompt_form(flags.prompts, flags.template)
    if flags.file is not None:
        questions = tuning.read_questions(flags.file.read_bytes(), form, chat=flags.chat)
    elif setup.is_embedded:
        questions = tuning.embedded_questions()
    else:
        raise InvalidInputError(
            "pass a FILE with questions and answers; only the embedded members have questions of "
            "their own"
        )
    return questions[: flags.limit]


def _file_options(setup: Setup, result: tuning.Tuning, options: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of the configuration file, with only the models that decode."""
    alone = len(options["use"]) == 1  # one model needs no weights and no option of the search
    dropped = {*tuning.CHOICES, "weights"} if alone else {}
    typed = {name: value for name, value in setup.file.options.items() if name not in dropped}
    written = {"strategy": "single" if alone else result.strategy, **typed, **options}
    file = setup.file
    if file.models:
        names = member_names(file.members)
        chosen = written.pop("use")
        models = dict(zip(names, file.models, strict=True))
        written["models"] = [_from_anywhere(models[name], name) for name in chosen]
        if written.get("weights") is not None:
            weights = file.config.member_weights(names)
            written["weights"] = [weights[name] for name in chosen]
        written |= {name: getattr(file, name) for name in ("dtype", "device_map", "revision")}
    known = result.confidence_of(options)
    if not isinstance(known, str) and known.calibration is not None:
        written["calibration"] = known.calibration.model_dump()
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in written.items()}
    return {k: v for k, v in plain.items() if v is not None}


def _from_anywhere(model: str | Mapping[str, Any], name: str) -> str | dict[str, Any]:
    """Return a model with an absolute path and with the name that its member has here."""
    setting = model if isinstance(model, str) else model.get("path", "")
    path = str(Path(setting).absolute()) if setting and Path(setting).exists() else setting
    if isinstance(model, str):
        (alone,) = member_names([as_spec(path)])
        return path if alone == name else {"path": path, "name": name}
    return {**model, **({"path": path} if path else {}), "name": name}


def _shown(result: tuning.Tuning, options: dict[str, Any], output: Path) -> Group:
    about = f"; {result.metric} in percent, tokens per answer; strategy {result.strategy}"
    title = Text(f"{result.searched} questions to search on", "bold").append(about, "not bold dim")
    ranked = sorted(result.trials, key=lambda trial: (-trial.score, trial.tokens))
    searched = [(f"{name} alone", trial) for name, trial in result.alone.items()]
    searched += [("ensemble", trial) for trial in ranked]
    alone = len(options["use"]) == 1
    written = f"{options['use'][0]} alone" if alone else "the ensemble"
    reach = (
        f"Every member alone is wrong on {result.out_of_reach.shown()} % of the "
        f"{result.searched} questions; no choice among their answers can be right there."
    )
    return Group(
        title,
        _table(result.metric, searched),
        "",
        Text(f"{result.held_out} held-out questions", "bold"),
        _table(result.metric, [*result.tested.items()]),
        "",
        *_confidence(written, result.confidence_of(options)),
        "",
        Text(printable(f"{reach}\n{result.verdict}\n{output} describes {written}.")),
    )


def _confidence(written: str, worth: Reliability | str) -> list[RenderableType]:
    if isinstance(worth, str):
        return [Text(printable(f"No confidence: {worth}."))]
    title = Text(f"Confidence of {written}", "bold")
    title.append(f"; cross-validated on {worth.questions} questions", "not bold dim")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("surest answers, %", "confidence from", "right among them, %"):
        table.add_column(column, justify="right", overflow="fold")
    for point in worth.curve:
        table.add_row(str(point.answered), f"{point.confidence:.2f}", point.right.shown())
    figures = (
        f"A right answer has a higher confidence than a wrong one in {worth.area.shown()} % of all "
        f"pairs (area under the ROC curve). Calibration error: {worth.error:.1f} points."
    )
    if worth.area.low <= 50:
        figures += " These questions do not show that this confidence is better than chance."
    return [title, table, Text(figures)]


def _table(metric: str, rows: Sequence[tuple[str, tuning.Trial]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", metric, "tokens", "setting"):
        justify: Literal["left", "right"] = "left" if column in ("", "setting") else "right"
        table.add_column(column, justify=justify, overflow="fold")
    for name, trial in rows:
        chosen = trial.options["use"]
        parts = [f"{key} {value}" for key, value in trial.options.items() if key != "use"]
        setting = f"{'+'.join(chosen)}; {', '.join(parts)}" if len(chosen) > 1 else ""
        failed = f" ({trial.failed} failed)" if trial.failed else ""
        cells = (name, f"{trial.score:.1f}{failed}", f"{trial.tokens:.0f}", setting)
        table.add_row(*map(printable, cells))
    return table


COMMAND = Command(
    tune,
    add_flags,
    "[FILE]",
    refused={
        **dict.fromkeys(
            SAMPLING,
            "the search compares settings without sampling; add the option to the file that "
            "adafuse tune writes",
        ),
        **dict.fromkeys(("logprobs", "top_logprobs"), "the search records no log-probabilities"),
        "continue_final_message": "the messages of the search end with the question",
    },
)
