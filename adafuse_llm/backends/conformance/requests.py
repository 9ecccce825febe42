"""Checks of several requests."""

from __future__ import annotations

import gc
import weakref

from adafuse_llm.backends.base import NodeQuery
from adafuse_llm.backends.conformance.trial import TOP, Trial, WatchedTree
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


def batches(trial: Trial) -> None:
    """Evaluate queries of several requests in one call, twice and in another order."""
    sizes = (trial.size, 1, trial.size, max(1, trial.size // 2), trial.size)
    shifts = (0, 1, 0, 3, 5)  # the first and the third prompt are equal
    trees = [
        trial.begin(trial.prompt(size, shift)) for size, shift in zip(sizes, shifts, strict=True)
    ]
    trial.check(*(NodeQuery(tree, (tree.root,), (), TOP) for tree in trees))
    for turn in range(2):
        queries = []
        for number, tree in enumerate(trees):
            line = trial.line(tree, 1 + (number + turn) % 2)
            evaluate = tuple(line) if number != 1 else ()  # one query only scores
            queries.append(NodeQuery(tree, evaluate, tuple(line[:1]), top=2 + number))
        trial.chance.shuffle(queries)
        trial.check(*queries)
        tree = trees[turn]
        tree.commit(next(iter(tree.root.children.values())))
    trial.check(*(NodeQuery(tree, (tree.root,), (), TOP) for tree in trees))


def prefixes(trial: Trial) -> None:
    """Begin requests whose prompts begin with the tokens of running and finished requests."""
    size = max(1, min(SHARED, trial.room - trial.depth - 1))
    prompt = trial.prompt(size)
    running = trial.begin(prompt)
    trial.check_nodes(running, [running.root, *trial.line(running, 2)])
    other = [*prompt[:-1], next(token for token in trial.words if token != prompt[-1])]
    for ids in (prompt, [*prompt, *prompt[:1]], other, prompt[: max(1, size // 2)]):
        _check_request(trial, ids)
    line = trial.line(running, 2)
    trial.check_nodes(running, [running.root, *line], line)
    running.commit(line[-1])
    written = list(running.ids)
    sharing = trial.begin(prompt)
    trial.check_nodes(sharing, [sharing.root])
    trial.finish(running)
    trial.check_nodes(sharing, [sharing.root, *trial.line(sharing, 2)])
    for ids in (prompt, written, [*written, prompt[0]][: trial.room], other):
        _check_request(trial, ids)
    several = [trial.begin(prompt) for _ in range(3)]
    trial.check(*(NodeQuery(tree, (tree.root,), (), TOP) for tree in several))


def _check_request(trial: Trial, ids: list[int]) -> None:
    """Begin a request, and check its first results."""
    tree = trial.begin(ids)
    trial.check_nodes(tree, [tree.root, *trial.line(tree, 1)])
    trial.finish(tree)


def many_requests(trial: Trial) -> None:
    """Begin and finish many requests with branches, a few of them at a time."""
    running: list[TokenTree] = []
    for number in range(MANY):
        tree = trial.begin(trial.prompt(max(1, trial.size // 2), shift=number % 5))
        running.append(tree)
        evaluate = trial.check if number >= MANY - CHECKED else trial.ask
        children = tuple(trial.siblings(tree, 3))
        evaluate(NodeQuery(tree, (tree.root, *children), children, TOP))
        tree.commit(children[0])
        evaluate(NodeQuery(tree, tuple(trial.siblings(tree, 3)), (), TOP))
        if len(running) >= CHECKED:
            trial.finish(running.pop(0))


def release(trial: Trial) -> None:
    """Release trees: evaluated ones, ones without any query, and twice."""
    trial.backend.release(TokenTree(trial.prompt()))
    tree = WatchedTree(trial.prompt(shift=1))
    trial.ask(NodeQuery(tree, (tree.root, *trial.line(tree, 2)), (), TOP))
    tree.commit(next(iter(tree.root.children.values())))
    trial.backend.release(tree)
    expect(
        tree.state is None,
        f"After release, tree.state is a {type(tree.state).__name__}; expected None.",
    )
    trial.backend.release(tree)
    trace = weakref.ref(tree)
    del tree
    gc.collect()
    expect(trace() is None, "After release, the backend still has a reference to the tree.")
    _check_request(trial, trial.prompt(shift=1))


def faults(trial: Trial) -> None:
    """Evaluate a token that the vocabulary does not have, and then other tokens."""
    tree = trial.begin()
    child = trial.line(tree, 1)[0]
    trial.check_nodes(tree, [tree.root, child])
    wrong = tree.child(tree.root, UNKNOWN)
    _check_raises(trial, NodeQuery(tree, (wrong,), (), TOP))
    trial.check_nodes(tree, [], trial.siblings(tree, 2))
    trial.check_nodes(tree, [child, *trial.line(tree, 1, child)])
    tree.prune([child])
    trial.check_nodes(tree, [tree.root, child])

    bad = trial.begin([*trial.prompt()[:-1], UNKNOWN])
    good = NodeQuery(trial.begin(trial.prompt(shift=2)), (), (), TOP)
    good = NodeQuery(good.tree, (good.tree.root, *trial.line(good.tree, 1)), (), TOP)
    mine = NodeQuery(tree, tuple(trial.line(tree, 2)), (), TOP)
    _check_raises(trial, good, NodeQuery(bad, (bad.root,), (), TOP), mine)
    trial.finish(bad)
    trial.check(good)
    trial.check(mine)
    tree.commit(_last(tree))
    trial.check(NodeQuery(tree, (tree.root,), (), TOP), good)


def _last(tree: TokenTree) -> Node:
    """Return a node without children."""
    return next(node for node in tree.nodes() if not node.children)


def _check_raises(trial: Trial, *queries: NodeQuery) -> None:
    """Check that a call fails, as it must for a token that the vocabulary does not have."""
    try:
        trial.backend.evaluate(list(queries))
    except Exception:  # the exception may have any type
        return
    fail(f"evaluate returned results for token {UNKNOWN}; expected an exception.")
