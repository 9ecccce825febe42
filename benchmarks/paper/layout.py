"""The systems in each table and figure.

A system is a row: the name of a strategy, options of `AdaFuseConfig`, and members. To add a
strategy or an option, add a row here or in a suite file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from adafuse_llm.config import DEFAULT_BRANCHES, AdaFuseConfig
from adafuse_llm.embedded import HELDOUT_KINDS
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, nearest
from adafuse_llm.report.page import count
from adafuse_llm.strategies.base import Strategy, refuse_unused_options
from adafuse_llm.strategies.registry import find_strategy
from benchmarks.paper.metrics import METRICS
from benchmarks.paper.tasks import TASKS

PAPER_TASKS = ("nq", "squad", "triviaqa", "gsm8k", "flores_en_de", "flores_de_en")
"""Tasks of the paper's Table 1."""

LONG_TASKS = tuple(f"embedded_{kind}" for kind in HELDOUT_KINDS if kind != "facts")
"""Tasks of the suite ``long``."""

ALL_SUBSETS = 3
"""Largest number of members for which Table 2 has every subset. With more members, it
has each member alone, and the first 2, the first 3, … members together."""

BRANCHES = (1, 2, 3, 4, 5)
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
WIDTHS = (2, 3, 5)

OF_TASKS = ("max_new_tokens", "stop", "use")
"""Options that tasks and command-line options may set. A value in a row overrides them."""

Kind = Literal["member", "peer", "adafuse"]
Size = Literal["table", "sweep", "time"]


class Plain(BaseModel):
    """Frozen data of a suite or a report."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(Plain):
    """A system: a strategy, its options and its members.

    Attributes:
        name: name in the tables.
        strategy: name of the strategy.
        options: options of `AdaFuseConfig`, which override those of the task.
        use: names of the members that take part. None for all.
        kind: kind of system, which decides the comparisons of Table 1.
        at: position on a figure's axis.
        series: name of the line of a figure to which the row belongs.
        optional: what happens if this installation lacks the strategy or an option. If True, the
            row is left out, and the report gives the reason. If False, an error is raised.
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
        """Key of the row's answers. Rows with the same key share their answers.

        The key omits options that have their default value, except those in `OF_TASKS`.
        """
        fields = AdaFuseConfig.model_fields
        given = [
            f"{name}={value}"
            for name, value in sorted(self.options.items())
            if name in OF_TASKS or name not in fields or value not in self._defaults(name)
        ]
        members = "+".join(quote(each, safe="") for each in self.use or ())
        return " ".join([self.strategy, *given, *([f"by {members}"] if members else [])])

    def _defaults(self, option: str) -> tuple[Any, ...]:
        """Return the values of an option that change nothing in an ensemble of several members."""
        default = AdaFuseConfig.model_fields[option].default
        branches = option == "branching_factor" and self.strategy == "adafuse"
        return (default, DEFAULT_BRANCHES) if branches else (default,)


class Part(Plain):
    """A table or a figure.

    Attributes:
        name: name, such as ``table-1``.
        title: heading.
        about: note on the contents.
        rows: the systems.
        size: name of the field of `Sizes` that holds the number of questions.
        reference: name of the row that the other rows are tested against.
        axis: label of the axis of `Row.at`. None for a part without a line chart.
        absent: names of rows that are left out, with the reason.
    """

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]
    size: Size = "sweep"
    reference: str | None = None
    axis: str | None = None
    absent: Mapping[str, str] = Field(default_factory=dict)

    def of(self, name: str, members: Sequence[str]) -> Part:
        """Return the part for an ensemble of some members. Each of them is also a row, alone.

        Args:
            name: name of the ensemble, of the part, and at the beginning of its rows' names.
            members: names of the members.
        """
        rows = [
            row
            if row.kind == "member"
            else row.model_copy(update={"name": f"{name}: {row.name}", "use": tuple(members)})
            for row in self.rows
            if row.kind != "member" or set(row.use or ()) <= set(members)
        ]
        title = f"{self.title} ({name})"
        return self.model_copy(update={"name": name, "title": title, "rows": tuple(rows)})

    def without(self, names: Sequence[str]) -> Part:
        """Return the part without the rows that have these names."""
        kept = tuple(row for row in self.rows if row.name not in names)
        left = {row.name: "the suite leaves it out" for row in self.rows if row not in kept}
        return self.model_copy(update={"rows": kept, "absent": {**self.absent, **left}})


