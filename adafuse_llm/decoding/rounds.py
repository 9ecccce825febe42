"""Algorithm 1: a round, and rounds until the response ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf, isfinite

from adafuse_llm import results
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.draft import Drafting
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, MemberQuery, Steps
from adafuse_llm.decoding.score import Pool, PoolCandidate, fuse
from adafuse_llm.errors import DecodingError
from adafuse_llm.results import (
    FinishReason,
    Generation,
    Round,
    ScoredText,
    Scores,
    StreamEvent,
    Usage,
)
from adafuse_llm.text.stops import Transcript


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a round decided: the pool as scored, and its winner, already committed."""

    pool: tuple[PoolCandidate, ...]
    scored: tuple[results.Candidate, ...]
    winner: int
    margins: dict[str, tuple[float, ...]]


PlayRound = Callable[[bool], Steps[RoundOutcome]]
"""Plays one round, given whether the response is still empty. What a request learns from round to
round lives in the play."""


Scorer = Callable[[PoolCandidate, Sequence[Member]], results.Candidate]
"""Tells a candidate's score from what the members make of it."""


def score(candidate: PoolCandidate, members: Sequence[Member]) -> results.Candidate:
    """A candidate with every member's NLL and the fused score."""
    nll = [candidate.nll(member) for member in members]
    return to_result(candidate, members, nll, fuse(nll, [member.weight for member in members]))


def play_round(
    members: Sequence[Member],
    config: AdaFuseConfig,
    drafts: Drafting,
    first_word: bool,
    scorer: Scorer = score,
) -> Steps[RoundOutcome]:
    """One round of Algorithm 1: propose, pool, score, choose, commit.

    Raises:
        DecodingError: no member can score any candidate.
    """
    proposals = yield from drafts.propose(config, first_word=first_word)
    pool = Pool(first_word=first_word)
    for member, proposal in zip(members, proposals, strict=True):
        pool.add(member, proposal)
    yield from in_lockstep([pool.read(member, drafts.likely) for member in members])
    scored = [scorer(candidate, members) for candidate in pool.candidates]
    margins = {m.name: p.margins for m, p in zip(members, proposals, strict=True)}
    outcome = commit_best(pool, scored, margins)
    drafts.observe(pool.candidates[outcome.winner])
    return outcome


def commit_best(
    pool: Pool,
    scored: Sequence[results.Candidate],
    margins: dict[str, tuple[float, ...]],
) -> RoundOutcome:
    """Choose a winner and commit it to every member.

    Raises:
        DecodingError: no candidate has a score.
    """
    winner = best_candidate(scored)
    for member, end in pool.candidates[winner].ends.items():
        member.commit(end)
    return RoundOutcome(tuple(pool.candidates), tuple(scored), winner, margins)


def decode(
    members: Sequence[Member],
    config: AdaFuseConfig,
    play: PlayRound,
    transcript: Transcript,
    rounds: list[Round],
) -> Generator[tuple[MemberQuery, ...] | StreamEvent, None, None]:
    """Rounds until the response ends; one event per committed span.

    Args:
        members: every member with its prompt.
        config: options.
        play: plays a round.
        transcript: the response, empty at first; grows with every round.
        rounds: empty at first; grows with every round.
    """
    for index in count():
        started = time.perf_counter()
        outcome = yield from play(not transcript.text.strip())
        elapsed = time.perf_counter() - started
        winner = outcome.pool[outcome.winner]
        added, shown = transcript.push(winner.text)
        rounds.append(
            Round(
                index=index,
                candidates=outcome.scored,
                winner=outcome.winner,
                text=added,
                margins=outcome.margins,
                elapsed=elapsed,
            )
        )
        finish = _finish(winner, members, config, transcript)
        if finish is not None:
            shown += transcript.flush()
            generation = summarise(members, transcript, rounds, finish)
            yield StreamEvent(text=shown, round=rounds[-1], generation=generation)
            return
        yield StreamEvent(text=shown, round=rounds[-1])


def score_texts(
    members: Sequence[Member], texts: Sequence[str], *, stops: bool
) -> Generator[tuple[MemberQuery, ...] | Scores, None, None]:
    """What the members make of given texts after their prompts, one pass each; ends with it.

    Args:
        members: every member with its prompt.
        texts: each scored by itself.
        stops: whether the response is to end after each.
    """
    pool = Pool(first_word=False)
    pool.candidates = [PoolCandidate(text, stops) for text in texts]
    yield from in_lockstep([pool.read(member, lambda _: False) for member in members])
    weights = [member.weight for member in members]
    scored = []
    for candidate in pool.candidates:
        terms = {member.name: candidate.terms(member) for member in members}
        found = score(candidate, members)
        sums = [found.nll.get(name, inf) * max(1, count) for name, count in terms.items()]
        total = fuse(sums, weights)
        scored.append(
            ScoredText(
                text=candidate.text,
                nll=found.nll,
                tokens={name: terms[name] for name in found.nll},
                score=found.score,
                loglikelihood=None if total is None else 0.0 - total,
            )
        )
    yield Scores(texts=tuple(scored), usage=usage(members))


def to_result(
    candidate: PoolCandidate,
    members: Sequence[Member],
    nll: Sequence[float],
    score: float | None,
) -> results.Candidate:
    """A candidate as results show it: members whose number is not finite are left out."""
    return results.Candidate(
        text=candidate.text,
        stops=candidate.stops,
        proposers=tuple(member.name for member in candidate.proposers),
        nll={m.name: value for m, value in zip(members, nll, strict=True) if isfinite(value)},
        score=score,
    )


def best_candidate(scored: Sequence[results.Candidate]) -> int:
    """Index of the lowest fused score; of equal ones the earlier.

    Raises:
        DecodingError: no candidate has a score.
    """
    scores = [(c.score, index) for index, c in enumerate(scored) if c.score is not None]
    if not scores:
        raise DecodingError(
            "no member could score any of the round's candidates "
            f"({', '.join(repr(c.text) for c in scored)}): every log-likelihood is infinite. "
            "Check the members' logits, or give weight to the members that can score."
        )
    return min(scores)[1]


def summarise(
    members: Sequence[Member],
    transcript: Transcript,
    rounds: Sequence[Round],
    finish: FinishReason,
) -> Generation:
    """The result of the rounds played so far."""
    return Generation(
        text=transcript.text,
        rounds=tuple(rounds),
        finish_reason=finish,
        usage=usage(members),
    )


def usage(members: Sequence[Member]) -> Usage:
    """What the members have spent so far."""
    return Usage(
        prompt_tokens={member.name: member.prompt_tokens for member in members},
        completion_tokens={member.name: member.response_tokens for member in members},
        forward_passes={member.name: member.passes for member in members},
        tokens_processed={member.name: member.tokens for member in members},
        cached_tokens={member.name: member.reused for member in members},
    )


def cancelled(
    members: Sequence[Member], transcript: Transcript, rounds: Sequence[Round]
) -> StreamEvent:
    """The event that closes a decode before its end."""
    shown = transcript.flush()
    generation = summarise(members, transcript, rounds, "cancelled")
    return StreamEvent(text=shown, round=None, generation=generation)


def _finish(
    winner: PoolCandidate, members: Sequence[Member], config: AdaFuseConfig, transcript: Transcript
) -> FinishReason | None:
    """Why the response ends after this commit, if it does."""
    if transcript.stopped:
        return "stop_sequence"
    if winner.stops:
        return "stop"
    if max(member.response_tokens for member in members) >= config.max_new_tokens:
        return "length"
    if any(member not in winner.ends or member.is_full(member.tree.root) for member in members):
        return "length"
    return None
