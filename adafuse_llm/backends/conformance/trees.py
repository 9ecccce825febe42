"""Checks of the nodes of one request's tree."""

from __future__ import annotations

from collections.abc import Sequence

from adafuse_llm.backends.base import NodeQuery
from adafuse_llm.backends.conformance.trial import PROMPT, TOP, Trial, place
from adafuse_llm.backends.conformance.violations import expect
from adafuse_llm.tree import Node, TokenTree

LONG = 600
"""Number of tokens in the longest prompt, if the context window has room for them."""

STEPS = 40
"""Number of queries in a random walk."""

RUNNING = 3
"""Number of requests that run at the same time in a random walk."""


def prompts(trial: Trial) -> None:
    """Evaluate the roots of prompts of several lengths."""
    for size in (1, 2, 3, trial.size, min(LONG, trial.room)):
        if size <= trial.room:
            tree = trial.begin(trial.prompt(size, shift=size))
            trial.check_nodes(tree, [tree.root])
            trial.end()


def branches(trial: Trial) -> None:
    """Evaluate siblings and deep paths in one query, and in queries of their own."""
    for together in (True, False):
        tree = trial.begin()
        children = trial.siblings(tree, 3)
        deep = trial.line(tree, trial.depth - 1, children[0])
        others = trial.siblings(tree, 2, children[-1]) if trial.depth > 1 else []
        nodes = [tree.root, *children, *deep, *others]
        for part in [nodes] if together else [[node] for node in nodes]:
            trial.check_nodes(tree, part)


def late_ancestors(trial: Trial) -> None:
    """Evaluate nodes before their ancestors, and again after them."""
    tree = trial.begin()
    line = trial.line(tree, trial.depth)
    trial.check_nodes(tree, line[-1:])
    trial.check_nodes(tree, [*reversed(line), tree.root])
    trial.check_nodes(tree, [tree.root, *line])
    trial.check_nodes(tree, trial.siblings(tree, 2, line[0]) if trial.depth > 1 else line)


def scores(trial: Trial) -> None:
    """Score nodes in the query that evaluates their parents, and in later queries."""
    tree = trial.begin()
    children = trial.siblings(tree, 6)
    trial.check_nodes(tree, [tree.root], children[:3])
    trial.check_nodes(tree, [], children[3:] or children)
    line = trial.line(tree, trial.depth, None)
    trial.check_nodes(tree, line[:-1], line)
    (known,) = trial.check_nodes(tree, [tree.root]).next
    trial.check_nodes(tree, [], [tree.child(tree.root, token) for token in known.tokens])


def wider(trial: Trial) -> None:
    """Ask for more likely tokens after an evaluated node."""
    tree = trial.begin()
    nodes = [tree.root, *trial.line(tree, 1)]
    for top in (2, 16, 3):
        trial.check_nodes(tree, nodes, top=top)


