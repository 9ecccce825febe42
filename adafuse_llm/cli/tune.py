"""`adafuse tune`: find the best members and options, and test them against the best member."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from adafuse_llm import AdaFuseConfig, InvalidInputError, RequestCancelledError, __version__
from adafuse_llm.cli.common import FILE, INTERRUPTED, RESUMABLE, Setup
from adafuse_llm.cli.passages import Docs, FollowLinks, Passages
from adafuse_llm.cli.terminal import (
    cancel_on_interrupt,
    one_line,
    print_json,
    progress_bar,
    stdout_console,
)
from adafuse_llm.config import SAMPLING
from adafuse_llm.documents import Retriever, question_messages, read_documents
from adafuse_llm.evaluation import tuning
from adafuse_llm.evaluation.files import Results, naming, prompt_form
from adafuse_llm.evaluation.metrics import load_metric
from adafuse_llm.evaluation.tuning import (
    Answer,
    Question,
    Trial,
    Tuning,
    best,
    candidates,
    divide,
    embedded_questions,
    optimizer,
    read_questions,
)
from adafuse_llm.loading.config_file import write_config
from adafuse_llm.loading.specs import as_specs, member_names
from adafuse_llm.report.styles import printable
from adafuse_llm.strategies.registry import find_strategy

STOP = ("\nQuestion:",)
"""Where answers stop unless a flag sets it. Base models write a question after their answer."""

REFUSED = {
    **dict.fromkeys(
        SAMPLING,
        "the search compares settings without sampling; add the option to the file that "
        "adafuse tune writes",
    ),
    **dict.fromkeys(("logprobs", "top_logprobs"), "the search records no log-probabilities"),
    "continue_final_message": "the messages of the search end with the question",
}
"""Options that this command refuses, with the reason."""


def tune(
    setup: Setup,
    *,
    file: Annotated[
        Path | None,
        typer.Argument(
            help='JSON lines with "question" and "answer". Without a file, the embedded members '
            "answer questions that come with them.",
            **FILE,
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Configuration file to write (YAML).", dir_okay=False)
    ] = Path("adafuse.yaml"),
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Text file with instructions and examples to put before every question.", **FILE
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(help=r"Template of a question, with {question}. \n is a line break."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a chat message.")
    ] = False,
    docs: Docs = None,
    follow_links: FollowLinks = False,
    passages: Passages = 3,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N questions.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Metric to maximize: exact_match, contains, number or verbatim. Default: "
            "exact_match, or verbatim without a file.",
            metavar="NAME",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Number of ensemble settings to try.")] = 30,
    seed: Annotated[int, typer.Option(help="Random seed of the split and of the search.")] = 1,
    held_out: Annotated[
        float, typer.Option(help="Fraction of the questions to hold out from the search.")
    ] = 0.5,
    keep_ensemble: Annotated[
        bool,
        typer.Option(
            "--keep-ensemble", help="Write the ensemble even if it is not significantly better."
        ),
    ] = False,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Number of questions to answer at the same time.")
    ] = 16,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start again and discard existing results.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Find the members and options that best answer your questions, and test them.

    The search tries members and settings on one part of the questions. The best setting is then
    compared with the best single member on the other, held-out part. If the ensemble scores higher
    at p < 0.05, OUTPUT describes the ensemble, otherwise the best member alone. To use the file
    with another command, pass --config OUTPUT. Options that you set are not searched.

    Answers are saved in OUTPUT.trials.jsonl. To resume after an interruption, run the same command
    again.

    Exit codes: 0 success; 2 nothing could be run; 130 interrupted.
    """
    form = prompt_form(prompts, template)
    questions = _questions(setup, file, form, chat=chat)[:limit]
    digest = {}
    if docs:
        if prompts or template:
            raise InvalidInputError(
                "--docs has a prompt of its own, as in adafuse ask: leave out --prompts and "
                "--template"
            )
        questions = _with_passages(questions, docs, passages, follow_links=follow_links)
        sent = repr([each.request for each in questions])
        digest["docs"] = hashlib.sha256(sent.encode()).hexdigest()
    metric = metric or ("verbatim" if file is None else "exact_match")
    load_metric(metric)
    results = Results(output.with_name(f"{output.name}.trials.jsonl"))
    if output.exists() and not overwrite and not results.path.exists():
        raise InvalidInputError(f"{output} exists. Pass --overwrite, or choose another --output.")
    if file is not None:
        config = AdaFuseConfig(**{"stop": STOP, **setup.options})
        setup = dataclasses.replace(setup, config=config)
    names = member_names(setup.members())
    candidates(names, setup.config.use, find_strategy(setup.strategy))
    optimizer(seed)
    searched, tested = map(len, divide(questions, held_out, seed))
    identity = {
        "test set": "embedded" if file is None else hashlib.sha256(file.read_bytes()).hexdigest(),
        "prompts": form,
        "chat": chat,
        **digest,
        "metric": metric,
        "models": list(setup.models) or "embedded",
        "strategy": setup.strategy,
        "dtype": setup.dtype,
        "revision": setup.revision,
        "device_map": setup.device_map,
        "max_requests": max_requests,
        **setup.config.model_dump(mode="json"),
        "questions": len(questions),
        "held-out": held_out,
        "seed": seed,
    }
    numbers = range(1, 1_000_000)
    with ExitStack() as stack:
        stack.enter_context(results.lock())
        known = [] if overwrite else results.done(identity, numbers)
        engine = stack.enter_context(setup.engine(max_requests=max_requests))
        cancel = stack.enter_context(cancel_on_interrupt())
        progress = stack.enter_context(progress_bar())
        results.begin(identity, afresh=not known)
        settings = len(engine.config.use or engine.members) + trials
        watch = _Watch(progress, settings * searched + 2 * tested, searched)
        try:
            found = tuning.tune(
                engine,
                questions,
                metric=metric,
                trials=trials,
                seed=seed,
                held_out=held_out,
                fixed=setup.options,
                known=known,
                log=results.append,
                cancel=cancel,
                on_answer=watch.answer,
                on_trial=watch.trial,
            )
        except RequestCancelledError:
            typer.echo(RESUMABLE, err=True)
            return INTERRUPTED
    options = found.ensemble if keep_ensemble else found.options
    with naming(output):
        write_config(
            output, _file_options(setup, options, engine.strategy.name), comment=_comment(found)
        )
    if as_json:
        chosen = {"written": options, "pays": found.pays, "verdict": found.verdict}
        print_json({**found.model_dump(mode="json"), **chosen})
    else:
        stdout_console().print(_shown(found, options, output))
    return 0


