"""Private reasoning: each member reasons alone, and then all members write the answer together.

ThinkMerge (arXiv 2512.02874) lets one model reason several times, and averages its distributions
while it writes one answer after all of them. Here, every member reasons in its own chat template
and in its own tokens. The strategy then writes the answer as it always does; only the prompts of
the members differ.

A member that reasons has a thinker (`Member.thinker`) in the same token tree. So the answer needs
no second pass over the prompt or the reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.draft import Drafting
from adafuse_llm.decoding.lockstep import in_lockstep
from adafuse_llm.decoding.member import Member, MemberQuery, Steps
from adafuse_llm.decoding.rounds import decode
from adafuse_llm.reasoning import CLOSING, REASONING_CLOSES
from adafuse_llm.strategies.base import StrategyContext
from adafuse_llm.strategies.single import Single
from adafuse_llm.text.stops import Transcript

E = TypeVar("E")

TOKENS = AdaFuseConfig(max_word_tokens=1)
"""Options with which a word is a token, so that nothing is written beyond the end of reasoning."""


def thoughts_first(
    members: Sequence[Member],
    steps: Generator[tuple[MemberQuery, ...] | E, None, None],
    drafting: Callable[[Sequence[Member]], Drafting],
) -> Generator[tuple[MemberQuery, ...] | E, None, None]:
    """Let the members that have a thinker reason, all at the same time, and then yield `steps`.

    Args:
        members: the members of a request.
        steps: the computation of the answer, not begun.
        drafting: function that returns the drafting method of some members.
    """
    pairs = [(member, member.thinker) for member in members if member.thinker is not None]
    yield from in_lockstep([_think(m, thinker, drafting([thinker])) for m, thinker in pairs])
    yield from steps


def _think(member: Member, thinker: Member, drafting: Drafting) -> Steps[None]:
    """Write a member's reasoning, as the strategy ``single`` does, and close it."""
    play = Single().begin(StrategyContext([thinker], TOKENS, drafting))
    for step in drafting.around(decode([thinker], play, Transcript([REASONING_CLOSES]), [])):
        if isinstance(step, tuple):
            yield step
    if missing := _closing(thinker):
        encoded = thinker.encode(missing)
        assert encoded is not None, "a thinker leaves room in the context window"
        thinker.commit(encoded[0], missing)
    member.begin_answer()


def _closing(thinker: Member) -> str:
    """Return the text between the end of a member's reasoning so far and its answer."""
    ids, start = thinker.tree.ids, thinker.prompt_tokens
    text = thinker.codec.decode_continuation(ids[:start], ids[start:])
    _, closed, after = text.rpartition(REASONING_CLOSES)
    if not closed:
        return CLOSING.lstrip() if text.endswith("\n") else CLOSING
    blank = CLOSING.partition(REASONING_CLOSES)[2]
    return blank[len(after) :] if blank.startswith(after) else ""
