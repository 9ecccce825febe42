"""The strategy Mixture: a weighted mean of the members' probabilities of whole words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from typing_extensions import override

from adafuse_llm import results
from adafuse_llm.backends.base import Backend
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.draft import MAX_DRAFT, NoDrafts
from adafuse_llm.decoding.member import MemberState, Steps
from adafuse_llm.decoding.propose import propose
from adafuse_llm.decoding.rounds import PlayRound, RoundOutcome, choose_best, play_round
from adafuse_llm.decoding.score import Pool, PoolCandidate, to_result
from adafuse_llm.errors import InvalidInputError
from adafuse_llm.strategies.adafuse import branch_tokens
from adafuse_llm.strategies.base import OF_WORDS, Strategy, StrategyContext
from adafuse_llm.text.words import has_end
from adafuse_llm.tree.adjustment import log_sum
from adafuse_llm.tree.tokens import Node


@dataclass(frozen=True)
class Mixture(Strategy):
    """The linear pool of the members' probabilities of the next word.

    In a round, every member proposes its greedy word, or `branching_factor` alternatives if it is
    not confident. The word with the highest pooled probability wins::

        P(word) = sum of w_k P_k(word) over the members k

    P_k is the member's probability of the word's tokens, times the probability that the word ends
    after them: before a token that begins with whitespace, or at the end of the response. With
    their ends, different words exclude each other, so their probabilities can be compared however
    many tokens a member needs for them (Pimentel and Meister, arXiv 2406.14561). P_k leaves out the
    end of a word that ends the response, ends in whitespace, has letters of a script without
    spaces, has `max_word_tokens` tokens, or fills the context window.

    The weights w_k are those of the option `weights`, divided by their sum. By default, they are
    proportional to the members' numbers of parameters, or equal if a number is not known. A member
    that cannot write a word exactly gives it a probability of 0.

    The score is -log of the pooled probability, and the NLL is -log of P_k, both in nats. Under a
    grammar, probabilities are relative to all that it permits at the start of the word.

    The member with the highest weight proposes first, and the others read its word in order of
    weight. As soon as the pooled probability of the word is above one half, the word wins, because
    no other word can have more. Such a round has one candidate, with the NLL of the members that
    have read it, and a score as if the others gave it a probability of 0. If no word wins like
    this, all members propose. They always propose the first word of a reply to messages, and the
    first word after a prompt that ends in spaces.

    Cost: one pass per token for the member with the highest weight. Others read only the words that
    it cannot decide alone.

    At a `temperature` above 0, each round draws a member, with a probability proportional to its
    weight, and this member draws the word. So words come from the weighted mean of the
    distributions. If another member drew the last word, and this word has an end, the new word
    must begin after it. The round has one candidate, whose score and NLL are -log P_k of the drawn
    member. Cost: one pass per token, and one more when another member goes on.
    """

    name = "mixture"
    options = OF_WORDS | {"margin_threshold", "branching_factor", "weights"}

    @override
    def check(self, members: Sequence[Backend]) -> None:
        for member in members:
            if not member.has_word_ends():
                raise InvalidInputError(
                    f"strategy {self.name!r} needs to know how likely a word ends, but member "
                    f"{member.name!r} does not know it. Servers of vLLM and SGLang do if their "
                    "structured outputs work; llama-server does not. Leave the member out with "
                    "use=[...], or choose another strategy, such as 'adafuse'."
                )

    @override
    def weights(self, members: Sequence[Backend]) -> Sequence[float]:
        sizes = [member.parameters for member in members]
        known = [float(size) for size in sizes if size]
        return known if len(known) == len(members) else super().weights(members)

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return max(2, _one_word(config).branches)

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        return branch_tokens(members, _one_word(config)) + MAX_DRAFT

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        rounds = _DrawnRounds if context.config.temperature else _Rounds
        return rounds(context, _one_word(context.config)).play


def _one_word(config: AdaFuseConfig) -> AdaFuseConfig:
    # a round has one word, and by default no alternatives
    return config.override({"max_words": 1, "branching_factor": config.branching_factor or 1})


class _Rounds:
    def __init__(self, context: StrategyContext, config: AdaFuseConfig) -> None:
        self._members = members = context.members
        self._config = config
        self._drafts = context.drafts
        for member in members:
            member.word_ends = True

    def play(self) -> Steps[RoundOutcome]:
        opening = self._members[0].opening
        if not (opening.is_reply or opening.spaces):
            outcome = yield from self._play_majority()
            if outcome is not None:
                return outcome
        return (yield from play_round(self._members, self._config, NoDrafts(), self._score))

    def _play_majority(self) -> Steps[RoundOutcome | None]:
        # the member with the highest weight proposes
        members = sorted(self._members, key=lambda member: -member.weight)
        lead = members[0]
        proposal = yield from self._drafts.propose_lead(lead, self._config)
        pool = Pool(lead.opening)
        candidate = pool.add(lead, proposal)
        total = math.fsum(member.weight for member in members)
        # the others read its word until the pooled probability is above one half
        logprobs: list[float] = []
        pooled = 0.0
        for member in members:
            yield from pool.read(member, lambda _: True)
            logprobs.append(self._logprob(candidate, member))
            pooled += member.weight / total * math.exp(logprobs[-1])
            if pooled > 0.5:
                break
        else:
            return None
        for member in members:
            pool.encode(member, candidate)
        asked = members[: len(logprobs)]
        nll = [0.0 - logprob for logprob in logprobs]
        score = -math.log(pooled)
        scored = to_result(candidate, asked, nll, score, -score)
        margins = {member.name: () for member in asked} | {lead.name: proposal.margins}
        return choose_best(pool, [scored], margins)

    def _score(self, candidate: PoolCandidate, members: Sequence[MemberState]) -> results.Candidate:
        logprobs = [self._logprob(candidate, member) for member in members]
        nll = [0.0 - logprob for logprob in logprobs]
        weighted = [
            math.log(member.weight) + logprob
            for member, logprob in zip(members, logprobs, strict=True)
            if member.weight
        ]
        pooled = log_sum(weighted) - math.log(math.fsum(member.weight for member in members))
        if pooled == -math.inf:
            return to_result(candidate, members, nll, None)
        return to_result(candidate, members, nll, 0.0 - pooled, pooled)

    def _logprob(self, candidate: PoolCandidate, member: MemberState) -> float:
        word = candidate.logprob(member)
        if word == -math.inf or not self._has_end(candidate):
            return word
        end = candidate.nodes[member]
        if member.permits.is_forced(end):
            return word
        word_end = member.next(end).word_end_logprob
        assert word_end is not None, "the query asks for it"
        return word + word_end

    def _has_end(self, candidate: PoolCandidate) -> bool:
        # a word that a limit may have cut has no end
        writer = candidate.proposers[0]
        tokens = len(candidate.path(writer))
        is_cut = tokens >= self._config.max_word_tokens or writer.is_full(candidate.nodes[writer])
        return not (candidate.ends or is_cut) and has_end(candidate.text)


class _DrawnRounds(_Rounds):
    def __init__(self, context: StrategyContext, config: AdaFuseConfig) -> None:
        super().__init__(context, config)
        self._random = Random(f"members {config.seed}")  # noqa: S311  a seed gives one text
        self._ended: dict[MemberState, Node] = {}  # where the last word ended, if it had an end
        for number, member in enumerate(context.members):
            member.draw_apart(f"member {number}")

    @override
    def play(self) -> Steps[RoundOutcome]:
        members = self._members
        (writer,) = self._random.choices(members, [member.weight for member in members])
        writer.after_word = self._ended.get(writer) is writer.tree.root
        pool = Pool(writer.opening)
        yield from pool.expect(members)
        proposal = yield from propose(writer, self._config)
        candidate = pool.add(writer, proposal)
        yield from pool.read(writer, self._has_end)
        for member in members:
            pool.encode(member, candidate)
        self._ended = candidate.nodes if self._has_end(candidate) else {}
        nll = 0.0 - self._logprob(candidate, writer)
        scored = to_result(candidate, [writer], [nll], nll, -nll)
        return choose_best(pool, [scored], {writer.name: proposal.margins})
