"""Lossless drafting: nodes that are evaluated before the algorithm needs them.

Drafts are additional nodes that a pass evaluates because the algorithm will probably need them
later. If the algorithm needs a draft, it does not need another pass for it. If not, the pass has
processed a few tokens too many. Drafts never change a result. Passes that the algorithm makes
anyway carry three kinds of drafts:

* Spans that other members proposed in this round. The member must score these spans anyway. If the
  member would propose the same span, its proposal needs no further pass.
* Nodes after a candidate that is likely to win: the tokens that would begin the member's next
  proposal.
* Tokens that followed an earlier occurrence of the last few tokens (`Lookup`), because answers
  often quote earlier text.

A member drafts the last two kinds while it has processed at most 2 + B tokens per committed token,
and never if further tokens of a pass are expensive (`Backend.token_cost`).

`Drafts.wrap` adds the drafts to the queries of a request, between the algorithm and the driver.
The algorithm and its members know nothing of them.

A strategy in which one member writes most words has other drafts: `Drafts.propose_lead` lets a
smaller member write a few tokens, which the larger one reads in its next pass (speculative
decoding, Leviathan et al., arXiv 2211.17192).
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from typing_extensions import override

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.member import Ask, MemberQuery, MemberState, Steps, in_lockstep
from adafuse_llm.decoding.propose import Proposal, propose
from adafuse_llm.decoding.score import Pool, PoolCandidate
from adafuse_llm.text.words import added
from adafuse_llm.tree.tokens import Node

E = TypeVar("E")
Events: TypeAlias = Generator[Ask | E, None, None]
Proposals: TypeAlias = Mapping[MemberState, Steps[Proposal]]

WIN_SHARE = 0.4
"""Lowest share of the members that propose a candidate which is likely to win. Members whose
further tokens are expensive wait until all propose it."""

EXPENSIVE = 0.5
"""Highest `Backend.token_cost` of a member that drafts tokens which may never be needed."""

MIN_RESPONSE_TOKENS = 4
"""Number of response tokens that the limit on drafts assumes while the response is shorter."""

MAX_DRAFT = 6
"""Maximum number of tokens that a member drafts for a larger one at a time."""

START_RATE, RATE_STEP, RETRY_STEP = 0.7, 0.15, 0.01
"""Expected share of drafted tokens that are right, the weight of each new observation, and how fast
the expectation returns to its start while nothing is drafted."""

MAX_SIZE = 0.5
"""Largest size of a member that drafts, relative to the one for which it drafts."""

WORTH_IT = 0.9
"""Highest expected cost of a token, relative to no drafts, at which a member drafts."""

MAX_COMPARED = 16
"""Maximum number of last tokens that `Lookup` compares with earlier text."""


class Lookup:
    """Finds the last tokens of a member in earlier text, and copies what followed.

    Earlier text is the prompt and the answer. The last place of the last two tokens counts, or else
    that of the last token. A longer match lets more tokens be copied, half as many as are equal,
    because a longer quotation goes on more often.
    """

    def __init__(self) -> None:
        self._read = 0
        self._places: dict[tuple[int, ...], int] = {}

    def after(self, member: MemberState, node: Node) -> list[Node]:
        """Return nodes that may follow `node`, parents before children."""
        ids = member.tree.ids
        for end in range(self._read, len(ids)):
            for size in (1, 2):
                self._places[tuple(ids[max(0, end - size) : end])] = end
        self._read = len(ids)
        last = (*ids[-MAX_COMPARED:], *member.tree.tokens(node))[-MAX_COMPARED:]
        place = self._places.get(last[-2:]) or self._places.get(last[-1:])
        if place is None:
            return []
        most = min(len(last), place)
        equal = next((n for n in range(most) if ids[place - 1 - n] != last[-1 - n]), most)
        copied: list[Node] = []
        for token in ids[place : place + 1 + equal // 2]:
            if token in member.end_ids or member.is_full(node):
                break
            node = member.tree.child(node, token)
            copied.append(node)
        return copied


class Drafter:
    """A member that drafts for a larger one, the reader, and how well it has done so lately.

    Attributes:
        cost: cost of its tokens relative to those of `reader`; infinite if it cannot draft.
    """

    def __init__(self, member: MemberState, reader: MemberState) -> None:
        self.member, self._reader = member, reader
        own, other = member.backend.parameters, reader.backend.parameters
        is_here = not (member.backend.is_remote or reader.backend.is_remote)
        self.cost = own / other if own and other and is_here else math.inf
        self._rate = START_RATE

    def plan(self) -> tuple[float, int]:
        """Return the best number of tokens to draft, after the cost that it should lead to.

        The cost of a token is a share of a pass of the larger member over one token. With n
        drafted tokens, of which each is right with probability r if those before it are, a pass
        yields 1 + r + ... + r^n tokens.
        """
        each = self.cost + self._reader.backend.token_cost
        costs = [
            ((1 + count * each) / math.fsum(self._rate**n for n in range(count + 1)), count)
            for count in range(1, MAX_DRAFT + 1)
        ]
        return min(costs) if min(costs)[0] <= WORTH_IT else (1.0, 0)

    def draft(self, start: Node, count: int) -> Steps[list[Node]]:
        """Return up to `count` nodes that may follow `start`, a node of the larger member."""
        if count < 1:
            return []
        member, reader = self.member, self._reader
        text = reader.text(start)
        found = member.encode(text)
        if found is None or not found[1]:
            return []
        node = found[0]
        for _ in range(count):
            if member.is_full(node) or not member.permits.permitted([node]):
                break
            yield from member.evaluate([node])
            if (token := member.next(node).chosen) in member.end_ids:
                break
            node = member.tree.child(node, token)
        found = reader.encode(added(text, member.text(node)), start)
        if found is None:
            return []
        end, limit = found[0], _limit(reader)
        nodes = reader.tree.path(end)[start.length - reader.tree.root.length :]
        return [each for each in nodes if each.length <= limit]

    def learn(self, start: Node, drafts: Sequence[Node]) -> None:
        """Learn from how many `drafts` after `start` the larger member would have written.

        Without any, expect more of the next ones.
        """
        if not drafts:
            self._rate += RETRY_STEP * (START_RATE - self._rate)
        for draft in drafts:
            if start.next is None:
                return
            is_right = start.next.chosen == draft.token
            self._rate += RATE_STEP * (is_right - self._rate)
            if not is_right:
                return
            start = draft


class NoDrafts:
    """Lets all members propose at the same time, and adds no drafts."""

    def wrap(self, steps: Events[E]) -> Events[E]:
        """Yield the steps of a request, and add drafts to its queries."""
        return steps

    def propose_all(self, proposals: Proposals, config: AdaFuseConfig) -> Steps[list[Proposal]]:  # noqa: ARG002
        """Run the computations of a round's proposals. Return the proposals in the same order."""
        return in_lockstep(list(proposals.values()))

    def propose_lead(self, member: MemberState, config: AdaFuseConfig) -> Steps[Proposal]:
        """Return the proposal of a member while others, if they are smaller, draft for it."""
        return propose(member, config)

    def may_win(self, member: MemberState, candidate: PoolCandidate) -> bool:  # noqa: ARG002
        """Return whether `member` should evaluate a candidate's last node before the round ends.

        The pool is complete.
        """
        return True


