"""The systems in each table.

A system is a row: the name of a strategy, options of `AdaFuseConfig`, and members. To add a
strategy or an option, add a row here or in a suite file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from adafuse_llm.errors import InvalidInputError, nearest
from benchmarks.paper.tasks import LONG_TASKS

PAPER_TASKS = ("nq", "squad", "triviaqa", "gsm8k", "flores_en_de", "flores_de_en")
"""Tasks of the paper's Table 1."""

ALL_SUBSETS = 3
"""Largest number of members for which Table 2 has every subset. With more members, it
has each member alone, and the first 2, the first 3, … members together."""

Kind = Literal["member", "peer", "adafuse"]
Size = Literal["table", "sweep", "time"]


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(_Plain):
    """A system: a strategy, its options and its members.

    Attributes:
        name: name in the tables.
        strategy: name of the strategy.
        options: options of `AdaFuseConfig`, which override those of the task.
        use: names of the members that take part. None for all.
        kind: kind of system, which decides the comparisons of Table 1.
    """

    name: str
    strategy: str = "adafuse"
    options: Mapping[str, Any] = Field(default_factory=dict)
    use: tuple[str, ...] | None = None
    kind: Kind = "adafuse"

    @property
    def key(self) -> str:
        """Name of the row's file of answers. Rows with the same key share their answers."""
        options = [f"{name}={value}" for name, value in sorted(self.options.items())]
        members = [f"by {'+'.join(self.use)}"] if self.use else []
        key = " ".join([self.strategy, *options, *members])
        safe = re.sub(r"[^\w.=+-]+", "_", key)
        if re.search(r"[^\w.=+ -]", key):  # distinguishes keys with equal safe names
            safe += f"_{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        return safe


class Part(_Plain):
    """A table.

    Attributes:
        name: name, such as ``table-1``.
        title: heading.
        rows: the systems.
        size: name of the field of `Sizes` that holds the number of questions. For ``time``,
            questions run one at a time.
        reference: name of the row that the other rows are tested against. If None, the AdaFuse rows
            are tested against the best member and every peer.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    size: Size = "sweep"
    reference: str | None = None


class Sizes(_Plain):
    """Largest number of questions per task, for each kind of part. A part uses the first ones.

    Attributes:
        table: for Table 1.
        sweep: for the other tables.
        time: for the part that measures time.
    """

    table: int = Field(default=720, ge=1)
    sweep: int = Field(default=180, ge=1)
    time: int = Field(default=24, ge=1)


class Suite(_Plain):
    """Settings of a suite.

    Attributes:
        models: folders or hub ids. Empty for the embedded members.
        real: names of members of ``make real``, which replace `models`.
        dtype: data type of the weights.
        device_map: how accelerate places the weights on devices.
        chat: whether to send prompts as messages.
        tasks: names of tasks. Empty for the paper's tasks with data, or ``embedded`` without data.
        metrics: metrics by task, the main one first. They replace the task's own metrics.
        questions: numbers of questions.
        ranges: numbers of the first and of the last question, by task.
        max_requests: number of concurrent questions, except in the part that measures time.
        ensembles: members by name of an ensemble. Each has a Table 1 of its own.
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
    metrics: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    questions: Sizes = Sizes()
    ranges: Mapping[str, tuple[int, int]] = Field(default_factory=dict)
    max_requests: int = Field(default=16, ge=1)
    ensembles: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    with_peers: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    peers: tuple[Row, ...] = ()


PEERS = tuple(
    Row(name=name, strategy=strategy, kind="peer")
    for name, strategy in (
        ("majority vote", "vote"),
        ("likelihood reranker", "rerank"),
        ("SweetSpan", "sweetspan"),
        ("UniTE", "unite"),
        ("GaC", "gac"),
        ("GaC, gated", "gac-gated"),
        ("DeePEn", "deepen"),
    )
)
TUNED = (
    Row(name="GaC, gate at 0.9", strategy="gac-gated-0.9", kind="peer"),
    Row(name="DeePEn, rate 0.3", strategy="deepen-0.3", kind="peer"),
)
"""Peers with the settings that were best for the embedded members on development questions."""

PLAIN = Row(name="AdaFuse, B = 1", options={"branching_factor": 1})
BRANCHED = Row(name="AdaFuse, B = 3", options={"branching_factor": 3})
MIXTURE = Row(name="mixture of words", strategy="mixture")

