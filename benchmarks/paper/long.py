"""Analysis of answers that have several sentences.

lengths    the score by the number of words of the reference answer
decisions  what the rounds of AdaFuse decide inside an answer, and whether they decide rightly
sentences  how many sentences of an answer are right, wrong and missing

The reference answer is the first accepted answer of a question.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from pydantic import TypeAdapter

from adafuse_llm.report.styles import owner
from adafuse_llm.results import Candidate, Round
from adafuse_llm.summary import is_unanimous
from benchmarks.paper.layout import Plain
from benchmarks.paper.metrics import sentences
from benchmarks.paper.runner import Record, lost

LONG_SHARE = 0.2
"""Share of the questions of a task whose reference must have several sentences. A task with a
smaller share is not analyzed."""

LEAST_QUESTIONS = 20
"""Minimum number of questions in a bin of lengths, if the task has as many."""

MOST_BINS = 6
"""Maximum number of bins of lengths."""

ALL_TASKS = "all tasks"
"""Key of the questions of all tasks together."""

THIRDS = ("first third", "middle third", "last third")
"""Parts of an answer, by the number of its rounds."""


class Bin(Plain):
    """Questions whose reference answers have similar numbers of words.

    Attributes:
        least, most: smallest and largest number of words of a reference answer in this bin.
        questions: number of questions.
    """

    least: int
    most: int
    questions: int

    @property
    def words(self) -> str:
        """The range of words, such as ``8-12``."""
        return f"{self.least}-{self.most}" if self.most > self.least else f"{self.least}"


class Mean(Plain):
    """A mean score in percent, with its standard error. One answer has no standard error."""

    value: float
    error: float | None

    def shown(self) -> str:
        """Format the mean like ``81.7 ± 2.3``."""
        return f"{self.value:.1f}" + ("" if self.error is None else f" ± {self.error:.1f}")

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean by the normal distribution, within 0 and 100."""
        if self.error is None:
            return None
        return max(0.0, self.value - 1.96 * self.error), min(100.0, self.value + 1.96 * self.error)


class Lengths(Plain):
    """Scores by the number of words of the reference answer.

    Attributes:
        bins: the bins, by increasing number of words.
        means: by system, the mean score of each bin.
    """

    bins: tuple[Bin, ...]
    means: dict[str, tuple[Mean, ...]]

    def overall(self, system: str) -> float:
        """Return the mean score of a system over all questions."""
        pairs = list(zip(self.bins, self.means[system], strict=True))
        questions = sum(each.questions for each in self.bins)
        return sum(each.questions * mean.value for each, mean in pairs) / questions


class Decisions(Plain):
    """Counts of rounds, and of what they decided.

    A round is judged if the text of the current sentence agrees with the reference's sentence of
    the same number. A candidate keeps to the reference if its words follow there, and it ends the
    response only where the reference ends. Only a word that the next round continues may be
    incomplete; all others are compared as wholes.

    The owner of a round is the member whose text it committed; a unanimous round has none. The
    winner changes if the owner differs from the owner of the last round that has one. The change is
    judged by what the earlier owner proposed in the same round. Of several proposals, the one that
    this member finds most likely counts.

    Attributes:
        rounds: number of rounds, without forced ones.
        unanimous: rounds with one candidate, which all members proposed.
        changes: rounds in which the winner changed.
        right: changes that kept to the reference although the earlier owner would have left it.
        wrong: changes that left the reference although the earlier owner would have kept to it.
        neutral: changes after which both texts kept to the reference, or both left it.
        judged: number of judged rounds.
        kept: judged rounds that kept to the reference.
        missed: judged rounds that left the reference although another candidate kept to it.
        unknown: judged rounds in which no candidate kept to the reference.
    """

    rounds: int = 0
    unanimous: int = 0
    changes: int = 0
    right: int = 0
    wrong: int = 0
    neutral: int = 0
    judged: int = 0
    kept: int = 0
    missed: int = 0
    unknown: int = 0


class Sentences(Plain):
    """Sentences per answer.

    Attributes:
        right: sentences of the answer that the reference has, too.
        wrong: sentences of the answer that the reference does not have.
        missing: sentences of the reference that the answer does not have.
    """

    right: float
    wrong: float
    missing: float


class Long(Plain):
    """The analysis of answers that have several sentences.

    A system with lost answers (`Record.is_lost`) is absent.

    Attributes:
        lengths: scores by length of the reference, by task. With several tasks, `ALL_TASKS` has the
            questions of all.
        decisions: by task and row of AdaFuse, the decisions in each of `THIRDS`.
        sentences: by task and system.
    """

    lengths: dict[str, Lengths]
    decisions: dict[str, dict[str, tuple[Decisions, ...]]]
    sentences: dict[str, dict[str, Sentences]]


