"""`adafuse tune`: search for the best members and options, and test them."""

from __future__ import annotations

import hashlib
import io
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from threading import Event
from typing import Any, Literal

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    Answer,
    InvalidInputError,
    RequestCancelledError,
    __version__,
)
from adafuse_llm.cli.common import INTERRUPTED, STOPPED, Command, Parser, Setup
from adafuse_llm.cli.terminal import (
    cancel_on_interrupt,
    one_line,
    print_json,
    progress_bar,
    stdout_console,
    tell,
)
from adafuse_llm.config import SAMPLING
from adafuse_llm.evaluation import decisions, tuning
from adafuse_llm.evaluation.comparison import Score
from adafuse_llm.evaluation.confidence import Coverage, Reliability
from adafuse_llm.evaluation.exact_match import load_metric
from adafuse_llm.evaluation.files import Results, read_text
from adafuse_llm.loading.config_file import ConfigFile, write_config
from adafuse_llm.loading.specs import as_spec, member_names
from adafuse_llm.report.styles import printable
from adafuse_llm.strategies.registry import find_strategy

SEARCH = ("prompt", "chat", "metric", "trials", "keep_ensemble")
"""Names of flags that have no effect with --decide."""


def add_flags(parser: Parser) -> None:
    """Add the flags of this command."""
    text = 'JSON lines with "question" and "answer".'
    parser.add_argument("file", type=Path, metavar="FILE", help=text)
    parser.flag("--output FILE", "Configuration file to write.", default=Path("adafuse.yaml"))
    parser.flag(
        "--decide",
        'Calibrate typed questions. A line of FILE has "state", "question", "answer" and, if the '
        'answer is not yes or no, "options"; "type": "score" makes them a scale.',
    )
    parser.flag(
        "--prompt FILE",
        "Text of the prompt, such as instructions and examples, with {question} for the question. "
        r"Default: 'Question: {question}\nAnswer:', and only the question with --chat.",
    )
    parser.flag("--chat", "Send the prompt as a chat message.")
    parser.flag("--max-requests NUMBER", "Number of questions to answer at the same time.")
    parser.flag("--overwrite", "Start again and discard existing results.")
    parser.flag("--limit N", "Use only the first N questions.")
    text = "Metric to maximize: exact_match, contains, number or verbatim."
    parser.flag("--metric NAME", text, default="exact_match")
    parser.flag("--trials N", "Maximum number of ensemble settings to try.", default=30)
    parser.flag("--keep-ensemble", "Write the ensemble even if it is not significantly better.")
    text = "With --decide: percentage of the sure answers that may be wrong."
    parser.flag("--most-wrong NUMBER", text, type=float, default=5.0)
    parser.flag("--report FILE", "HTML page to write, with what the terminal shows.")
    parser.flag("--json", "Print one JSON object.")


def tune(setup: Setup, flags: Namespace) -> int:
    """Find the members and options that best answer your questions, and test them.

    The search tries members and settings on one half of the questions. The best setting is then
    compared with the best single member on the other, held-out half. If the ensemble scores higher
    at p < 0.05, OUTPUT describes the ensemble; otherwise, the best member alone. To use the file
    with another command, pass --config OUTPUT. Options that you set stay as they are.

    With 50 answers or more, at least 5 of them right and 5 wrong, OUTPUT also calibrates the
    confidence of every answer, and a table shows how many of the surest answers are right.

    With --decide, there is no search: all members answer the typed questions of FILE, OUTPUT
    calibrates the probabilities of the options, and a threshold marks the sure answers.

    Answers are saved in OUTPUT.trials.jsonl. To resume after an interruption or an error, run the
    same command again.
    """
    unused = {"most_wrong": "without --decide"}
    if flags.decide:
        unused = dict.fromkeys(SEARCH, "with --decide")
    parser = COMMAND.parser()
    for name, where in unused.items():
        if getattr(flags, name) != parser.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            raise InvalidInputError(f"{flag} has no effect {where}: leave it out")
    old = {"decisions"} if flags.decide else {"calibration", "decisions"}
    if any(getattr(setup.file, name) is not None for name in old):
        tell("the old calibration is left out; with enough answers, a new one is fitted")
        kept = {name: getattr(setup.file, name) for name in setup.file.model_fields_set - old}
        setup = replace(setup, file=ConfigFile(**kept))
    try:
        return _fit(setup, flags) if flags.decide else _search(setup, flags)
    except RequestCancelledError:
        tell(f"{STOPPED}: run the same command again to resume")
        return INTERRUPTED


