"""Which systems stand in which table or figure.

A system is a row: a strategy by its name, options of `AdaFuseConfig`, and members. A new strategy
or option needs a row here, or in a suite file, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, nearest
from adafuse_llm.evaluation.metrics import METRICS
from adafuse_llm.evaluation.tasks import TASKS
from adafuse_llm.report.page import count
from adafuse_llm.strategies.base import Strategy, refuse_unused_options
from adafuse_llm.strategies.registry import find_strategy

PAPER_TASKS = ("nq", "squad", "triviaqa", "gsm8k", "flores_en_de", "flores_de_en")
"""Of the paper's Table 1."""

ALL_SUBSETS = 3
"""Up to so many members, Table 2 has every subset of them; of more, the first 1, 2, … in order."""

BRANCHES = (1, 2, 3, 4, 5)
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
WIDTHS = (2, 3, 5)

OF_TASKS = ("max_new_tokens", "stop", "use")
"""Options that tasks and flags decide where a row says nothing."""

Kind = Literal["member", "peer", "adafuse"]
Size = Literal["table", "sweep", "time"]


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(_Plain):
    """A system.

    Attributes:
        name: shown.
        strategy: by its name.
        options: of `AdaFuseConfig`, over those of the task.
        use: names of the members that take part; None for all.
        kind: what Table 1 compares it with.
        at: its place on a figure's axis.
        series: whose line of a figure it belongs to.
        optional: whether it is left out, with the reason, where this installation lacks the
            strategy or an option; otherwise that is an error.
    """

    name: str
    strategy: str = "adafuse"
    options: Mapping[str, Any] = Field(default_factory=dict)
    use: tuple[str, ...] | None = None
    kind: Kind = "adafuse"
    at: float | None = None
    series: str = ""
    optional: bool = False

    @property
    def key(self) -> str:
        """What decides the answers: rows of the same key are decoded once. An option at its default
        is left out, unless a row without it may get another value.
        """
        fields = AdaFuseConfig.model_fields
        given = [
            f"{name}={value}"
            for name, value in sorted(self.options.items())
            if name in OF_TASKS or name not in fields or value != fields[name].default
        ]
        members = "+".join(quote(each, safe="") for each in self.use or ())
        return " ".join([self.strategy, *given, *([f"by {members}"] if members else [])])


class Part(_Plain):
    """A table or a figure.

    Attributes:
        name: such as ``table-1``.
        title: shown.
        about: what is to be seen, in a sentence.
        rows: its systems.
        size: how many questions: as many as Table 1 has, as a sweep has, or as are timed.
        reference: the row that the others are tested against.
        axis: what `Row.at` means, where there is a line to draw.
        absent: rows that cannot be, and why.
    """

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]
    size: Size = "sweep"
    reference: str | None = None
    axis: str | None = None
    absent: Mapping[str, str] = Field(default_factory=dict)

    def without(self, names: Sequence[str]) -> Part:
        """The same less rows of these names."""
        kept = tuple(row for row in self.rows if row.name not in names)
        left = {row.name: "the suite file leaves it out" for row in self.rows if row not in kept}
        return self.model_copy(update={"rows": kept, "absent": {**self.absent, **left}})


class Sizes(_Plain):
    """How many questions of every task each kind of part asks, from the first."""

    table: int = Field(default=720, ge=1)
    sweep: int = Field(default=180, ge=1)
    time: int = Field(default=24, ge=1)