@dataclass(frozen=True)
class Answered:
    """The answers to the questions of a task.

    Attributes:
        metric: name of the main metric.
        stop: the stop sequences.
        records: records by system. All systems have the same questions in the same order.
    """

    metric: str
    stop: Sequence[str]
    records: Mapping[str, Sequence[Record]]

    @property
    def questions(self) -> Sequence[Record]:
        """The records of one system, for the questions and reference answers."""
        return next(iter(self.records.values()), ())

    @property
    def is_long(self) -> bool:
        """Whether enough of the reference answers have several sentences (`LONG_SHARE`)."""
        several = [len(sentences(record.label[0])) > 1 for record in self.questions]
        return bool(several) and fmean(several) >= LONG_SHARE

    @property
    def complete(self) -> Answered:
        """The answers of the systems without lost answers."""
        kept = {name: records for name, records in self.records.items() if not lost(records)}
        return Answered(self.metric, self.stop, kept)

    @property
    def words(self) -> list[int]:
        """The number of words of each reference answer."""
        return [len(record.label[0].split()) for record in self.questions]

    @property
    def scores(self) -> dict[str, list[float]]:
        """The score of each answer by the main metric, by system."""
        return {
            name: [record.metrics[self.metric] for record in records]
            for name, records in self.records.items()
        }


def long_answers(tasks: Mapping[str, Answered], members: Sequence[str]) -> Long | None:
    """Analyze the tasks whose answers have several sentences. Return None if there are none.

    Args:
        tasks: the answers by task.
        members: names of the members.
    """
    chosen = {name: task.complete for name, task in tasks.items() if task.is_long}
    chosen = {name: task for name, task in chosen.items() if task.records}
    if not chosen:
        return None
    lengths = {name: _lengths(task.words, task.scores) for name, task in chosen.items()}
    if len(chosen) > 1:
        lengths[ALL_TASKS] = _together(list(chosen.values()))
    return Long(
        lengths=lengths,
        decisions={
            name: {
                system: decisions(records, members, task.stop)
                for system, records in task.records.items()
                if any(record.rounds for record in records)
            }
            for name, task in chosen.items()
        },
        sentences={
            name: {system: _sentences(records) for system, records in task.records.items()}
            for name, task in chosen.items()
        },
    )


def rounds_of(record: Record) -> tuple[Round, ...]:
    """Return the rounds of an answer. The result is empty if they were not recorded."""
    return _ROUNDS.validate_python(record.rounds or ())


_ROUNDS = TypeAdapter(tuple[Round, ...])


# Scores by length -----------------------------------------------------------------------------


def _together(tasks: Sequence[Answered]) -> Lengths:
    """Return the scores by length over the questions of all tasks."""
    systems = [name for name in tasks[0].records if all(name in task.records for task in tasks)]
    scores = {name: [score for task in tasks for score in task.scores[name]] for name in systems}
    return _lengths([size for task in tasks for size in task.words], scores)


def _lengths(words: Sequence[int], scores: Mapping[str, Sequence[float]]) -> Lengths:
    bins = bins_of(words)
    return Lengths(
        bins=tuple(bins),
        means={
            name: tuple(
                _mean(
                    [v for v, n in zip(values, words, strict=True) if each.least <= n <= each.most]
                )
                for each in bins
            )
            for name, values in scores.items()
        },
    )


