"""AdaFuse with a beam: several hypotheses at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from typing_extensions import override

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.lockstep import in_lockstep, merge_queries
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.propose import propose
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, commit_best, score, to_result
from adafuse_llm.decoding.score import Pool, PoolCandidate
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.strategies.adafuse import branch_tokens
from adafuse_llm.strategies.base import Strategy, StrategyContext
from adafuse_llm.tree import Node

USUAL = 3
"""Hypotheses that are kept, where nothing else is said."""


@dataclass(frozen=True)
class BeamSearch(Strategy):
    """AdaFuse that keeps the best hypotheses of every round instead of one.

    After the beam-search variant of the paper's Appendix F (Figure 7), whose scoring is not public:
    see "Strategies" for what is decided here. In every round each hypothesis is continued by all
    members' proposals, as Algorithm 1 has it, and scored by all. The best `num_beams` continuations
    and finished answers are kept, by the mean of F over the rounds they took. With one beam it
    decides what AdaFuse decides.

    The pool of the only round holds the answers that were kept. Score: mean of F over their rounds;
    NLL: the member's own share of it; proposers: who proposed every part. A stream has one event.

    Cost: `num_beams` times AdaFuse's tokens, less what hypotheses have in common; the passes of one
    member are shared by all hypotheses. Nothing is drafted.

    Args:
        num_beams: hypotheses that are kept.

    Raises:
        InvalidOptionError: it is no whole number, or less than one.
    """

    num_beams: int = USUAL

    options = frozenset(
        {"margin_threshold", "max_words", "branching_factor", "max_word_tokens", "weights"}
    )

    def __post_init__(self) -> None:
        if not isinstance(self.num_beams, int) or self.num_beams < 1:
            raise InvalidOptionError(
                f"BeamSearch(num_beams=...) must be a whole number from 1; got {self.num_beams!r}"
            )

    @property
    @override
    def name(self) -> str:
        return "beam" if self.num_beams == USUAL else f"beam-{self.num_beams}"

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return max(2, config.branching_factor)

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        return self.num_beams * (config.max_new_tokens + branch_tokens(members, config))

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return partial(self._play, context.members, context.config)

    def _play(
        self, members: Sequence[Member], config: AdaFuseConfig, first_word: bool
    ) -> Steps[RoundOutcome]:
        kept = [Hypothesis(starts={member: member.tree.root for member in members})]
        while running := [each for each in kept if not each.is_done(members, config)]:
            done = [each for each in kept if each not in running]
            extended = yield from _extended(running, members, config, first_word)
            kept = self._best([*done, *extended]) or done
            for member in members:
                member.prune(each.starts[member] for each in kept if member in each.starts)
        pool = Pool(first_word=False)
        pool.candidates = [each.candidate() for each in kept]
        scored = [
            to_result(candidate, members, [each.nll(member) for member in members], each.score)
            for candidate, each in zip(pool.candidates, kept, strict=True)
        ]
        best = kept[0].margins if kept else {}
        return commit_best(pool, scored, {m.name: tuple(best.get(m, ())) for m in members})

    def _best(self, answers: Sequence[Hypothesis]) -> list[Hypothesis]:
        """The best answers, the best first; of those with the same text, and of equals, the
        earlier.
        """
        different: dict[tuple[str, bool], Hypothesis] = {}
        for each in sorted(answers, key=lambda each: each.score):
            different.setdefault((each.text.lstrip(), each.stops), each)
        return list(different.values())[: self.num_beams]


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """An answer as far as it goes.

    Attributes:
        text: what was written so far.
        stops: whether the answer ends with it.
        starts: the last node, by member; absent where it does not fit the member's window.
        rounds: what was chosen in every round.
        fused: F of these, in nats per token.
        margins: by member, at the start of each of its words.
    """

    text: str = ""
    stops: bool = False
    starts: dict[Member, Node] = field(default_factory=dict)
    rounds: tuple[PoolCandidate, ...] = ()
    fused: tuple[float, ...] = ()
    margins: dict[Member, tuple[float, ...]] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Mean F of its rounds; 0 before the first."""
        return math.fsum(self.fused) / len(self.fused) if self.fused else 0.0

    def nll(self, member: Member) -> float:
        """Mean over rounds of the member's NLL; infinite if it could score none."""
        known = [each for each in (c.nll(member) for c in self.rounds) if math.isfinite(each)]
        return math.fsum(known) / len(known) if known else math.inf

    def is_done(self, members: Sequence[Member], config: AdaFuseConfig) -> bool:
        """Whether the answer is at its end, at a stop sequence, or at a limit."""
        if not self.rounds:
            return False
        return (
            self.stops
            or any(stop in self.text for stop in config.stop)
            or any(m not in self.starts or m.is_full(self.starts[m]) for m in members)
            or max(self._written(m) for m in members) >= config.max_new_tokens
        )

    def _written(self, member: Member) -> int:
        return self.starts[member].length - member.prompt_tokens

    def candidate(self) -> PoolCandidate:
        """The whole answer as a candidate; its proposers have proposed every part of it."""
        candidate = PoolCandidate(self.text, self.stops)
        candidate.proposers = [
            member
            for member in self.rounds[0].proposers
            if all(member in each.proposers for each in self.rounds)
        ]
        candidate.ends = dict(self.starts)
        return candidate


def _extended(
    answers: Sequence[Hypothesis],
    members: Sequence[Member],
    config: AdaFuseConfig,
    first_word: bool,
) -> Steps[list[Hypothesis]]:
    """One round for each answer: all continuations that a member can score."""
    pools = [
        Pool(first_word=first_word and not each.text.strip(), starts=each.starts)
        for each in answers
    ]
    proposals = yield from in_lockstep(
        [
            merge_queries(
                member, [propose(member, config, each.starts[member]) for each in answers]
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
                        fused=(*answer.fused, fused),
                        margins=margins,
                    )
                )
    return extended
