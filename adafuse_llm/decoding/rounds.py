"""Algorithm 1: one round, and the loop of rounds until the response ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count
from math import inf, isfinite

from adafuse_llm import results
from adafuse_llm.calibration import Calibration
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.draft import NoDrafts
from adafuse_llm.decoding.member import Ask, MemberState, Steps, in_lockstep
from adafuse_llm.decoding.propose import Proposal, propose
from adafuse_llm.decoding.score import (
    Pool,
    PoolCandidate,
    Scorer,
    best_candidate,
    fuse,
    score,
    to_result,
)
from adafuse_llm.errors import ContextWindowError
from adafuse_llm.results import (
    FinishReason,
    Generation,
    Round,
    ScoredText,
    Scores,
    StreamEvent,
    TokenLogprob,
    Usage,
    total_logprob,
)
from adafuse_llm.text.stops import Transcript


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The outcome of a round.

    Attributes:
        pool: the candidates of the round.
        scored: the same candidates with their scores, in the same order.
        winner: index of the winning candidate.
        margins: the margins Δ of each member (`Proposal.margins`), by member name.
        committed: the winner, or the part of it that ``max_new_tokens`` allows.
        forced: whether the grammar determined the text, so that no member was asked.
    """

    pool: tuple[PoolCandidate, ...]
    scored: tuple[results.Candidate, ...]
    winner: int
    margins: dict[str, tuple[float, ...]]
    committed: PoolCandidate
    forced: bool = False


PlayRound = Callable[[], Steps[RoundOutcome]]
"""A function that plays one round of one request. It holds the state that a request keeps between
rounds."""

Proposer = Callable[[MemberState, AdaFuseConfig], Steps[Proposal]]
"""A function that computes a member's proposal in a round, and yields the queries for this."""


def play_round(
    members: Sequence[MemberState],
    config: AdaFuseConfig,
    drafts: NoDrafts,
    scorer: Scorer = score,
    *,
    proposer: Proposer = propose,
) -> Steps[RoundOutcome]:
    """Play one round of Algorithm 1 up to the commit: propose, pool, score, choose.

    ``drafts`` decides in which order the members propose, and which tokens their passes evaluate in
    advance. It changes no result.

    Raises:
        DecodingError: no member can score any candidate.
    """
    # every member proposes words, up to the first one of which it is not confident
    proposals = yield from drafts.propose_all({m: proposer(m, config) for m in members}, config)
    # equal texts are one candidate
    pool = Pool(members[0].opening)
    for member, proposal in zip(members, proposals, strict=True):
        pool.add(member, proposal)
    # every member reads and scores the candidates of the others
    yield from in_lockstep([pool.read(m, partial(drafts.may_win, m)) for m in members])
    scored = [scorer(candidate, members) for candidate in pool.candidates]
    # the lowest score wins
    margins = {m.name: p.margins for m, p in zip(members, proposals, strict=True)}
    return choose_best(pool, scored, margins)


def choose_best(
    pool: Pool, scored: Sequence[results.Candidate], margins: dict[str, tuple[float, ...]]
) -> RoundOutcome:
    """Choose the candidate of a pool with the lowest score. `scored` is in the order of the pool.

    If the text exceeds a limit of tokens, `committed` is its longest prefix within all limits.
    """
    winner = best_candidate(scored)
    committed = pool.cut(pool.candidates[winner])
    return RoundOutcome(tuple(pool.candidates), tuple(scored), winner, margins, committed)


def _commit(
    candidate: PoolCandidate, members: Sequence[MemberState], top_logprobs: int | None
) -> Steps[dict[str, tuple[TokenLogprob, ...]]]:
    tokens = {}
    if top_logprobs is not None:
        # some committed tokens have no log-probability yet
        steps = []
        for member, end in candidate.nodes.items():
            path = member.tree.path(end)
            parents = [node.parent for node in path if node.parent]
            steps.append(member.evaluate(parents, path, drafting=False))
        yield from in_lockstep(steps)
        tokens = {
            member.name: member.logprobs(candidate.nodes[member], top_logprobs)
            for member in sorted(members, key=lambda member: -member.weight)
            if member in candidate.nodes
        }
    for member, end in candidate.nodes.items():
        member.commit(end, candidate.text)
    return tokens


