"""AdaFuse with several hypotheses, which a round extends and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from typing_extensions import override

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.lockstep import in_lockstep, merge_queries
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.propose import propose
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, choose_best, score, to_result
from adafuse_llm.decoding.score import Pool, PoolCandidate
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.strategies.adafuse import OF_ROUNDS, branch_tokens
from adafuse_llm.strategies.base import Strategy, StrategyContext
from adafuse_llm.text.opening import Opening
from adafuse_llm.tree import Node

DEFAULT_HYPOTHESES = 3
"""Default number of hypotheses that a round keeps."""


@dataclass(frozen=True)
class HypothesisSearch(Strategy):
    """AdaFuse that keeps `num_hypotheses` hypotheses after a round instead of one.

    This strategy is this project's own, and is not in the paper. `BeamSearch` is the variant of the
    paper's Appendix F. In every round, all members propose continuations of each hypothesis, as in
    Algorithm 1, and all members score them. Continuations and finished answers are ranked by the
    mean of F over their rounds, and the best `num_hypotheses` of them are kept. With one
    hypothesis, the result is the same as AdaFuse's.

    The result has one round, whose pool holds the answers that were kept. The score is the mean of
    F over the rounds of the answer. The NLL is the mean of a member's NLL over these rounds. The
    proposers are the members that proposed every part of the answer. A stream has one event.

    Cost: `num_hypotheses` times as many tokens as AdaFuse, minus the tokens that hypotheses share.
    All hypotheses share the passes of a member. There are no drafts.

    Args:
        num_hypotheses: number of hypotheses to keep.

    Raises:
        InvalidOptionError: `num_hypotheses` is not a whole number, or is less than one.
    """

    num_hypotheses: int = DEFAULT_HYPOTHESES

    options = frozenset({"choices", *OF_ROUNDS})

    def __post_init__(self) -> None:
        if not isinstance(self.num_hypotheses, int) or self.num_hypotheses < 1:
            raise InvalidOptionError(
                "HypothesisSearch(num_hypotheses=...) must be a whole number of at least 1; "
                f"got {self.num_hypotheses!r}"
            )

    @property
    @override
    def name(self) -> str:
        return f"hypotheses-{self.num_hypotheses}"

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return max(2, config.branches)

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        return self.num_hypotheses * (config.max_new_tokens + branch_tokens(members, config))

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return partial(self._play, context.members, context.config)

    def _play(self, members: Sequence[Member], config: AdaFuseConfig) -> Steps[RoundOutcome]:
        opening = members[0].opening
        kept = [Hypothesis(starts={member: member.tree.root for member in members})]
        while running := [
            answer for answer in kept if not answer.is_done(members, config, opening)
        ]:
            done = [answer for answer in kept if answer not in running]
            extended = yield from _extended(running, members, config, opening)
            kept = self._best([*done, *extended], opening) or done
            for member in members:
                member.prune(answer.starts[member] for answer in kept if member in answer.starts)
        pool = Pool(opening)
        pool.candidates = [answer.candidate(opening) for answer in kept]
        scored = [
            to_result(candidate, members, [answer.nll(member) for member in members], answer.score)
            for candidate, answer in zip(pool.candidates, kept, strict=True)
        ]
        best = kept[0].margins if kept else {}
        margins = {m.name: tuple(best.get(m, ())) for m in members}
        by_candidate = dict(zip(pool.candidates, kept, strict=True))
        return choose_best(
            pool, scored, margins, lambda candidate: by_candidate[candidate].prefixes(opening)
        )

    def _best(self, answers: Sequence[Hypothesis], opening: Opening) -> list[Hypothesis]:
        """Return the best answers, the best first.

        If several answers have the same text, only the best one is returned. If two scores are
        equal, the earlier answer comes first.
        """
        best: dict[tuple[str, bool], Hypothesis] = {}
        for answer in sorted(answers, key=lambda answer: answer.score):
            best.setdefault((opening.key(answer.text), answer.stops), answer)
        return list(best.values())[: self.num_hypotheses]


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """An answer that the search has started or finished.

    Attributes:
        text: the text so far, as its first proposers wrote it.
        stops: whether the answer ends after the text.
        starts: the last node in each member's tree. A member is missing if its context window has
            no room for the text.
        rounds: the candidate of each round.
        pool: the pool of the last round.
        fused: F of these candidates, in nats per token.
        margins: margins at the start of each word, by member.
    """

    text: str = ""
    stops: bool = False
    starts: dict[Member, Node] = field(default_factory=dict)
    rounds: tuple[PoolCandidate, ...] = ()
    pool: Pool | None = None
    fused: tuple[float, ...] = ()
    margins: dict[Member, tuple[float, ...]] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Mean F of the rounds; 0 before the first round."""
        return math.fsum(self.fused) / len(self.fused) if self.fused else 0.0

    def nll(self, member: Member) -> float:
        """Return the mean of a member's NLL over the rounds that it can score, or infinity."""
        finite = [nll for nll in (c.nll(member) for c in self.rounds) if math.isfinite(nll)]
        return math.fsum(finite) / len(finite) if finite else math.inf

    def is_done(self, members: Sequence[Member], config: AdaFuseConfig, opening: Opening) -> bool:
        """Return whether the answer has ended, has a stop sequence, or is at a length limit."""
        if not self.rounds:
            return False
        return (
            self.stops
            or any(stop in opening.shown(self.text) for stop in config.stop)
            or any(m not in self.starts or m.is_full(self.starts[m]) for m in members)
            or any(m.room(self.starts[m]) <= 0 for m in members)
        )

    def candidate(self, opening: Opening) -> PoolCandidate:
        """Return the answer as a candidate. Its proposers are those that proposed every part."""
        candidate = PoolCandidate(self.text, opening.shown(self.text), self.stops)
        candidate.proposers = [
            member
            for member in self.rounds[0].proposers
            if all(member in part.proposers for part in self.rounds)
        ]
        candidate.ends = dict(self.starts)
        return candidate

    def prefixes(self, opening: Opening) -> Iterator[PoolCandidate]:
        """Yield the answers that end within the last round, the longest first."""
        assert self.pool is not None, "an answer has at least one round"
        last = self.rounds[-1]
        before = self.text.removesuffix(last.text)
        for prefix in self.pool.prefixes(last):
            text = before + prefix.text
            candidate = PoolCandidate(text, opening.shown(text), stops=False)
            candidate.ends = prefix.ends
            yield candidate