def _search(setup: Setup, flags: Namespace) -> int:
    questions, metric = _questions(flags), flags.metric
    load_metric(metric)
    config = setup.file.config
    if "stop" not in setup.file.options:
        # end a response where a base model goes on with another question
        config = config.override({"stop": ("\nQuestion:",)})
    names = member_names(setup.file.members)
    tuning.candidates(names, config, find_strategy(setup.file.strategy))
    searched, tested = map(len, tuning.divide(questions))
    asked = repr([(question.request, question.accepted) for question in questions])
    digest = hashlib.sha256(asked.encode()).hexdigest()
    identity = {"questions": digest, "metric": metric, **setup.identity(config)}
    with _job(setup, flags, config, identity) as (engine, known, results, cancel, progress):
        settings = len(engine.config.use or engine.members) + flags.trials
        bar = progress.add_task("answers", total=settings * searched + 2 * tested)

        def on_answer(_members: str, answer: tuning.Answer) -> None:
            progress.advance(bar)
            if answer.error is not None:
                progress.console.print(f"line {answer.line}: {one_line(answer.error)}")

        result = tuning.tune(
            engine,
            questions,
            metric=metric,
            trials=flags.trials,
            fixed=setup.file.options,
            known=known,
            log=results.append,
            cancel=cancel,
            on_answer=on_answer,
        )
    options = result.ensemble if flags.keep_ensemble else result.options
    found, confidence = {**options}, result.confidence_of(options)
    if not isinstance(confidence, str) and confidence.calibration is not None:
        found["calibration"] = confidence.calibration.model_dump()
    comment = (
        f"{result.metric}, {result.searched} questions to search on, {result.held_out} held out, "
        f"{len(result.trials)} settings tried\n{result.verdict}\n"
    )
    values = result.model_dump(mode="json")
    values |= {"written": options, "pays": result.pays, "verdict": result.verdict}
    written = _file_options(setup, result.strategy, found)
    return _write(flags, written, comment, values, _shown(result, options, flags.output))


def _fit(setup: Setup, flags: Namespace) -> int:
    questions = decisions.read_labeled(flags.file.read_bytes(), flags.limit)
    config = setup.file.config
    config.member_weights(member_names(setup.file.members))  # raises an error for unknown members
    asked = hashlib.sha256(repr(questions).encode()).hexdigest()
    identity = {"typed questions": asked, **setup.identity(config)}
    with _job(setup, flags, config, identity) as (engine, known, results, cancel, progress):
        answers = [*map(Answer.model_validate, known)]
        new = decisions.measured(engine, questions[len(known) :], cancel)
        for answer in progress.track(new, len(questions), len(known), description="questions"):
            results.append(answer.model_dump())
            answers.append(answer)
    fit = decisions.fit_decisions(questions, answers, flags.most_wrong)
    found = {"decisions": fit.calibration.model_dump()}
    comment = f"--decide, {fit.questions} questions, {fit.accuracy.shown()} % right\n"
    written = _file_options(setup, setup.file.strategy, found)
    shown = _shown_fit(fit, flags.most_wrong, flags.output)
    return _write(flags, written, comment, fit.model_dump(mode="json"), shown)


@contextmanager
def _job(
    setup: Setup, flags: Namespace, config: AdaFuseConfig, identity: dict[str, Any]
) -> Iterator[tuple[AdaFuseEngine, list[dict[str, Any]], Results, Event, Progress]]:
    """Yield the engine, earlier results, their file, the event that cancels, and a progress bar."""
    output = flags.output
    results = Results(output.with_name(f"{output.name}.trials.jsonl"))
    if output.exists() and not flags.overwrite and not results.path.exists():
        raise InvalidInputError(f"{output} exists. Pass --overwrite, or choose another --output.")
    with ExitStack() as stack:
        known = stack.enter_context(results.resumed(identity, afresh=flags.overwrite))
        engine = stack.enter_context(setup.load(config))
        cancel = stack.enter_context(cancel_on_interrupt())
        progress = stack.enter_context(progress_bar())
        yield engine, known, results, cancel, progress


def _write(
    flags: Namespace, options: dict[str, Any], comment: str, values: dict[str, Any], shown: Group
) -> int:
    today = date.today().isoformat()  # noqa: DTZ011
    comment = f"adafuse tune, adafuse-llm {__version__}, {today}\n{comment}"
    write_config(flags.output, options, comment=comment)
    if flags.report is not None:
        page = Console(record=True, file=io.StringIO(), width=120)
        page.print(shown)
        page.save_html(flags.report)
    if flags.json:
        print_json(values)
    else:
        stdout_console().print(shown)
    return 0


def _questions(flags: Namespace) -> list[tuning.Question]:
    form = "{question}" if flags.chat else "Question: {question}\nAnswer:"
    if flags.prompt is not None:
        form = read_text(flags.prompt).removesuffix("\n")
        if "{question}" not in form:
            raise InvalidInputError(f"{flags.prompt} needs {{question}} where the question goes")
    return tuning.read_questions(flags.file.read_bytes(), form, chat=flags.chat)[: flags.limit]