class Sizes(Plain):
    """Largest number of questions per task, for each kind of part. A part uses the first ones.

    Attributes:
        table: for Table 1.
        sweep: for the other tables and figures.
        time: for parts that measure time.
    """

    table: int = Field(default=720, ge=1)
    sweep: int = Field(default=180, ge=1)
    time: int = Field(default=24, ge=1)


class Suite(Plain):
    """Settings of a suite: the parts of the paper, members, tasks and numbers of questions.

    Attributes:
        models: folders or hub ids. Empty for the embedded members.
        real: names of members of ``make real``, which replace `models`.
        dtype: data type of the weights.
        device_map: how accelerate places the weights on devices.
        chat: whether to send prompts as messages.
        tasks: names of tasks. Empty for all tasks with data, or ``embedded`` without data.
        metrics: metrics by task, the main one first. They replace the task's own metrics.
        questions: numbers of questions.
        first: number of the first question of each task, from 1.
        ranges: numbers of the first and of the last question, by task. They replace `first`.
        max_requests: number of concurrent questions, except in parts that measure time.
        workers: number of processes that decode, except in parts that measure time.
        max_new_tokens: length limit by task. It replaces the task's own limit.
        ensembles: members by name of an ensemble. Each ensemble has a Table 1 of its own, which is
            a part with the name of the ensemble.
        with_peers: names of the ensembles whose Table 1 has the peers. Empty for all.
        parts: names of parts. Empty for all.
        without: names of rows to leave out.
        rows: further systems. They make up the additional part ``more``.
        peers: further peers of Table 1.
    """

    models: tuple[str, ...] = ()
    real: tuple[str, ...] = ()
    dtype: str = "auto"
    device_map: str | None = None
    chat: bool = False
    tasks: tuple[str, ...] = ()
    metrics: Mapping[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(
        default_factory=dict
    )
    questions: Sizes = Sizes()
    first: int = Field(default=1, ge=1)
    ranges: Mapping[str, tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]] = Field(
        default_factory=dict
    )
    max_requests: int = Field(default=16, ge=1)
    workers: int = Field(default=1, ge=1)
    max_new_tokens: Mapping[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    ensembles: Mapping[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(
        default_factory=dict
    )
    with_peers: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    peers: tuple[Row, ...] = ()

    def limited(self, limit: int | None) -> Suite:
        """Return the suite with at most `limit` questions of every task in every part."""
        if limit is None:
            return self
        sizes = {name: min(limit, size) for name, size in self.questions.model_dump().items()}
        return self.model_copy(update={"questions": Sizes(**sizes)})

    def starting(self, first: int | None) -> Suite:
        """Return the suite with another first question of every task, and as many questions."""
        if first is None:
            return self
        ranges = {task: (first, first + end - start) for task, (start, end) in self.ranges.items()}
        return self.model_copy(update={"first": first, "ranges": ranges})

    def development(self) -> Suite:
        """Return the suite with as many questions from number 1, but none that this suite asks."""
        ranges = {
            t: (1, min(last - first + 1, first - 1)) for t, (first, last) in self.ranges.items()
        }
        return self.model_copy(update={"first": 1, "ranges": ranges})

    def asked(self, task: str) -> slice:
        """Return the range of a task's questions. It has no end if the suite has none for it."""
        first, last = self.ranges.get(task, (self.first, None))
        return slice(first - 1, last)


PEERS = (
    Row(name="majority vote", strategy="vote", kind="peer"),
    Row(name="likelihood reranker", strategy="rerank", kind="peer"),
    Row(name="SweetSpan", strategy="sweetspan", kind="peer"),
    Row(name="UniTE", strategy="unite", kind="peer"),
    Row(name="GaC", strategy="gac", kind="peer"),
    Row(name="GaC, gated", strategy="gac-gated", kind="peer"),
    Row(name="DeePEn", strategy="deepen", kind="peer"),
    Row(name="CoRE", strategy="core", kind="peer"),
    Row(name="SAFE", strategy="safe", kind="peer"),
    Row(name="SpecEM", strategy="specem", kind="peer"),
)

PLAIN = Row(name="AdaFuse, B = 1", options={"branching_factor": 1})
BRANCHED = Row(name="AdaFuse, B = 3", options={"branching_factor": 3})
OURS = (PLAIN, BRANCHED)

TUNED = (
    Row(name="GaC, gate at 0.9", strategy="gac-gated-0.9", kind="peer"),
    Row(name="DeePEn, rate 0.3", strategy="deepen-0.3", kind="peer"),
)
"""Peers with the settings that were best for the embedded members on development questions."""

MIXTURE = Row(name="mixture of words", strategy="mixture")

REAL = Suite(
    real=("smollm", "gemma", "qwen"),
    ranges={"squad": (301, 364), "nq": (301, 332), "triviaqa": (301, 332)},
    tasks=("squad", "nq", "triviaqa"),
    questions=Sizes(table=500),
    workers=2,
    ensembles={
        "smollm+qwen": ("smollm", "qwen"),
        "gemma+qwen": ("gemma", "qwen"),
        "all": ("smollm", "gemma", "qwen"),
    },
    with_peers=("smollm+qwen",),
    parts=("smollm+qwen", "gemma+qwen", "all"),
    without=("GaC, gated",),
    peers=(MIXTURE,),
)
"""The suite ``real``: questions with answers of a few words, for all ensembles and their peers.

Questions 1 to 300 of a task are for development, and questions 301 to 800 for the final test; of
the long embedded tasks, which have 300 questions, those are the two halves. The accepted answers of
the embedded tasks are written in sentences that only the embedded members know, so the metrics
compare words instead.
"""

REAL_PAIRS = REAL.model_copy(
    update={
        "ranges": {
            "squad": (301, 800),
            "nq": (301, 396),
            "triviaqa": (301, 396),
            "gsm8k": (301, 396),
            "flores_en_de": (301, 332),
            "flores_de_en": (301, 332),
            "embedded": (301, 428),
            "embedded_summary": (151, 214),
        },
        "tasks": (
            *REAL.tasks,
            "gsm8k",
            "flores_en_de",
            "flores_de_en",
            "embedded",
            "embedded_summary",
        ),
        "metrics": {
            "flores_en_de": ("chrf",),
            "flores_de_en": ("chrf",),
            "embedded": ("contains", "f1"),
            "embedded_summary": ("f1",),
        },
        "ensembles": {name: REAL.ensembles[name] for name in ("smollm+qwen", "gemma+qwen")},
        "parts": ("smollm+qwen", "gemma+qwen"),
        "without": (*(row.name for row in PEERS), PLAIN.name),
        "with_peers": (),
    }
)
"""The suite ``real-pairs``: more questions, for pairs and the two rules that ``auto`` chooses from.

A pair needs up to half a minute of a core for an answer of GSM8K or a summary. The metric of
translations is chrF, because spBLEU needs a tokenizer that sacrebleu downloads.
"""

SUITES: Mapping[str, Suite] = {
    "paper": Suite(peers=TUNED),
    "long": Suite(
        peers=TUNED,
        tasks=LONG_TASKS,
        questions=Sizes(table=300, sweep=300),
        parts=("table-1",),
        workers=2,
    ),
    "real": REAL,
    "real-development": REAL.development(),
    "real-pairs": REAL_PAIRS,
    "real-pairs-development": REAL_PAIRS.development(),
    "even": Suite(
        tasks=("embedded", *LONG_TASKS),
        ranges={"embedded": (301, 800), **dict.fromkeys(LONG_TASKS, (151, 300))},
        questions=Sizes(sweep=500),
        parts=("more",),
        rows=(PLAIN, MIXTURE),
        workers=2,
    ),
}
"""Suites by name: the paper's tables and figures, Table 1 on questions with long answers, Table 1
of ensembles of real members, on questions for the final test and on those for development, and the
two rules that ``auto`` chooses from, with members of the same size."""


def load_suite(name: str) -> Suite:
    """Load a suite of `SUITES`, or a suite from a YAML file.

    Raises:
        InvalidInputError: the suite does not exist, or the file is not a suite.
        InvalidOptionError: the strategy or an option of a row does not exist.
    """
    if name in SUITES:
        return SUITES[name]
    path = Path(name)
    if not path.is_file():
        raise InvalidInputError(
            f"there is no suite {name!r}.{nearest(name, SUITES)} Pass {' or '.join(SUITES)}, or "
            "the path of a YAML file."
        )
    import yaml

    try:
        suite = Suite(**yaml.safe_load(path.read_text(encoding="utf-8-sig")))
    except ValidationError as error:
        raise InvalidInputError(f"{path} is not a suite: {_first_problem(error)}") from error
    except TypeError as error:
        raise InvalidInputError(
            f"{path} is not a suite: it must contain names and values"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError(f"{path} is not YAML: {reason}") from error
    _check(suite, path)
    return suite


def _check(suite: Suite, path: Path) -> None:
    """Check that the names in a suite exist."""
    for task in (*suite.tasks, *suite.metrics, *suite.max_new_tokens, *suite.ranges):
        if task not in TASKS:
            raise InvalidInputError(f"{path}: there is no task {task!r}.{nearest(task, TASKS)}")
    for name in (name for names in suite.metrics.values() for name in names):
        if name not in METRICS:
            raise InvalidInputError(f"{path}: there is no metric {name!r}.{nearest(name, METRICS)}")
    for task, (first, last) in suite.ranges.items():
        if last < first:
            raise InvalidInputError(
                f"{path}: the range of {task} must end with question {first} or a later one; got "
                f"{last}"
            )
    _check_names("part", suite.parts, [part.name for part in _all_parts(suite, ())])
    for row in (*suite.rows, *suite.peers):
        if not row.optional:
            settled(row)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    place = ".".join(str(each) for each in problem["loc"])
    return f"{place}: {problem['msg']}; got {problem['input']!r}"


def settled(row: Row, options: Mapping[str, Any] | None = None) -> tuple[Strategy, AdaFuseConfig]:
    """Return the strategy and options of a row.

    Args:
        row: the system.
        options: options of the task. The options of the row override them.

    Raises:
        InvalidOptionError: the strategy or an option does not exist, or the strategy does not use
            an option.
    """
    strategy = find_strategy(row.strategy)
    config = AdaFuseConfig(**{**(options or {}), **row.options})
    refuse_unused_options(strategy, config)
    return strategy, config


def parts_of(suite: Suite, members: Sequence[str]) -> tuple[Part, ...]:
    """Return the parts of a suite for members with these names.

    Raises:
        InvalidInputError: the suite names a part or a row that does not exist.
    """
    rows = [row.name for part in paper(members, suite.rows, suite.peers) for row in part.rows]
    _check_names("row", suite.without, list(dict.fromkeys(rows)))
    parts = _all_parts(suite, members)
    _check_names("part", suite.parts, [part.name for part in parts])
    return tuple(part for part in parts if not suite.parts or part.name in suite.parts)


def _all_parts(suite: Suite, members: Sequence[str]) -> list[Part]:
    """Return all parts, whether or not `Suite.parts` names them."""
    parts = paper(members, suite.rows, suite.peers)
    first, *others = [part.without(suite.without) for part in parts]
    _check_names("ensemble", suite.with_peers, list(suite.ensembles))
    peers_of = suite.with_peers or suite.ensembles
    plain = first.without([row.name for row in first.rows if row.kind == "peer"])
    tables = [
        (first if name in peers_of else plain).of(name, chosen)
        for name, chosen in suite.ensembles.items()
    ]
    return [first, *tables, *others]


def _check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise InvalidInputError(
                f"there is no {what} {name!r} in the suite.{nearest(name, known)} "
                f"The suite has {', '.join(known)}."
            )


RANKER = "LLM-Blender's PairRanker"
NO_RANKER = "it needs a separate model with published weights; see the page Strategies"


def paper(
    members: Sequence[str], more: Sequence[Row] = (), peers: Sequence[Row] = ()
) -> tuple[Part, ...]:
    """Return the tables and figures of the AdaFuse paper (arXiv 2601.06022) for given members.

    Args:
        members: names of the members.
        more: rows of an additional part ``more``.
        peers: further peers of Table 1.
    """
    alone = tuple(
        Row(name=f"{each} alone", strategy="single", use=(each,), kind="member") for each in members
    )
    beams = _beams()
    parts = [
        Part(
            name="table-1",
            title="Table 1: members, peers and AdaFuse",
            about="B = 1 is the setting of the paper's Table 1 (§3.3 off). B = 3 is the default of "
            "the strategy `adafuse`.",
            rows=(*alone, *PEERS, *peers, *OURS),
            size="table",
            absent={RANKER: NO_RANKER},
        ),
        Part(
            name="table-2",
            title="Table 2: from one member to all",
            about="AdaFuse has B = 3. A single member decodes greedily.",
            rows=(*(row.model_copy(update={"at": 1.0}) for row in alone), *_subsets(members)),
        ),
        Part(
            name="figure-2",
            title="Figure 2: a fixed number of words a round, and the adaptive one",
            about="§3.3 is off, so members propose no alternatives.",
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
            about="B = 1 turns §3.3 off. With the adaptive length off, a round has one word "
            "(M = 1). The left panel of the paper's figure compares §3.3 on and off by data set: "
            "here, B = 3 and B = 1 of each task.",
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
            axis="B, alternatives for an unsure word",
        ),
        Part(
            name="figure-5",
            title="Figure 5: run time",
            about="Seconds from the request to the end of the answer. Questions run one at a time, "
            "after a first one that is not counted.",
            rows=(*alone, *PEERS, *OURS),
            size="time",
        ),
        Part(
            name="figure-6",
            title="Figure 6: the confidence threshold τ",
            about="B = 1. At a low threshold members are confident of nearly every word.",
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
            about="AdaFuse has B = 3. The rows of beams follow Appendix F of the paper. The rows "
            "of hypotheses are this project's own variant, which keeps several partial answers "
            "across rounds (B = 3). The page Strategies describes both.",
            rows=tuple(beams),
            reference=beams[0].name if beams else None,
            axis="beams, or hypotheses",
            absent={}
            if beams
            else {"beam search": "the strategies beam-N and hypotheses-N do not exist"},
        ),
    ]
    if more:
        parts.append(
            Part(
                name="more",
                title="Beyond the paper",
                about="Rows of the suite file, compared with the default.",
                rows=(BRANCHED, *more),
                reference=BRANCHED.name,
            )
        )
    return tuple(parts)


def _subsets(members: Sequence[str]) -> Iterator[Row]:
    """Yield ensembles of two or more members. The full ensemble has the same key in Table 1."""
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
    """Return the rows of Figure 7, or no rows if their strategies do not exist.

    The first row is AdaFuse, the reference. One hypothesis is AdaFuse itself.
    """
    own = "hypotheses across rounds"
    wider = [
        *(
            Row(
                name=f"{width} beams",
                strategy=f"beam-{width}",
                at=float(width),
                series="beams in a round",
            )
            for width in WIDTHS
        ),
        *(
            Row(
                name=f"{width} hypotheses",
                strategy=f"hypotheses-{width}",
                at=float(width),
                series=own,
            )
            for width in WIDTHS
        ),
    ]
    try:
        for row in wider:
            settled(row)
    except InvalidOptionError:
        return []
    return [BRANCHED.model_copy(update={"name": "AdaFuse", "at": 1.0, "series": own}), *wider]
