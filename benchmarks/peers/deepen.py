"""DeePEn: whole distributions, averaged over the tokens that all vocabularies share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from adafuse_llm.backends.base import Backend, SupportsAnchors, SupportsPlacement
from adafuse_llm.config import GRAMMARS, AdaFuseConfig
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, choose_best, to_result
from adafuse_llm.errors import InvalidInputError, InvalidOptionError
from adafuse_llm.strategies.base import Strategy, StrategyContext
from adafuse_llm.strategies.rivals.token_level import (
    LISTED,
    first_logprobs,
    offer,
    offer_tokens,
    union,
)

EXAMPLE_RATE = 0.15
"""Learning rate of the source's example."""


@dataclass(frozen=True)
class DeePEn(Strategy):
    """The members' whole distributions, averaged over anchors (arXiv 2404.12715).

    Anchors are the tokens that all vocabularies share. Every member compares its own tokens with
    the anchors to convert its distribution to a distribution over the anchors. These distributions
    are averaged. The main member moves its own distribution toward the average by a few steps of
    gradient descent. The likeliest token after these steps is committed. If the main member's
    likeliest token ends the response before these steps, the response ends without them.

    The score is -log of the token's probability after these steps. The NLL of a member is -log of
    the probability that it gives to its own first token for the text, in nats.

    Cost: one pass per member for each committed token, and matrix products. Every member keeps a
    matrix that takes 4 bytes times the vocabulary size times the number of anchors.

    Args:
        main: name of the main member. Default: the first member that decodes.
        steps: number of steps of gradient descent.
        rate: learning rate. The source tunes it for each task. The default is its example. Any
            other rate is part of the name, as in ``deepen-0.3``.

    Raises:
        InvalidOptionError: `steps` is less than one, or `rate` is not positive.
    """

    main: str | None = None
    steps: int = 5
    rate: float = EXAMPLE_RATE

    options = frozenset({*GRAMMARS, "weights"})

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InvalidOptionError(f"DeePEn(steps=...) must be 1 or more; got {self.steps!r}")
        if not 0 < self.rate < math.inf:
            raise InvalidOptionError(f"DeePEn(rate=...) must be above 0; got {self.rate!r}")

    @property
    @override
    def name(self) -> str:
        return "deepen" if self.rate == EXAMPLE_RATE else f"deepen-{self.rate:g}"

    @override
    def check(self, members: Sequence[Backend]) -> None:
        names = [member.name for member in members]
        if self.main is not None and self.main not in names:
            raise InvalidInputError(
                f"DeePEn(main=...) must be one of the members that decode ({', '.join(names)}); "
                f"got {self.main!r}"
            )
        if lacking := [
            member.name for member in members if not isinstance(member, SupportsAnchors)
        ]:
            raise InvalidInputError(
                f"strategy {self.name!r} needs members with whole distributions and embeddings "
                "(adafuse_llm.backends.SupportsAnchors), such as Hugging Face models and GGUF "
                f"files. Leave out {', '.join(lacking)}, or choose another strategy."
            )
        if not (shared := _shared(members)):
            raise InvalidInputError(
                f"strategy {self.name!r} needs tokens that all members share; {', '.join(names)} "
                "share none. Choose other members, or another strategy."
            )
        needed, free = Counter[str](), dict[str, int]()
        for member in members:
            if isinstance(member, SupportsAnchors) and isinstance(member, SupportsPlacement):
                device, size = member.device, member.free_bytes()
                needed[device] += member.anchor_bytes(len(shared))
                free[device] = min(free.get(device, size), size)
        for device, size in needed.items():
            if size > free[device]:
                raise InvalidInputError(
                    f"strategy {self.name!r} needs {size / 1e9:.1f} GB of memory on {device} for "
                    f"{len(shared)} shared tokens of {', '.join(names)}, and "
                    f"{free[device] / 1e9:.1f} GB are free. Choose another strategy, or members "
                    "with smaller vocabularies."
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
    ) -> Steps[RoundOutcome]:
        offers = yield from in_lockstep([offer(member, LISTED) for member in members])
        likeliest = main.next(main.tree.root)
        token, logprob = likeliest.tokens[0], likeliest.logprobs[0]
        if token not in main.end_ids:
            token, logprob = self._fuse(members, main, anchors)
        chosen = yield from offer_tokens(main, [token])
        others = [(m, own) for m, own in zip(members, offers, strict=True) if m is not main]
        pool = union(
            [main, *(m for m, _ in others)],
            [chosen, *(own for _, own in others)],
        )
        del pool.candidates[1:]
        logprobs = yield from first_logprobs(members, pool)
        (candidate,) = pool.candidates
        nll = [0.0 - each[0] for each in logprobs]
        margins: dict[str, tuple[float, ...]] = {
            member.name: (member.next(member.tree.root).margin,) for member in members
        }
        return choose_best(pool, [to_result(candidate, members, nll, 0.0 - logprob)], margins)

    def _fuse(
        self, members: Sequence[Member], main: Member, anchors: Sequence[Sequence[int]]
    ) -> tuple[int, float]:
        """Return the main member's likeliest token after the steps, and its log-probability."""
        relative = []
        for member, own in zip(members, anchors, strict=True):
            assert isinstance(member.backend, SupportsAnchors)
            relative.append(member.backend.relative(member.tree, member.tree.root, own))
        total = math.fsum(member.weight for member in members)
        shares = [member.weight / total for member in members]
        target = [
            math.fsum(share * value for share, value in zip(shares, values, strict=True))
            for values in zip(*relative, strict=True)
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
    """Return the spellings of the tokens that all members share, sorted."""
    vocabularies = [
        member.vocabulary.keys() for member in members if isinstance(member, SupportsAnchors)
    ]
    return sorted(set(vocabularies[0]).intersection(*vocabularies[1:]))
