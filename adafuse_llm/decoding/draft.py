"""Lossless drafting: nodes that are evaluated before the algorithm needs them.

A draft that the algorithm needs later saves a pass. Any other only makes a pass a little longer.
Drafts never change a result. `Drafts.wrap` adds three kinds of drafts to the queries of a
request. Neither the algorithm nor the members know of them:

* Spans that other members proposed in this round. The member must score them anyway, and may
  propose one of them itself.
* Tokens that would begin the member's next proposal, after a candidate that is likely to win.
* Tokens that followed an earlier copy of the last few tokens (`Lookup`): answers often quote.

Where one member writes most words, `Drafts.propose_lead` lets a smaller member write a few tokens,
which the larger one reads in its next pass (speculative decoding, arXiv 2211.17192).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from typing_extensions import override

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.decoding.member import Ask, MemberState, Steps, in_lockstep
from adafuse_llm.decoding.propose import Proposal, propose
from adafuse_llm.decoding.score import Pool, PoolCandidate
from adafuse_llm.text.words import added
from adafuse_llm.tree.tokens import Node

E = TypeVar("E")
Events: TypeAlias = Generator[Ask | E, None, None]
Proposals: TypeAlias = Mapping[MemberState, Steps[Proposal]]

WIN_SHARE = 0.4
"""A candidate is likely to win if it is the likeliest span of a member, and at least this share of
the members propose it. For a member whose further tokens are expensive, all must propose it."""

EXPENSIVE = 0.2
"""Above this `Backend.token_cost`, a member's further tokens are expensive: it gets fewer drafts.
In passes of SmolLM2 and Qwen 0.5B, more drafts saved time up to 0.25 (B = 1) or 0.17 (B = 3)."""

MAX_DRAFT = 6
"""Maximum number of tokens that a member drafts for a larger one at a time."""

START_RATE, RATE_STEP, RETRY_STEP = 0.7, 0.15, 0.01
"""`START_RATE` is the share of right drafts that a `Drafter` expects first. A checked draft moves
it with the weight `RATE_STEP`. A pass without drafts moves it back with the weight `RETRY_STEP`."""

MAX_SIZE = 0.5
"""Largest ratio of a drafter's parameter count to that of the member for which it drafts."""

WORTH_IT = 0.9
"""A member drafts if drafts are expected to lower the cost of a token to at most this share."""

MAX_COMPARED = 16
"""Maximum number of last tokens that `Lookup` compares with earlier text."""


