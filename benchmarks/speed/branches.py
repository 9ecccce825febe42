"""Count where the members' forward passes and tokens go.

Nothing here is timed. A pass belongs to what forced it:

first     the first tokens of alternatives, or the first token of a later word
grow      further tokens of a word
reread    the last token of a winner that was unlikely
score     spans of other members

A processed token is committed, asked for (a proposal or a score needed it) or never needed. The
prompts' own passes do not count. The clock stands still, so the same member always leads.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

from adafuse_llm.backends.base import NodeQuery, NodeResult
from adafuse_llm.decoding import draft, propose
from adafuse_llm.decoding.member import Member, MemberQuery, Steps
from adafuse_llm.decoding.score import Pool
from adafuse_llm.tree import Node
from benchmarks.speed.members import embedded, make_engine, prompt_of

CAUSES: Final = ("first", "grow", "reread", "score")
USES: Final = ("committed", "asked for", "never needed")


@dataclass
class Counts:
    """Counts of all members.

    Attributes:
        committed: number of committed tokens.
        passes: number of passes by cause.
        tokens: number of processed tokens by use.
    """

    committed: int = 0
    passes: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        """Return the counts per committed token, as one cell of a table."""

        def shares(counts: Counter[str], names: Sequence[str]) -> str:
            parts = ", ".join(f"{name} {counts[name] / self.committed:.3f}" for name in names)
            return f"{counts.total() / self.committed:.3f} ({parts})"

        return f"passes {shares(self.passes, CAUSES)}; tokens {shares(self.tokens, USES)}"


class _Recorder:
    """A record of the passes of all members. It keeps all nodes, so that they stay distinct."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._causes: dict[int, tuple[str, MemberQuery]] = {}
        self._processed: dict[Node, None] = {}
        self._asked: set[Node] = set()
        self._committed: set[Node] = set()

    def name(self, cause: str, run: Callable[..., Steps[Any]]) -> Callable[..., Steps[Any]]:
        """Return `run`, whose queries have this cause unless they have one already."""

        def named(*args: Any, **options: Any) -> Steps[Any]:
            steps = run(*args, **options)
            while True:
                try:
                    queries = next(steps)
                except StopIteration as done:
                    return done.value
                for each in queries:
                    if isinstance(each, MemberQuery):
                        self._causes.setdefault(id(each.query), (cause, each))
                yield queries

        return named

    def asked(self, nodes: Iterable[Node]) -> list[Node]:
        """Record nodes that the algorithm needs."""
        nodes = list(nodes)
        self._asked.update(nodes)
        return nodes

    def learned(self, member: Member, query: NodeQuery, result: NodeResult) -> None:
        """Record a pass."""
        cause, _ = self._causes.pop(id(query), ("first", None))
        if not member.passes or not result.passes:
            return
        if cause != "score" and member.tree.root in query.evaluate:
            cause = "reread"
        elif cause == "grow" and query.evaluate[0].parent is member.tree.root:
            cause = "first"
        self.counts.passes[cause] += result.passes
        self._processed.update(dict.fromkeys(query.evaluate))

    def committed(self, member: Member, end: Node) -> None:
        """Record committed tokens."""
        path = member.tree.path(end)
        self.counts.committed += len(path)
        self._committed.update(path)

    def finish(self) -> Counts:
        """Count the uses of all processed tokens, and return all counts."""
        for node in self._processed:
            use = 0 if node in self._committed else 1 if node in self._asked else 2
            self.counts.tokens[USES[use]] += 1
        return self.counts


@contextmanager
def recording() -> Iterator[_Recorder]:
    """Record the passes of all requests, on a clock that stands still."""
    recorder = _Recorder()
    evaluate, learn, commit = Member.evaluate, Member.learn, Member.commit
    together = draft.Drafts.together

    def evaluated(member: Member, nodes: Iterable[Node], *args: Any, **options: Any) -> Any:
        return evaluate(member, recorder.asked(nodes), *args, **options)

    def learned(member: Member, query: NodeQuery, result: NodeResult, *args: Any) -> None:
        recorder.learned(member, query, result)
        learn(member, query, result, *args)

    def committed(member: Member, end: Node, text: str) -> None:
        recorder.committed(member, end)
        commit(member, end, text)

    def proposed(drafts: draft.Drafts, proposals: Mapping[Member, Steps[Any]], *args: Any) -> Any:
        named = {m: recorder.name("first", lambda each=p: each)() for m, p in proposals.items()}
        return together(drafts, named, *args)

    patches: list[tuple[Any, str, Any]] = [
        (Member, "evaluate", evaluated),
        (Member, "learn", learned),
        (Member, "commit", committed),
        (propose, "finish_words", recorder.name("grow", propose.finish_words)),
        (draft.Drafts, "together", proposed),
        (Pool, "read", recorder.name("score", Pool.read)),
        (time, "perf_counter", lambda: 0.0),
    ]
    with ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield recorder


def prose(
    texts: int, prompt: int, response: int, branches: int, *, drafting: bool, at_once: bool = False
) -> Counts:
    """Count what the embedded members need for prose."""
    options: dict[str, Any] = {"branching_factor": branches, "max_new_tokens": response}
    prompts = [prompt_of(prompt, seed) for seed in range(texts)]
    with (
        make_engine(embedded(), drafting=drafting, **options) as engine,
        recording() as recorder,
    ):
        if at_once:
            engine.generate_batch(prompts)
        else:
            for text in prompts:
                engine.generate(text)
    return recorder.finish()


def answers(conversations: Sequence[Any], branches: int, *, drafting: bool) -> Counts:
    """Count what the embedded members need for short answers that quote."""
    members = embedded(endless=False)
    with (
        make_engine(members, drafting=drafting, branching_factor=branches) as engine,
        recording() as recorder,
    ):
        for messages in conversations:
            engine.generate(messages=messages)
    return recorder.finish()
