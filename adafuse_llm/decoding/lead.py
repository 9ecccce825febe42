"""Choice of the member of a device that proposes first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from adafuse_llm.decoding.hit_rate import PRIOR_CHANCE, HitRate
from adafuse_llm.decoding.member import RECENT_WEIGHT, Member
from adafuse_llm.decoding.score import PoolCandidate

SWITCH_COST_RATIO = 0.85
"""Another member becomes the lead if the expected cost of a round with this member as the lead is
below this share of the expected cost with the current lead."""


class Lead:
    """Choice of the member that proposes first, among members that propose one after another.

    The expected time of a round with lead l, in seconds, is

        c_l n_l + Σ c_k (1 + p_k (n_l - 1) + (1 - a_kl) n_k).

    The sum is over the other members k, which check the lead's n_l tokens in one pass. c is seconds
    per pass, n is tokens per proposal, and a is the share of rounds in which two members agree. All
    three are measured in this request. The first member leads until c and n are known. p is the
    price of a token (`adafuse_llm.decoding.costs`). If it is not 0, c is seconds per pass over one
    token.

    Attributes:
        member: the lead.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.member = members[0]
        self._members = tuple(members)
        self._sizes: dict[Member, float] = {}
        self._agree = {
            pair: HitRate(PRIOR_CHANCE) for pair in map(frozenset, combinations(members, 2))
        }

    def order(self) -> list[Member]:
        """Return the members in the order in which they propose in this round, the lead first."""
        costs = {member: self._cost(member) for member in self._members}
        best = min(self._members, key=costs.__getitem__)
        if costs[best] < SWITCH_COST_RATIO * costs[self.member]:
            self.member = best
        return [self.member, *(member for member in self._members if member is not self.member)]

    def learn(self, likeliest: dict[Member, PoolCandidate], sizes: dict[Member, int]) -> None:
        """Learn from the members' likeliest candidates in a round and their numbers of tokens."""
        for pair, rate in self._agree.items():
            one, other = pair
            rate.learn(likeliest[one] is likeliest[other])
        for member in self._members:
            size = self._sizes.get(member, sizes[member])
            self._sizes[member] = size + RECENT_WEIGHT * (sizes[member] - size)

    def _cost(self, lead: Member) -> float:
        """Return the expected seconds of a round that `lead` leads."""
        if not self._sizes or any(member.pass_seconds is None for member in self._members):
            return 0.0
        cost = 0.0
        for member in self._members:
            own = self._sizes[member]
            seconds, price = _pass_cost(member)
            passes = own
            if member is not lead:
                disagreement = 1 - self._agree[frozenset((member, lead))].value
                passes = 1 + price * max(self._sizes[lead] - 1, 0.0) + disagreement * own
            cost += passes * seconds
        return cost


def _pass_cost(member: Member) -> tuple[float, float]:
    """Return the seconds of a pass of `member`, and the price of each token after the first."""
    times = member.pass_times
    if times.draft_price and times.cost is not None:
        return times.cost.seconds, times.draft_price
    return member.pass_seconds or 0.0, 0.0