REAL = Suite(
    real=("smollm", "gemma", "qwen"),
    ranges={"squad": (301, 364), "nq": (301, 332), "triviaqa": (301, 332)},
    tasks=("squad", "nq", "triviaqa"),
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
"""Questions with answers of a few words, for ensembles of real members and their peers.

Questions 1 to 300 of a task are for development, and questions 301 to 800 for the final test. The
long embedded tasks have 300 questions, half of them for each. The accepted answers of
the embedded tasks are written in sentences that only the embedded members know, so the metrics
compare words instead.
"""

SUITES: Mapping[str, Suite] = {
    "embedded": Suite(peers=TUNED),
    "long": Suite(peers=TUNED, tasks=LONG_TASKS, questions=Sizes(table=300), parts=("table-1",)),
    "real": REAL,
    "real-pairs": REAL.model_copy(
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
            "tasks": (*REAL.tasks, *PAPER_TASKS[3:], "embedded", "embedded_summary"),
            "metrics": {  # spBLEU needs a tokenizer that sacrebleu downloads
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
    ),
    "even": Suite(
        tasks=("embedded", *LONG_TASKS),
        ranges={"embedded": (301, 800), **dict.fromkeys(LONG_TASKS, (151, 300))},
        questions=Sizes(sweep=500),
        parts=("more",),
        rows=(PLAIN, MIXTURE),
    ),
}
"""Suites by name: the paper's tables; Table 1 for questions with long answers, and for ensembles of
real members; pairs of real members with the two rules that ``auto`` chooses from; and these two
rules with members of the same size."""


def load_suite(name: str) -> Suite:
    """Load a suite of `SUITES`, or a suite from a YAML file.

    Raises:
        InvalidInputError: the suite does not exist, or the file is not a suite.
    """
    if name in SUITES:
        return SUITES[name]
    path = Path(name)
    if not path.is_file():
        raise InvalidInputError(
            f"there is no suite {name!r}.{nearest(name, SUITES)} Pass {', '.join(SUITES)}, or "
            "the path of a YAML file."
        )
    import yaml

    try:
        return Suite(**yaml.safe_load(path.read_text(encoding="utf-8-sig")))
    except (ValidationError, TypeError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError(f"{path} is not a suite: {reason}") from error


def parts_of(suite: Suite, members: Sequence[str]) -> list[Part]:
    """Return the parts of a suite for members with these names.

    Raises:
        InvalidInputError: the suite names a part that does not exist.
    """
    alone = [
        Row(name=f"{each} alone", strategy="single", use=(each,), kind="member") for each in members
    ]
    rows = [row for row in (*PEERS, *suite.peers, PLAIN, BRANCHED) if row.name not in suite.without]
    every = [_table("table-1", "Table 1: members, peers and AdaFuse", (*alone, *rows))]
    for name, chosen in suite.ensembles.items():
        plain = bool(suite.with_peers) and name not in suite.with_peers
        its = [row for row in rows if not (plain and row.kind == "peer" and row in PEERS)]
        own = [row.model_copy(update={"use": chosen}) for row in its]
        its_members = [row for row in alone if row.use and row.use[0] in chosen]
        every.append(_table(name, f"Table 1: {name}", (*its_members, *own)))
    every += _sweeps(members, alone, rows)
    if suite.rows:
        title = "Beyond the paper"
        more = (BRANCHED, *suite.rows)
        every.append(Part(name="more", title=title, rows=more, reference=BRANCHED.name))
    known = [part.name for part in every]
    for name in suite.parts:
        if name not in known:
            raise InvalidInputError(
                f"there is no part {name!r} in the suite.{nearest(name, known)} The suite has "
                f"{', '.join(known)}."
            )
    return [part for part in every if not suite.parts or part.name in suite.parts]


def _table(name: str, title: str, rows: Sequence[Row]) -> Part:
    return Part(name=name, title=title, rows=tuple(rows), size="table")


def _sweeps(members: Sequence[str], alone: Sequence[Row], rows: Sequence[Row]) -> Iterator[Part]:
    """Yield the other tables and the figures of the paper (arXiv 2601.06022), as tables."""
    yield Part(
        name="table-2", title="Table 2: from one member to all", rows=(*alone, *_subsets(members))
    )
    adaptive = PLAIN.model_copy(update={"name": "adaptive, M = 3"})
    always_sure = {"margin_threshold": 0.0, "branching_factor": 1}
    fixed = (
        Row(name=f"{words} words a round", options={**always_sure, "max_words": words})
        for words in (1, 2, 3)
    )
    yield Part(
        name="figure-2",
        title="Figure 2: a fixed number of words a round, and the adaptive one (B = 1)",
        rows=(*fixed, adaptive),
        reference=adaptive.name,
    )
    yield Part(
        name="figure-4",
        title="Figure 4: more branches, with the adaptive length on (M = 3) and off (M = 1)",
        rows=tuple(
            Row(
                name=f"B = {branches}, M = {words}",
                options={"branching_factor": branches}
                | ({} if words == 3 else {"max_words": words}),
            )
            for words in (3, 1)
            for branches in (1, 2, 3, 4, 5)
        ),
        reference="B = 1, M = 3",
    )
    yield Part(
        name="figure-5",
        title="Figure 5: run time, one question at a time",
        rows=(*alone, *rows),
        size="time",
    )
    yield Part(
        name="figure-6",
        title="Figure 6: the confidence threshold τ (B = 1)",
        rows=tuple(
            Row(name=f"τ = {value}", options={**PLAIN.options, "margin_threshold": value})
            for value in (0.1, 0.3, 0.5, 0.7, 0.9)
        ),
        reference="τ = 0.7",
    )
    yield Part(
        name="figure-7",
        title="Figure 7: beams (B = 3), as in Appendix F of the paper",
        rows=(
            BRANCHED,
            *(Row(name=f"{width} beams", strategy=f"beam-{width}") for width in (2, 3, 5)),
        ),
        reference=BRANCHED.name,
    )


def _subsets(members: Sequence[str]) -> Iterator[Row]:
    """Yield ensembles of two or more members. The full ensemble has the same key in Table 1."""
    every = len(members) <= ALL_SUBSETS
    for size in range(2, len(members) + 1):
        for chosen in combinations(members, size) if every else [tuple(members[:size])]:
            use = None if len(chosen) == len(members) else chosen
            yield BRANCHED.model_copy(update={"name": " + ".join(chosen), "use": use})
