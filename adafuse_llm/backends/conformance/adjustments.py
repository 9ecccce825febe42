"""The check of changed distributions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from adafuse_llm.adjustment import Adjustment, changed
from adafuse_llm.backends.base import AdjustsTokens, NodeQuery
from adafuse_llm.backends.conformance.harness import TOP, Harness, place
from adafuse_llm.backends.conformance.oracle import (
    compare,
    compare_logprobs,
    is_complete,
    log_total,
    summarized,
)
from adafuse_llm.backends.conformance.violations import expect
from adafuse_llm.tree import Node, TokenTree


def adjustments(harness: Harness) -> None:
    """Change the distributions of requests in different ways, before and after a commit."""
    own = cast("AdjustsTokens", harness.backend).own_adjustment
    expect(
        isinstance(own, Adjustment),
        f"own_adjustment is a {type(own).__name__}; expected an Adjustment.",
    )
    for adjustment in _ways(harness):
        tree = harness.begin()
        tree.adjustment = adjustment
        line = harness.line(tree, 2)
        _check(harness, tree, [tree.root, *line], harness.siblings(tree, 3))
        tree.commit(line[0])
        _check(harness, tree, [tree.root, line[1]], [line[1]])
        harness.finish(tree)
    harness.check_nodes(tree := harness.begin(), [tree.root, *harness.line(tree, 2)])


def _ways(harness: Harness) -> Iterator[Adjustment]:
    """Yield adjustments that have an effect after the prompts of the check."""
    one, other, *_ = harness.words
    ends = tuple(sorted(harness.backend.end_ids))
    if harness.subject.logits is not None:  # log-probabilities differ from logits by a constant
        yield Adjustment(repetition_penalty=1.4)
        yield Adjustment(repetition_penalty=0.6, biases=(((one,), 3.0),), no_repeat_ngram_size=2)
    yield Adjustment(presence_penalty=1.5, frequency_penalty=0.5)
    yield Adjustment(biases=(((one,), 2.0), ((one, other), -3.0)), suppressed=(other,))
    yield Adjustment(min_new_tokens=2, end_ids=ends, suppressed_first=(one,))
    yield Adjustment(no_repeat_ngram_size=1)


def _check(harness: Harness, tree: TokenTree, nodes: list[Node], score: list[Node]) -> None:
    """Compare the results of a query with what the changed logits give."""
    (result,) = harness.ask(NodeQuery(tree, tuple(nodes), tuple(score), TOP))
    for node, summary in zip(nodes, result.next, strict=True):
        if known := _expected(harness, tree, node):
            ends = log_total(known[token] for token in harness.backend.end_ids if token in known)
            compare(
                place(tree, node), summary, summarized(known, TOP, ends), TOP, harness.tolerance
            )
    for node, logprob in zip(score, result.logprobs, strict=True):
        assert node.parent is not None
        if known := _expected(harness, tree, node.parent):
            what = f"the log-probability of token {node.token} in NodeResult.logprobs"
            where = place(tree, node.parent)
            compare_logprobs(where, what, logprob, known.get(node.token), harness.tolerance)


def _expected(harness: Harness, tree: TokenTree, node: Node) -> dict[int, float] | None:
    """Return the expected distribution after a node, or None if it is not known."""
    changes, ids = tree.changes(node), [*tree.ids, *tree.tokens(node)]
    assert changes is not None
    if harness.subject.logits is not None:
        logits = dict(enumerate(map(float, harness.subject.logits(ids))))
    else:
        logits = dict(harness.oracle.distribution(ids))
        if not is_complete(logits):
            return None
    return changed(logits, changes)
