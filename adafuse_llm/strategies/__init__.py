"""AdaFuse, the strategies that it is compared with, and the parts for new strategies."""

from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, Steps
from adafuse_llm.decoding.propose import Proposal, Span, propose
from adafuse_llm.decoding.rounds import (
    PlayRound,
    RoundOutcome,
    choose_best,
    play_round,
    to_result,
)
from adafuse_llm.decoding.score import Pool, PoolCandidate
from adafuse_llm.strategies.adafuse import AdaFuse
from adafuse_llm.strategies.base import Strategy, StrategyContext
from adafuse_llm.strategies.beam import BeamSearch
from adafuse_llm.strategies.fixed import FixedWords
from adafuse_llm.strategies.mixture import Mixture
from adafuse_llm.strategies.registry import find_strategy
from adafuse_llm.strategies.rivals.deepen import DeePEn
from adafuse_llm.strategies.rivals.gac import GaC
from adafuse_llm.strategies.rivals.pair_ranker import PairRanker
from adafuse_llm.strategies.rivals.rerank import Ranker, Rerank
from adafuse_llm.strategies.rivals.sweetspan import SweetSpan
from adafuse_llm.strategies.rivals.unite import UniTE
from adafuse_llm.strategies.rivals.vote import MajorityVote
from adafuse_llm.strategies.single import Single

__all__ = [  # noqa: RUF022  grouped by use
    "AdaFuse",
    "BeamSearch",
    "DeePEn",
    "FixedWords",
    "GaC",
    "MajorityVote",
    "Mixture",
    "PairRanker",
    "Rerank",
    "Single",
    "SweetSpan",
    "UniTE",
    "find_strategy",
    "Member",
    "PlayRound",
    "Pool",
    "PoolCandidate",
    "Proposal",
    "Ranker",
    "RoundOutcome",
    "Span",
    "Steps",
    "Strategy",
    "StrategyContext",
    "choose_best",
    "in_lockstep",
    "play_round",
    "propose",
    "to_result",
]