class Drafts(NoDrafts):
    """The drafts of one request.

    Members that share a device propose one after another, so that each reads the spans of those
    before it. Others propose at the same time. If the engine is `crowded`, all do: one pass of a
    member then serves several requests, which saves more than drafts do.

    Passes carry drafts from the first call of `propose_all` on, so strategies that do not call it
    have none. A member whose drafts have failed drafts no more.
    """

    def __init__(self, members: Sequence[MemberState], crowded: Callable[[], bool]) -> None:
        self._members = tuple(members)
        self._crowded = crowded
        by_lane: defaultdict[str, list[MemberState]] = defaultdict(list)
        lanes = {member.backend.lane for member in self._members}
        for member in self._members:
            backend = member.backend  # a GGUF member's lane is not its device
            by_lane[backend.device if backend.device in lanes else backend.lane].append(member)
        self._lanes = list(by_lane.values())
        self._lookups = {member: Lookup() for member in self._members}
        self._config, self._is_used = AdaFuseConfig(), False
        self._failed: set[MemberState] = set()
        self._drafters: dict[MemberState, list[Drafter]] = {}

    @override
    def wrap(self, steps: Events[E]) -> Events[E]:
        for step in steps:
            if not isinstance(step, Ask):
                yield step
                continue
            queries = []
            for asked in step.queries:
                member, query = asked.member, asked.query
                if asked.may_draft and self._is_used and member not in self._failed:
                    drafts = self.extra_nodes(member, query.evaluate)
                    queries.append(member.with_drafts(query, drafts))
                else:
                    queries.append(asked)
            yield Ask(tuple(queries))
            for asked in queries:
                if asked.without_drafts and any(n.next is None for n in asked.query.evaluate):
                    self._failed.add(asked.member)

    @override
    def propose_all(self, proposals: Proposals, config: AdaFuseConfig) -> Steps[list[Proposal]]:
        self._config, self._is_used = config, True
        self._pool = Pool(self._members[0].opening)
        self._proposals: dict[MemberState, Proposal] = {}
        self._likeliest: set[PoolCandidate] = set()
        groups = [[member] for member in self._members] if self._crowded() else self._lanes
        yield from in_lockstep([self._in_turn(group, proposals) for group in groups])
        return [self._proposals[member] for member in proposals]

    def _in_turn(self, members: Sequence[MemberState], proposals: Proposals) -> Steps[None]:
        for member in members:
            self._proposals[member] = yield from proposals[member]
            self._likeliest.add(self._pool.add(member, self._proposals[member]))

    @override
    def propose_lead(self, member: MemberState, config: AdaFuseConfig) -> Steps[Proposal]:
        if member not in self._drafters:
            drafters = [Drafter(each, member) for each in self._members if each is not member]
            self._drafters[member] = [each for each in drafters if each.cost <= MAX_SIZE]
        drafters = self._drafters[member]
        steps = propose(member, config)
        while True:
            try:
                ask = next(steps)
            except StopIteration as done:
                proposal: Proposal = done.value
                return proposal
            (asked,) = ask.queries
            if not drafters or not self._can_read(member, asked):
                yield ask
                continue
            (start,) = asked.query.evaluate
            best = min(drafters, key=lambda each: each.plan())
            drafts = yield from best.draft(start, min(best.plan()[1], member.room(start)))
            nodes = dict.fromkeys(drafts)
            if start is not member.tree.root and self._is_open(member):
                nodes |= dict.fromkeys((yield from self._proposed(member, config)))
                nodes.pop(start, None)
            yield Ask((member.with_drafts(asked.query, list(nodes)),))
            best.learn(start, drafts)

    def _can_read(self, member: MemberState, asked: MemberQuery) -> bool:
        if member in self._failed or len(asked.query.evaluate) > 1 or not asked.may_draft:
            return False
        is_first = not member.passes  # the pass that reads the prompt
        return not is_first and _limit(member) > member.tree.root.length and not self._crowded()

    def _is_open(self, member: MemberState) -> bool:
        """Return whether `member` is so unsure of its word that others will probably propose.

        Under a grammar, which they may be unable to follow, they are not asked. Nor are they if
        further tokens of a pass are expensive.
        """
        if member.grammar is not None or member.backend.token_cost > EXPENSIVE:
            return False
        start = member.next(member.tree.root)
        share = member.weight / math.fsum(each.weight for each in self._members)
        return share * math.exp(start.logprobs[0]) <= 0.5

    def _proposed(self, member: MemberState, config: AdaFuseConfig) -> Steps[list[Node]]:
        """Return the nodes of the words that the drafting members would propose."""
        others = [each.member for each in self._drafters[member]]
        proposals = yield from in_lockstep([propose(each, config) for each in others])
        nodes: list[Node] = []
        for other, proposal in zip(others, proposals, strict=True):
            for span in proposal.spans:
                if (found := member.encode(other.text(span.node))) is not None:
                    nodes += member.tree.path(found[0])
        return [node for node in nodes if node.next is None and node.length <= _limit(member)]

    @override
    def may_win(self, member: MemberState, candidate: PoolCandidate) -> bool:
        candidate = self._pool.find(candidate)
        share = len(candidate.proposers) / len(self._members)
        least = 1.0 if member.backend.token_cost > EXPENSIVE else WIN_SHARE
        return candidate in self._likeliest and share >= least

    def extra_nodes(self, member: MemberState, wanted: Sequence[Node]) -> Sequence[Node]:
        """Return the nodes that a pass of `member` evaluates in addition to `wanted`."""
        tree, limit = member.tree, _limit(member)
        if limit <= tree.root.length or (tree.root.next is None and not member.passes):
            return ()  # the last case is the pass that reads the prompt
        nodes = dict.fromkeys(wanted)
        tips = list(wanted)
        for candidate in self._pool.candidates:
            if (end := self._pool.encode(member, candidate)) is not None:
                is_likely = self.may_win(member, candidate)
                path = tree.path(end)
                nodes.update(dict.fromkeys(path if is_likely else path[:-1]))
                if is_likely and not candidate.ends:
                    tips += self._next(member, end)
        # copies may never be needed, so a member adds them while it has processed few tokens
        processed = member.tokens + member.reused - member.prompt_tokens
        committed = max(member.response_tokens, MIN_RESPONSE_TOKENS)
        may_waste = processed <= (2 + self._config.branches) * committed
        if may_waste and member.backend.token_cost <= EXPENSIVE:
            for tip in tips:
                copied = self._lookups[member].after(member, tip)
                nodes.update(dict.fromkeys([*tree.path(tip), *copied]))
        drafts = [node for node in nodes if node.next is None and node.length <= limit]
        return [node for node in drafts if node not in wanted]

    def _next(self, member: MemberState, end: Node) -> Iterable[Node]:
        """Return the nodes with which a round after `end` would begin, as far as `end` is known."""
        if end.next is None or member.is_full(end):
            return [end]
        is_sure = end.next.margin >= self._config.margin_threshold
        starts = end.next.branches(1 if is_sure else self._config.branches)
        return [member.tree.child(end, each) for each in starts if each not in member.end_ids]


def _limit(member: MemberState) -> int:
    """Return the maximum length of a sequence, in tokens."""
    return sys.maxsize if member.window is None else member.window