def _file_options(setup: Setup, strategy: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of the configuration file, which lists only the models that decode."""
    file, alone = setup.file, len(found.get("use", ())) == 1
    # leave out weights and searched options, which have no effect on a member alone
    dropped = {*tuning.CHOICES, "weights"} if alone else set()
    typed = file.config.model_dump(mode="json", exclude_unset=True, exclude=dropped)
    written = {"strategy": "single" if alone else strategy, **typed, **found}
    if file.models:
        names = member_names(file.members)
        chosen = written.pop("use", None) or names
        models = dict(zip(names, file.models, strict=True))
        written["models"] = [_from_anywhere(models[name], name) for name in chosen]
        if written.get("weights") is not None:
            weights = file.config.member_weights(names)
            written["weights"] = [weights[name] for name in chosen]
        written |= {name: getattr(file, name) for name in ("dtype", "device_map", "revision")}
    return {name: value for name, value in written.items() if value is not None}


def _from_anywhere(model: str | Mapping[str, Any], name: str) -> str | dict[str, Any]:
    """Return a model's entry with an absolute path, valid in any folder, and the name `name`."""
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
    reach = _reach(result.out_of_reach, result.searched)
    return Group(
        title,
        _trials(result.metric, searched),
        "",
        Text(f"{result.held_out} held-out questions", "bold"),
        _trials(result.metric, [*result.tested.items()]),
        "",
        *_confidence(written, result.confidence_of(options)),
        "",
        Text(printable(f"{reach}\n{result.verdict}\n{output} describes {written}.")),
    )


def _shown_fit(fit: decisions.DecisionFit, most_wrong: float, output: Path) -> Group:
    calibration = fit.calibration
    table = _table("", "right, %", "weight", "changes with the order, %")
    for name, right in fit.alone.items():
        weight, changes = calibration.weights[name], fit.flips[name].shown()
        table.add_row(printable(name), right.shown(), f"{weight:.2f}", changes)
    table.add_row("together", fit.accuracy.shown())
    figures = f"Calibration error: {fit.error:.1f} points."
    if fit.area is not None:
        first = next(iter(calibration.intercepts))
        figures = f"Area under the ROC curve of {first}: {fit.area.shown()} %. {figures}"
    sure = (
        f"These questions do not show that the surest answers are at most {most_wrong:g} % wrong. "
        "Add questions, or allow more (--most-wrong)."
    )
    if calibration.threshold is not None:
        sure = (
            f"At most {most_wrong:g} % of the answers with a confidence of "
            f"{calibration.threshold:.3f} or more are wrong (this bound holds in 95 % of cases). "
            f"They are {fit.coverage} % of the answers; hand over the others."
        )
    reach = _reach(fit.beta, fit.questions)
    end = Text(printable(f"{figures}\n\n{reach}\n{sure}\n{output} has the calibration."))
    title = Text(f"{fit.questions} questions", "bold").append("; cross-validated", "not bold dim")
    return Group(title, table, "", _curve(fit.curve), end)


def _reach(missed: Score, questions: int) -> str:
    return (
        f"Every member alone is wrong on {missed.shown()} % of the {questions} questions; no "
        "choice among their answers can be right there."
    )


def _confidence(written: str, worth: Reliability | str) -> list[RenderableType]:
    if isinstance(worth, str):
        return [Text(printable(f"No confidence: {worth}."))]
    title = Text(f"Confidence of {written}", "bold")
    title.append(f"; cross-validated on {worth.questions} questions", "not bold dim")
    figures = (
        f"A right answer has a higher confidence than a wrong one in {worth.area.shown()} % of all "
        f"pairs (area under the ROC curve). Calibration error: {worth.error:.1f} points."
    )
    if worth.area.low <= 50:
        figures += " These questions do not show that this confidence is better than chance."
    return [title, _curve(worth.curve), Text(figures)]


def _curve(points: Sequence[Coverage]) -> Table:
    table = _table("surest answers, %", "confidence from", "right among them, %", "")
    for point in points:
        right, bar = point.right, Bar(100, 0, point.right.value, width=40)
        table.add_row(str(point.answered), f"{point.confidence:.2f}", right.shown(), bar)
    return table


def _trials(metric: str, rows: Sequence[tuple[str, tuning.Trial]]) -> Table:
    table = _table("", metric, "tokens", "setting")
    for name, trial in rows:
        chosen = trial.options["use"]
        parts = [f"{key} {value}" for key, value in trial.options.items() if key != "use"]
        setting = f"{'+'.join(chosen)}; {', '.join(parts)}" if len(chosen) > 1 else ""
        failed = f" ({trial.failed} failed)" if trial.failed else ""
        cells = (name, f"{trial.score:.1f}{failed}", f"{trial.tokens:.0f}", setting)
        table.add_row(*map(printable, cells))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        justify: Literal["left", "right"] = "left" if column in ("", "setting") else "right"
        table.add_column(column, justify=justify, overflow="fold")
    return table


COMMAND = Command(
    tune,
    add_flags,
    "FILE",
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
