"""What decoding returns: plain frozen data that serialises to JSON (``model_dump_json``).

Members appear by name. No field ever holds NaN or infinity: a member that could not score a
candidate is absent from its ``nll``.
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
    """One span of the pool of a round (§3.4).

    ``nll`` and ``score`` are described as AdaFuse means them; other strategies say what theirs are.

    Attributes:
        text: the span exactly as its first proposer wrote it.
        stops: whether the response ends after it.
        proposers: names of the members that proposed it, in member order.
        nll: mean negative log-likelihood per token by member, in nats (equation 5).
        score: fused score F, the weighted mean of ``nll`` (equation 6); None if no member
            could score the candidate, which then cannot win.
    """

    text: str
    stops: bool
    proposers: tuple[str, ...]
    nll: dict[str, float]
    score: float | None


class Round(_Result):
    """One round of Algorithm 1: the pool, and what was committed.

    Attributes:
        index: number of the round, from 0.
        candidates: the pool, in order of proposal.
        winner: index of the committed candidate.
        text: what the round committed: the winner's text, less leading spaces that the prompt
            already ended in, and less one where a reply to messages begins with it.
        margins: for each member, its margin Δ at the start of each word that it considered
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
    """What a decode cost, by member name.

    Attributes:
        prompt_tokens: tokens of the prompt in the member's vocabulary.
        completion_tokens: tokens of the committed response in the member's vocabulary.
        forward_passes: forward passes of the member's model that served this request.
        tokens_processed: tokens that went through those passes, the prompt's included.
        cached_tokens: tokens of the prompt that needed no pass, as an earlier request began with
            the same.
    """

    prompt_tokens: dict[str, int]
    completion_tokens: dict[str, int]
    forward_passes: dict[str, int]
    tokens_processed: dict[str, int]
    cached_tokens: dict[str, int]


class Generation(_Result):
    """A finished response with the decisions behind it.

    The joined texts of the rounds are the text, followed by what a stop sequence cut off.

    It shows itself: in a notebook, printed with rich in a terminal, and as a page of its own
    (`to_html`).
    """

    text: str
    rounds: tuple[Round, ...]
    finish_reason: FinishReason
    usage: Usage

    def __str__(self) -> str:
        return self.text

    def to_html(self, path: str | Path, *, title: str = "What the ensemble wrote") -> Path:
        """Write one self-contained HTML page: the text by winning member, every round, charts.

        Args:
            path: the file to write.
            title: shown on top, such as the question.

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
    """What an ensemble makes of a given text.

    Attributes:
        text: as given.
        nll: mean negative log-likelihood per token by member, in nats (equation 5); members that
            cannot write exactly this text, or that find it impossible, are absent.
        tokens: over how many terms each mean is: the text's tokens in the member's vocabulary,
            and one for the end of the response where that was asked for.
        score: fused score F, the weighted mean of ``nll`` (equation 6); None if no member with
            weight could score it.
        loglikelihood: equation 6 over whole log-likelihoods instead of means per token, in nats:
            the weighted mean of ``-nll * tokens``. Unlike F it compares texts of different length
            as probabilities do. None where ``score`` is.
    """

    text: str
    nll: dict[str, float]
    tokens: dict[str, int]
    score: float | None
    loglikelihood: float | None


class Scores(_Result):
    """Given texts, each as a continuation of one prompt, and what scoring them cost."""

    texts: tuple[ScoredText, ...]
    usage: Usage


class StreamEvent(_Result):
    """What a stream yields: one event per committed span.

    Attributes:
        text: what may be shown now. Empty while the response could be the beginning of a stop
            sequence; the joined texts of a stream are the text of its generation.
        round: the round that committed the span; None on the event that closes a cancelled
            decode.
        generation: the whole result, on the last event only.
    """

    text: str
    round: Round | None
    generation: Generation | None = None