class _Watch:
    """A progress display that also prints a setting if it is better than all earlier ones."""

    def __init__(self, progress: Progress, total: int, searched: int) -> None:
        self._progress, self._searched = progress, searched
        self._bar = progress.add_task("answers", total=total)
        self._seen = 0
        self._tried: list[Trial] = []

    def trial(self, trial: Trial) -> None:
        self._seen += 1
        self._progress.update(self._bar, completed=self._seen * self._searched)
        if len(trial.options["use"]) > 1:
            self._tried.append(trial)
            if best(self._tried) is trial:
                line = f"trial {len(self._tried)}: {_line(trial)}"
                self._progress.console.print(line, soft_wrap=True)

    def answer(self, _name: str, answer: Answer) -> None:
        self._progress.advance(self._bar)
        if answer.error is not None:
            self._progress.console.print(f"line {answer.line}: {one_line(answer.error)}")


def _questions(setup: Setup, file: Path | None, form: str, *, chat: bool) -> list[Question]:
    """Return the questions of the file, or those that come with the embedded members."""
    if file is not None:
        return read_questions(file.read_bytes(), form, chat=chat)
    if not setup.is_embedded:
        raise InvalidInputError(
            "pass a FILE with questions and answers; only the embedded members have questions of "
            "their own"
        )
    return embedded_questions()


def _with_passages(
    questions: Sequence[Question], docs: Sequence[Path], passages: int, *, follow_links: bool
) -> list[Question]:
    """Return the questions with the passages of documents before them, as `adafuse ask` sends."""
    skipped = partial(typer.echo, err=True)
    retriever = Retriever(read_documents(docs, follow_links=follow_links, on_skip=skipped))
    return [
        dataclasses.replace(
            each,
            request={
                "messages": question_messages(each.text, retriever.search(each.text, k=passages))
            },
        )
        for each in questions
    ]


