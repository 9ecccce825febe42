"""DeePEn: whole distributions, compared through anchors that all vocabularies share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from adafuse_llm.backends.base import Backend, SupportsAnchors
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, commit_best, to_result
from adafuse_llm.errors import InvalidInputError, InvalidOptionError
from adafuse_llm.strategies.base import Strategy, StrategyContext
from adafuse_llm.strategies.token_level import (
    LISTED,
    first_logprobs,
    offer,
    offer_tokens,
    union,
)


@dataclass(frozen=True)
class DeePEn(Strategy):
    """The members' whole distributions, averaged over anchors (arXiv 2404.12715).

    Every member tells its distribution over the tokens that all vocabularies share, which it
    compares its own tokens with; these are averaged. The main member then moves its own
    distribution towards the average by a few steps of gradient descent, and its likeliest token is
    committed. Where it would end the response, it does so unasked.

    Score: -log of the probability that the main member ends up with. NLL: -log of a member's own
    probability of its first token for the text, in nats. Cost: one pass per member for each
    committed token, and products with a matrix of a number per token and anchor, which every member
    keeps: 4 bytes times vocabulary times anchors.

    Args:
        main: the main member's name; default: the first member that decodes.
        steps: of gradient descent.
        rate: its learning rate; the source tunes it for each task.

    Raises:
        InvalidOptionError: no steps, or a rate that is not positive.
    """

    main: str | None = None
    steps: int = 5
    rate: float = 0.15

    name = "deepen"
    options = frozenset({"weights"})

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InvalidOptionError(f"DeePEn(steps=...) must be 1 or more; got {self.steps!r}")
        if not 0 < self.rate < math.inf:
            raise InvalidOptionError(f"DeePEn(rate=...) must be above 0; got {self.rate!r}")

    @override
    def check(self, members: Sequence[Backend]) -> None:
        names = [member.name for member in members]
        if self.main is not None and self.main not in names:
            raise InvalidInputError(
                f"DeePEn(main=...) must be a member that decodes ({', '.join(names)}); "
                f"got {self.main!r}"
            )
        if lacking := [
            member.name for member in members if not isinstance(member, SupportsAnchors)
        ]:
            raise InvalidInputError(
                "strategy 'deepen' needs members that tell whole distributions and embeddings "
                "(adafuse_llm.backends.SupportsAnchors), as Hugging Face models do; "
                f"{', '.join(lacking)} cannot. Leave them out, or choose another strategy."
            )
        if not _shared(members):
            raise InvalidInputError(
                f"strategy 'deepen' needs tokens that all members have; {', '.join(names)} share "
                "none. Choose other members or another strategy."
            )

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return LISTED

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        members = context.members
        mains = [member for member in members if member.name == self.main]
        shared = _shared([member.backend for member in members])
        anchors = [
            [member.backend.vocabulary[spelling] for spelling in shared]
            for member in members
            if isinstance(member.backend, SupportsAnchors)
        ]
        return partial(self._play, members, (mains or members)[0], anchors)

    def _play(
        self,
        members: Sequence[Member],
        main: Member,
        anchors: Sequence[Sequence[int]],
        first_word: bool,
    ) -> Steps[RoundOutcome]:
        offers = yield from in_lockstep([offer(member, LISTED) for member in members])
        likeliest = main.next(main.tree.root)
        token, logprob = likeliest.greedy, likeliest.logprobs[0]
        if token not in main.end_ids:
            token, logprob = self._fuse(members, main, anchors)
        chosen = yield from offer_tokens(main, [token])
        others = [(m, own) for m, own in zip(members, offers, strict=True) if m is not main]
        pool = union(
            [main, *(m for m, _ in others)],
            [chosen, *(own for _, own in others)],
            first_word=first_word,
        )
        del pool.candidates[1:]
        logprobs = yield from first_logprobs(members, pool)
        (candidate,) = pool.candidates
        nll = [0.0 - each[0] for each in logprobs]
        margins: dict[str, tuple[float, ...]] = {
            member.name: (member.next(member.tree.root).margin,) for member in members
        }
        return commit_best(pool, [to_result(candidate, members, nll, 0.0 - logprob)], margins)

    def _fuse(
        self, members: Sequence[Member], main: Member, anchors: Sequence[Sequence[int]]
    ) -> tuple[int, float]:
        """The main member's token after the correction, and its log-probability."""
        seen = []
        for member, own in zip(members, anchors, strict=True):
            assert isinstance(member.backend, SupportsAnchors)
            seen.append(member.backend.relative(member.tree, member.tree.root, own))
        total = math.fsum(member.weight for member in members)
        shares = [member.weight / total for member in members]
        target = [
            math.fsum(share * value for share, value in zip(shares, values, strict=True))
            for values in zip(*seen, strict=True)
        ]
        assert isinstance(main.backend, SupportsAnchors)
        return main.backend.corrected(
            main.tree,
            main.tree.root,
            anchors[list(members).index(main)],
            target,
            steps=self.steps,
            rate=self.rate,
        )


def _shared(members: Sequence[Backend]) -> list[str]:
    """Spellings of the tokens that all members have, in order."""
    vocabularies = [
        member.vocabulary.keys() for member in members if isinstance(member, SupportsAnchors)
    ]
    return sorted(set(vocabularies[0]).intersection(*vocabularies[1:]))