def forced_round(members: Sequence[MemberState]) -> RoundOutcome | None:
    """Return a round with the text that the grammar determines, without asking any member.

    None if no grammar determines a text, if the reply has not begun, or if a member has no room for
    the text.
    """
    opening, grammar = members[0].opening, members[0].grammar
    text = "" if grammar is None or opening.is_reply else grammar.forced()
    if grammar is None or not text:
        return None
    pool = Pool(opening)
    candidate = pool.suggest(opening.with_spaces(text), ends=grammar.ends_after(text))
    # if a member has no room for it, the members propose what fits
    for member in members:
        pool.encode(member, candidate)
    if len(candidate.nodes) < len(members) or not pool.fits(candidate):
        return None
    scored = (to_result(candidate, members, [inf] * len(members), 0.0, 0.0),)
    return RoundOutcome((candidate,), scored, 0, {}, candidate, forced=True)


@dataclass
class Response:
    """One response while it grows: its text, its rounds, and its log-likelihoods by member.

    The calibration, if there is one, computes the confidence of the response at its end.
    """

    members: Sequence[MemberState]
    strategy: str
    transcript: Transcript
    calibration: Calibration | None = None
    has_default_limit: bool = False  # nobody has set the limit of tokens
    rounds: list[Round] = field(default_factory=list)
    member_logprobs: dict[str, float] = field(default_factory=dict)

    def count(self, outcome: RoundOutcome) -> None:
        """Add the members' log-likelihoods of the winner. Call this before the commit."""
        winner, scored = outcome.pool[outcome.winner], outcome.scored[outcome.winner]
        if scored.logprob is not None:
            for member in self.members:
                if member.name in scored.nll:
                    so_far = self.member_logprobs.get(member.name, 0.0)
                    self.member_logprobs[member.name] = so_far + winner.logprob(member)

    def cut(self) -> None:
        """Remove from the last rounds, too, what a stop sequence has cut off the transcript."""
        # the rounds lose as many characters as the transcript has lost
        left = sum(len(done.text) for done in self.rounds) - len(self.transcript.text)
        for number, done in reversed([*enumerate(self.rounds)]):
            if left <= 0:
                return
            kept = done.text[: max(0, len(done.text) - left)]
            tokens = {}
            for name, own in done.logprobs.items():
                sizes = [len(token.text) for token in own]  # spaces of the prompt included
                starts = accumulate(sizes, initial=len(done.text) - sum(sizes))
                pairs = zip(own, starts, strict=False)
                tokens[name] = tuple(token for token, start in pairs if start < len(kept))
            self.rounds[number] = done.model_copy(update={"text": kept, "logprobs": tokens})
            left -= len(done.text) - len(kept)

    def event(
        self, shown: str, finish: FinishReason | None = None, cut_by: str = ""
    ) -> StreamEvent:
        """Return an event with the last round (unless cancelled) and, at the end, the result."""
        first, generation = self.members[0], None
        if finish is not None:
            shown += self.transcript.flush()
            generation = Generation(
                text=self.transcript.text,
                rounds=tuple(self.rounds),
                finish_reason=finish,
                cut_by=cut_by,
                usage=usage(self.members),
                strategy=self.strategy,
                logprob=total_logprob(self.rounds),
                member_logprobs=self.member_logprobs,
                seed=first.sampling.seed if first.sampling else None,
                reply_prefix=first.reply_prefix,
            )
            if self.calibration is not None:
                confidence = self.calibration.confidence(generation)
                generation = generation.model_copy(update={"confidence": confidence})
        return StreamEvent(
            text=shown,
            round=None if finish == "cancelled" else self.rounds[-1],
            generation=generation,
            reply_prefix=first.reply_prefix,
        )


def decode(
    response: Response, play: PlayRound, top_logprobs: int | None = None
) -> Generator[Ask | StreamEvent, None, None]:
    """Play rounds until a response ends, and yield one event per committed span.

    With `top_logprobs`, every round lists its committed tokens, each with that many likeliest ones.
    """
    members, grammar = response.members, response.members[0].grammar
    for index in count():
        started = time.perf_counter()
        # where the grammar leaves no choice, no member is asked
        outcome = forced_round(members) or (yield from play())
        response.count(outcome)
        # all members go on from the text that has won
        logprobs = yield from _commit(outcome.committed, members, top_logprobs)
        text = outcome.committed.shown
        response.rounds.append(
            Round(
                index=index,
                candidates=outcome.scored,
                winner=outcome.winner,
                text=text,
                margins=outcome.margins,
                elapsed=time.perf_counter() - started,
                forced=outcome.forced,
                logprobs=logprobs,
            )
        )
        if grammar is not None:
            grammar.commit(text)
        # readers see what no stop sequence can cut off any more
        shown = response.transcript.push(text)
        if response.transcript.stopped:
            response.cut()
        finish, cut_by = _finish(outcome, response)
        yield response.event(shown, finish, cut_by)
        if finish is not None:
            return