def _extended(
    answers: Sequence[Hypothesis],
    members: Sequence[Member],
    config: AdaFuseConfig,
    opening: Opening,
) -> Steps[list[Hypothesis]]:
    """Continue the answers by one round, and return the new answers that have a score."""
    pools = [Pool(opening.after(answer.text), answer.starts) for answer in answers]
    proposals = yield from in_lockstep(
        [
            merge_queries(
                member, [propose(member, config, answer.starts[member]) for answer in answers]
            )
            for member in members
        ]
    )
    for member, own in zip(members, proposals, strict=True):
        for pool, proposal in zip(pools, own, strict=True):
            pool.add(member, proposal)
    yield from in_lockstep(
        [merge_queries(m, [pool.read(m, lambda _: False) for pool in pools]) for m in members]
    )
    extended = []
    for place, (answer, pool) in enumerate(zip(answers, pools, strict=True)):
        margins = {
            member: (*answer.margins.get(member, ()), *own[place].margins)
            for member, own in zip(members, proposals, strict=True)
        }
        for candidate in pool.candidates:
            fused = score(candidate, members).score
            if fused is not None:
                extended.append(
                    Hypothesis(
                        text=answer.text + candidate.text,
                        stops=candidate.stops,
                        starts=candidate.ends,
                        rounds=(*answer.rounds, candidate),
                        pool=pool,
                        fused=(*answer.fused, fused),
                        margins=margins,
                    )
                )
    return extended
