"""Checks of the nodes of one request's tree."""

from __future__ import annotations

from collections.abc import Sequence

from adafuse_llm.backends.base import NodeQuery
from adafuse_llm.backends.conformance.harness import PROMPT, TOP, Harness, place
from adafuse_llm.backends.conformance.violations import expect
from adafuse_llm.tree import Node, TokenTree

LONG = 600
"""Number of tokens in the longest prompt, if the context window has room for them."""

STEPS = 40
"""Number of queries in a random walk."""

RUNNING = 3
"""Number of requests that run at the same time in a random walk."""


def prompts(harness: Harness) -> None:
    """Evaluate the roots of prompts of several lengths."""
    for size in (1, 2, 3, harness.size, min(LONG, harness.room)):
        if size <= harness.room:
            tree = harness.begin(harness.prompt(size, shift=size))
            harness.check_nodes(tree, [tree.root])
            harness.end()


def branches(harness: Harness) -> None:
    """Evaluate siblings and deep paths in one query, and in queries of their own."""
    for together in (True, False):
        tree = harness.begin()
        children = harness.siblings(tree, 3)
        deep = harness.line(tree, harness.depth - 1, children[0])
        others = harness.siblings(tree, 2, children[-1]) if harness.depth > 1 else []
        nodes = [tree.root, *children, *deep, *others]
        for part in [nodes] if together else [[node] for node in nodes]:
            harness.check_nodes(tree, part)


def late_ancestors(harness: Harness) -> None:
    """Evaluate nodes before their ancestors, and again after them."""
    tree = harness.begin()
    line = harness.line(tree, harness.depth)
    harness.check_nodes(tree, line[-1:])
    harness.check_nodes(tree, [*reversed(line), tree.root])
    harness.check_nodes(tree, [tree.root, *line])
    harness.check_nodes(tree, harness.siblings(tree, 2, line[0]) if harness.depth > 1 else line)


def scores(harness: Harness) -> None:
    """Score nodes in the query that evaluates their parents, and in later queries."""
    tree = harness.begin()
    children = harness.siblings(tree, 6)
    harness.check_nodes(tree, [tree.root], children[:3])
    harness.check_nodes(tree, [], children[3:] or children)
    line = harness.line(tree, harness.depth, None)
    harness.check_nodes(tree, line[:-1], line)
    (known,) = harness.check_nodes(tree, [tree.root]).next
    harness.check_nodes(tree, [], [tree.child(tree.root, token) for token in known.tokens])


def wider(harness: Harness) -> None:
    """Ask for more likely tokens after an evaluated node."""
    tree = harness.begin()
    nodes = [tree.root, *harness.line(tree, 1)]
    for top in (2, 16, 3):
        harness.check_nodes(tree, nodes, top=top)