class Suite(_Plain):
    """A suite: the paper's parts, over which members and tasks, and how many questions.

    Attributes:
        models: folders or hub ids; none for the embedded members.
        dtype: data type of the weights.
        device_map: where accelerate places them.
        chat: whether prompts are sent as messages.
        tasks: which; none for all that there are data for, or ``embedded`` without data.
        metrics: metrics of a task, the main one first, where its own are not wanted.
        questions: how many.
        max_requests: questions that are answered at the same time, except where time is measured.
        max_new_tokens: by task, where the task's own limit is not wanted.
        parts: names of parts; none for all.
        without: names of rows that are left out.
        rows: further systems, in a part of their own (``more``).
    """

    models: tuple[str, ...] = ()
    dtype: str = "auto"
    device_map: str | None = None
    chat: bool = False
    tasks: tuple[str, ...] = ()
    metrics: Mapping[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(
        default_factory=dict
    )
    questions: Sizes = Sizes()
    max_requests: int = Field(default=16, ge=1)
    max_new_tokens: Mapping[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    parts: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()

    def limited(self, limit: int | None) -> Suite:
        """The same with at most `limit` questions of every task in every part."""
        if limit is None:
            return self
        sizes = {name: min(limit, each) for name, each in self.questions.model_dump().items()}
        return self.model_copy(update={"questions": Sizes(**sizes)})


def load_suite(name: str) -> Suite:
    """A suite by its name (``paper``), or of a YAML file.

    Raises:
        InvalidInputError: there is none, or the file holds something else.
        InvalidOptionError: a row has a strategy or an option that there is not.
    """
    if name == "paper":
        return Suite()
    path = Path(name)
    if not path.is_file():
        raise InvalidInputError(
            f"there is no suite {name!r}.{nearest(name, ['paper'])} Pass paper, or a YAML file."
        )
    import yaml

    try:
        suite = Suite(**yaml.safe_load(path.read_text(encoding="utf-8-sig")))
    except ValidationError as error:
        raise InvalidInputError(f"{path} is no suite: {_first_problem(error)}") from error
    except TypeError as error:
        raise InvalidInputError(f"{path} is no suite: it must hold names and values") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError(f"{path} is no suite: not YAML: {reason}") from error
    _check(suite, path)
    return suite


def _check(suite: Suite, path: Path) -> None:
    """Refuse names that there are not."""
    for each in (*suite.tasks, *suite.metrics, *suite.max_new_tokens):
        if each not in TASKS:
            raise InvalidInputError(f"{path}: there is no task {each!r}.{nearest(each, TASKS)}")
    for each in (name for names in suite.metrics.values() for name in names):
        if each not in METRICS:
            raise InvalidInputError(f"{path}: there is no metric {each!r}.{nearest(each, METRICS)}")
    _check_names("part", suite.parts, [part.name for part in paper((), suite.rows)])
    for row in suite.rows:
        if not row.optional:
            settled(row)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    place = ".".join(str(each) for each in problem["loc"])
    return f"{place}: {problem['msg']}; got {problem['input']!r}"


def settled(row: Row, options: Mapping[str, Any] | None = None) -> tuple[Strategy, AdaFuseConfig]:
    """A row's strategy and options.

    Args:
        row: the system.
        options: of its task; those of the row come before them.

    Raises:
        InvalidOptionError: there is no such strategy or option, or they do not go together.
    """
    strategy = find_strategy(row.strategy)
    config = AdaFuseConfig(**{**(options or {}), **row.options})
    refuse_unused_options(strategy, config)
    return strategy, config


def parts_of(suite: Suite, members: Sequence[str]) -> tuple[Part, ...]:
    """The parts of a suite, for members of these names.

    Raises:
        InvalidInputError: it names a part, or a row to leave out, that there is not.
    """
    parts = paper(members, suite.rows)
    _check_names("part", suite.parts, [part.name for part in parts])
    rows = [row.name for part in parts for row in part.rows]
    _check_names("row", suite.without, list(dict.fromkeys(rows)))
    return tuple(
        part.without(suite.without) for part in parts if not suite.parts or part.name in suite.parts
    )


def _check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise InvalidInputError(
                f"there is no {what} {name!r} in the suite.{nearest(name, known)} "
                f"It has {', '.join(known)}."
            )


PEERS = (
    Row(name="majority vote", strategy="vote", kind="peer"),
    Row(name="likelihood reranker", strategy="rerank", kind="peer"),
    Row(name="SweetSpan", strategy="sweetspan", kind="peer"),
    Row(name="UniTE", strategy="unite", kind="peer"),
    Row(name="GaC", strategy="gac", kind="peer"),
    Row(name="GaC, gated", strategy="gac-gated", kind="peer"),
    Row(name="DeePEn", strategy="deepen", kind="peer"),
)

RANKER = "LLM-Blender's PairRanker"
NO_RANKER = "it needs its published weights, a model of its own; see Strategies"

PLAIN = Row(name="AdaFuse, B = 1", options={"branching_factor": 1})
BRANCHED = Row(name="AdaFuse, B = 3", options={"branching_factor": 3})
OURS = (PLAIN, BRANCHED)


def paper(members: Sequence[str], more: Sequence[Row] = ()) -> tuple[Part, ...]:
    """The tables and figures of the AdaFuse paper (arXiv 2601.06022) for members of these names."""
    alone = tuple(
        Row(name=f"{each} alone", strategy="single", use=(each,), kind="member") for each in members
    )
    beams = _beams()
    parts = [
        Part(
            name="table-1",
            title="Table 1: members, peers and AdaFuse",
            about="B = 1 is the setting of the paper's Table 1 (§3.3 off), B = 3 this package's "
            "default.",
            rows=(*alone, *PEERS, *OURS),
            size="table",
            absent={RANKER: NO_RANKER},
        ),
        Part(
            name="table-2",
            title="Table 2: from one member to all",
            about="AdaFuse with B = 3; one member decodes greedily.",
            rows=(*(row.model_copy(update={"at": 1.0}) for row in alone), *_subsets(members)),
        ),
        Part(
            name="figure-2",
            title="Figure 2: a fixed number of words a round, and the adaptive one",
            about="§3.3 is off: nothing branches.",
            rows=(
                *(
                    Row(name=f"{count(words, 'word')} a round", strategy=f"fixed-{words}")
                    for words in (1, 2, 3)
                ),
                PLAIN.model_copy(update={"name": "adaptive, M = 3"}),
            ),
            reference="adaptive, M = 3",
        ),
        Part(
            name="figure-4",
            title="Figure 4: more branches, with the adaptive length on and off",
            about="B = 1 is §3.3 switched off. Off, a round is one word (M = 1).",
            rows=tuple(
                Row(
                    name=f"B = {branches}, M = {words}",
                    options={"branching_factor": branches, "max_words": words},
                    at=float(branches),
                    series=f"adaptive length {'on' if words > 1 else 'off'}",
                )
                for words in (3, 1)
                for branches in BRANCHES
            ),
            reference="B = 1, M = 3",
            axis="B, branches of an unsure word",
        ),
        Part(
            name="figure-5",
            title="Figure 5: run time",
            about="One question at a time, after a first one that is not counted: seconds from "
            "the request to the end of the answer.",
            rows=(*alone, *PEERS, *OURS),
            size="time",
        ),
        Part(
            name="figure-6",
            title="Figure 6: the confidence threshold τ",
            about="B = 1. At a low threshold members are sure of nearly every word.",
            rows=tuple(
                PLAIN.model_copy(
                    update={
                        "name": f"τ = {threshold}",
                        "options": {**PLAIN.options, "margin_threshold": threshold},
                        "at": threshold,
                    }
                )
                for threshold in THRESHOLDS
            ),
            reference="τ = 0.7",
            axis="τ",
        ),
        Part(
            name="figure-7",
            title="Figure 7: the beam-search variant",
            about="B = 3. Appendix F, as it is read on the page about strategies.",
            rows=tuple(beams),
            reference=beams[0].name if beams else None,
            axis="beams",
            absent={} if beams else {"beam search": "there is no strategy beam-1, beam-2, …"},
        ),
    ]
    if more:
        parts.append(
            Part(
                name="more",
                title="Beyond the paper",
                about="Rows of the suite file, beside the default.",
                rows=(BRANCHED, *more),
                reference=BRANCHED.name,
            )
        )
    return tuple(parts)


def _subsets(members: Sequence[str]) -> Iterator[Row]:
    """Ensembles of two members and more; all of them together is a row of Table 1."""
    every = len(members) <= ALL_SUBSETS
    for size in range(2, len(members) + 1):
        for chosen in combinations(members, size) if every else [tuple(members[:size])]:
            yield BRANCHED.model_copy(
                update={
                    "name": " + ".join(chosen),
                    "use": None if len(chosen) == len(members) else chosen,
                    "at": float(size),
                }
            )


def _beams() -> list[Row]:
    """The beam-search variant, if there is such a strategy; one beam is AdaFuse itself."""
    wider = [
        Row(name=count(width, "beam"), strategy=f"beam-{width}", at=float(width))
        for width in WIDTHS
    ]
    try:
        for row in wider:
            settled(row)
    except InvalidOptionError:
        return []
    return [BRANCHED.model_copy(update={"name": "1 beam (AdaFuse)", "at": 1.0}), *wider]
