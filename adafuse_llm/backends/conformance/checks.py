"""The checks, and a way to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adafuse_llm.backends.base import (
    AdjustsTokens,
    Backend,
    DrawsTokens,
    FollowsGrammars,
    KnowsDistributions,
    LimitsDrafting,
    RestrictsTokens,
    SupportsClose,
    SupportsPlacement,
)
from adafuse_llm.backends.conformance import (
    adjustments,
    choices,
    facts,
    requests,
    texts,
    trees,
)
from adafuse_llm.backends.conformance.harness import Harness
from adafuse_llm.backends.conformance.subject import Subject
from adafuse_llm.backends.conformance.violations import (
    BrokenRuleError,
    ConformanceError,
    Violation,
)


def _always(_backend: object) -> bool:
    return True


def _restricts(backend: object) -> bool:
    return isinstance(backend, RestrictsTokens) and backend.token_texts is not None


def _implements(protocol: type) -> Callable[[object], bool]:
    return lambda backend: isinstance(backend, protocol)


@dataclass(frozen=True)
class Check:
    """A check of one rule. ``str(check)`` is its name.

    Attributes:
        name: name of the check.
        rule: the rule.
    """

    name: str
    rule: str
    _run: Callable[[Harness], None]
    _applies: Callable[[Backend], bool] = _always

    def __str__(self) -> str:
        return self.name

    def __call__(self, subject: Subject) -> bool:
        """Check a backend.

        Returns:
            Whether the rule applies to the backend. Some rules are those of optional extensions.

        Raises:
            ConformanceError: the backend breaks the rule, or raises an exception.
        """
        cause = None
        try:
            harness = Harness(subject)
            if not self._applies(harness.backend):
                return False
            try:
                self._run(harness)
            finally:
                harness.end()
        except BrokenRuleError as error:
            found = str(error)
        except Exception as error:  # a backend may raise anything
            found, cause = f"The backend raised {type(error).__name__}: {error}.", error
        else:
            return True
        raise ConformanceError([Violation(self.name, self.rule, found)]) from cause


@dataclass(frozen=True)
class Report:
    """The result of all checks of a backend that breaks no rule.

    Attributes:
        passed: names of the checks that the backend passes.
        skipped: names of the checks that do not apply, because they need optional extensions.
    """

    passed: tuple[str, ...]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        skipped = f"; {', '.join(self.skipped)} do not apply" if self.skipped else ""
        return f"{len(self.passed)} checks passed{skipped}"


def run_checks(subject: Subject) -> Report:
    """Run all checks on a backend. If the check ``facts`` fails, run no other check.

    Raises:
        ConformanceError: the backend breaks rules. The error lists all of them.
    """
    applied: dict[str, bool] = {}
    violations: list[Violation] = []
    for check in CHECKS:
        try:
            applied[check.name] = check(subject)
        except ConformanceError as error:
            violations += error.violations
            if check.name == "facts":
                break
    if violations:
        raise ConformanceError(violations)
    return Report(
        tuple(name for name, done in applied.items() if done),
        tuple(name for name, done in applied.items() if not done),
    )


CHECKS: tuple[Check, ...] = (
    Check(
        "facts",
        "A backend has a name, a codec, a frozenset of end_ids and a context_window.",
        facts.facts,
    ),
    Check(
        "extensions",
        "A backend has all members of an extension or none.",
        facts.extensions,
    ),
    Check(
        "continuations",
        "decode_continuation returns the text that was encoded if encode_continuation says that "
        "the tokens are exact.",
        texts.continuations,
    ),
    Check(
        "pieces",
        "The texts that tokens add one by one are together the text of all tokens.",
        texts.pieces,
    ),
    Check("prompts", "encode_prompt returns the tokens of the whole text.", texts.prompts),
    Check(
        "messages",
        "encode_messages returns the tokens of a conversation.",
        texts.messages,
    ),
    Check(
        "control_tokens",
        "Control tokens that are spelled out in a text stay text.",
        texts.control_tokens,
    ),
    Check(
        "plain_passes",
        "The result for a root is that of a plain forward pass over tree.ids.",
        trees.prompts,
    ),
    Check(
        "branches",
        "The result for a node depends only on tree.ids and on the tokens on the path to the node.",
        trees.branches,
    ),
    Check(
        "late_ancestors",
        "A query may name nodes in any order, nodes without evaluated ancestors, and nodes that "
        "are evaluated already.",
        trees.late_ancestors,
    ),
    Check(
        "scores",
        "NodeResult.logprobs has the log-probability of each token after its parent, whether "
        "this query or an earlier one evaluates the parent.",
        trees.scores,
    ),
    Check(
        "wider",
        "A later query may ask for more or fewer likely tokens after the same node.",
        trees.wider,
    ),
    Check(
        "commits",
        "After a commit, the new root and the nodes below it keep their results, and later nodes "
        "follow the committed tokens.",
        trees.commits,
    ),
    Check(
        "unevaluated_commits",
        "The engine may commit nodes that are not evaluated.",
        trees.unevaluated_commits,
    ),
    Check(
        "early_commits",
        "The engine may commit nodes before the first query.",
        trees.early_commits,
    ),
    Check(
        "prunes",
        "The tree may drop nodes without a commit. A node that is created again has the same "
        "results.",
        trees.prunes,
    ),
    Check(
        "random_walk",
        "Results do not depend on what was evaluated, committed or dropped before.",
        trees.random_walk,
    ),
    Check(
        "batches",
        "evaluate returns one result for each query, in order. It is the result that the query "
        "has in a call of its own.",
        requests.batches,
    ),
    Check(
        "prefixes",
        "What a backend reuses from other requests does not change results.",
        requests.prefixes,
    ),
    Check(
        "many_requests",
        "Finished requests leave their room to later ones.",
        requests.many_requests,
    ),
    Check(
        "release",
        "release frees what tree.state holds, sets it to None, and accepts every tree.",
        requests.release,
    ),
    Check(
        "faults",
        "A token outside the vocabulary raises an exception. Later queries have right results.",
        requests.faults,
    ),
    Check(
        "costs",
        "A query that was answered before costs no more than the first time.",
        trees.costs,
    ),
    Check(
        "token_texts",
        "token_texts has the text of each token in the middle of a text.",
        choices.token_texts,
        _restricts,
    ),
    Check(
        "masks",
        "Node.allowed restricts the listed tokens and sets Next.mass. It does not change "
        "log-probabilities.",
        choices.masks,
        _restricts,
    ),
    Check(
        "word_ends",
        "Next.word_end_logprob is the total probability of the permitted tokens that begin with "
        "whitespace or end the sequence.",
        choices.word_ends,
        _restricts,
    ),
    Check(
        "draws",
        "Next.drawn is the token that adafuse_llm.backends.gumbel.drawn draws. A draw does not "
        "change log-probabilities.",
        choices.draws,
        _implements(DrawsTokens),
    ),
    Check(
        "adjustments",
        "TokenTree.changes changes the logits after a node before anything is computed from them.",
        adjustments.adjustments,
        _implements(AdjustsTokens),
    ),
    Check(
        "placement",
        "The facts about memory are numbers of bytes. More tokens need no fewer bytes.",
        facts.placement,
        _implements(SupportsPlacement),
    ),
    Check(
        "drafts",
        "draft_limit returns at least the number of committed tokens.",
        facts.drafts,
        _implements(LimitsDrafting),
    ),
    Check(
        "grammars",
        "grammar_tokenizer returns a tokenizer with all tokens of the member.",
        facts.grammars,
        _implements(FollowsGrammars),
    ),
    Check(
        "distribution",
        "distribution returns the log-probability of every token.",
        choices.distribution,
        _implements(KnowsDistributions),
    ),
    Check(
        "close",
        "A backend can be closed twice.",
        facts.close,
        _implements(SupportsClose),
    ),
)
"""All checks, from the simplest to the most demanding. The last one closes the backend."""