def commits(trial: Trial) -> None:
    """Commit evaluated nodes, once and several times in a row, and go on below them."""
    tree = trial.begin(trial.prompt(max(1, trial.size // 2)))
    for length in (1, 2, 1, 3):
        if tree.root.length + length >= trial.room:
            break
        siblings = trial.siblings(tree, 3)
        line = trial.line(tree, length)
        below = trial.line(tree, 1, line[-1])
        trial.check_nodes(tree, [tree.root, *siblings, *line, *below])
        tree.commit(line[-1])
        trial.check_nodes(tree, trial.line(tree, 1, tree.root))
        trial.check_nodes(tree, [tree.root, *below], below)
    line = trial.line(tree, 2)
    trial.check_nodes(tree, [tree.root, *line])
    for node in line:
        tree.commit(node)
    trial.check_nodes(tree, [tree.root, *trial.line(tree, 1)])


def unevaluated_commits(trial: Trial) -> None:
    """Commit nodes that were only scored, or that were not evaluated at all."""
    tree = trial.begin(trial.prompt(max(1, trial.size // 2)))
    line = trial.line(tree, 3)
    trial.check_nodes(tree, [tree.root, *line[:-1]], line)
    tree.commit(line[-1])  # its last token was only scored
    trial.check_nodes(tree, [tree.root])
    for length in (2, 1):
        if tree.root.length + length < trial.room:
            tree.commit(trial.line(tree, length)[-1])
    trial.check_nodes(tree, [tree.root, *trial.line(tree, 1)])


def early_commits(trial: Trial) -> None:
    """Commit a node before the first query."""
    tree = trial.begin(trial.prompt(max(1, trial.size // 2)))
    tree.commit(trial.line(tree, 2)[-1])
    trial.check_nodes(tree, [tree.root, *trial.line(tree, 1)])


def prunes(trial: Trial) -> None:
    """Drop nodes without a commit, evaluate the remaining ones, and create dropped ones again."""
    tree = trial.begin()
    children = trial.siblings(tree, 3)
    kept = trial.line(tree, trial.depth - 1, children[0])
    dropped = trial.line(tree, trial.depth - 1, children[-1])
    trial.check_nodes(tree, [tree.root, *children, *kept, *dropped])
    tree.prune([children[0]])
    trial.check_nodes(tree, [children[0], *kept])
    again = tree.child(tree.root, children[-1].token)
    trial.check_nodes(tree, [again, *trial.line(tree, trial.depth - 1, again)], [again])
    tree.prune([tree.root])
    tree.prune([again])
    tree.commit(again)
    trial.check_nodes(tree, [tree.root, *trial.line(tree, trial.depth - 1)])


def random_walk(trial: Trial) -> None:
    """Grow, evaluate, commit and prune several trees at random, in shared calls."""
    trees = [_anew(trial, number) for number in range(RUNNING)]
    for step in range(STEPS):
        for number, tree in enumerate(trees):
            if tree.root.length + 1 > min(trial.room, 3 * PROMPT):
                trial.finish(tree)
                trees[number] = _anew(trial, step)
        chosen = trial.chance.sample(trees, trial.chance.randint(1, RUNNING))
        trial.check(*(_random_query(trial, tree) for tree in chosen))
        for tree in trees:
            _change(trial, tree)


def costs(trial: Trial) -> None:
    """Ask the same query twice."""
    tree = trial.begin()
    nodes = [tree.root, *trial.line(tree, 2)]
    first = trial.check_nodes(tree, nodes)
    second = trial.check_nodes(tree, nodes)
    for name in ("passes", "tokens"):
        before, after = getattr(first, name), getattr(second, name)
        expect(
            after <= before,
            f"{place(tree, tree.root)}, a query had {before} {name}, and the same query had "
            f"{after} {name} later; expected no more.",
        )


def _anew(trial: Trial, shift: int) -> TokenTree:
    """Return the tree of a new request for a random walk."""
    size = trial.chance.randint(1, trial.size)
    return trial.begin(trial.prompt(size, shift=trial.chance.choice((0, shift))))


def _random_query(trial: Trial, tree: TokenTree) -> NodeQuery:
    """Return a query about new and old nodes of a tree."""
    chance = trial.chance
    nodes = list(tree.nodes())
    for start in chance.sample(nodes, min(2, len(nodes))):
        nodes += trial.line(tree, chance.randint(1, 3), start)
    nodes = list(dict.fromkeys(nodes))
    evaluate = chance.sample(nodes, min(len(nodes), chance.randint(1, 5)))
    chosen = {*evaluate}
    score = [
        node
        for node in nodes
        if node.parent and (node.parent.next or node.parent in chosen) and chance.random() < 0.4
    ]
    return NodeQuery(tree, tuple(evaluate), tuple(score), chance.choice((2, TOP, 2 * TOP)))


def _change(trial: Trial, tree: TokenTree) -> None:
    """Commit a node of a tree, or prune the tree, or do nothing."""
    nodes: Sequence[Node] = list(tree.nodes())[1:]
    action = trial.chance.random()
    if nodes and action < 0.35:
        tree.commit(trial.chance.choice(nodes))
    elif nodes and action < 0.5:
        tree.prune(trial.chance.sample(nodes, min(2, len(nodes))))