def _file_options(setup: Setup, options: dict[str, Any], strategy: str) -> dict[str, Any]:
    """Return the contents of the configuration file.

    The file lists only the models that decode. One model answers greedily, so the file then has
    no option of the search and no weights.
    """
    dropped = {*tuning.CHOICES, "weights"} if len(options["use"]) == 1 else {}
    typed = {name: value for name, value in setup.options.items() if name not in dropped}
    found = {"strategy": strategy, **typed, **options}
    if setup.models:
        names = member_names(as_specs(setup.models, setup.revision))
        chosen = found.pop("use")
        models = dict(zip(names, setup.models, strict=True))
        found["models"] = [_from_anywhere(models[name]) for name in chosen]
        if found.get("weights") is not None:
            weights = setup.config.member_weights(names)
            found["weights"] = [weights[name] for name in chosen]
        found |= {
            "dtype": setup.dtype,
            "device_map": setup.device_map,
            "revision": setup.revision,
        }
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}
    return {k: v for k, v in plain.items() if v is not None}


def _from_anywhere(model: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """Return a model with an absolute path, if the path is that of a local folder or file."""
    if not isinstance(model, str) and "path" not in model:  # it is on a server
        return dict(model)
    path = model if isinstance(model, str) else model["path"]
    if Path(path).exists():
        path = str(Path(path).absolute())
    return path if isinstance(model, str) else {**model, "path": path}


def _comment(found: Tuning) -> str:
    return (
        f"adafuse tune, adafuse-llm {__version__}, {date.today().isoformat()}\n"  # noqa: DTZ011
        f"{found.metric}, {found.searched} questions to search on, {found.held_out} held out, "
        f"seed {found.seed}, {len(found.trials)} settings tried\n{found.verdict}\n"
    )


def _shown(found: Tuning, options: dict[str, Any], output: Path) -> Group:
    title = Text(f"{found.searched} questions to search on", "bold")
    title.append(
        f"; {found.metric} in percent, tokens per answer; strategy {found.strategy}", "not bold dim"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", found.metric, "tokens", "setting"):
        left = column in ("", "setting")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    for name, trial in found.alone.items():
        table.add_row(f"{printable(name)} alone", *_cells(trial)[:-1], "")
    for trial in _best(found):
        table.add_row("ensemble", *_cells(trial))
    parts: list[Any] = [title, table, ""]
    parts += [Text(f"{found.held_out} held-out questions", "bold"), _tested(found), ""]
    alone = len(options["use"]) == 1
    written = f"{options['use'][0]} alone" if alone else "the ensemble"
    parts.append(Text(printable(f"{found.verdict}\n{output} describes {written}.")))
    return Group(*parts)


def _best(found: Tuning) -> list[Trial]:
    """Return the distinct settings, best first."""
    different = {repr(trial.options): trial for trial in reversed(found.trials)}
    return sorted(different.values(), key=lambda t: (-t.score, t.tokens))


def _tested(found: Tuning) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", found.metric, "tokens"):
        table.add_column(column, justify="right" if column else "left")
    for name, trial in found.tested.items():
        table.add_row(printable(name), *_cells(trial)[:-1])
    return table


def _cells(trial: Trial) -> tuple[str, str, str]:
    options = {name: value for name, value in trial.options.items() if name != "use"}
    parts = [f"{name} {_plain(value)}" for name, value in options.items()]
    setting = f"{'+'.join(trial.options['use'])}; {', '.join(parts)}"
    return f"{trial.score:.1f}{_failed(trial)}", f"{trial.tokens:.0f}", printable(setting)


def _line(trial: Trial) -> str:
    _, tokens, setting = _cells(trial)
    return f"{trial.score:.1f} %{_failed(trial)}, {tokens} tokens: {setting}"


def _failed(trial: Trial) -> str:
    return f" ({trial.failed} failed)" if trial.failed else ""


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={weight:g}" for name, weight in value.items())
    return str(value)
