"""What a pass of n tokens costs, measured in the passes of all requests.

A pass of n tokens takes about a + b n seconds. The price of a token is b / (a + b): the cost of one
more token in a pass, as a share of a pass over one token. At price 0 a further token is free. At
price 1 it costs as much as a pass of its own, so a draft saves nothing even if it is needed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import combinations

from adafuse_llm.results import PassCost

MAX_TOKENS = 32
"""Largest pass that is measured. Larger passes read prompts, where a token may cost less."""

MIN_PASSES, MAX_PASSES = 8, 16
"""Number of passes of one size that a measurement needs, and number that it keeps."""

MAX_AGE = 2048
"""Number of later passes after which a measured pass no longer counts. If drafts are too expensive,
this is how often the engine drafts for a few passes again to measure larger passes."""

UPDATE_INTERVAL = 8
"""Number of passes after which the cost is computed again."""

MIN_SECONDS = 0.0005
"""Shortest pass over one token whose tokens have a price. In shorter passes, Python's own work
outweighs the model's."""

MIN_PRICE = 0.3
"""Lowest price that changes what is drafted. Below it, a token whose chance reaches the limits for
free tokens is worth its price, and noise in the measurement changes nothing."""


class PassTimes:
    """Recent passes of one backend, and the cost that follows from them.

    The fastest of several passes of the same size counts, because other programs and other causes
    of noise only make a pass slower. Passes that serve the same number of requests are compared
    with each other. The cost follows from the passes with the fewest requests that were measured
    often enough.

    One thread calls `learn`. Any thread may read the attributes.

    Attributes:
        cost: the cost of a pass, or None before enough passes.
        draft_price: the price to use for decisions about drafts. It is 0 below `MIN_PRICE` and
            before enough passes.
    """

    def __init__(self) -> None:
        self.cost: PassCost | None = None
        self.draft_price = 0.0
        self._learned = 0
        self._recent: dict[int, dict[int, deque[tuple[int, float]]]] = defaultdict(dict)

    def learn(self, requests: int, tokens: int, seconds: float) -> None:
        """Learn from a pass that did not read a prompt.

        Args:
            requests: number of requests that the pass served.
            tokens: number of tokens that the backend processed for all these requests.
            seconds: wall-clock seconds that the backend took.
        """
        if not 1 <= tokens <= MAX_TOKENS:
            return
        passes = self._recent[requests].setdefault(tokens, deque(maxlen=MAX_PASSES))
        passes.append((self._learned, seconds))
        self._learned += 1
        if self._learned % UPDATE_INTERVAL == 0:
            self._update()

    def _update(self) -> None:
        costs = (_cost(self._fastest(requests)) for requests in sorted(self._recent))
        self.cost = next((cost for cost in costs if cost is not None), None)
        price = 0.0 if self.cost is None else self.cost.price
        self.draft_price = price if price >= MIN_PRICE else 0.0

    def _fastest(self, requests: int) -> dict[int, float]:
        """Return the seconds of the fastest recent pass by number of tokens."""
        oldest = self._learned - MAX_AGE
        recent = {
            tokens: [seconds for learned, seconds in passes if learned >= oldest]
            for tokens, passes in self._recent[requests].items()
        }
        return {
            size: min(seconds) for size, seconds in recent.items() if len(seconds) >= MIN_PASSES
        }


def _cost(seconds: Mapping[int, float]) -> PassCost | None:
    """Return the cost of a pass, given the seconds of passes by number of tokens.

    Return None if fewer than two sizes are known.
    """
    if len(seconds) < 2:
        return None
    per_token = _slope(seconds)
    smallest = min(seconds)
    single = seconds[smallest] - per_token * (smallest - 1)
    single = max(single, seconds[smallest] / smallest)
    if single < MIN_SECONDS:
        return PassCost(seconds=single, price=0.0)
    return PassCost(seconds=single, price=per_token / single)


def _slope(seconds: Mapping[int, float]) -> float:
    """Return the seconds per token: the median slope between two sizes, at least 0.

    Each pair of sizes has a weight equal to its difference, because noise changes the slope between
    distant sizes less.
    """
    pairs = combinations(sorted(seconds), 2)
    slopes = sorted(((seconds[b] - seconds[a]) / (b - a), b - a) for a, b in pairs)
    half = sum(weight for _, weight in slopes) / 2
    passed = 0
    for slope, weight in slopes:
        passed += weight
        if passed >= half:
            return max(slope, 0.0)
    raise AssertionError("there are at least two sizes")
