"""AdaFuse with a token-level beam search in every round (the paper's Appendix F)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from adafuse_llm import AdaFuseConfig
from adafuse_llm.backends import Node
from adafuse_llm.strategies import (
    MemberState,
    NoDrafts,
    PlayRound,
    Proposal,
    Span,
    Steps,
    Strategy,
    StrategyContext,
    finish_words,
    play_round,
)

BEAM_TOKENS = 5
"""Number of new tokens of a beam (Appendix F). It is also the longest word that a beam proposes."""


@dataclass(frozen=True)
class BeamSearch(Strategy):
    """AdaFuse with a token-level beam search in every round (the paper's Appendix F and Figure 7).

    In a round, each member runs a beam search of width `num_beams` for at most five new tokens.
    Each beam is cut to its first word. These words are the member's candidates. All members score
    them, and the word with the lowest F is committed, so a round has one word. The score and the
    NLL are the same as in `AdaFuse`. The paper leaves open how a beam is scored and what happens to
    longer words: here, the score is the sum of log-probabilities, and a word has at most five
    tokens.

    Cost: at most about five passes per member for each committed word. A pass evaluates up to
    `num_beams` tokens, or the words of the other members. There are no drafts.

    Args:
        num_beams: number of beams of a member.
    """

    num_beams: int = 3

    options = frozenset({"max_word_letters", "weights"})

    @property
    @override
    def name(self) -> str:
        return f"beam-{self.num_beams}"

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return max(2, self.num_beams)

    @override
    def max_extra_tokens(self, members: int, config: AdaFuseConfig) -> int:
        return members * self.num_beams * config.max_word_tokens

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        proposer = partial(_propose, num_beams=self.num_beams)
        return partial(play_round, context.members, context.config, NoDrafts(), proposer=proposer)


@dataclass(frozen=True, slots=True)
class _Beam:
    """A continuation of the committed text.

    Attributes:
        tokens: the tokens. The last one may be an end-of-sequence token.
        node: the last node that is not an end-of-sequence token.
        score: sum of the tokens' log-probabilities.
    """

    tokens: tuple[int, ...]
    node: Node
    score: float


def _propose(member: MemberState, config: AdaFuseConfig, num_beams: int) -> Steps[Proposal]:
    """Propose the first words of a member's beams, the best beam first."""
    root = member.tree.root
    yield from member.evaluate([root])
    if member.is_full(root):
        return Proposal((Span(root, ends=False),), ())
    beams = yield from _search(member, num_beams)
    growing = [beam for beam in beams if beam.node is not root]

    def follow(index: int, end: Node) -> int:
        """Return the next token of a beam, or the likeliest token after the whole beam."""
        tokens, size = growing[index].tokens, end.length - root.length
        return tokens[size] if size < len(tokens) else member.next(end).chosen

    firsts = [member.tree.child(root, beam.tokens[0]) for beam in growing]
    found = yield from finish_words(
        member, root, firsts, follow, limit=BEAM_TOKENS, letters=config.max_word_letters
    )
    ends = iter(found)
    spans = [
        Span(root, ends=True) if beam.node is root else Span(next(ends), ends=False)
        for beam in beams
    ]
    return Proposal(tuple(spans), (member.next(root).margin,))


def _search(member: MemberState, num_beams: int) -> Steps[list[_Beam]]:
    """Return the beams with the highest sums of log-probabilities, the best beam first.

    A beam that ends the response, or for which the context window has no more room, keeps its sum
    and is not continued. If two sums are equal, the extension of the better beam comes first, and
    then the likelier token.
    """
    beams = [_Beam((), member.tree.root, 0.0)]
    for _ in range(BEAM_TOKENS):
        running = [beam for beam in beams if not _is_done(member, beam)]
        yield from member.evaluate(beam.node for beam in running)
        found = [
            (score, beam, token)
            for beam in beams
            for score, token in _extensions(member, beam, num_beams)
        ]
        found.sort(key=lambda each: -each[0])
        beams = [_extended(member, *each) for each in found[:num_beams]]
    return beams


def _is_done(member: MemberState, beam: _Beam) -> bool:
    """Return whether a beam ends the response, or the context window has no room after it."""
    ends = bool(beam.tokens) and beam.tokens[-1] in member.end_ids
    return ends or member.is_full(beam.node)


def _extensions(member: MemberState, beam: _Beam, count: int) -> list[tuple[float, int | None]]:
    """Return the likeliest next tokens of a beam, each with the sum of the longer beam.

    The token is None if the beam is not continued.
    """
    if _is_done(member, beam):
        return [(beam.score, None)]
    summary = member.next(beam.node)
    return [
        (beam.score + logprob - summary.mass, token)
        for token, logprob in zip(summary.tokens[:count], summary.logprobs, strict=False)
    ]


def _extended(member: MemberState, score: float, beam: _Beam, token: int | None) -> _Beam:
    """Return a beam with one more token, or the same beam if there is no token."""
    if token is None:
        return beam
    ends = token in member.end_ids
    node = beam.node if ends else member.tree.child(beam.node, token)
    return _Beam((*beam.tokens, token), node, score)