class Lookup:
    """Finds an earlier occurrence of a member's last tokens, and copies what followed it."""

    def __init__(self) -> None:
        self._read = 0
        self._places: dict[tuple[int, ...], int] = {}

    def after(self, member: MemberState, node: Node) -> list[Node]:
        """Return nodes for the tokens to copy after `node`, parents before children."""
        # index the new committed tokens: where did each token, and each pair, last end?
        ids = member.tree.ids
        for end in range(self._read, len(ids)):
            for size in (1, 2):
                self._places[tuple(ids[max(0, end - size) : end])] = end
        self._read = len(ids)
        pair = (node.parent.token, node.token) if node.parent else tuple(ids[-2:])
        place = self._places.get(pair) or self._places.get(pair[-1:])
        if place is None:
            return []
        # Copy one token, and one more for every two tokens that are the same before both places:
        # a long quotation probably goes on.
        last = (*ids[-MAX_COMPARED:], *member.tree.tokens(node))[-MAX_COMPARED:]
        most, equal = min(len(last), place), 0
        while equal < most and ids[place - 1 - equal] == last[-1 - equal]:
            equal += 1
        copied: list[Node] = []
        for token in ids[place : place + 1 + equal // 2]:
            if token in member.end_ids or member.is_full(node):
                break
            node = member.tree.child(node, token)
            copied.append(node)
        return copied


class Drafter:
    """A member that drafts for a larger one, the reader, and how often its drafts are right.

    `cost` is the cost of its tokens relative to the reader's, infinite if it cannot draft.
    """

    def __init__(self, member: MemberState, reader: MemberState) -> None:
        self.member, self._reader = member, reader
        own, other = member.backend.parameters, reader.backend.parameters
        is_here = not (member.backend.is_remote or reader.backend.is_remote)
        self.cost = own / other if own and other and is_here else math.inf
        self._rate = START_RATE

    def plan(self) -> tuple[float, int]:
        """Return the expected cost of a token with the best number of drafts, and this number.

        The unit is a pass of the reader over one token. The number is 0 if drafts do not pay.
        """
        # with n drafts, of which each is right with probability r if those before it are, a pass
        # yields 1 + r + ... + r^n tokens on average
        cost = self.cost + self._reader.backend.token_cost
        costs = [
            ((1 + count * cost) / math.fsum(self._rate**n for n in range(count + 1)), count)
            for count in range(1, MAX_DRAFT + 1)
        ]
        return min(costs) if min(costs)[0] <= WORTH_IT else (1.0, 0)

    def draft(self, start: Node, count: int) -> Steps[Sequence[Node]]:
        """Write up to `count` tokens after the reader's node `start`. Return the reader's nodes."""
        if count < 1:
            return []
        member, reader = self.member, self._reader
        text = reader.text(start)
        encoded = member.encode(text)
        if encoded is None or not encoded[1]:
            return []
        node, _ = encoded
        for _ in range(count):
            if member.is_full(node) or not member.permits.permitted([node]):
                break
            yield from member.evaluate([node])
            if (token := member.next(node).chosen) in member.end_ids:
                break
            node = member.tree.child(node, token)
        # the reader gets the new text in its own tokens
        encoded = reader.encode(added(text, member.text(node)), start)
        if encoded is None:
            return []
        return reader.tree.path(encoded[0])[start.length - reader.tree.root.length :]

    def learn(self, start: Node, drafts: Sequence[Node]) -> None:
        """Learn how many of the `drafts` after `start` the reader would have written itself."""
        if not drafts:  # move the rate towards its start
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
        """Yield the steps of a request, with drafts in its queries."""
        return steps

    def propose_all(self, proposals: Proposals, config: AdaFuseConfig) -> Steps[list[Proposal]]:  # noqa: ARG002
        """Compute the proposals of a round, and return them in the order of `proposals`."""
        return in_lockstep(list(proposals.values()))

    def propose_lead(self, member: MemberState, config: AdaFuseConfig) -> Steps[Proposal]:
        """Return the proposal of a member for which smaller members may draft."""
        return propose(member, config)

    def may_win(self, member: MemberState, candidate: PoolCandidate) -> bool:  # noqa: ARG002
        """Return whether a candidate may win, so that `member` evaluates its last node already."""
        return True


class Drafts(NoDrafts):
    """The drafts of one request.

    Members that share a device propose one after another, so each reads the spans of those before
    it. If the engine is `crowded`, all propose at the same time: one pass of a member then serves
    several requests, which saves more than drafts do.

    `wrap` adds drafts only after the first call of `propose_all`, which not all strategies make. A
    member whose query with drafts has failed gets no more drafts.
    """

    def __init__(self, members: Sequence[MemberState], crowded: Callable[[], bool]) -> None:
        self._members = tuple(members)
        self._crowded = crowded
        by_lane: defaultdict[str, list[MemberState]] = defaultdict(list)
        lanes = {member.backend.lane for member in self._members}
        for member in self._members:
            backend = member.backend  # a GGUF member's lane is not its device
            by_lane[backend.device if backend.device in lanes else backend.lane].append(member)
        # members of a lane take turns, so a later one can read what an earlier one proposed
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
            # add drafts only to passes that the algorithm makes anyway
            queries = list(step.queries)
            for place, asked in enumerate(queries):
                if asked.may_draft and self._is_used and asked.member not in self._failed:
                    drafts = self.extra_nodes(asked.member, asked.query.evaluate)
                    queries[place] = asked.member.with_drafts(asked.query, drafts)
            yield Ask(tuple(queries))
            # a query that failed with its drafts was repeated without them
            for asked in queries:
                if asked.without_drafts and asked.query.evaluate[-1].next is None:
                    self._failed.add(asked.member)

    @override
    def propose_all(self, proposals: Proposals, config: AdaFuseConfig) -> Steps[list[Proposal]]:
        self._config, self._is_used = config, True
        self._pool = Pool(self._members[0].opening)
        self._likeliest: set[PoolCandidate] = set()
        complete: dict[MemberState, Proposal] = {}

        def take_turns(members: Sequence[MemberState]) -> Steps[None]:
            for member in members:
                complete[member] = yield from proposals[member]
                self._likeliest.add(self._pool.add(member, complete[member]))

        groups = [[member] for member in self._members] if self._crowded() else self._lanes
        yield from in_lockstep([take_turns(group) for group in groups])
        return [complete[member] for member in proposals]

    @override
    def propose_lead(self, member: MemberState, config: AdaFuseConfig) -> Steps[Proposal]:
        if member not in self._drafters:
            drafters = [Drafter(other, member) for other in self._members if other is not member]
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
            may_draft = asked.may_draft and member.passes and len(asked.query.evaluate) == 1
            if not may_draft or not drafters or member in self._failed or self._crowded():
                yield ask
                continue
            # the best drafter writes a few tokens ahead, which this pass reads
            (start,) = asked.query.evaluate
            best = min(drafters, key=Drafter.plan)
            drafts = yield from best.draft(start, min(best.plan()[1], member.room(start)))
            yield Ask((member.with_drafts(asked.query, drafts),))
            best.learn(start, drafts)

    @override
    def may_win(self, member: MemberState, candidate: PoolCandidate) -> bool:
        return self._is_likely(member, self._pool.suggest(candidate.text, ends=candidate.ends))

    def _is_likely(self, member: MemberState, candidate: PoolCandidate) -> bool:
        # `candidate` is in the pool of the drafts
        if candidate not in self._likeliest:
            return False
        least = 1.0 if member.backend.token_cost > EXPENSIVE else WIN_SHARE
        return len(candidate.proposers) / len(self._members) >= least

    def extra_nodes(self, member: MemberState, wanted: Sequence[Node]) -> Iterable[Node]:
        """Return the nodes that a pass of `member` should evaluate in addition to `wanted`."""
        if member.tree.root.next is None and not member.passes:
            return ()  # this pass reads the prompt
        # spans that the member must score anyway, and the next tokens after a likely winner
        nodes: list[Node] = []
        starts: list[Node] = []
        for candidate in self._pool.candidates:
            if (end := self._pool.encode(member, candidate)) is not None:
                is_likely = self._is_likely(member, candidate)
                last = end if is_likely else end.parent
                if last and last.next is None:  # otherwise, the path to it is evaluated, too
                    nodes += member.tree.path(last)
                if is_likely and not candidate.ends:
                    starts += self._starts(member, end)
        # add copies, which may never be needed, only if few tokens were processed per committed one
        processed = member.tokens + member.reused - member.prompt_tokens
        committed = max(member.response_tokens, 4)  # the first words may have copies, too
        may_waste = processed <= (2 + self._config.branches) * committed
        if may_waste and member.backend.token_cost <= EXPENSIVE:
            for tip in (*wanted, *starts):
                nodes += [tip, *self._lookups[member].after(member, tip)]
        return nodes

    def _starts(self, member: MemberState, end: Node) -> Iterable[Node]:
        # the nodes with which a round after `end` begins, or `end` if these are not known
        if end.next is None or member.is_full(end):
            return [end]
        is_sure = end.next.margin >= self._config.margin_threshold
        starts = end.next.branches(1 if is_sure else self._config.branches)
        return [member.tree.child(end, token) for token in starts if token not in member.end_ids]