def pool_texts(members: Sequence[MemberState], texts: Sequence[str], *, ends: bool) -> Pool:
    """Return a pool of whole responses, and add their tokens to every member's tree."""
    opening = members[0].opening
    pool = Pool(opening)
    for text in texts:
        candidate = PoolCandidate(opening.with_spaces(text), text, ends)
        pool.candidates.append(candidate)
        for member in members:
            pool.encode(member, candidate)
    return pool


def score_texts(members: Sequence[MemberState], pool: Pool) -> Generator[Ask | Scores, None, None]:
    """Score the texts of `pool_texts` with one query per member. Yield the scores at the end."""
    yield from in_lockstep([pool.read(member) for member in members])
    scored = []
    for candidate in pool.candidates:
        result = score(candidate, members)
        others = [member for member in members if member.name not in result.nll]
        scored.append(
            ScoredText(
                text=candidate.shown,
                nll=result.nll,
                tokens={m.name: candidate.terms(m) for m in members if m.name in result.nll},
                score=result.score,
                loglikelihood=result.logprob,
                missing={m.name: pool.why_missing(m, candidate) for m in others},
            )
        )
    yield Scores(texts=tuple(scored), usage=usage(members))


def choose(members: Sequence[MemberState], choices: Sequence[str]) -> Steps[RoundOutcome]:
    """Play the only round of a response that is one of several texts.

    The NLL of a text is the sum over its tokens and the end of the response, in nats, and F is the
    weighted mean over the members. A member that cannot score all texts takes no part. The
    whitespace with which a member begins a reply does not count towards the limit of tokens.

    Raises:
        ContextWindowError: a member's window has no room for a text and this whitespace.
        DecodingError: no member can score all texts.
    """
    opening = members[0].opening
    pool = Pool(opening)
    yield from pool.expect(members)
    for text in choices:
        pool.suggest(opening.with_spaces(text), ends=True)
    yield from in_lockstep([pool.read(member, lambda _: False) for member in members])
    for member in members:
        if any(member not in candidate.nodes for candidate in pool.candidates):
            raise ContextWindowError(
                f"the prompt leaves member {member.name!r} no room for the longest of the choices "
                f"in its context window of {member.window}. Shorten the prompt, or leave it out."
            )
    sums = [[-c.logprob(member) for c in pool.candidates] for member in members]
    # a member that cannot score all texts has no say
    sums = [row if all(map(isfinite, row)) else [inf] * len(row) for row in sums]
    weights = [member.weight for member in members]
    scored = []
    for candidate, *nll in zip(pool.candidates, *sums, strict=True):
        total = fuse(nll, weights)
        logprob = None if total is None else -total
        scored.append(to_result(candidate, members, nll, total, logprob))
    winner = best_candidate(scored)
    margins: dict[str, tuple[float, ...]] = {member.name: () for member in members}
    chosen = pool.candidates[winner]
    return RoundOutcome(tuple(pool.candidates), tuple(scored), winner, margins, chosen)


def usage(members: Sequence[MemberState]) -> Usage:
    """Return the members' token and pass counts so far."""
    return Usage(
        prompt_tokens={member.name: member.prompt_tokens for member in members},
        completion_tokens={member.name: member.response_tokens for member in members},
        forward_passes={member.name: member.passes for member in members},
        tokens_processed={member.name: member.tokens for member in members},
        # forced text before the first pass may be cached, too, but is no part of the prompt
        cached_tokens={m.name: min(m.reused, m.prompt_tokens) for m in members},
    )


def _finish(outcome: RoundOutcome, response: Response) -> tuple[FinishReason | None, str]:
    # why the response ends after this round, if it does, and the limit that ends it, in words
    members, stopped = response.members, response.transcript.stopped
    winner, grammar = outcome.pool[outcome.winner], members[0].grammar
    if stopped:
        return stopped, ""
    if outcome.committed.ends or (grammar is not None and grammar.ends_after("")):
        return "stop", ""
    # a limit may have been reached
    if any(member.room(end) <= 0 for member, end in winner.nodes.items()):
        limit = members[0].limit
        tokens = "token" if limit == 1 else "tokens"
        kind = "default limit" if response.has_default_limit else "limit"
        return "length", f"the {kind} of {limit:,} {tokens} (max_new_tokens)"
    for member in members:
        if member not in winner.nodes or member.is_full(winner.nodes[member]):
            window = f"{member.window:,} tokens"
            return "length", f"the context window of member {member.name!r} ({window})"
    if outcome.committed is not winner:
        return "length", "max_word_tokens (inside a character)"
    return None, ""
