"""The strategies AdaFuse, Mixture and Single, and what a new strategy can use."""

from adafuse_llm.decoding.draft import NoDrafts
from adafuse_llm.decoding.member import MemberState, Steps, in_lockstep
from adafuse_llm.decoding.propose import Proposal, Span, branch, finish_words, propose
from adafuse_llm.decoding.rounds import PlayRound, Proposer, RoundOutcome, choose_best, play_round
from adafuse_llm.decoding.score import Pool, PoolCandidate, Scorer, fuse, score, to_result
from adafuse_llm.strategies.adafuse import AdaFuse, Single
from adafuse_llm.strategies.base import OF_WORDS, Strategy, StrategyContext
from adafuse_llm.strategies.mixture import Mixture
from adafuse_llm.strategies.registry import find_strategy

__all__ = [  # noqa: RUF022  grouped by use
    "AdaFuse",
    "Mixture",
    "Single",
    "find_strategy",
    "OF_WORDS",
    "NoDrafts",
    "MemberState",
    "PlayRound",
    "Pool",
    "PoolCandidate",
    "Proposal",
    "Proposer",
    "RoundOutcome",
    "Scorer",
    "Span",
    "Steps",
    "Strategy",
    "StrategyContext",
    "branch",
    "choose_best",
    "finish_words",
    "fuse",
    "in_lockstep",
    "play_round",
    "propose",
    "score",
    "to_result",
]
