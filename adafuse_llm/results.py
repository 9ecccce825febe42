"""Results of decoding: plain frozen data that serializes to JSON (``model_dump_json``).

Results refer to members by name. No field is ever NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from adafuse_llm.text.reasoning import split_reasoning

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

FinishReason = Literal["stop", "stop_sequence", "length", "cancelled"]
"""Why a response ended: by itself, at a stop sequence, at a length limit, or by cancellation."""


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer server can send more


class Candidate(_Result):
    """One span of a round's pool (§3.4).

    The descriptions of ``nll`` and ``score`` hold for the strategy `adafuse`. With ``choices``,
    ``nll`` is a sum over the tokens. Other strategies document their own.

    Attributes:
        text: the span as its first proposer wrote it. Spaces that end the prompt, and whitespace
            before a reply to messages, are left out.
        ends: whether the response ends after the span.
        proposers: names of the members that proposed the span, in member order.
        nll: mean negative log-likelihood per token by member, in nats (equation 4). Members that
            cannot score the span are absent.
        score: fused score F, the weighted mean of ``nll`` (equation 5). None if no member could
            score the candidate, which then cannot win.
        logprob: log-probability of the span, in nats (`Generation.logprob`). None if `score` is
            None, or if the strategy's scores say nothing about probabilities.
    """

    text: str
    ends: bool
    proposers: tuple[str, ...]
    nll: dict[str, float]
    score: float | None
    logprob: float | None = None


class TopToken(_Result):
    """One of the likeliest tokens at a position in a response.

    Attributes:
        text: the text that the token adds to the tokens before it.
        logprob: natural logarithm of the member's probability of the token.
    """

    text: str
    logprob: float


class TokenLogprob(_Result):
    """A committed token of one member.

    Attributes:
        text: the text that the token adds to the tokens before it. If several tokens form one
            character, the last token adds the character.
        logprob: natural logarithm of the member's probability p of the token, after penalties and
            ``logit_bias``, but before sampling options and grammars. None if p is 0.
        top: the ``top_logprobs`` likeliest tokens at this position, the likeliest first. Under a
            grammar, only tokens that the grammar permits.
    """

    text: str
    logprob: float | None
    top: tuple[TopToken, ...] = ()


class Round(_Result):
    """One round of Algorithm 1: the pool and the committed text.

    Attributes:
        index: number of the round, from 0.
        candidates: the pool, in order of proposal.
        winner: index of the committed candidate.
        text: the committed text: the winner's, or its beginning if ``max_new_tokens`` or a stop
            sequence cut it.
        margins: margins Δ by member, one at the start of each word that the member considered
            (equation 1). For a member that only scored candidates, the tuple is empty. A member
            that was not asked is absent.
        forced: whether the grammar allows no other text, so that no member was asked. The round
            then has one candidate without proposers.
        elapsed: wall-clock seconds from the start of the round to its commit.
        logprobs: the committed tokens by member (option ``logprobs``), the member with the highest
            weight first. A member without room for the text is absent.
    """

    index: int
    candidates: tuple[Candidate, ...]
    winner: int
    text: str
    margins: dict[str, tuple[float, ...]]
    elapsed: float
    forced: bool = False
    logprobs: dict[str, tuple[TokenLogprob, ...]] = {}

    @property
    def asked(self) -> tuple[str, ...]:
        """The members that proposed or scored a span. A strategy need not ask all members."""
        named = (name for span in self.candidates for name in (*span.proposers, *span.nll))
        return tuple(dict.fromkeys([*self.margins, *named]))

    @property
    def is_unanimous(self) -> bool | None:
        """Whether several members proposed the same span, and no other span was proposed.

        None if fewer than two members proposed, because then nobody could agree or disagree.
        """
        members = {name for candidate in self.candidates for name in candidate.proposers}
        return len(self.candidates) == 1 if len(members) > 1 else None

    @property
    def choice_probabilities(self) -> tuple[float, ...] | None:
        """The probability of each candidate: the softmax of the negative fused scores.

        None if the round did not choose among given texts (the option `choices`).
        """
        if self.forced or any(self.margins.values()):
            return None
        scores = [span.score for span in self.candidates if span.ends and not span.proposers]
        known = [score for score in scores if score is not None]
        if not known or len(known) < len(self.candidates):
            return None
        powers = [math.exp(min(known) - score) for score in known]
        return tuple(power / sum(powers) for power in powers)


class Usage(_Result):
    """Cost of a decode, by member name.

    Attributes:
        prompt_tokens: the member's tokens of the prompt, including spaces at its end.
        completion_tokens: the member's tokens of the response.
        forward_passes: forward passes of the member's model for this request.
        tokens_processed: tokens in these passes, including those of the prompt.
        cached_tokens: tokens of the prompt that no pass processed, because the member still had
            them from an earlier request that began with the same tokens.
    """

    prompt_tokens: dict[str, int]
    completion_tokens: dict[str, int]
    forward_passes: dict[str, int]
    tokens_processed: dict[str, int]
    cached_tokens: dict[str, int]


class MemberInfo(_Result):
    """What applications need to know about a member.

    Attributes:
        name: the member's name.
        context_window: maximum number of tokens of a prompt and its response together; None if
            there is no limit.
        has_chat_template: whether the member has a chat template. If not, it reads messages as
            plain text.
        parameters: number of the model's parameters; None if it is not known.
    """

    name: str
    context_window: int | None
    has_chat_template: bool
    parameters: int | None = None


def smallest_window(members: Iterable[MemberInfo], names: Container[str]) -> int | None:
    """Return the smallest context window of the named members; None if there is no limit."""
    windows = (info.context_window for info in members if info.name in names)
    return min((window for window in windows if window is not None), default=None)


class Generation(_Result):
    """A finished response with the rounds that produced it. The texts of the rounds form ``text``.

    Notebooks display it as the last expression of a cell, and rich prints it in terminals.

    Attributes:
        text: the response.
        rounds: the rounds, in order.
        finish_reason: why the response ended.
        cut_by: what limited the length, if the reason is ``"length"``, such as ``the limit of 9
            tokens (max_new_tokens)``, or ``the default limit of ...`` if nobody set it; else "".
        usage: the cost.
        strategy: name of the strategy that ran, never ``"auto"``; "" if it is not known.
        logprob: log-probability of the response under the strategy's rule, in nats: the sum over
            the rounds of `Candidate.logprob` of the winner. With ``adafuse`` and ``single``, this
            is equation 5 without the division by the number of tokens. With ``mixture``, it is the
            logarithm of the pooled probability of the word and its end. A member that was not asked
            adds 0 to this probability. The whitespace that ends a word counts again as the
            beginning of the next word. With ``choices``, it is the weighted mean of the
            log-likelihoods of the chosen text and its end. A grammar makes probabilities relative
            to what it permits, so a forced round adds 0. A span counts as a whole, even if its end
            was cut off. None if the strategy gives no probabilities.
        member_logprobs: log-likelihood by member, in nats: the sum over the committed spans that
            the member scored, without the ends of words that ``mixture`` adds.
        confidence: probability that the response is right (the option `calibration`). None without
            a calibration, if the response is not whole (``"length"`` or ``"cancelled"``), or if the
            calibration was fitted for other members or another strategy.
        seed: the seed that gives the same response again; None if nothing was drawn.
        alternatives: the other responses, with the option ``n``.
        reply_prefix: text with which the members' chat templates began the reply, such as
            ``<think>``. ``text`` does not contain it.
    """

    text: str
    rounds: tuple[Round, ...]
    finish_reason: FinishReason
    usage: Usage
    cut_by: str = ""
    strategy: str = ""
    logprob: float | None = None
    member_logprobs: dict[str, float] = {}
    confidence: float | None = None
    seed: int | None = None
    alternatives: tuple[Generation, ...] = ()
    reply_prefix: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def reasoning(self) -> str:
        """The reasoning at the beginning of the response, without markers; "" if there is none."""
        return split_reasoning(self.text, self.reply_prefix)[0]

    @property
    def answer(self) -> str:
        """The response without reasoning."""
        return split_reasoning(self.text, self.reply_prefix)[1]

    def _repr_mimebundle_(self, *arguments: Any, **settings: Any) -> dict[str, str]:
        from rich.jupyter import JupyterMixin

        return JupyterMixin._repr_mimebundle_(self, *arguments, **settings)

    def __rich_console__(self, console: Console, _: ConsoleOptions) -> RenderResult:
        from adafuse_llm.report.terminal import shown

        yield from shown(self, console)


def total_logprob(rounds: Iterable[Round]) -> float | None:
    """Return the log-probability of a response with these rounds (`Generation.logprob`)."""
    logprobs = [played.candidates[played.winner].logprob for played in rounds]
    known = [logprob for logprob in logprobs if logprob is not None]
    return math.fsum(known) if len(known) == len(logprobs) else None


class ScoredText(_Result):
    """The score that an ensemble gives to a text.

    Attributes:
        text: the text that was scored.
        nll: mean negative log-likelihood per token by member, in nats (equation 4). A member
            is absent if it cannot write exactly this text, or gives it a probability of 0.
        tokens: number of terms in this mean, by member: the member's tokens of the text, and one
            more if the end of the response is scored.
        score: fused score F, the weighted mean of ``nll`` (equation 5). None if no member with a
            positive weight can score the text.
        loglikelihood: weighted mean of the members' ``-nll * tokens``, in nats. Unlike F, it is
            not a mean per token, so longer texts tend to lower values. None if ``score`` is None.
        missing: why a member is absent from ``nll``, by member.
    """

    text: str
    nll: dict[str, float]
    tokens: dict[str, int]
    score: float | None
    loglikelihood: float | None
    missing: dict[str, str] = {}


class Scores(_Result):
    """The scores of continuations of one prompt, in the order of the call, and their cost."""

    texts: tuple[ScoredText, ...]
    usage: Usage


def total_usage(generations: Sequence[Generation | Scores], prompts: int) -> Usage:
    """Return the usage of all responses to `prompts` prompts. Each prompt counts once."""
    share = len(generations) // prompts
    total: dict[str, dict[str, int]] = {}
    for number, generation in enumerate(generations):
        for kind, counts in generation.usage.model_dump().items():
            once = kind in ("prompt_tokens", "cached_tokens") and number % share
            sums = total.setdefault(kind, dict.fromkeys(counts, 0))
            for member, count in counts.items():
                sums[member] += 0 if once else count
    return Usage(**total)


class Chosen(_Result):
    """The option that an ensemble chose from a list.

    Attributes:
        text: the chosen option.
        index: index of the chosen option in the list.
        probabilities: probabilities of the options, in order: the softmax of -F.
        nll: by member, the negative log-likelihoods, in nats, of the options in order, each with
            the end of the response. Members that cannot score all options are absent.
        usage: the cost.
    """

    text: str
    index: int
    probabilities: tuple[float, ...]
    nll: dict[str, tuple[float, ...]]
    usage: Usage


class Answer(_Result):
    """The answer to a typed question. Without a calibration, its probabilities only rank options.

    Attributes:
        probabilities: probability by option. Levels have the order of the scale.
        members: uncalibrated probabilities by member and option. A member that cannot write all
            labels (letters or numbers before the options) takes no part, and is absent.
        mass: probability of all labels together, by member: the mean over the orders of the
            options. A member with a low mass would rather write something else.
        swayed: members whose likeliest option changes with the order of the options.
        warnings: which members take no part, and which deciding members have little mass.
        is_sure: whether all members with a weight took part, and the confidence is at least the
            threshold of the calibration. None without a threshold.
    """

    probabilities: dict[str, float]
    members: dict[str, dict[str, float]]
    mass: dict[str, float]
    swayed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    is_sure: bool | None = None

    @property
    def choice(self) -> str:
        """The likeliest option."""
        return max(self.probabilities, key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """The probability of `choice`; with a calibration, the probability that it is right."""
        return self.probabilities[self.choice]

    @property
    def probability(self) -> float:
        """The probability of yes. Only the answer to a `Predicate` has it."""
        return self.probabilities["yes"]

    @property
    def score(self) -> float:
        """The expected level of the answer to a `Score`. The first level counts as 0."""
        return math.fsum(level * p for level, p in enumerate(self.probabilities.values()))


class Decision(_Result, Mapping[str, Answer]):
    """The answers to all questions about a state: a mapping from the names of the questions.

    Attributes:
        answers: the answers by name of the question.
        usage: the cost of all prompts, one for every question and order of its options.
        strategy: how the answers follow from the members' log-probabilities: ``"weights"``, as the
            weighted mean; ``"calibrated"``, by a calibration (the option `decisions`);
            ``"largest"``, as the mean of the members with the highest known number of parameters.
    """

    answers: dict[str, Answer]
    usage: Usage
    strategy: str

    def __getitem__(self, name: str) -> Answer:
        return self.answers[name]

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]  # of a mapping, not of fields
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)


class StreamEvent(_Result):
    """One event of a stream: a committed span.

    Attributes:
        text: the text that can be shown now. An end that could begin a stop sequence is held back.
            The texts of all events form the text of the generation.
        round: the round that committed the span. None on the event that ends a cancelled decode.
        generation: the whole result in the last event, and None in all others.
        reply_prefix: as in `Generation`. It is the same in all events of a response.
    """

    text: str
    round: Round | None
    generation: Generation | None = None
    reply_prefix: str = ""
