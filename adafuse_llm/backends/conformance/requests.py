"""Checks of several requests."""

from __future__ import annotations

import gc
import weakref

from adafuse_llm.backends.base import NodeQuery
from adafuse_llm.backends.conformance.harness import TOP, Harness, WatchedTree
from adafuse_llm.backends.conformance.violations import expect, fail
from adafuse_llm.tree import Node, TokenTree

UNKNOWN = 10**9
"""A token id that no vocabulary has."""

SHARED = 48
"""Number of tokens that prompts share, if the context window has room for them."""

MANY = 32
"""Number of requests, one after the other, after which a member must not have run out of room."""

CHECKED = 3
"""Number of these requests that run at the same time. The results of the last ones are checked."""


def batches(harness: Harness) -> None:
    """Evaluate queries of several requests in one call, twice and in another order."""
    sizes = (harness.size, 1, harness.size, max(1, harness.size // 2), harness.size)
    shifts = (0, 1, 0, 3, 5)  # the first and the third prompt are equal
    trees = [
        harness.begin(harness.prompt(size, shift))
        for size, shift in zip(sizes, shifts, strict=True)
    ]
    harness.check(*(NodeQuery(tree, (tree.root,), (), TOP) for tree in trees))
    for turn in range(2):
        queries = []
        for number, tree in enumerate(trees):
            line = harness.line(tree, 1 + (number + turn) % 2)
            evaluate = tuple(line) if number != 1 else ()  # one query only scores
            queries.append(NodeQuery(tree, evaluate, tuple(line[:1]), top=2 + number))
        harness.chance.shuffle(queries)
        harness.check(*queries)
        tree = trees[turn]
        tree.commit(next(iter(tree.root.children.values())))
    harness.check(*(NodeQuery(tree, (tree.root,), (), TOP) for tree in trees))


def prefixes(harness: Harness) -> None:
    """Begin requests whose prompts begin with the tokens of running and finished requests."""
    size = max(1, min(SHARED, harness.room - harness.depth - 1))
    prompt = harness.prompt(size)
    running = harness.begin(prompt)
    harness.check_nodes(running, [running.root, *harness.line(running, 2)])
    other = [*prompt[:-1], next(token for token in harness.words if token != prompt[-1])]
    for ids in (prompt, [*prompt, *prompt[:1]], other, prompt[: max(1, size // 2)]):
        _check_request(harness, ids)
    line = harness.line(running, 2)
    harness.check_nodes(running, [running.root, *line], line)
    running.commit(line[-1])
    written = list(running.ids)
    sharing = harness.begin(prompt)
    harness.check_nodes(sharing, [sharing.root])
    harness.finish(running)
    harness.check_nodes(sharing, [sharing.root, *harness.line(sharing, 2)])
    for ids in (prompt, written, [*written, prompt[0]][: harness.room], other):
        _check_request(harness, ids)
    several = [harness.begin(prompt) for _ in range(3)]
    harness.check(*(NodeQuery(tree, (tree.root,), (), TOP) for tree in several))


def _check_request(harness: Harness, ids: list[int]) -> None:
    """Begin a request, and check its first results."""
    tree = harness.begin(ids)
    harness.check_nodes(tree, [tree.root, *harness.line(tree, 1)])
    harness.finish(tree)


def many_requests(harness: Harness) -> None:
    """Begin and finish many requests with branches, a few of them at a time."""
    running: list[TokenTree] = []
    for number in range(MANY):
        tree = harness.begin(harness.prompt(max(1, harness.size // 2), shift=number % 5))
        running.append(tree)
        evaluate = harness.check if number >= MANY - CHECKED else harness.ask
        children = tuple(harness.siblings(tree, 3))
        evaluate(NodeQuery(tree, (tree.root, *children), children, TOP))
        tree.commit(children[0])
        evaluate(NodeQuery(tree, tuple(harness.siblings(tree, 3)), (), TOP))
        if len(running) >= CHECKED:
            harness.finish(running.pop(0))


def release(harness: Harness) -> None:
    """Release trees: evaluated ones, ones without any query, and twice."""
    harness.backend.release(TokenTree(harness.prompt()))
    tree = WatchedTree(harness.prompt(shift=1))
    harness.ask(NodeQuery(tree, (tree.root, *harness.line(tree, 2)), (), TOP))
    tree.commit(next(iter(tree.root.children.values())))
    harness.backend.release(tree)
    expect(
        tree.state is None,
        f"After release, tree.state is a {type(tree.state).__name__}; expected None.",
    )
    harness.backend.release(tree)
    trace = weakref.ref(tree)
    del tree
    gc.collect()
    expect(trace() is None, "After release, the backend still has a reference to the tree.")
    _check_request(harness, harness.prompt(shift=1))


def faults(harness: Harness) -> None:
    """Evaluate a token that the vocabulary does not have, and then other tokens."""
    tree = harness.begin()
    child = harness.line(tree, 1)[0]
    harness.check_nodes(tree, [tree.root, child])
    wrong = tree.child(tree.root, UNKNOWN)
    _check_raises(harness, NodeQuery(tree, (wrong,), (), TOP))
    harness.check_nodes(tree, [], harness.siblings(tree, 2))
    harness.check_nodes(tree, [child, *harness.line(tree, 1, child)])
    tree.prune([child])
    harness.check_nodes(tree, [tree.root, child])

    bad = harness.begin([*harness.prompt()[:-1], UNKNOWN])
    good = NodeQuery(harness.begin(harness.prompt(shift=2)), (), (), TOP)
    good = NodeQuery(good.tree, (good.tree.root, *harness.line(good.tree, 1)), (), TOP)
    mine = NodeQuery(tree, tuple(harness.line(tree, 2)), (), TOP)
    _check_raises(harness, good, NodeQuery(bad, (bad.root,), (), TOP), mine)
    harness.finish(bad)
    harness.check(good)
    harness.check(mine)
    tree.commit(_last(tree))
    harness.check(NodeQuery(tree, (tree.root,), (), TOP), good)


def _last(tree: TokenTree) -> Node:
    """Return a node without children."""
    return next(node for node in tree.nodes() if not node.children)


def _check_raises(harness: Harness, *queries: NodeQuery) -> None:
    """Check that a call fails, as it must for a token that the vocabulary does not have."""
    try:
        harness.backend.evaluate(list(queries))
    except Exception:  # the exception may have any type
        return
    fail(f"evaluate returned results for token {UNKNOWN}; expected an exception.")