def bins_of(words: Sequence[int]) -> list[Bin]:
    """Divide questions into bins by their numbers of words.

    The bins have similar numbers of questions. There are at most `MOST_BINS` bins, and each has at
    least `LEAST_QUESTIONS` questions if there are as many.
    """
    target = max(LEAST_QUESTIONS, -(-len(words) // MOST_BINS))
    bins: list[list[int]] = [[]]
    for size in sorted(words):
        if len(bins[-1]) >= target and size != bins[-1][-1]:
            bins.append([])
        bins[-1].append(size)
    if len(bins) > 1 and len(bins[-1]) < LEAST_QUESTIONS:
        rest = bins.pop()
        bins[-1] += rest
    return [Bin(least=each[0], most=each[-1], questions=len(each)) for each in bins if each]


def _mean(values: Sequence[float]) -> Mean:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Mean(value=fmean(values), error=error)


# Decisions of rounds --------------------------------------------------------------------------


def decisions(
    records: Iterable[Record], members: Sequence[str], stop: Sequence[str] = ()
) -> tuple[Decisions, ...]:
    """Count what the rounds of answers decided, for each of `THIRDS`.

    Args:
        records: the answers with their rounds.
        members: names of the members.
        stop: the stop sequences.
    """
    counts: list[Counter[str]] = [Counter() for _ in THIRDS]
    for record in records:
        reference, rounds = _Reference(record.label[0], stop), rounds_of(record)
        text = "".join(each.text for each in rounds)
        start = 0
        before: str | None = None
        for place, decided in enumerate(rounds):
            now = owner(decided, members)
            if not decided.forced:
                third = len(THIRDS) * (2 * place + 1) // (2 * len(rounds))
                changed_from = before if now is not None and now != before else None
                counts[third].update(_judge(decided, reference, text, start, changed_from))
            start, before = start + len(decided.text), now or before
    return tuple(Decisions(**count) for count in counts)


def total(parts: Iterable[Decisions]) -> Decisions:
    """Return the sums of the counts."""
    sums: Counter[str] = Counter()
    for each in parts:
        sums.update(each.model_dump())
    return Decisions(**sums)


def _judge(
    decided: Round, reference: _Reference, text: str, start: int, changed_from: str | None
) -> list[str]:
    """Return the names of the fields of `Decisions` that count a round.

    Args:
        decided: the round.
        reference: the reference answer.
        text: the whole response.
        start: where the text of the round starts in the response.
        changed_from: the earlier owner if the winner changed, or None.
    """
    names = ["rounds"]
    if is_unanimous(decided):
        names.append("unanimous")
    if changed_from is not None:
        names.append("changes")
    committed, following = text[:start], text[start + len(decided.text) :]
    if not reference.has_start(committed, decided.text):
        return names
    continued = _is_inside_word(decided.text, following)
    kept = [
        reference.has(committed, each, is_continued=continued and index == decided.winner)
        for index, each in enumerate(decided.candidates)
    ]
    won = kept[decided.winner]
    names += ["judged", "kept" if won else "missed" if any(kept) else "unknown"]
    other = None if changed_from is None else _proposal(decided, changed_from)
    if other is not None:
        names.append("neutral" if kept[other] == won else "right" if won else "wrong")
    return names


def _proposal(decided: Round, member: str) -> int | None:
    """Return the index of the candidate that a member proposed and finds most likely, or None."""
    own = [
        (candidate.nll.get(member, math.inf), index)
        for index, candidate in enumerate(decided.candidates)
        if member in candidate.proposers
    ]
    return min(own)[1] if own else None


class _Reference:
    """The reference answer, with which the text of rounds is compared word by word.

    Args:
        text: the reference answer.
        stop: sequences that end a response.
    """

    def __init__(self, text: str, stop: Sequence[str]) -> None:
        self._sentences, self._stop = _words_by_sentence(text), stop

    def has_start(self, committed: str, following: str) -> bool:
        """Return whether the last sentence of a text agrees with the one of the same number.

        The last sentence is empty if the text ends with a complete sentence. The last word may be
        incomplete if the following text continues it.
        """
        *complete, current = _words_by_sentence(committed)
        if len(complete) >= len(self._sentences):
            return False
        is_continued = _is_inside_word(committed, following)
        return _begins(current, self._sentences[len(complete)], is_continued=is_continued)

    def has(self, committed: str, candidate: Candidate, *, is_continued: bool) -> bool:
        """Return whether a candidate keeps to the reference.

        Sentences that were complete before do not count, whether right or wrong.

        Args:
            committed: the text before the candidate.
            candidate: the candidate.
            is_continued: whether the next round continues its last word.
        """
        complete = _words_by_sentence(committed)[:-1]
        whole = committed + candidate.text
        ends = [place for each in self._stop if (place := whole.find(each)) >= 0]
        words = whole[: min(ends, default=len(whole))].split()[sum(map(len, complete)) :]
        rest = [word for sentence in self._sentences[len(complete) :] for word in sentence]
        if ends or candidate.stops:
            return words == rest
        return _begins(words, rest, is_continued=is_continued)


def _begins(words: list[str], expected: list[str], *, is_continued: bool) -> bool:
    """Return whether the expected words begin with these. A continued last word may be incomplete.

    Return False if there are no words, because the continued one belongs to an earlier sentence.
    """
    if not is_continued:
        return words == expected[: len(words)]
    return bool(words) and " ".join(expected).startswith(" ".join(words))


def _is_inside_word(before: str, after: str) -> bool:
    """Return whether the border between two texts is inside a word."""
    return bool(before[-1:].strip() and after[:1].strip())


def _words_by_sentence(text: str) -> list[list[str]]:
    """Return the words of each sentence. The last sentence is incomplete; it may be empty."""
    found: list[list[str]] = [[]]
    for word in re.findall(r"\n|\S+", text):
        if word != "\n":
            found[-1].append(word)
        if found[-1] and word[-1] in ".!?\n":
            found.append([])
    return found


# Sentences ------------------------------------------------------------------------------------


def _sentences(records: Sequence[Record]) -> Sentences:
    """Count the right, wrong and missing sentences of answers."""
    counts = [
        (right, len(ours) - right, len(theirs) - right)
        for record in records
        for ours, theirs in [(sentences(record.answer), sentences(record.label[0]))]
        for right in [(Counter(ours) & Counter(theirs)).total()]
    ]
    right, wrong, missing = (fmean(each) for each in zip(*counts, strict=True))
    return Sentences(right=right, wrong=wrong, missing=missing)
