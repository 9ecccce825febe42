"""Results of decoding: plain frozen data that serializes to JSON (``model_dump_json``).

Members appear by name. No field ever holds NaN or infinity: a member that cannot score a
candidate is absent from the candidate's ``nll``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

FinishReason = Literal["stop", "stop_sequence", "length", "cancelled"]
"""Why a decode ended: the winner stopped, a stop sequence appeared, a token or window limit
was reached, or the caller cancelled."""


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Candidate(_Result):
    """One span of a round's pool (§3.4).

    The descriptions of ``nll`` and ``score`` apply to AdaFuse. The documentation of each other
    strategy describes its own.

    Attributes:
        text: the span exactly as its first proposer wrote it.
        stops: whether the response ends after the span.
        proposers: names of the members that proposed the span, in member order.
        nll: mean negative log-likelihood per token by member, in nats (equation 5).
        score: fused score F, the weighted mean of ``nll`` (equation 6). None if no member could
            score the candidate; such a candidate cannot win.
    """

    text: str
    stops: bool
    proposers: tuple[str, ...]
    nll: dict[str, float]
    score: float | None


class Round(_Result):
    """One round of Algorithm 1: the pool and the committed text.

    Attributes:
        index: number of the round, from 0.
        candidates: the pool, in order of proposal.
        winner: index of the committed candidate.
        text: the committed text: the winner's text without the leading spaces that the prompt
            already ends with. A reply to messages also loses one leading space.
        margins: by member, the margin Δ at the start of each word that the member considered
            (equation 1), dimensionless.
        elapsed: wall-clock seconds from the start of the round to its commit.
    """

    index: int
    candidates: tuple[Candidate, ...]
    winner: int
    text: str
    margins: dict[str, tuple[float, ...]]
    elapsed: float


class Usage(_Result):
    """Cost of a decode, by member name.

    Attributes:
        prompt_tokens: tokens of the prompt in the member's vocabulary.
        completion_tokens: tokens of the committed response in the member's vocabulary.
        forward_passes: forward passes of the member's model for this request.
        tokens_processed: tokens in those passes, including the prompt's.
        cached_tokens: tokens of the prompt that needed no pass because an earlier request began
            with the same tokens.
    """

    prompt_tokens: dict[str, int]
    completion_tokens: dict[str, int]
    forward_passes: dict[str, int]
    tokens_processed: dict[str, int]
    cached_tokens: dict[str, int]


class Generation(_Result):
    """A finished response with the decisions behind it.

    The texts of the rounds, joined, are ``text`` plus any characters that a stop sequence cut off.

    To display it: end a notebook cell with it, print it with rich in a terminal, or write it to an
    HTML page (`to_html`).
    """

    text: str
    rounds: tuple[Round, ...]
    finish_reason: FinishReason
    usage: Usage

    def __str__(self) -> str:
        return self.text

    def to_html(self, path: str | Path, *, title: str = "Ensemble response") -> Path:
        """Write one self-contained HTML page: the text by winning member, every round, charts.

        Args:
            path: the file to write.
            title: heading of the page, such as the question.

        Returns:
            The path.
        """
        from adafuse_llm.report.page import page

        path = Path(path)
        path.write_text(page(self, title=title), encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        from adafuse_llm.report.page import fragment

        return fragment(self)

    def __rich_console__(self, console: Console, _: ConsoleOptions) -> RenderResult:
        from adafuse_llm.report.terminal import shown

        yield from shown(self, console)


class ScoredText(_Result):
    """An ensemble's score of a given text.

    Attributes:
        text: the given text.
        nll: mean negative log-likelihood per token by member, in nats (equation 5). Members that
            cannot write exactly this text, or to which it is impossible, are absent.
        tokens: number of terms in each mean: the text's tokens in the member's vocabulary, plus
            one if the end of the response is scored too.
        score: fused score F, the weighted mean of ``nll`` (equation 6). None if no member with a
            positive weight can score the text.
        loglikelihood: equation 6 applied to whole log-likelihoods instead of means per token, in
            nats: the weighted mean of ``-nll * tokens``. Unlike F, it compares texts of different
            lengths by their probability. None if ``score`` is None.
    """

    text: str
    nll: dict[str, float]
    tokens: dict[str, int]
    score: float | None
    loglikelihood: float | None


class Scores(_Result):
    """The scores of given continuations of one prompt, and the cost of scoring them."""

    texts: tuple[ScoredText, ...]
    usage: Usage


class StreamEvent(_Result):
    """One event of a stream: a committed span.

    Attributes:
        text: the text that can be shown now. Text that could be the beginning of a stop sequence
            waits for a later event. The texts of a stream, joined, are its generation's text.
        round: the round that committed the span. None on the event that ends a cancelled decode.
        generation: the whole result. Only the last event has it.
    """

    text: str
    round: Round | None
    generation: Generation | None = None