def commits(harness: Harness) -> None:
    """Commit evaluated nodes, once and several times in a row, and go on below them."""
    tree = harness.begin(harness.prompt(max(1, harness.size // 2)))
    for length in (1, 2, 1, 3):
        if tree.root.length + length >= harness.room:
            break
        siblings = harness.siblings(tree, 3)
        line = harness.line(tree, length)
        below = harness.line(tree, 1, line[-1])
        harness.check_nodes(tree, [tree.root, *siblings, *line, *below])
        tree.commit(line[-1])
        harness.check_nodes(tree, harness.line(tree, 1, tree.root))
        harness.check_nodes(tree, [tree.root, *below], below)
    line = harness.line(tree, 2)
    harness.check_nodes(tree, [tree.root, *line])
    for node in line:
        tree.commit(node)
    harness.check_nodes(tree, [tree.root, *harness.line(tree, 1)])


def unevaluated_commits(harness: Harness) -> None:
    """Commit nodes that were only scored, or that were not evaluated at all."""
    tree = harness.begin(harness.prompt(max(1, harness.size // 2)))
    line = harness.line(tree, 3)
    harness.check_nodes(tree, [tree.root, *line[:-1]], line)
    tree.commit(line[-1])  # its last token was only scored
    harness.check_nodes(tree, [tree.root])
    for length in (2, 1):
        if tree.root.length + length < harness.room:
            tree.commit(harness.line(tree, length)[-1])
    harness.check_nodes(tree, [tree.root, *harness.line(tree, 1)])


def early_commits(harness: Harness) -> None:
    """Commit a node before the first query."""
    tree = harness.begin(harness.prompt(max(1, harness.size // 2)))
    tree.commit(harness.line(tree, 2)[-1])
    harness.check_nodes(tree, [tree.root, *harness.line(tree, 1)])


def prunes(harness: Harness) -> None:
    """Drop nodes without a commit, evaluate the remaining ones, and create dropped ones again."""
    tree = harness.begin()
    children = harness.siblings(tree, 3)
    kept = harness.line(tree, harness.depth - 1, children[0])
    dropped = harness.line(tree, harness.depth - 1, children[-1])
    harness.check_nodes(tree, [tree.root, *children, *kept, *dropped])
    tree.prune([children[0]])
    harness.check_nodes(tree, [children[0], *kept])
    again = tree.child(tree.root, children[-1].token)
    harness.check_nodes(tree, [again, *harness.line(tree, harness.depth - 1, again)], [again])
    tree.prune([tree.root])
    tree.prune([again])
    tree.commit(again)
    harness.check_nodes(tree, [tree.root, *harness.line(tree, harness.depth - 1)])


def random_walk(harness: Harness) -> None:
    """Grow, evaluate, commit and prune several trees at random, in shared calls."""
    trees = [_anew(harness, number) for number in range(RUNNING)]
    for step in range(STEPS):
        for number, tree in enumerate(trees):
            if tree.root.length + 1 > min(harness.room, 3 * PROMPT):
                harness.finish(tree)
                trees[number] = _anew(harness, step)
        chosen = harness.chance.sample(trees, harness.chance.randint(1, RUNNING))
        harness.check(*(_random_query(harness, tree) for tree in chosen))
        for tree in trees:
            _change(harness, tree)


def costs(harness: Harness) -> None:
    """Ask the same query twice."""
    tree = harness.begin()
    nodes = [tree.root, *harness.line(tree, 2)]
    first = harness.check_nodes(tree, nodes)
    second = harness.check_nodes(tree, nodes)
    for name in ("passes", "tokens"):
        before, after = getattr(first, name), getattr(second, name)
        expect(
            after <= before,
            f"{place(tree, tree.root)}, a query had {before} {name}, and the same query had "
            f"{after} {name} later; expected no more.",
        )


def _anew(harness: Harness, shift: int) -> TokenTree:
    """Return the tree of a new request for a random walk."""
    size = harness.chance.randint(1, harness.size)
    return harness.begin(harness.prompt(size, shift=harness.chance.choice((0, shift))))


def _random_query(harness: Harness, tree: TokenTree) -> NodeQuery:
    """Return a query about new and old nodes of a tree."""
    chance = harness.chance
    nodes = list(tree.nodes())
    for start in chance.sample(nodes, min(2, len(nodes))):
        nodes += harness.line(tree, chance.randint(1, 3), start)
    nodes = list(dict.fromkeys(nodes))
    evaluate = chance.sample(nodes, min(len(nodes), chance.randint(1, 5)))
    chosen = {*evaluate}
    score = [
        node
        for node in nodes
        if node.parent and (node.parent.next or node.parent in chosen) and chance.random() < 0.4
    ]
    return NodeQuery(tree, tuple(evaluate), tuple(score), chance.choice((2, TOP, 2 * TOP)))


def _change(harness: Harness, tree: TokenTree) -> None:
    """Commit a node of a tree, or prune the tree, or do nothing."""
    nodes: Sequence[Node] = list(tree.nodes())[1:]
    action = harness.chance.random()
    if nodes and action < 0.35:
        tree.commit(harness.chance.choice(nodes))
    elif nodes and action < 0.5:
        tree.prune(harness.chance.sample(nodes, min(2, len(nodes))))
